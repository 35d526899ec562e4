// Goal: a deleted block whose file is still there stays deleted over a restart, and a disk that removes nothing takes no room
// from what is stored in memory. Method: a store whose tier below does nothing of what it is told.
#include <sys/eventfd.h>

#include "tests/check.h"
#include "tests/store_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {

constexpr uint32_t kBlocks = 64;

// Knows a file of every key and removes none.
struct Stuck final : LowerTier {
  Presence promote(const Key&, uint32_t) override { return Presence::Missing; }
  Below forget(const Key&) override { return Below::Known; }
  void forget_all() override {}
  void remember_flush() override {}
  Figures figures() override { return {}; }
};

// A write that begins after a delete has asked, and ends before it has the store's lock.
struct Late final : LowerTier {
  Presence promote(const Key&, uint32_t) override { return Presence::Missing; }
  Below forget(const Key&) override { return ++asked == 2 ? Below::Known : Below::Nothing; }
  void forget_all() override {}
  void remember_flush() override {}
  Figures figures() override { return {}; }
  int asked = 0;
};

}  // namespace

TEST(files_that_cannot_go_cost_no_put) {
  Rig rig(16 << 20, kBlocks, true);
  for (uint64_t i = 0; i < 5 * kBlocks; ++i) {
    CHECK(rig.put(i, 2) == Grant::Granted && rig.store->add_disk(key(i), 0));
    CHECK(rig.store->remove(key(i)));
    rig.store->settle();
  }
  std::vector<uint64_t> all;
  for (uint64_t i = 1000; i < 1000 + kBlocks; ++i) all.push_back(i);
  for (const Granted& granted : rig.create(all, 2)) CHECK(granted.status == Grant::Granted);
  rig.store->check_integrity();
  for (uint64_t i = 0; i < 5 * kBlocks; ++i) rig.store->file_gone(key(i));
  rig.store->check_integrity();
}

// The file was written anew, or found again, before it went.
TEST(a_block_that_is_deleted_again_is_remembered_once) {
  Rig rig(16 << 20, kBlocks, true);
  CHECK(rig.put(1, 2) == Grant::Granted && rig.store->add_disk(key(1), 0) && rig.store->remove(key(1)));
  rig.store->settle();
  for (int again = 0; again < 3; ++again) {
    CHECK(rig.store->add_disk(key(1), 0) && rig.store->remove(key(1)));
    rig.store->check_integrity();
  }
  rig.restart();
  rig.store->check_integrity();
  rig.store->file_gone(key(1));
  for (uint64_t i = 2; i < 2 + kBlocks; ++i) CHECK(rig.store->add_disk(key(i), 0));  // all records are free again
  rig.store->check_integrity();
}

// In that order: what lies only on disk is found there all the same.
TEST(what_lies_on_disk_goes_before_what_is_remembered) {
  Rig rig(16 << 20, kBlocks, true);
  CHECK(rig.put(1, 2) == Grant::Granted && rig.store->add_disk(key(1), 0) && rig.store->remove(key(1)));
  rig.store->settle();
  for (uint64_t i = 2; i <= kBlocks; ++i) CHECK(rig.store->add_disk(key(i), 0));
  CHECK(!rig.store->add_disk(key(500), 0));
  for (uint64_t i = 1000; i < 1010; ++i) CHECK(rig.put(i, 2) == Grant::Granted);
  CHECK_EQ(rig.store->stats().on_disk, kBlocks - 1 - 10);
  rig.restart();
  const Deleted told = rig.store->take_deleted();
  CHECK(told.keys.size() == 1 && told.keys[0] == key(1));
}

// There are more files than records.
TEST(a_delete_of_what_only_the_tier_knew_outlives_the_daemon) {
  Rig rig(16 << 20, kBlocks, true);
  Stuck tier;
  const Fd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  rig.store->attach_disk(wake.get(), &tier);
  for (uint64_t i = 1; i <= kBlocks; ++i) CHECK(rig.store->add_disk(key(i), 0));
  CHECK(rig.store->remove(key(500)));
  CHECK(rig.store->remove(key(500)));  // again: remembered once
  rig.store->check_integrity();
  rig.store->detach_disk();
  rig.restart();
  rig.store->check_integrity();
  const Deleted told = rig.store->take_deleted();
  CHECK(told.keys.size() == 1 && told.keys[0] == key(500));
  rig.store->file_gone(key(500));
  CHECK_EQ(rig.store->stats().on_disk, kBlocks - 1);
  rig.store->check_integrity();
}

// Somebody writes the key anew while its old file is being deleted: that block is not to go with it.
TEST(a_block_that_is_being_written_anew_is_not_deleted) {
  Rig rig(16 << 20, kBlocks, true);
  Stuck tier;
  const Fd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  rig.store->attach_disk(wake.get(), &tier);
  const Granted granted = rig.create(1, 2);
  CHECK(granted.status == Grant::Granted && rig.store->remove(key(1)));
  CHECK(rig.seal(granted.handle) == Done::Ok);
  CHECK(rig.store->take_deleted().keys.empty());
  CHECK(rig.resident(1));
  rig.store->detach_disk();
  rig.store->check_integrity();
}

TEST(a_file_written_while_its_block_is_deleted_goes_before_the_answer) {
  Rig rig(16 << 20, kBlocks, true);
  Late tier;
  const Fd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  rig.store->attach_disk(wake.get(), &tier);
  CHECK(rig.put(1, 2) == Grant::Granted && rig.store->remove(key(1)));
  CHECK_EQ(tier.asked, 3);
  rig.store->detach_disk();
}
