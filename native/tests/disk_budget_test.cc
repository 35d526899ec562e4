// Goal: no more than the day's budget is written, whatever is removed meanwhile, is under way, fails, or is cut off by a kill;
// and one who cannot count does not write.
//
// Method: a budget of a few files; what was counted is read from the directory while a write is held up, as a kill would leave
// it.
//
// Proven against the tier as it was: all fail but the first.
#include <fstream>

#include "check.h"
#include "disk_hooks.h"

namespace kv {
namespace {

using test::DiskRig;
using test::eventually;
using test::HookedRig;
using test::key;

constexpr uint64_t kFileBytes = HookedRig::kFileBytes;

void limit(DiskRig& rig, uint64_t bytes = 3 * kFileBytes) {
  rig.also = [bytes, before = rig.also](DiskTier::Options& options) {
    if (before) before(options);
    options.daily_write_bytes = bytes;
  };
  rig.restart(true);
}

// Each load goes through turns that would have written.
void turns(DiskRig& rig, uint64_t from, uint64_t count) {
  for (uint64_t i = from; i < from + count; ++i) CHECK(rig.load(i));
}

// A budget that began anew with each daemon would bound nothing.
TEST(the_daily_budget_outlives_the_daemon) {
  DiskRig rig;
  constexpr uint64_t kFileBytes = 17 * kPageBytes + kBlockFileHeaderBytes;
  rig.also = [](DiskTier::Options& options) { options.daily_write_bytes = 3 * kFileBytes; };
  rig.restart(true);
  for (uint64_t i = 1; i <= 3; ++i) CHECK(rig.put_on_disk(i));
  const uint64_t spent = rig.tier->stats().written_today_bytes;
  CHECK_EQ(spent, rig.bytes_on_disk());
  rig.restart(false);
  CHECK_EQ(rig.tier->stats().written_today_bytes, spent);
  CHECK(rig.put(10, kMaxPriority));
  CHECK_EQ(rig.store->stats().pending_writes, 1u);
  for (uint64_t i = 1; i <= 3; ++i) CHECK(rig.load(i));  // each goes through turns that would have written
  CHECK_EQ(rig.tier->stats().written, 0u);
}

TEST(what_is_gone_was_written_all_the_same) {
  DiskRig rig;
  limit(rig);
  CHECK(rig.put_on_disk(1) && rig.put_on_disk(2));
  CHECK(rig.store->remove(key(2)));
  rig.store->settle();
  CHECK(eventually([&] { return rig.files().size() == 1; }));
  rig.restart(false);
  CHECK_EQ(rig.tier->stats().written_today_bytes, 2 * kFileBytes);
  CHECK(rig.put_on_disk(3));
  CHECK(rig.put(4, kMaxPriority));
  turns(rig, 1, 1);
  CHECK_EQ(rig.tier->stats().written, 1u);
  CHECK_EQ(rig.tier->stats().written_today_bytes, 3 * kFileBytes);
}

// Many at once, the last of them with less left than it takes.
TEST(what_is_under_way_counts) {
  DiskRig rig;
  limit(rig, 4 * kFileBytes - 1);
  for (uint64_t i = 1; i <= 20; ++i) CHECK(rig.put(i, kMaxPriority));
  CHECK(eventually([&] { return rig.tier->stats().written == 3 && !rig.busy(); }));
  for (uint64_t i = 21; i <= 24; ++i) CHECK(rig.put(i, kMaxPriority));
  rig.restart(true);
  CHECK_EQ(rig.files().size(), 3u);
  CHECK_EQ(rig.tier->stats().written_today_bytes, 3 * kFileBytes);
}

TEST(a_block_larger_than_the_budget_keeps_no_other_out) {
  HookedRig rig;
  limit(rig, 2 * kFileBytes);
  rig.put_large(1);
  CHECK(eventually([&] { return rig.tier->stats().writes_too_large == 1; }));
  CHECK(rig.put_on_disk(2));
}

// Killed in the middle of a write: a temporary file, and what was counted before its first byte.
TEST(a_write_that_was_cut_off_counts) {
  HookedRig rig;
  limit(rig);
  test::Gate gate;
  std::atomic<bool> open{false};
  gate.open = [&] { return open.load(); };
  rig.narrow(gate);
  CHECK(rig.put(1, kMaxPriority));
  CHECK(eventually([&] { return gate.submitted() == "w"; }));
  const Written then = RealFiles(rig.directory, false).written();
  CHECK_EQ(then.bytes, kFileBytes);
  open = true;
  CHECK(eventually([&] { return rig.on_disk_as_well(1); }));
  CHECK(rig.store->remove(key(1)));
  rig.store->settle();
  CHECK(eventually([&] { return rig.files().empty(); }));
  rig.restart(false);
  CHECK_EQ(rig.tier->stats().written_today_bytes, kFileBytes);
}

TEST(what_was_counted_on_another_day_or_cannot_be_read_says_nothing) {
  DiskRig rig;
  limit(rig);
  const auto write = [&](const std::string& text) { std::ofstream(rig.directory + "/" + kWrittenFile) << text; };
  CHECK(rig.put_on_disk(1));
  CHECK_EQ(RealFiles(rig.directory, false).written().bytes, kFileBytes);
  for (const char* text : {"0000000001 00000000000999999999\n", "", "12", "999999999999999999999999999999999999999999999",
                           "garbage garbage garbage garbage garbage"}) {
    rig.stop();
    write(text);
    rig.start(true);
    CHECK_EQ(rig.tier->stats().written_today_bytes, kFileBytes);  // what lies there
  }
  CHECK(rig.put_on_disk(2));
  CHECK_EQ(RealFiles(rig.directory, false).written().bytes, kFileBytes);
}

TEST(who_cannot_count_does_not_write) {
  DiskRig rig;
  limit(rig);
  CHECK(rig.put_on_disk(1));
  rig.stop();
  std::filesystem::remove(rig.directory + "/" + kWrittenFile);
  std::filesystem::create_directory(rig.directory + "/" + kWrittenFile);
  rig.start(true);
  CHECK(rig.put(2, kMaxPriority));
  CHECK(eventually([&] { return rig.tier->stats().write_errors == 1 && !rig.busy(); }));
  CHECK_EQ(rig.files().size(), 1u);
  CHECK_EQ(rig.tier->stats().bytes, kFileBytes);
}

}  // namespace
}  // namespace kv
