// Goal: what somebody waits for is loaded before what nobody does, whatever was asked for first, and before what is written.
//
// Method: the tier is held at one call while the test asks for what it wants; then the order of the calls is looked at.
//
// Proven against the tier as it was: all fail.
#include <set>

#include "check.h"
#include "disk_hooks.h"

namespace kv {
namespace {

using test::eventually;
using test::Gate;
using test::HookedRig;
using test::key;
using test::kFewDirectories;

constexpr uint64_t kFirst = 10'000;

// Files without blocks in them; the tier waits where it opens the first.
struct Held {
  explicit Held(uint64_t files) {
    rig.tier.reset();
    rig.make_files(kFirst, files);
    rig.start_tier();
    rig.hooks.open = [this](const std::string& path) {
      {
        std::lock_guard lock(mutex);
        opened.push_back(path);
      }
      if (!released) begun = true, CHECK(eventually([&] { return released.load(); }));
      return -ENOENT;
    };
    CHECK_EQ(rig.tier->promote(key(kFirst), 50), Presence::Pending);
    CHECK(eventually([&] { return begun.load(); }));
  }
  ~Held() { release(); }
  void release() {
    released = true;
    CHECK(eventually([&] { return !rig.busy(); }));
  }
  std::mutex mutex;
  std::vector<std::string> opened;
  std::atomic<bool> begun{false}, released{false};
  HookedRig rig{1ull << 30};
};

TEST(a_hint_that_is_waited_for_is_a_hint_no_more) {
  Held held(40);
  for (uint64_t i = 1; i < 30; ++i) CHECK_EQ(held.rig.tier->promote(key(kFirst + i), 10), Presence::Pending);
  CHECK_EQ(held.rig.tier->promote(key(kFirst + 30), 0), Presence::Pending);
  CHECK_EQ(held.rig.tier->promote(key(kFirst + 30), 100), Presence::Pending);
  CHECK_EQ(held.rig.tier->promote(key(kFirst + 30), 5), Presence::Pending);  // and stays so
  CHECK_EQ(held.rig.tier->stats().loads_waiting, 30u);
  held.release();
  CHECK_EQ(held.opened.size(), 31u);
  CHECK_EQ(held.opened[1], path_of(key(kFirst + 30), kFewDirectories));
}

TEST(a_queue_full_of_hints_refuses_nobody_who_waits) {
  constexpr uint64_t kFull = 4096;
  Held held(kFull + 10);
  for (uint64_t i = 1; i <= kFull; ++i) CHECK_EQ(held.rig.tier->promote(key(kFirst + i), 0), Presence::Pending);
  const uint64_t late = kFirst + kFull + 1;
  CHECK_EQ(held.rig.tier->promote(key(late), 0), Presence::OnDisk);
  CHECK_EQ(held.rig.tier->promote(key(late), 100), Presence::Pending);
  CHECK_EQ(held.rig.tier->stats().loads_waiting, kFull);
  CHECK_EQ(held.rig.tier->promote(key(kFirst + kFull), 0), Presence::OnDisk);  // the last of the hints
  held.release();
  CHECK_EQ(held.opened[1], path_of(key(late), kFewDirectories));
}

TEST(a_read_waits_for_no_step_of_a_write_that_has_not_begun) {
  HookedRig rig;
  CHECK(rig.put_on_disk(1));
  StoreTest::evict(*rig.store, rig.store->lookup(key(1)).snapshot.record);
  rig.store->settle();
  CHECK_EQ(rig.presence(1), Presence::OnDisk);
  std::atomic<bool> released{false};
  Gate gate;
  gate.open = [&] { return released.load() || !gate.submitted().starts_with("w"); };
  rig.narrow(gate);
  rig.put_large(2);
  CHECK(eventually([&] { return gate.submitted() == "w"; }));
  CHECK_EQ(rig.tier->promote(key(1), 100), Presence::Pending);
  CHECK(eventually([&] { return rig.tier->stats().loads_in_flight == 1; }));
  released = true;
  CHECK(eventually([&] { return !rig.busy(); }));
  CHECK_EQ(rig.presence(1), Presence::Resident);
  CHECK(gate.submitted().starts_with("wrw"));
}

}  // namespace
}  // namespace kv
