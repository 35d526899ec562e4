// Goal: a block that is due for the disk is evicted after all that are not, and counted where it goes unwritten.
// Method: a store without a tier behind it, so that nothing is written unless the test says so.
//
// Proven by removal: kDueWorth of 1: the first test's due blocks go first; place() in end_write(): what was written stays
// longest.
#include "tests/check.h"
#include "tests/store_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {

constexpr uint64_t kBlocks = 64;

struct Burst {
  Rig rig{kBlocks * 4 * kPageBytes, 4 * kBlocks, true};
  uint64_t next = 1000;

  // Of the lowest priority and used twice: due for the disk, and worth least.
  void put_due(uint64_t number) {
    CHECK_EQ(rig.put(number, 4, 0, 0), Grant::Granted);
    const Key wanted[] = {key(number)};
    CHECK(rig.store->touch(wanted)[0]);
  }
  void put_others(uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) CHECK_EQ(rig.put(next++, 4, 0, kMaxPriority - 1), Grant::Granted);
  }
  uint64_t resident(uint64_t first, uint64_t count) {
    uint64_t there = 0;
    for (uint64_t i = first; i < first + count; ++i) there += rig.resident(i);
    return there;
  }
  uint64_t lost() { return rig.store->stats().evictions_unwritten; }
};

}  // namespace

TEST(what_is_due_for_the_disk_goes_last) {
  Burst pool;
  for (uint64_t i = 0; i < 16; ++i) pool.put_due(i);
  CHECK_EQ(pool.rig.store->stats().pending_writes, 16u);
  pool.put_others(4 * kBlocks);
  CHECK(pool.rig.store->stats().evictions >= 3 * kBlocks);
  CHECK_EQ(pool.resident(0, 16), 16u);
  CHECK_EQ(pool.lost(), 0u);
  pool.rig.store->check_integrity();
}

TEST(what_was_written_goes_as_any_other) {
  Burst pool;
  for (uint64_t i = 0; i < 16; ++i) pool.put_due(i);
  for (uint64_t i = 0; i < 8; ++i) {
    const auto job = pool.rig.store->begin_write();
    CHECK(job && pool.rig.store->end_write(job->handle, true));
  }
  pool.put_others(2 * kBlocks);
  CHECK_EQ(pool.resident(0, 16), 8u);
  CHECK_EQ(pool.rig.store->stats().on_disk, 8u);
  CHECK_EQ(pool.lost(), 0u);
  pool.rig.store->check_integrity();
}

TEST(a_burst_of_more_than_the_memory_is_counted) {
  Burst pool;
  for (uint64_t i = 0; i < 3 * kBlocks; ++i) CHECK_EQ(pool.rig.put(i, 4, 0, kMaxPriority), Grant::Granted);
  const Stats stats = pool.rig.store->stats();
  CHECK_EQ(stats.pending_writes + stats.evictions_unwritten, 3 * kBlocks);
  CHECK_EQ(stats.evictions_unwritten, stats.evictions);
  CHECK(stats.evictions_unwritten >= 2 * kBlocks);
  pool.rig.store->remove(key(3 * kBlocks - 1));  // a delete is no loss
  pool.rig.store->settle();
  CHECK_EQ(pool.lost(), stats.evictions_unwritten);
  pool.rig.store->check_integrity();
}
