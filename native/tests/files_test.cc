// Goal: a file has a block's name only when it is published, no call leaves the directory or follows a link, and nothing that is
// no regular file is opened or waited for.
// Method: a real directory, what an attacker or an accident could leave in it, and the calls' answers.
#include "core/files/files.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <thread>

#include "tests/check.h"
#include "tests/disk_fixture.h"

using namespace kv;
using namespace kv::test;
namespace fs = std::filesystem;

namespace {

std::function<void()> before_rename;

struct Fixture {
  Directory directory;
  RealFiles files{directory.path, false};

  std::string put(const std::string& path, uint64_t bytes = 8192) {
    std::string temp;
    const Fd fd(files.create_temp(bytes, &temp));
    KV_INVARIANT(fd && files.publish(temp, path) == 0);
    return path;
  }
  int open(const std::string& path) {
    uint64_t bytes = 0;
    const Fd fd(files.open_read(path, &bytes));
    return fd ? 0 : files.open_read(path, &bytes);
  }
  size_t temps() const { return std::distance(fs::directory_iterator(directory / "tmp"), fs::directory_iterator()); }
};

}  // namespace

// In libc's place, so that something can happen at that moment.
extern "C" int renameat2(int from, const char* old_name, int to, const char* new_name, unsigned flags) noexcept {
  if (before_rename) before_rename();
  return static_cast<int>(::syscall(SYS_renameat2, from, old_name, to, new_name, flags));
}

// Somebody tidies up, or a file system is mounted anew.
TEST(the_directory_of_temporary_files_is_made_again) {
  Directory directory;
  RealFiles files(directory.path, false);
  fs::remove(directory / "tmp");
  std::string temp;
  const Fd fd(files.create_temp(4096, &temp));
  CHECK(fd);
  CHECK(fs::exists(directory / temp));
  fs::remove_all(directory / "tmp");
  CHECK_EQ(files.keep_flushed(7), 0);
  CHECK_EQ(files.flushed_s(), 7u);
}

TEST(a_file_has_its_name_only_when_published) {
  Fixture f;
  const std::string path = path_of(key_of_number(1), {2, 2});
  std::string temp;
  const Fd fd(f.files.create_temp(12288, &temp));
  CHECK(fd);
  CHECK(is_temp_name(temp.substr(4)));
  CHECK_EQ(f.open(path), -ENOENT);
  struct stat about;
  CHECK_EQ(::fstat(fd.get(), &about), 0);
  CHECK_EQ(about.st_size, 12288);
  CHECK_EQ(about.st_mode & 07777, 0600u);
  CHECK(about.st_blocks * 512 >= 12288);
  CHECK_EQ(f.files.publish(temp, path), 0);
  CHECK_EQ(f.temps(), 0u);
  uint64_t bytes = 0;
  const Fd back(f.files.open_read(path, &bytes));
  CHECK(back);
  CHECK_EQ(bytes, 12288u);
  for (const fs::path& each : {fs::path(f.directory.path), fs::path(f.directory / path.substr(0, 2)),
                               fs::path(f.directory / path.substr(0, 5)), fs::path(f.directory / "tmp")})
    CHECK(fs::status(each).permissions() == fs::perms::owner_all || each == f.directory.path);
  CHECK_EQ(f.files.remove(path), 0);
  CHECK_EQ(f.files.remove(path), -ENOENT);
  CHECK_EQ(f.open(path), -ENOENT);
}

TEST(publishing_replaces) {
  Fixture f;
  const std::string path = f.put(path_of(key_of_number(1), {2, 2}), 4096);
  f.put(path, 8192);
  CHECK_EQ(fs::file_size(f.directory / path), 8192u);
}

TEST(nothing_but_a_regular_file_is_opened) {
  Fixture f;
  const std::string good = f.put("aa/good");
  fs::create_symlink("good", f.directory / "aa/link");
  fs::create_directory(f.directory / "aa/directory");
  fs::create_directory_symlink(f.directory / "aa", f.directory / "bb");
  CHECK_EQ(::mkfifo((f.directory / "aa/fifo").c_str(), 0600), 0);
  CHECK_EQ(f.open("aa/good"), 0);
  CHECK_EQ(f.open("aa/link"), -ELOOP);
  CHECK_EQ(f.open("bb/good"), -ELOOP);
  CHECK_EQ(f.open("aa/directory"), -ENXIO);
  CHECK_EQ(f.open("aa/fifo"), -ENXIO);
  CHECK_EQ(f.open("aa/none"), -ENOENT);
  CHECK_EQ(f.open("aa/good/more"), -ENOTDIR);
}

