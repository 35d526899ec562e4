// Goal: a disk that answers nothing is named while it does not, and holds up nobody but who waits for it.
//
// Method: calls and transfers that end when the test says so; a moment instead of ten seconds is taken for a hang.
#include <thread>

#include "check.h"
#include "disk_hooks.h"

namespace kv {
namespace {

using test::eventually;
using test::HookedRig;
using test::key;

bool tells(HookedRig& rig, std::string_view text) {
  for (const auto& condition : rig.tier->conditions())
    if (condition.state == "failed" && condition.text.find(text) != std::string::npos) return true;
  return false;
}

TEST(a_call_that_does_not_return_is_told) {
  HookedRig rig;
  CHECK(rig.put_on_disk(1));
  rig.fill(1000);
  std::atomic<bool> open{false};
  rig.hooks.open = [&](const std::string&) { return eventually([&] { return open.load(); }) ? 0 : -EIO; };
  DiskTierTest::hangs_after(*rig.tier, 50);
  CHECK_EQ(rig.tier->promote(key(1), 35), Presence::Pending);
  CHECK(eventually([&] { return tells(rig, "does not return"); }));
  CHECK(rig.put(5000));
  DiskTierTest::hangs_after(*rig.tier, 60'000);
  open = true;
  CHECK(eventually([&] { return rig.presence(1) == Presence::Resident; }));
  CHECK_EQ(rig.tier->conditions().size(), 0u);
}

TEST(a_listing_that_does_not_return_is_told) {
  HookedRig rig;
  std::atomic<bool> open{false};
  rig.hooks.make_directories = [&] { CHECK(eventually([&] { return open.load(); })); };
  rig.tier.reset();
  rig.make_tier();
  DiskTierTest::hangs_after(*rig.tier, 50);
  rig.tier->start();
  CHECK(eventually([&] { return tells(rig, "listing " + rig.directory + " does not return"); }));
  DiskTierTest::hangs_after(*rig.tier, 60'000);
  open = true;
  CHECK(eventually([&] { return !rig.tier->stats().indexing && rig.tier->conditions().empty(); }));
}

TEST(a_flush_that_hangs_holds_up_no_other) {
  HookedRig rig;
  std::atomic<bool> open{false}, begun{false};
  rig.hooks.keep_flushed = [&] { return begun = true, eventually([&] { return open.load(); }) ? 0 : -EIO; };
  std::thread first([&] { rig.store->flush(); });
  CHECK(eventually([&] { return begun.load(); }));
  CHECK_EQ(test::thrown([&] { rig.store->flush(); }), std::optional(Code::Unavailable));
  open = true;
  first.join();
  rig.store->flush();
}

TEST(transfers_that_do_not_end_are_told) {
  HookedRig rig;
  test::Gate gate;
  std::atomic<bool> open{false};
  gate.open = [&] { return open.load(); };
  rig.narrow(gate);
  DiskTierTest::hangs_after(*rig.tier, 50);
  CHECK(rig.put(1, kMaxPriority));
  CHECK(eventually([&] { return tells(rig, "no transfer in " + rig.directory); }));
  DiskTierTest::hangs_after(*rig.tier, 60'000);
  open = true;
  CHECK(eventually([&] { return rig.on_disk_as_well(1) && rig.tier->conditions().empty(); }));
}

}  // namespace
}  // namespace kv
