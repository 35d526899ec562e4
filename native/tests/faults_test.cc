// Goal: the schedule of failures fails what it says, when it says, the same way for the same seed; without a fault nothing
// differs; a power loss leaves damaged files and no process. Method: small schedules over a real directory; kills in a forked
// child.
#include "core/files/faults.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <map>

#include "tests/check.h"
#include "tests/disk_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {

struct Faulty {
  explicit Faulty(const std::string& schedule, const std::string& where)
      : faults(schedule, where, std::make_unique<RealFiles>(where, false), std::make_unique<ThreadEngine>(4)) {}
  // What write_block() of the tier does, in steps. 0 or the first error; a short write is -EIO.
  int64_t put(const std::string& path, uint64_t bytes = 64 << 10) {
    std::string temp;
    const int fd = faults.files().create_temp(bytes, &temp);
    if (fd < 0) return fd;
    Aligned data(bytes);
    std::memset(data.data, 0x5a, bytes);
    const int64_t wrote = run(faults.engine(), transfer(fd, true, 0, data.data, bytes));
    faults.files().close(fd);
    if (wrote < 0) return wrote;
    return wrote == static_cast<int64_t>(bytes) ? faults.files().publish(temp, path) : -EIO;
  }
  int64_t get(const std::string& path, std::vector<uint8_t>* out = nullptr) {
    uint64_t bytes = 0;
    const int fd = faults.files().open_read(path, &bytes);
    if (fd < 0) return fd;
    Aligned data(bytes);
    const int64_t got = run(faults.engine(), transfer(fd, false, 0, data.data, bytes));
    faults.files().close(fd);
    if (out) out->assign(reinterpret_cast<uint8_t*>(data.data), reinterpret_cast<uint8_t*>(data.data) + bytes);
    return got;
  }
  Faults faults;
};

