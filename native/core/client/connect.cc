#include "core/client/connect.h"

#include <limits.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

#include "core/base/error.h"
#include "core/base/polling.h"

namespace kv {
namespace {

constexpr double kOpeningS = 0.5;
constexpr int kMostLinks = 40;  // that the kernel follows
constexpr std::chrono::milliseconds kLook{5};

// What EACCES means: the daemon is another user's.
std::string closed_to_us(const std::string& socket) {
  struct stat found;
  const bool seen = ::stat(socket.c_str(), &found) == 0;
  return "user " + std::to_string(::geteuid()) + " may not " +
         (seen ? "connect to " + socket + ", which is user " + std::to_string(found.st_uid) + "'s"
               : "enter " + socket.substr(0, socket.rfind('/'))) +
         ": the daemon's operator can name the user, or a group of it, as reader or writer of a namespace";
}

// The part of the path, links in it followed, that anybody could have made first: it lies where everybody may write, as below
// /tmp, and is neither this user's nor root's. Empty where there is none.
std::string anybodys(const std::string& path) {
  std::string above = path.starts_with('/') ? "/" : "./", rest = path;
  for (int links = 0; !rest.empty();) {
    const std::string name = rest.substr(0, rest.find('/'));
    rest.erase(0, name.size() + 1);
    if (name.empty()) continue;
    const std::string part = above + name;
    struct stat found, where;
    if (::lstat(part.c_str(), &found) != 0 || ::stat(above.c_str(), &where) != 0) return {};  // connect() says why
    const bool trusted = found.st_uid == 0 || found.st_uid == ::geteuid();
    if ((where.st_mode & S_IWOTH) && !trusted)
      return part + " is user " + std::to_string(found.st_uid) + "'s, and lies where everybody may make it: " + above;
    char target[PATH_MAX];
    const ssize_t length = S_ISLNK(found.st_mode) ? ::readlink(part.c_str(), target, sizeof target) : -1;
    if (length < 0) {
      above = part + "/";
      continue;
    }
    if (++links > kMostLinks) return {};  // connect() says why
    rest.insert(0, std::string(target, static_cast<size_t>(length)) + "/");
    if (rest.starts_with('/')) above.assign(1, '/');  // by a text GCC 12 warns of what is not so
  }
  return {};
}

}  // namespace

Fd connect_to(const std::string& path, double timeout_s, bool known) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path)
    throw Error(Code::InvalidArgument, "the socket's path has " + std::to_string(path.size()) + " bytes, the limit is " +
                                           std::to_string(sizeof address.sun_path - 1));
  std::copy(path.begin(), path.end(), address.sun_path);
  if (const std::string why = anybodys(path); !why.empty())
    throw Error(Code::NotPermitted,
                why + ": who answers there may be anybody; have the daemon where its user or root alone may write");
  const uint64_t opened_ns = monotonic_ns() + static_cast<uint64_t>(1e9 * std::min(timeout_s, kOpeningS));
  Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket) throw Error(Code::Unavailable, errno_text("a socket for the daemon at " + path));
  const double whole = std::floor(timeout_s);
  timeval limit{static_cast<time_t>(whole), static_cast<suseconds_t>((timeout_s - whole) * 1e6)};
  if (limit.tv_sec == 0 && limit.tv_usec == 0) limit.tv_usec = 1;  // zero would mean for ever
  ::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  // A daemon that starts makes its socket before it opens it to others. A client that was served before comes back later anyhow.
  for (;; std::this_thread::sleep_for(kLook)) {
    if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) return socket;
    if (errno != EACCES || known || monotonic_ns() >= opened_ns) break;
  }
  if (errno == EACCES && !known) throw Error(Code::NotPermitted, closed_to_us(path));
  throw Error(Code::Unavailable, errno_text("no daemon at " + path));
}

}  // namespace kv
