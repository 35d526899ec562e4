// Goal: a tier that is to stop does: it lists no further, submits nothing more, and removes for a moment only; what it had no
// time to remove does not come back, whatever of the memory is lost.
//
// Method: the step under way waits until the tier was told to stop; then what is done after it is counted.
//
// Proven against the tier as it was: all fail.
#include "check.h"
#include "core/base/polling.h"
#include "core/files/fsck.h"
#include "disk_hooks.h"

namespace kv {
namespace {

using test::eventually;
using test::HookedRig;

bool stopping(HookedRig& rig) {
  return eventually([&] { return DiskTierTest::stopping(*rig.tier); });
}

TEST(a_listing_ends_among_strays) {
  HookedRig rig;
  rig.tier.reset();
  for (int i = 0; i < 500; ++i) const Fd made(::open((rig.directory + "/stray" + std::to_string(i)).c_str(), O_CREAT, 0600));
  std::atomic<bool> begun{false};
  rig.hooks.make_directories = [&] { begun = true, CHECK(stopping(rig)); };
  rig.make_tier();
  rig.tier->start();
  CHECK(eventually([&] { return begun.load(); }));
  rig.tier->stop();
  CHECK_EQ(rig.tier->stats().strays, 0u);
}

TEST(a_large_write_is_given_up) {
  HookedRig rig;
  test::Gate gate;
  gate.open = [&] { return DiskTierTest::stopping(*rig.tier); };
  rig.narrow(gate);
  rig.put_large(1);
  CHECK(eventually([&] { return gate.submitted() == "w"; }));
  rig.tier->stop();
  CHECK_EQ(gate.submitted(), "w");
  CHECK_EQ(rig.files().size(), 0u);
  CHECK_EQ(rig.tier->stats().write_errors, 0u);
  CHECK_EQ(rig.store->stats().pending_writes, 0u);
  rig.store->check_integrity();
}

// The rest is the next daemon's.
TEST(removals_end_soon) {
  constexpr uint64_t kFew = 10, kEachNs = 10'000'000, kTimeNs = 50'000'000;
  HookedRig rig;
  rig.tier.reset();
  rig.make_files(10'000, 500);
  rig.start_tier();
  std::atomic<uint64_t> removed{0};
  rig.hooks.remove = [&](const std::string&) {
    if (++removed == kFew) CHECK(stopping(rig));
    if (removed > kFew)  // a slow disk
      for (const uint64_t end = monotonic_ns() + kEachNs; monotonic_ns() < end;) continue;
    return 0;
  };
  rig.store->flush();
  CHECK(eventually([&] { return removed.load() == kFew; }));
  rig.tier->stop();
  CHECK(removed.load() <= kFew + kTimeNs / kEachNs + 1);
}

void leave_deleted(HookedRig& rig, uint64_t count) {
  rig.hooks.remove = [](const std::string&) { return -EAGAIN; };  // not now
  for (uint64_t i = 0; i < count; ++i) CHECK(rig.store->remove(test::key(i)));
  rig.restart(false);
}

TEST(what_was_deleted_stays_so_without_the_memory) {
  constexpr uint64_t kCount = 5;
  HookedRig rig;
  for (uint64_t i = 0; i <= kCount; ++i) CHECK(rig.put_on_disk(i));
  leave_deleted(rig, kCount);
  rig.restart(false);  // this one could not remove them either
  for (uint64_t i = 0; i < kCount; ++i) CHECK_EQ(rig.tier->promote(test::key(i), 35), Presence::Missing);
  rig.tier->stop();  // its thread reads what is changed here
  rig.hooks.remove = nullptr;
  rig.restart(false);
  for (uint64_t i = 0; i < kCount; ++i) CHECK_EQ(rig.tier->promote(test::key(i), 35), Presence::Missing);
  CHECK(eventually([&] { return rig.files().size() == 1; }));
  CHECK(eventually([&] { return !test::fs::exists(rig.directory + "/" + kDeletedFile); }));
  for (uint64_t i = 0; i < kCount; ++i) CHECK(rig.put_on_disk(i));  // anew
  rig.restart(false);
  for (uint64_t i = 0; i <= kCount; ++i) CHECK(rig.load(i) && rig.right(i));
}

// A block that is in no record, deleted before the directory is listed: only the pool can tell of it after a kill, before which
// nothing was written.
TEST(what_was_deleted_before_the_listing_stays_so_after_a_kill) {
  HookedRig rig;
  rig.tier.reset();
  rig.make_files(500, 2);
  rig.hooks.remove = [](const std::string&) { return -EAGAIN; };
  rig.hooks.make_directories = [&] { CHECK(stopping(rig)); };
  rig.make_tier();
  rig.tier->start();
  CHECK(!rig.store->remove(test::key(500)));
  rig.tier->stop();
  test::fs::remove(rig.directory + "/" + kDeletedFile);
  rig.hooks = {};
  rig.restart(true);
  CHECK_EQ(rig.tier->promote(test::key(500), 35), Presence::Missing);
  CHECK(eventually([&] { return rig.files().size() == 1; }));
  rig.store->check_integrity();
}

TEST(fsck_says_what_was_deleted) {
  HookedRig rig;
  for (uint64_t i = 0; i < 3; ++i) CHECK(rig.put_on_disk(i));
  leave_deleted(rig, 2);
  rig.stop();
  const FsckReport report = fsck(rig.directory, {}, {});
  CHECK_EQ(report.found[static_cast<size_t>(Finding::Leftover)], 2u);
  CHECK_EQ(report.found[static_cast<size_t>(Finding::Foreign)], 0u);
}

}  // namespace
}  // namespace kv
