// Goal: whatever the date does, what is used now is worth more than what was used before, also behind a restart. Method: this
// program's clock_gettime and time, which the store calls, are moved; a block that was just put must outlive older ones.
//
// Rules proven by removal (failed checks of one run): the scores count from the date: 352; a clock in the table, or of a table of
// before, that lies behind its scores is believed: 38.
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cmath>

#include "tests/check.h"
#include "tests/store_fixture.h"

namespace {
std::atomic<int64_t> moved_s{0};
}  // namespace

extern "C" int clock_gettime(clockid_t clock, timespec* out) noexcept {
  const int result = static_cast<int>(::syscall(SYS_clock_gettime, clock, out));
  if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) out->tv_sec += moved_s.load();
  return result;
}
extern "C" time_t time(time_t* out) noexcept {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}

using namespace kv;
using namespace kv::test;

namespace {

constexpr uint64_t kBlocks = 1024, kNew = 10;
constexpr int64_t kDayS = 86400;

struct Clocked : Rig {
  Clocked() : Rig(kBlocks * 2 * kPageBytes, 2 * kBlocks) {}
  ~Clocked() { moved_s = 0; }
  void put_some(uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) CHECK(put(next++, 2) == Grant::Granted);
  }
  // Of the blocks put last the newest stay while older ones go.
  void check_the_newest_stay() {
    const uint64_t from = next;
    put_some(kNew);
    for (uint64_t i = from; i < next; ++i) CHECK(resident(i));
    put_some(kBlocks / 4);
    for (uint64_t i = from; i < from + kNew; ++i) CHECK(resident(i));
  }
  TableHeader& header() { return StoreTest::index(*store).header(); }
  uint64_t next = 0;
};

}  // namespace

TEST(a_clock_that_ran_a_day_ahead_and_was_put_right_freezes_nothing) {
  Clocked rig;
  for (const int64_t ahead : {kDayS, int64_t{0}, -kDayS, 365 * kDayS, int64_t{0}}) {
    moved_s = ahead;
    rig.put_some(kBlocks);
    rig.check_the_newest_stay();
    rig.restart();
    rig.check_the_newest_stay();
  }
  rig.store->check_integrity();
}

TEST(a_day_of_jumps) {
  Clocked rig;
  rig.put_some(kBlocks);
  for (uint64_t hour = 0; hour < 24; ++hour) {
    moved_s = static_cast<int64_t>(mixed(hour) % (4 * kDayS)) - 2 * kDayS;
    rig.check_the_newest_stay();
    if (hour % 3 == 0) rig.restart();
    rig.store->tick();
  }
  rig.store->check_integrity();
}

// It counts from a date, and its date was a day ahead.
TEST(a_table_of_before_whose_clock_was_ahead_is_healed) {
  Clocked rig;
  rig.put_some(kBlocks);
  for (uint32_t r = 0; r < 2 * kBlocks; ++r) {
    auto& rank = StoreTest::index(*rig.store).upkeep(r).rank;
    rank.store(std::bit_cast<uint64_t>(std::bit_cast<double>(rank.load()) * std::exp2(kDayS / kHalfLifeSeconds)));
  }
  rig.header().score_ns.store(0);
  rig.restart();
  rig.check_the_newest_stay();
}

TEST(a_table_of_before_goes_on_where_it_was) {
  Clocked rig;
  rig.put_some(kBlocks);
  rig.store->tick();
  const auto seconds = [&] { return static_cast<double>(rig.header().score_ns.load()) / 1e9; };
  const double before = seconds();
  rig.header().score_ns.store(0);
  rig.header().origin_s.fetch_sub(7200);
  rig.restart();
  CHECK(std::abs(seconds() - before - 7200) < 100);
  rig.store->tick();
  CHECK(std::abs(static_cast<double>(rig.header().origin_s.load()) + seconds() - static_cast<double>(::time(nullptr))) < 100);
}

TEST(a_clock_in_the_table_that_is_wrong_is_healed) {
  for (const uint64_t wrong : {uint64_t{1}, ~uint64_t{0}, uint64_t{1} << 62}) {
    Clocked rig;
    rig.header().score_ns.store(100ull * 3600 * 1'000'000'000);  // 100 half lives
    rig.put_some(kBlocks);
    rig.header().score_ns.store(wrong);
    rig.restart();
    rig.check_the_newest_stay();
    CHECK(std::isfinite(rig.store->describe(key(rig.next - 1))->score));
    rig.store->check_integrity();
  }
}
