// Goal: who polls leaves the processor of the client that it polls for, and goes nowhere that it may not go. Method: this
// thread's own affinity; for the whole, a daemon and a client that follows it from processor to processor.
//
// Rules proven by removal (failed checks of one run): to another processor: 2; seldom: 100; the affinity put back: 1; the look at
// where the thread is: 201; the hint in the client's page: 1.
#include "core/base/processor.h"

#include <sched.h>

#include <cstdio>

#include "core/base/polling.h"
#include "tests/session_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {

cpu_set_t affinity() {
  cpu_set_t set;
  KV_INVARIANT(::sched_getaffinity(0, sizeof set, &set) == 0);
  return set;
}

bool same(const cpu_set_t& a, const cpu_set_t& b) { return CPU_EQUAL(&a, &b); }

bool one_processor() {
  const cpu_set_t allowed = affinity();
  const bool alone = CPU_COUNT(&allowed) == 1;
  if (alone) std::printf("skipped: this process may run on one processor only\n");
  return alone;
}

// This thread, on one processor of those it may run on; `number` as pages have it.
struct Pinned {
  explicit Pinned(uint32_t number) : before(affinity()) {
    CPU_ZERO(&only);
    CPU_SET(number - 1, &only);
    KV_INVARIANT(::sched_setaffinity(0, sizeof only, &only) == 0);
  }
  ~Pinned() { ::sched_setaffinity(0, sizeof before, &before); }
  cpu_set_t before, only;
};

std::vector<uint32_t> allowed() {
  const cpu_set_t set = affinity();
  std::vector<uint32_t> numbers;
  for (uint32_t number = 1; number <= CPU_SETSIZE; ++number)
    if (CPU_ISSET(number - 1, &set)) numbers.push_back(number);
  return numbers;
}

}  // namespace

TEST(a_thread_leaves_its_processor_and_may_still_run_on_all) {
  if (one_processor()) return;
  const cpu_set_t before = affinity();
  CHECK(eventually([&] {  // the scheduler moves it too
    const uint32_t here = this_processor();
    return OwnProcessor().leave_to(here, 0) && this_processor() != here;
  }));
  CHECK(same(affinity(), before));
}

TEST(it_moves_seldom) {
  if (one_processor()) return;
  OwnProcessor thread;
  constexpr uint64_t kNow = 1'000'000;
  CHECK(eventually([&] { return thread.leave_to(this_processor(), kNow); }));
  for (int i = 0; i < 100; ++i) CHECK(!thread.leave_to(this_processor(), kNow + OwnProcessor::kMoveEveryNs - 1));
  CHECK(eventually([&] { return thread.leave_to(this_processor(), kNow + OwnProcessor::kMoveEveryNs); }));
}

TEST(it_stays_where_it_must_and_where_it_meets_nobody) {
  const Pinned pinned(allowed().front());
  const uint32_t here = this_processor();
  CHECK(!OwnProcessor().leave_to(here, 0));  // nowhere else to go
  CHECK(!OwnProcessor().leave_to(0, 0));
  CHECK(same(affinity(), pinned.only));
}

TEST(a_client_elsewhere_moves_nobody) {
  const auto processors = allowed();
  for (int i = 0; i < 100; ++i)
    for (uint32_t number : processors) {
      const Pinned pinned(number);  // so that it cannot meet the number asked for
      for (uint32_t other : processors)
        if (other != number) CHECK(!OwnProcessor().leave_to(other, 0));
    }
  CHECK(!OwnProcessor().leave_to(~0u, 0));
}

TEST(who_keeps_off_a_processor_runs_elsewhere_and_at_the_end_everywhere) {
  if (one_processor()) return;
  const cpu_set_t before = affinity();
  Apart thread;
  for (const uint32_t number : allowed()) {
    CHECK(thread.keep_off(number) && this_processor() != number);
    cpu_set_t others = before;
    CPU_CLR(number - 1, &others);
    CHECK(same(affinity(), others) && !thread.keep_off(number));
    if (number == 8) break;
  }
  CHECK(thread.keep_off(0) && same(affinity(), before) && !thread.keep_off(0));
  CHECK(!thread.keep_off(~0u) && same(affinity(), before));
}

TEST(where_it_must_be_it_stays_and_what_somebody_else_sets_stays) {
  const auto processors = allowed();
  {
    const Pinned pinned(processors.front());
    CHECK(!Apart().keep_off(processors.front()) && same(affinity(), pinned.only));
  }
  if (one_processor()) return;
  const cpu_set_t before = affinity();
  Apart thread;
  CHECK(thread.keep_off(processors.back()));
  {
    const Pinned pinned(processors.back());  // by an operator, say
    CHECK(thread.keep_off(0) && same(affinity(), pinned.only));
  }
  ::sched_setaffinity(0, sizeof before, &before);
}

// Wherever the daemon goes, the client goes too.
TEST(a_daemon_that_polls_steps_aside_for_its_client) {
  if (one_processor()) return;
  Daemon daemon;
  auto client = daemon.client();
  const auto processors = allowed();
  size_t turn = 0;
  CHECK(eventually([&] {
    const Pinned pinned(processors[turn++ % processors.size()]);
    for (int i = 0; i < 1000; ++i) client->touch(std::vector<Key>{key(1)});
    return daemon.server->steps_aside() >= 3;
  }));
}
