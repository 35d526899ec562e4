// Goal: a block that proved useful comes back from disk byte for byte after it was evicted, and after a restart of everything;
// what was deleted does not; nothing that was changed on disk is handed out; the quota is never exceeded; every record and byte
// of memory is accounted for after each.

#include "core/disk/tier.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "check.h"
#include "core/base/checksum.h"
#include "tier_fixture.h"

namespace kv {
namespace {

namespace fs = std::filesystem;
using test::DiskRig;
using test::eventually;
using test::key;
using test::kFewDirectories;
using test::kMiB;

TEST(a_block_used_twice_comes_back_after_eviction) {
  DiskRig rig;
  CHECK(rig.put_on_disk(1));
  CHECK_EQ(rig.files().size(), 1u);
  rig.fill(1000);
  CHECK_EQ(rig.presence(1), Presence::OnDisk);
  rig.store->check_integrity();
  CHECK(rig.load(1));
  CHECK(rig.right(1));
  const Snapshot at = rig.store->lookup(key(1)).snapshot;
  CHECK_EQ(at.shape.base_position, 5u);
  CHECK_EQ(StoreTest::index(*rig.store).upkeep(at.record).fingerprint.load(), 1u);
  CHECK_EQ(StoreTest::index(*rig.store).upkeep(at.record).parent.load(), 9u);
  CHECK(at.control.flags() & kFlagChecksummed);
  rig.store->check_integrity();
  CHECK_EQ(rig.store->scrub(0, ~0ull).corrupt, 0u);
}

TEST(a_block_used_once_is_not_written_unless_its_priority_says_so) {
  DiskRig rig;
  CHECK(rig.put(1));
  CHECK(rig.put(2, kMaxPriority));
  CHECK(eventually([&] { return rig.on_disk_as_well(2); }));
  CHECK(!rig.on_disk_as_well(1));
  CHECK_EQ(rig.files().size(), 1u);
}

TEST(blocks_come_back_after_a_restart_of_everything) {
  DiskRig rig;
  for (uint64_t i = 1; i <= 20; ++i) CHECK(rig.put_on_disk(i));
  rig.restart(false);
  CHECK_EQ(rig.tier->stats().files, 20u);
  for (uint64_t i = 1; i <= 20; ++i) {
    CHECK_EQ(rig.presence(i), Presence::OnDisk);
    CHECK(rig.load(i));
    CHECK(rig.right(i));
  }
  rig.store->check_integrity();
}

TEST(a_warm_restart_keeps_what_it_knew_of_the_disk) {
  DiskRig rig;
  CHECK(rig.put_on_disk(1));
  CHECK(rig.put_on_disk(2));
  rig.fill(1000);
  CHECK_EQ(rig.presence(1), Presence::OnDisk);
  CHECK(rig.load(2));
  const fs::path gone = fs::path(rig.directory) / path_of(key(1), kFewDirectories);
  rig.restart(true);
  CHECK_EQ(rig.presence(1), Presence::OnDisk);
  CHECK(rig.on_disk_as_well(2));
  rig.stop();
  CHECK(fs::remove(gone));
  rig.start(true);  // what is not there any more is forgotten when the directory is listed
  CHECK_EQ(rig.presence(1), Presence::Missing);
  CHECK(rig.right(2));
  rig.store->check_integrity();
}

TEST(what_was_deleted_does_not_come_back) {
  DiskRig rig;
  for (uint64_t i = 1; i <= 10; ++i) CHECK(rig.put_on_disk(i));
  rig.fill(1000);
  for (uint64_t i = 1; i <= 10; ++i) {
    CHECK(rig.store->remove(key(i)));
    CHECK_EQ(rig.tier->promote(key(i), 35), Presence::Missing);
    CHECK_EQ(rig.presence(i), Presence::Missing);
  }
  CHECK(eventually([&] { return rig.files().empty() && rig.tier->stats().bytes == 0; }));
  rig.restart(false);
  for (uint64_t i = 1; i <= 10; ++i) CHECK_EQ(rig.presence(i), Presence::Missing);
}

TEST(a_delete_in_the_middle_of_a_write_leaves_no_file) {
  DiskRig rig;
  for (uint64_t i = 1; i <= 200; ++i) {
    CHECK(rig.put(i));
    CHECK(test::touch(*rig.store, key(i)));
    for (uint64_t spin = test::mixed(i) % 4000; i % 3 && spin; --spin) rig.tier->stats();  // anywhere in the write
    CHECK(rig.store->remove(key(i)));
    rig.store->settle();
    CHECK_EQ(rig.tier->promote(key(i), 35), Presence::Missing);
  }
  CHECK(eventually([&] { return !rig.busy() && rig.files().empty() && rig.tier->stats().bytes == 0; }));
  CHECK_EQ(rig.store->stats().used_bytes, 0u);
  rig.store->check_integrity();
}

TEST(flush_removes_all_files) {
  DiskRig rig;
  for (uint64_t i = 1; i <= 20; ++i) CHECK(rig.put_on_disk(i));
  rig.fill(1000);
  rig.store->flush();
  rig.store->settle();
  for (uint64_t i = 1; i <= 20; ++i) CHECK_EQ(rig.presence(i), Presence::Missing);
  CHECK(eventually([&] { return rig.files().empty() && rig.tier->stats().bytes == 0; }));
  CHECK(rig.put_on_disk(1));  // and the tier goes on
}

TEST(a_changed_file_is_a_miss_and_goes) {
  DiskRig rig;
  for (uint64_t i = 1; i <= 12; ++i) CHECK(rig.put_on_disk(i));
  rig.fill(1000);
  for (uint64_t i = 1; i <= 12; ++i) {
    const fs::path path = fs::path(rig.directory) / path_of(key(i), kFewDirectories);
    const uint64_t size = fs::file_size(path);
    if (i == 1) {
      fs::resize_file(path, size / 2);
    } else if (i == 2) {
      fs::resize_file(path, 0);
    } else if (i == 3) {
      fs::copy_file(fs::path(rig.directory) / path_of(key(4), kFewDirectories), path, fs::copy_options::overwrite_existing);
    } else if (i == 12) {
      CHECK(fs::remove(path));
    } else {
      std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
      const auto at = static_cast<std::streamoff>(i == 4 ? 20 : size * (i - 5) / 7 + (i == 11 ? 100 - size / 7 : 0));
      file.seekg(at);
      const char old = static_cast<char>(file.get());
      file.seekp(at);
      file.put(static_cast<char>(old ^ 1));
    }
  }
  for (uint64_t i = 1; i <= 12; ++i) {
    CHECK_EQ(rig.presence(i), Presence::OnDisk);
    CHECK(!rig.load(i));
    CHECK_EQ(rig.presence(i), Presence::Missing);
    CHECK(!fs::exists(fs::path(rig.directory) / path_of(key(i), kFewDirectories)));
  }
  CHECK_EQ(rig.tier->stats().corrupt, 11u);
  CHECK_EQ(rig.tier->stats().load_misses, 1u);
  CHECK_EQ(rig.tier->stats().bytes, rig.bytes_on_disk());
  rig.store->check_integrity();
}

TEST(the_quota_holds) {
  constexpr uint64_t kQuota = kMiB;
  DiskRig rig(kQuota);
  for (uint64_t i = 1; i <= 100; ++i) {
    CHECK(rig.put(i, kMaxPriority));
    CHECK(rig.bytes_on_disk() <= kQuota);
  }
  CHECK(eventually([&] { return rig.store->stats().pending_writes == 0 && !rig.busy(); }));
  CHECK_EQ(rig.tier->stats().bytes, rig.bytes_on_disk());
  CHECK(rig.tier->stats().bytes > kQuota * 3 / 4);
  rig.tier->set_quota(kQuota / 2);
  CHECK(eventually([&] { return rig.bytes_on_disk() <= kQuota / 2; }));
  rig.store->check_integrity();
}

TEST(a_quota_that_shrank_while_nobody_ran_holds_again) {
  DiskRig rig;
  for (uint64_t i = 1; i <= 30; ++i) CHECK(rig.put_on_disk(i));
  rig.stop();
  rig.start(true);
  rig.tier->set_quota(10 * 80 * 1024);
  CHECK(eventually([&] { return rig.bytes_on_disk() <= 10 * 80 * 1024 && rig.tier->stats().bytes == rig.bytes_on_disk(); }));
}

TEST(time_to_live_holds_on_disk) {
  DiskRig rig;
  CHECK(rig.put(1, kMaxPriority, 3));
  CHECK(eventually([&] { return rig.on_disk_as_well(1); }));
  CHECK(eventually([&] { return rig.store->tick(), rig.files().empty(); }));
  CHECK_EQ(rig.presence(1), Presence::Missing);
  CHECK(rig.put(2, kMaxPriority, 3));
  CHECK(eventually([&] { return rig.on_disk_as_well(2); }));
  rig.restart(false);  // now only its header knows
  const time_t late = ::time(nullptr) + 4;
  CHECK(eventually([&] { return ::time(nullptr) > late; }));
  CHECK(!rig.load(2));
  CHECK(rig.files().empty());
  CHECK_EQ(rig.tier->stats().expired, 1u);
}

TEST(leftovers_of_a_crash_are_swept) {
  DiskRig rig;
  rig.stop();
  std::ofstream(rig.directory + "/tmp/0123456789abcdef.tmp") << "half";
  std::ofstream(rig.directory + "/readme.txt") << "somebody's";
  rig.start(true);
  CHECK(eventually([&] { return !fs::exists(rig.directory + "/tmp/0123456789abcdef.tmp"); }));
  CHECK(fs::exists(rig.directory + "/readme.txt"));
  CHECK_EQ(rig.tier->stats().strays, 1u);
}

TEST(it_works_without_direct_io_and_on_tmpfs) {
  DiskRig rig(64 * kMiB, "/dev/shm");
  CHECK(rig.put_on_disk(1));
  rig.fill(1000);
  CHECK(rig.load(1));
  CHECK(rig.right(1));
}

// A writer may cut named memory at any moment. The namespace ends; the program and the files do not.
TEST(a_truncated_pool_costs_no_file) {
  DiskRig rig;
  for (uint64_t i = 1; i <= 10; ++i) CHECK(rig.put_on_disk(i));
  rig.fill(1000);
  const size_t before = rig.files().size();
  CHECK_EQ(::ftruncate(rig.segments.pool.get(), 64 * 1024), 0);
  for (uint64_t i = 1; i <= 10; ++i) rig.tier->promote(key(i), 35);
  CHECK(eventually([&] { return !rig.busy(); }));
  rig.store->tick();
  for (uint64_t i = 1; i <= 10; ++i) rig.tier->promote(key(i), 35);
  CHECK(eventually([&] { return !rig.busy(); }));
  CHECK(!rig.store->problem().empty());
  CHECK_EQ(rig.tier->stats().corrupt, 0u);
  CHECK_EQ(rig.files().size(), before);
  rig.stop();
}

// Between a delete and the removal of its file the daemon may die: the next one goes on with it.
TEST(a_delete_survives_the_daemon) {
  test::Rig rig(1024 * kPageBytes, 600, true);
  auto put_with_file = [&](uint64_t i) {
    CHECK_EQ(rig.put(i, 2, 0, kMaxPriority), Grant::Granted);
    const auto job = rig.store->begin_write();
    CHECK(job && job->key == key(i));
    CHECK(job && rig.store->end_write(job->handle, true));
  };
  for (uint64_t i = 0; i < 3; ++i) put_with_file(i);
  CHECK(rig.store->remove(key(0)));  // in memory and on disk
  rig.store->settle();
  CHECK_EQ(rig.store->take_deleted().keys.size(), 1u);
  put_with_file(0);  // the same key again, while its old file is about to go
  CHECK(rig.store->remove(key(0)));
  rig.store->settle();
  CHECK(rig.store->remove(key(1)));
  rig.store->check_integrity();
  rig.restart();
  CHECK_EQ(rig.presence(0), Presence::Missing);
  CHECK_EQ(rig.presence(1), Presence::Missing);
  CHECK(rig.resident(2));
  CHECK_EQ(rig.store->stats().used_bytes, 2 * kPageBytes);
  CHECK_EQ(rig.store->stats().blocks, 1u);
  rig.store->check_integrity();
  std::vector<Key> going = rig.store->take_deleted().keys;
  CHECK_EQ(going.size(), 2u);
  for (const Key& gone : going) rig.store->file_gone(gone);
  rig.store->check_integrity();
  uint32_t from = 0;
  CHECK_EQ(rig.store->list(from, 100, {}, 0).size(), 1u);
  CHECK_EQ(from, Index::kAbsent);
  CHECK(rig.store->remove(key(2)));
  rig.store->settle();
  rig.store->file_gone(key(2));
  rig.restart();
  CHECK(rig.store->take_deleted().keys.empty());
}

// Scores grow with time, so of 300 that wish to be written the last 100 stay, and the last one is first.
TEST(the_least_valuable_pending_write_is_dropped) {
  test::Rig rig(1024 * kPageBytes, 600, true, 100);
  for (uint64_t i = 0; i < 300; ++i) CHECK_EQ(rig.put(i, 2, 0, kMaxPriority), Grant::Granted);
  CHECK_EQ(rig.store->stats().pending_writes, 100u);
  CHECK_EQ(rig.store->stats().writes_dropped, 200u);
  rig.store->check_integrity();
  for (uint64_t number = 299; number >= 200; --number) {
    const auto next = rig.store->begin_write();
    CHECK(next && next->key == key(number));
    if (next) CHECK(!rig.store->end_write(next->handle, false));
  }
  CHECK(!rig.store->begin_write());
  rig.store->check_integrity();
}

}  // namespace
}  // namespace kv
