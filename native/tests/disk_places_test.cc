// Goal: what fails in a directory is told until the same kind of call succeeds; a file that lies where no file of that block
// should be is removed, and counted until then.
//
// Method: calls that answer errors, one kind at a time; files put where another daemon, or another fan-out, had them.
//
// Proven against the tier as it was: all fail.
#include <fstream>

#include "check.h"
#include "disk_hooks.h"

namespace kv {
namespace {

namespace fs = std::filesystem;
using test::DiskRig;
using test::eventually;
using test::HookedRig;
using test::key;
using test::kFewDirectories;

bool tells(DiskRig& rig, std::string_view text) {
  for (const auto& condition : rig.tier->conditions())
    if (condition.text.find(text) != std::string::npos) return true;
  return false;
}

struct Failing {
  Failing() {
    for (uint64_t i = 0; i < 8; ++i) CHECK(rig.put_on_disk(i));
    rig.fill(1000);
  }
  void fail_to_write() {
    rig.hooks.create = [](const std::string&) { return -EIO; };  // the probe's too
    for (uint64_t n = 1; n <= 3; ++n) {                          // none is left waiting
      CHECK(rig.put(5000 + n, kMaxPriority));
      CHECK(eventually([&] { return rig.tier->stats().write_errors == n && !rig.busy(); }));
    }
    CHECK(tells(rig, "making a file"));
  }
  void fail_to_read() {
    rig.hooks.open = [](const std::string&) { return -EIO; };
    for (uint64_t i = 0; i < 3; ++i) {
      CHECK_EQ(rig.tier->promote(key(i), 35), Presence::Pending);
      CHECK(eventually([&] { return !rig.busy(); }));
    }
    rig.hooks.open = nullptr;
    CHECK(tells(rig, "opening a file"));
  }
  HookedRig rig;
};

TEST(a_read_that_succeeds_says_nothing_of_writing) {
  Failing f;
  f.fail_to_write();
  CHECK(f.rig.load(5));
  CHECK(tells(f.rig, "making a file"));
  f.rig.hooks.create = nullptr;
  CHECK(eventually([&] { return f.rig.tier->conditions().empty(); }));  // the probe's, or a write's
}

TEST(a_write_that_succeeds_says_nothing_of_reading) {
  Failing f;
  f.fail_to_read();
  CHECK(f.rig.put(6000, kMaxPriority));
  CHECK(eventually([&] { return f.rig.on_disk_as_well(6000); }));
  CHECK(tells(f.rig, "opening a file"));
  CHECK(f.rig.load(5));
  CHECK_EQ(f.rig.tier->conditions().size(), 0u);
}

TEST(nothing_ends_what_was_not_listed) {
  Failing f;
  HookedRig& rig = f.rig;
  rig.tier.reset();
  rig.make_tier();
  const fs::path here(rig.directory), away(here.string() + ".away");
  fs::rename(here, away);
  rig.run_tier();
  f.fail_to_read();
  CHECK(rig.load(5));
  CHECK(!tells(rig, "opening a file"));
  CHECK(tells(rig, "the quota is not known"));
  fs::rename(away, here);
  CHECK(eventually([&] { return rig.tier->conditions().empty(); }));
}

// By a mount or a rename: what is written there the next daemon does not find. What lies there is still had.
TEST(a_directory_that_was_replaced_is_named_and_not_written_to) {
  HookedRig rig;
  for (uint64_t i = 0; i < 4; ++i) CHECK(rig.put_on_disk(i));
  rig.fill(1000);
  const fs::path here(rig.directory), away(here.string() + ".away");
  fs::rename(here, away);
  fs::create_directory(here);
  CHECK(eventually([&] { return tells(rig, "another directory lies at " + rig.directory); }));
  CHECK(rig.put(5000, kMaxPriority));
  CHECK(rig.load(1) && rig.right(1));  // goes through turns that would have written
  CHECK_EQ(rig.store->stats().pending_writes, 1u);
  fs::remove(here);
  CHECK(eventually([&] { return tells(rig, "No such file"); }));
  fs::rename(away, here);
  CHECK(eventually([&] { return rig.tier->conditions().empty() && rig.on_disk_as_well(5000); }));
}

// A directory that is away cannot say that a file is gone.
TEST(what_is_deleted_meanwhile_does_not_come_with_the_listing) {
  HookedRig rig;
  for (uint64_t i = 0; i < 4; ++i) CHECK(rig.put_on_disk(i));
  rig.tier.reset();
  rig.make_tier();
  const fs::path here(rig.directory), away(here.string() + ".away");
  fs::rename(here, away);
  std::atomic<bool> asked{false};
  rig.hooks.remove = [&](const std::string&) { return asked = true, -ENOENT; };
  rig.run_tier();
  CHECK(rig.store->remove(key(1)));
  rig.store->settle();
  CHECK(eventually([&] { return asked.load(); }));
  rig.hooks.remove = nullptr;
  fs::rename(away, here);
  CHECK(eventually([&] { return rig.tier->conditions().empty() && rig.files().size() == 3; }));
  CHECK_EQ(rig.tier->promote(key(1), 35), Presence::Missing);
  CHECK_EQ(rig.tier->stats().bytes, rig.bytes_on_disk());
}

// One directory, then the other, then both: each has files of the same blocks.
TEST(the_same_block_in_two_directories_is_there_once) {
  constexpr uint64_t kBlocks = 10;
  DiskRig other, rig;
  other.stop();  // only its directory is wanted
  const auto add_other = [&](DiskTier::Options& options) {
    Choice choice = choose_engine(other.directory, 8);
    options.directories.push_back(
        {other.directory, std::make_unique<RealFiles>(other.directory, choice.direct), std::move(choice.engine)});
  };
  for (uint64_t i = 0; i < kBlocks; ++i) CHECK(rig.put_on_disk(i));
  rig.also = [&](DiskTier::Options& options) { options.directories.clear(), add_other(options); };
  rig.restart(false);
  for (uint64_t i = 0; i < kBlocks; ++i) CHECK(rig.put_on_disk(i));
  rig.also = add_other;
  rig.restart(false);
  CHECK(eventually([&] { return rig.files().size() + other.files().size() == kBlocks; }));
  CHECK(eventually([&] { return rig.tier->stats().bytes == rig.bytes_on_disk() + other.bytes_on_disk(); }));
  CHECK_EQ(rig.tier->stats().files, kBlocks);
  for (uint64_t i = 0; i < kBlocks; ++i) CHECK(rig.load(i) && rig.right(i));
  for (uint64_t i = 0; i < kBlocks; ++i) CHECK(rig.store->remove(key(i)));
  rig.store->settle();
  CHECK(eventually([&] { return rig.files().empty() && other.files().empty(); }));
  rig.stop();
}

TEST(files_of_another_fan_out_go) {
  DiskRig rig;
  for (uint64_t i = 0; i < 10; ++i) CHECK(rig.put_on_disk(i));
  fs::create_directory(rig.directory + "/abc.d");
  std::ofstream(rig.directory + "/abc.d/somebody's") << "bytes";
  rig.also = [](DiskTier::Options& options) { options.fanout = {1, 2}; };
  rig.restart(false);
  CHECK(eventually([&] { return rig.files().size() == 1 && rig.tier->stats().bytes == 0; }));
  CHECK_EQ(rig.tier->stats().strays, 1u);
  for (uint64_t i = 100; i < 110; ++i) CHECK(rig.put_on_disk(i));
  rig.also = nullptr;
  rig.restart(false);
  for (uint64_t i = 0; i < 10; ++i) CHECK_EQ(rig.tier->promote(key(i), 35), Presence::Missing);
  CHECK(eventually([&] { return rig.files().size() == 1 && rig.tier->stats().bytes == 0; }));
}

// Killed before what another fan-out left was removed: the next daemon, with the fan-out of before, knows that it must go.
TEST(a_deleted_block_does_not_come_back_from_where_nobody_looks) {
  HookedRig rig;
  for (uint64_t i = 0; i < 4; ++i) CHECK(rig.put_on_disk(i));
  rig.hooks.remove = [](const std::string& path) { return path.find('/') == 1 ? -EAGAIN : 0; };  // of the first fan-out
  rig.also = [before = rig.also](DiskTier::Options& options) { before(options), options.fanout = {1, 2}; };
  rig.restart(true);
  CHECK(rig.store->remove(key(1)));
  rig.store->settle();
  CHECK(rig.put_on_disk(2000));  // by then it was taken for gone
  CHECK(rig.store->remove(key(2000)));
  rig.store->settle();
  CHECK(eventually([&] { return rig.files().size() == 4; }));
  rig.also = [before = rig.also](DiskTier::Options& options) { before(options), options.fanout = kFewDirectories; };
  rig.stop();
  rig.hooks.remove = nullptr;
  rig.start(true);
  CHECK_EQ(rig.tier->promote(key(1), 35), Presence::Missing);
  CHECK(eventually([&] { return rig.files().size() == 3; }));
  CHECK_EQ(rig.presence(1), Presence::Missing);
}

}  // namespace
}  // namespace kv