// Fails if such an open is tried without an end: the thread of a disk span as long as the kernel leaves a lease, 45 s.
TEST(a_file_that_somebody_has_a_lease_on_is_not_waited_for) {
  Fixture f;
  f.put("a.kv");
  ::signal(SIGIO, SIG_IGN);  // what tells the holder
  const Fd holder(::open((f.directory / "a.kv").c_str(), O_RDWR | O_CLOEXEC));
  CHECK_EQ(::fcntl(holder.get(), F_SETLEASE, F_WRLCK), 0);
  CHECK_EQ(f.open("a.kv"), -EAGAIN);
  CHECK_EQ(::fcntl(holder.get(), F_SETLEASE, F_UNLCK), 0);
  CHECK_EQ(f.open("a.kv"), 0);
}

// What was taken for "all is flushed" removed every file: fails where the notes are given up after as many tries as a block.
TEST(a_note_that_somebody_has_a_lease_on_is_waited_for) {
  Fixture f;
  CHECK_EQ(f.files.keep_flushed(5), 0);
  ::signal(SIGIO, SIG_IGN);
  const Fd holder(::open((f.directory / "flushed").c_str(), O_RDWR | O_CLOEXEC));
  CHECK_EQ(::fcntl(holder.get(), F_SETLEASE, F_WRLCK), 0);
  const auto naps = [opener = ::gettid()] {
    std::ifstream about("/proc/self/task/" + std::to_string(opener) + "/status");
    for (std::string line; std::getline(about, line);)
      if (line.starts_with("voluntary")) return std::stol(line.substr(line.find(':') + 1));
    return 0l;
  };
  std::thread gives_way([&, before = naps()] {  // once the opener has waited a while
    for (int i = 0; i < 1'000'000 && naps() < before + 20; ++i) continue;
    CHECK_EQ(::fcntl(holder.get(), F_SETLEASE, F_UNLCK), 0);
  });
  CHECK_EQ(f.files.flushed_s(), 5u);
  gives_way.join();
}

TEST(no_call_leaves_the_directory) {
  Fixture f;
  Directory outside;
  std::ofstream(outside / "secret") << "x";
  fs::create_directory_symlink(outside.path, f.directory / "ab");
  std::string temp;
  const Fd fd(f.files.create_temp(4096, &temp));
  CHECK_EQ(f.open("../" + fs::path(outside.path).filename().string() + "/secret"), -EXDEV);
  CHECK_EQ(f.open(outside / "secret"), -EXDEV);
  CHECK_EQ(f.open("ab/secret"), -ELOOP);
  CHECK_EQ(f.files.remove("ab/secret"), -ELOOP);
  CHECK(f.files.aside("ab/secret") < 0);
  CHECK_EQ(f.files.publish(temp, "ab/new"), -ELOOP);
  CHECK_EQ(f.files.publish(temp, "../new"), -EXDEV);
  CHECK(fs::exists(outside / "secret"));
  CHECK(!fs::exists(outside / "new"));
  CHECK_EQ(f.temps(), 1u);
}

TEST(a_directory_is_never_removed) {
  Fixture f;
  fs::create_directories(f.directory / "ab/cd");
  CHECK(f.files.remove("ab/cd") < 0);
  CHECK(fs::exists(f.directory / "ab/cd"));
  std::string temp;
  const Fd fd(f.files.create_temp(4096, &temp));
  CHECK_EQ(f.files.publish(temp, "ab/cd"), -EISDIR);
  CHECK_EQ(f.files.remove(temp), 0);
}

TEST(what_is_kept_aside_is_found_by_nobody) {
  Fixture f;
  const std::string path = path_of(key_of_number(1), {2, 2});
  for (int i = 0; i < 3; ++i) {
    f.put(path);
    CHECK_EQ(f.files.aside(path), 0);
    CHECK_EQ(f.open(path), -ENOENT);
  }
  size_t kept = 0;
  for (const auto& each : fs::directory_iterator(f.directory / "aside")) kept += !key_of(each.path().filename().string());
  CHECK_EQ(kept, 3u);
}

TEST(a_file_that_does_not_fit_leaves_nothing) {
  Fixture f;
  std::string temp;
  const int answer = f.files.create_temp(1ull << 52, &temp);
  CHECK(answer == -ENOSPC || answer == -EFBIG);
  CHECK_EQ(f.temps(), 0u);
}