// How a child that does this ends: its signal, or 0.
int ends(const std::function<void()>& work) {
  const pid_t child = ::fork();
  if (child == 0) {
    work();
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

bool refused(const std::string& schedule) {
  Directory directory;
  try {
    Faulty(schedule, directory.path);
    return false;
  } catch (const Error& error) {
    return error.code == Code::InvalidArgument;
  }
}

}  // namespace

TEST(without_faults_nothing_differs) {
  Directory directory;
  Faulty f("seed=3", directory.path);
  CHECK_EQ(f.put("aa/1"), 0);
  CHECK_EQ(f.get("aa/1"), 64 << 10);
  CHECK_EQ(f.get("aa/2"), -ENOENT);
  CHECK_EQ(f.faults.files().remove("aa/1"), 0);
  CHECK_EQ(f.faults.injected(), 0u);
}

TEST(each_step_fails_as_told) {
  const std::map<std::string, int64_t> cases{
      {"create_enospc=@2", -ENOSPC}, {"write_eio=@2", -EIO},     {"write_short=@2", -EIO},     {"publish_erofs=@2", -EROFS},
      {"write_enomem=@2", -ENOMEM},  {"write_full=@2", -EAGAIN}, {"create_emfile=@2", -EMFILE}};
  for (const auto& [schedule, answer] : cases) {
    Directory directory;
    Faulty f(schedule, directory.path);
    CHECK_EQ(f.put("aa/1"), 0);
    CHECK_EQ(f.put("aa/2"), answer);
    CHECK_EQ(f.put("aa/3"), 0);
    CHECK_EQ(f.faults.injected(), 1u);
  }
  Directory directory;
  Faulty f("open_eio=@1,read_eio=@1,read_short=@2,remove_eio=@1,aside_eio=@1+", directory.path);
  CHECK_EQ(f.put("aa/1"), 0);
  CHECK_EQ(f.get("aa/1"), -EIO);
  CHECK_EQ(f.get("aa/1"), -EIO);
  CHECK(f.get("aa/1") < 64 << 10);
  CHECK_EQ(f.get("aa/1"), 64 << 10);
  CHECK_EQ(f.faults.files().aside("aa/1"), -EIO);
  CHECK_EQ(f.faults.files().aside("aa/1"), -EIO);
  CHECK_EQ(f.faults.files().remove("aa/1"), -EIO);
  CHECK_EQ(f.faults.files().remove("aa/1"), 0);
  CHECK_EQ(f.faults.engine().in_flight(), 0u);
}

TEST(a_short_write_leaves_a_part) {
  Directory directory;
  Faulty f("write_short=1", directory.path);
  Aligned data(64 << 10);
  std::memset(data.data, 0x5a, data.size);
  std::string temp;
  const Fd fd(f.faults.files().create_temp(data.size, &temp));
  const int64_t wrote = run(f.faults.engine(), transfer(fd.get(), true, 0, data.data, data.size));
  CHECK(wrote >= 0 && wrote <= 64 << 10);
  std::vector<uint8_t> back(data.size);
  CHECK_EQ(::pread(fd.get(), back.data(), back.size(), 0), 64 << 10);
  for (size_t i = 0; i < back.size(); ++i) CHECK_EQ(back[i], i < static_cast<size_t>(wrote) ? 0x5a : 0);
}

TEST(a_flip_changes_one_bit_of_what_is_read) {
  Directory directory;
  Faulty f("read_flip=@1", directory.path);
  CHECK_EQ(f.put("aa/1"), 0);
  for (const int expected : {1, 0}) {
    std::vector<uint8_t> bytes;
    CHECK_EQ(f.get("aa/1", &bytes), 64 << 10);
    int bits = 0;
    for (const uint8_t byte : bytes) bits += __builtin_popcount(byte ^ 0x5a);
    CHECK_EQ(bits, expected);
  }
}

TEST(the_same_seed_fails_the_same_calls) {
  std::vector<std::vector<int64_t>> answers;
  for (const char* seed : {"7", "7", "8"}) {
    Directory directory;
    Faulty f(std::string("write_eio=0.2,publish_enospc=0.2,read_short=0.3,seed=") + seed, directory.path);
    std::vector<int64_t> mine;
    for (int i = 0; i < 100; ++i) mine.push_back(f.put("aa/1"));
    for (int i = 0; i < 20; ++i) mine.push_back(f.get("aa/1"));
    answers.push_back(mine);
  }
  CHECK(answers[0] == answers[1]);
  CHECK(answers[0] != answers[2]);
}

TEST(a_kill_ends_the_process_before_the_step) {
  const std::map<std::string, bool> published{{"create_kill=@1", false},
                                              {"write_kill=@1", false},
                                              {"done_kill=@1", false},
                                              {"publish_kill=@1", false},
                                              {"read_kill=@1", true}};
  for (const auto& [schedule, there] : published) {
    Directory directory;
    CHECK_EQ(ends([&] {
               Faulty f(schedule, directory.path);
               f.put("aa/1");
               f.get("aa/1");
             }),
             SIGKILL);
    CHECK_EQ(std::filesystem::exists(directory / "aa/1"), there);
  }
}

TEST(a_power_loss_damages_what_was_written) {
  std::map<std::string, int> seen;
  for (int seed = 1; seed <= 12; ++seed) {
    Directory directory;
    CHECK_EQ(ends([&] {
               Faulty f("power_loss_after=32,seed=" + std::to_string(seed), directory.path);
               for (int i = 0;; ++i) f.put("aa/" + std::to_string(i));
             }),
             SIGKILL);
    Faulty after("", directory.path);
    for (int i = 0; i < 8; ++i) {  // create, write, done, publish: 32 steps
      std::vector<uint8_t> bytes;
      const int64_t got = after.get("aa/" + std::to_string(i), &bytes);
      const auto whole = static_cast<size_t>(std::count(bytes.begin(), bytes.end(), 0x5a));
      ++seen[got < 0 ? "gone" : got < 64 << 10 ? "cut" : whole == 0 ? "zeros" : whole < bytes.size() ? "torn" : "whole"];
    }
    CHECK(!std::filesystem::exists(directory / "aa/8"));
  }
  for (const char* kind : {"gone", "cut", "zeros", "torn", "whole"}) CHECK(seen[kind] > 0);
}

TEST(a_schedule_that_makes_no_sense_is_refused) {
  for (const char* schedule :
       {"write",       "write=1",      "write_eio",           "write_eio=",  "write_eio=2", "write_eio=-1", "write_eio=nan",
        "write_eio=@", "write_eio=@0", "write_eio=@x",        "write_bad=1", "bad_eio=1",   "open_short=1", "write_flip=1",
        "done_eio=1",  "seed=x",       "power_loss_after=-1", "=1",          ",",           "_=1",          "write_=1"})
    if (!CHECK(refused(schedule))) std::fprintf(stderr, "%s\n", schedule);
  CHECK(!refused(""));
  CHECK(!refused("seed=7,read_eio=0.01,write_enospc=1,write_kill=@40,publish_eio=@3+"));
}

TEST(a_power_loss_may_give_a_file_its_name_back_that_was_taken_over) {
  std::map<std::string, int> found;
  for (int seed = 1; seed <= 12; ++seed) {
    Directory directory;
    CHECK_EQ(ends([&] {
               Faulty f("power_loss_after=5,seed=" + std::to_string(seed), directory.path);
               f.put("aa/old");  // four steps
               std::string temp;
               const int fd = f.faults.files().take_over("aa/old", 64 << 10, &temp);
               f.faults.files().close(fd);
               f.put("aa/new");
             }),
             SIGKILL);
    found[std::filesystem::exists(directory / "aa/old") ? "old name" : "no name"] += 1;
  }
  CHECK(found["old name"] > 0);
  CHECK(found["no name"] > 0);
}
