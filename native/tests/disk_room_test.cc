// Goal: what was loaded from disk is still there when the one who asked comes for it, also in a pool full of better blocks, and
// takes no room from anybody who finds none.
//
// Proven by removal (in a copy of the tree): a load does not call keep_loaded(): 19 failed checks.
#include <cstdio>

#include "check.h"
#include "core/base/polling.h"
#include "tier_fixture.h"

namespace kv {
namespace {

using test::DiskRig;
using test::eventually;
using test::key;

// All others in the pool are worth more: without a moment's grace each load would evict the one before.
TEST(loads_do_not_evict_each_other) {
  DiskRig rig;
  for (uint64_t i = 0; i < 28; ++i) CHECK(rig.put_on_disk(i));
  rig.fill(1000);
  for (uint64_t i = 0; i < 28; ++i) CHECK_EQ(rig.presence(i), Presence::OnDisk);
  const uint64_t begun_ns = monotonic_ns();
  for (uint64_t i = 0; i < 28; ++i) rig.tier->promote(key(i), 35);
  CHECK(eventually([&] { return !rig.busy(); }));
  if (monotonic_ns() - begun_ns > 900'000'000) return (void)std::printf("     took longer than the grace lasts\n");
  for (uint64_t i = 0; i < 28; ++i) CHECK_EQ(rig.presence(i), Presence::Resident);
  CHECK_EQ(rig.tier->stats().loaded, 28u);
  rig.store->check_integrity();
}

// The grace ends where there would be no room otherwise.
TEST(blocks_just_loaded_make_room_if_nothing_else_can) {
  DiskRig rig;
  CHECK(rig.put_on_disk(1));
  rig.fill(1000);
  CHECK(rig.load(1));
  std::vector<Handle> held;
  for (uint64_t i = 2000; i < 2100; ++i) {  // unsealed blocks cannot be evicted
    const CreateItem item{.key = key(i), .fingerprint = i, .tokens = 1, .base_position = 5, .parent = 9};
    const Granted granted = rig.store->create({rig.owner, rig.layout, 35, 0, {&item, 1}})[0];
    if (granted.status != Grant::Granted) break;
    held.push_back(granted.handle);
  }
  CHECK_EQ(rig.presence(1), Presence::OnDisk);
  CHECK(held.size() >= 32);
  for (const Handle handle : held) rig.store->abort(rig.owner, handle);
  rig.store->settle();
  rig.store->check_integrity();
}

// Pinned just after the eviction had looked at the pins: it leaves memory later than its file left the disk.
TEST(a_zombie_whose_file_goes_is_nowhere_afterwards) {
  DiskRig rig;
  CHECK(rig.put_on_disk(1) && rig.put_on_disk(2));
  test::Page page(*rig.store);
  uint32_t slots[2];
  for (uint64_t i : {1, 2}) {
    const Snapshot at = rig.store->lookup(key(i)).snapshot;
    slots[i - 1] = page.pin({at.record, at.control.generation()});
    StoreTest::evict(*rig.store, at.record);
  }
  rig.store->drop_disk(key(1));
  for (uint32_t slot : slots) page.clear(slot);
  rig.store->tick();
  CHECK_EQ(rig.store->stats().zombies, 0u);
  CHECK_EQ(rig.presence(1), Presence::Missing);
  CHECK_EQ(rig.presence(2), Presence::OnDisk);
  page.unmap();
  rig.store->end_session(page.id);
  rig.store->check_integrity();
}

}  // namespace
}  // namespace kv