TEST(a_directory_that_cannot_be_used_is_named) {
  try {
    RealFiles("/proc/nothing", true);
    CHECK(false);
  } catch (const Error& error) {
    CHECK(std::string(error.what()).find("/proc/nothing") != std::string::npos);
  }
}

TEST(directories_are_made_ahead) {
  for (const Fanout fanout : {Fanout{2, 1}, Fanout{1, 2}, Fanout{3, 1}, Fanout{2, 2}}) {
    Fixture f;
    f.files.make_directories(fanout);
    size_t made = 0;
    for (const auto& each : fs::recursive_directory_iterator(f.directory.path)) made += each.is_directory();
    const bool few = fanout.levels * fanout.digits < 4;  // more are made by the files that need them
    CHECK_EQ(made, 1 + (!few ? 0u : fanout.levels == 2 ? 16u + 256u : fanout.levels == 1 ? 256u : 16u + 256u + 4096u));
    for (uint64_t number = 1; few && number < 50; ++number)
      CHECK(fs::is_directory(fs::path(f.directory / path_of(key_of_number(number), fanout)).parent_path()));
  }
}

TEST(a_file_that_is_taken_over_loses_its_name_and_keeps_its_room) {
  Fixture f;
  const std::string path = f.put("aa/1");
  struct stat before, after;
  CHECK_EQ(::stat((f.directory / path).c_str(), &before), 0);
  std::string temp;
  const Fd fd(f.files.take_over(path, 8192, &temp));
  CHECK(fd && is_temp_name(temp.substr(4)));
  CHECK_EQ(f.open(path), -ENOENT);
  CHECK_EQ(::fstat(fd.get(), &after), 0);
  CHECK_EQ(after.st_ino, before.st_ino);
  CHECK_EQ(::pwrite(fd.get(), "new", 3, 0), 3);
  CHECK_EQ(f.files.publish(temp, "aa/2"), 0);
  CHECK_EQ(f.open("aa/2"), 0);
  CHECK_EQ(f.temps(), 0u);
}

// As a backup with hard links does, between the first look and the move.
TEST(what_is_linked_while_it_moves_is_not_taken_over) {
  Fixture f;
  const std::string path = f.put("aa/1");
  before_rename = [&] { fs::create_hard_link(f.directory / path, f.directory / "link"); };
  std::string temp;
  CHECK_EQ(f.files.take_over(path, 8192, &temp), -ESTALE);
  before_rename = nullptr;
  CHECK(fs::exists(f.directory / "link"));
  CHECK_EQ(f.temps(), 0u);
}

// Its name stays, nothing of it is written over.
TEST(what_is_not_wholly_ours_is_not_taken_over) {
  Fixture f;
  const auto refused = [&](const std::string& path, int expected) {
    std::string temp;
    CHECK_EQ(f.files.take_over(path, 8192, &temp), expected);
    CHECK(fs::exists(fs::symlink_status(f.directory / path)) || expected == -ENOENT);
    CHECK_EQ(f.temps(), 0u);
  };
  refused("aa/nothing", -ENOENT);
  refused(f.put("aa/shorter", 4096), -ESTALE);
  refused(f.put("aa/longer", 12288), -ESTALE);
  f.put("aa/linked");
  fs::create_hard_link(f.directory / "aa/linked", f.directory / "aa/link");
  refused("aa/linked", -ESTALE);
  f.put("aa/open to all");
  CHECK_EQ(::chmod((f.directory / "aa/open to all").c_str(), 0644), 0);
  refused("aa/open to all", -ESTALE);
  f.put("aa/with holes");
  CHECK_EQ(::truncate((f.directory / "aa/with holes").c_str(), 0), 0);
  CHECK_EQ(::truncate((f.directory / "aa/with holes").c_str(), 8192), 0);
  refused("aa/with holes", -ESTALE);
  fs::create_symlink(f.directory / f.put("aa/target"), f.directory / "aa/symlink");
  refused("aa/symlink", -ELOOP);
  fs::create_directory(f.directory / "aa/directory");
  refused("aa/directory", -EISDIR);
  CHECK_EQ(::mkfifo((f.directory / "aa/fifo").c_str(), 0600), 0);
  refused("aa/fifo", -ESTALE);
  if (::geteuid() == 0) {
    f.put("aa/another's");
    CHECK_EQ(::chown((f.directory / "aa/another's").c_str(), 65534, 65534), 0);
    refused("aa/another's", -ESTALE);
  }
}
