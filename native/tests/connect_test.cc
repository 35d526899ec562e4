// Goal: a client that comes while a daemon opens its socket gets in, and one that is shut out is told so. Method: connect() in
// libc's place, which refuses as often as the test wants.
#include "core/client/connect.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "tests/session_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {
std::atomic<int> refusals{0};
}

extern "C" int connect(int socket, const sockaddr* address, socklen_t length) {
  if (refusals.load() > 0) return refusals.fetch_sub(1), errno = EACCES, -1;
  return static_cast<int>(::syscall(SYS_connect, socket, address, length));
}

TEST(a_socket_that_is_about_to_be_opened_is_waited_for) {
  Daemon daemon;
  refusals.store(2);
  const auto client = daemon.client();
  CHECK_EQ(refusals.load(), 0);
}

TEST(a_directory_that_anybody_could_have_made_first_is_not_believed) {
  if (::geteuid() != 0) return;  // who cannot give a directory away
  Daemon daemon;
  const std::string open_to_all = daemon.path.substr(0, daemon.path.rfind('/')) + "/tmp", theirs = open_to_all + "/run";
  CHECK_EQ(::mkdir(open_to_all.c_str(), 0700) | ::mkdir(theirs.c_str(), 0755), 0);
  CHECK_EQ(::rename(daemon.path.c_str(), (theirs + "/s").c_str()), 0);
  CHECK_EQ(::chown(theirs.c_str(), 12345, 12345), 0);
  connect_to(theirs + "/s", 10, false);
  CHECK_EQ(::chmod(open_to_all.c_str(), 01777), 0);
  CHECK(thrown([&] { connect_to(theirs + "/s", 10, false); }) == Code::NotPermitted);
  CHECK_EQ(::symlink(theirs.c_str(), (open_to_all + "/link").c_str()) | ::lchown((open_to_all + "/link").c_str(), 12345, 1), 0);
  CHECK(thrown([&] { connect_to(open_to_all + "/link/s", 10, false); }) == Code::NotPermitted);
  const std::string mine = daemon.path.substr(0, daemon.path.rfind('/')) + "/mine";
  CHECK_EQ(::symlink("tmp/../tmp/run", mine.c_str()), 0);  // this user's, where nobody else may write, to where anybody may
  CHECK(thrown([&] { connect_to(mine + "/s", 10, false); }) == Code::NotPermitted);
  CHECK_EQ(::chown(theirs.c_str(), 0, 0), 0);
  connect_to(theirs + "/s", 10, false);
  connect_to(mine + "/s", 10, false);
  CHECK_EQ(::rename((theirs + "/s").c_str(), daemon.path.c_str()), 0);
}

TEST(a_socket_that_stays_closed_is_said_to_be) {
  Daemon daemon;
  refusals.store(1 << 30);
  CHECK(thrown([&] { daemon.client(); }) == Code::NotPermitted);
  CHECK(refusals.load() < (1 << 30) - 1);
  refusals.store(2);
  CHECK(thrown([&] { connect_to(daemon.path, 10, true); }) == Code::Unavailable);  // who knows it comes back
  CHECK_EQ(refusals.load(), 1);
  refusals.store(0);
}
