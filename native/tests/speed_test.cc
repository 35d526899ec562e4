// Goal: the speed that is told is that of the loads of late, and one stall is not remembered for ever.
// Method: a clock made up. Proven by removal: without fading, and without forgetting, one test each fails.
#include "core/disk/speed.h"

#include "check.h"

using kv::LoadSpeed;

namespace {

constexpr uint64_t kSecond = 1'000'000'000, kMB = 1'000'000;

struct Clock {
  uint64_t now = 1000 * kSecond;
  LoadSpeed speed;
  uint64_t load(uint64_t bytes, uint64_t took_ns) {
    speed.tell(now, true);
    now += took_ns;
    speed.add(bytes);
    return speed.tell(now, false);
  }
  uint64_t idle(uint64_t ns) { return speed.tell(now += ns, false); }
};

}  // namespace

TEST(time_between_loads_does_not_count) {
  Clock clock;
  CHECK_EQ(clock.idle(5 * kSecond), 0u);
  CHECK_EQ(clock.load(100 * kMB, kSecond) / kMB, 100u);
  CHECK_EQ(clock.idle(3 * kSecond) / kMB, 100u);
  CHECK_EQ(clock.load(100 * kMB, kSecond) / kMB, 100u);
}

TEST(a_stall_fades) {
  Clock clock;
  clock.load(kMB, 8 * kSecond);
  CHECK(clock.idle(0) < kMB);
  for (int i = 0; i < 40; ++i) clock.idle(kSecond), clock.load(100 * kMB, kSecond / 10);
  CHECK(clock.idle(0) > 500 * kMB);
}

TEST(what_is_old_is_forgotten) {
  Clock clock;
  clock.load(kMB, 8 * kSecond);
  for (int i = 0; i < 59; ++i) CHECK(clock.idle(kSecond) > 0);
  CHECK_EQ(clock.idle(kSecond), 0u);
  CHECK_EQ(clock.load(100 * kMB, kSecond) / kMB, 100u);
}
