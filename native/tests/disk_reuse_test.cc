// Goal: where the quota is full, a block is written over a file that goes, never over one that anybody could still want, and
// nothing of either block is taken for the other's.
//
// Proven by removal (in a copy of the tree): is_ours() without st_nlink: the_link_of_a_file_keeps_its_bytes fails.
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "check.h"
#include "core/files/fsck.h"
#include "tier_fixture.h"

namespace kv {
namespace {

using test::DiskRig;
using test::eventually;
namespace fs = std::filesystem;

constexpr uint64_t kFileBytes = 17 * kPageBytes + kBlockFileHeaderBytes;
constexpr uint64_t kRoom = 10;  // of the quota, in files

std::vector<ino_t> inodes(DiskRig& rig) {
  std::vector<ino_t> out;
  struct stat about;
  for (const fs::path& path : rig.files())
    if (::stat(path.c_str(), &about) == 0) out.push_back(about.st_ino);
  std::sort(out.begin(), out.end());
  return out;
}

bool idle(DiskRig& rig) {
  return eventually([&] { return rig.store->stats().pending_writes == 0 && !rig.busy(); });
}

// How many of the blocks come back from disk, all of them right; the rest are gone.
uint64_t found(DiskRig& rig, uint64_t from, uint64_t count) {
  uint64_t hits = 0;
  for (uint64_t i = from; i < from + count; ++i) {
    if (rig.tier->promote(test::key(i), 35) != Presence::Pending) continue;
    CHECK(eventually([&] { return rig.presence(i) == Presence::Resident && !rig.busy(); }));
    CHECK(rig.right(i));
    hits += 1;
  }
  return hits;
}

void put_one_by_one(DiskRig& rig, uint64_t from, uint64_t count) {
  for (uint64_t i = from; i < from + count; ++i) {
    CHECK(rig.put_on_disk(i));
    CHECK(rig.bytes_on_disk() <= kRoom * kFileBytes);
  }
  CHECK(idle(rig));
}

TEST(a_full_directory_writes_over_the_files_that_go) {
  DiskRig rig(kRoom * kFileBytes);
  put_one_by_one(rig, 0, kRoom);
  const std::vector<ino_t> before = inodes(rig);
  CHECK_EQ(before.size(), kRoom);
  put_one_by_one(rig, 100, 20);
  CHECK(inodes(rig) == before);
  const DiskTier::Stats stats = rig.tier->stats();
  CHECK_EQ(stats.reused, 20u);
  CHECK_EQ(stats.evicted, 20u);
  CHECK_EQ(stats.removed, 0u);
  CHECK_EQ(stats.bytes, rig.bytes_on_disk());
  rig.restart(false);  // only the files are left
  CHECK_EQ(found(rig, 0, kRoom) + found(rig, 100, 20), kRoom);
  CHECK_EQ(rig.tier->stats().corrupt, 0u);
  rig.store->check_integrity();
}

// A bound on files, not on bytes, gives files up as well.
TEST(so_does_one_with_as_many_files_as_it_may_have) {
  DiskRig rig;
  rig.also = [](DiskTier::Options& options) { options.max_files = kRoom; };
  rig.restart(false);
  put_one_by_one(rig, 0, kRoom + 5);
  CHECK_EQ(rig.tier->stats().reused, 5u);
  CHECK_EQ(rig.files().size(), kRoom);
}

// Somebody keeps a copy the cheap way.
TEST(the_link_of_a_file_keeps_its_bytes) {
  DiskRig rig(kRoom * kFileBytes);
  put_one_by_one(rig, 0, kRoom);
  const std::string copies = rig.directory + "-copies";
  fs::create_directory(copies);
  std::vector<std::pair<fs::path, std::vector<char>>> kept;
  const auto bytes_of = [](const fs::path& path) {
    std::vector<char> bytes(kFileBytes);
    const Fd fd(::open(path.c_str(), O_RDONLY));
    CHECK_EQ(::read(fd.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
    return bytes;
  };
  for (const fs::path& path : rig.files()) {
    fs::create_hard_link(path, copies / path.filename());
    kept.emplace_back(copies / path.filename(), bytes_of(path));
  }
  put_one_by_one(rig, 100, kRoom);
  CHECK(rig.tier->stats().reused < kRoom);
  for (const auto& [path, bytes] : kept) CHECK(bytes_of(path) == bytes);
  fs::remove_all(copies);
}

TEST(a_file_of_another_length_is_removed) {
  DiskRig rig(kRoom * kFileBytes);
  put_one_by_one(rig, 0, kRoom);
  rig.layout = rig.store->register_layout(test::layout_blob(4, 2 * kPageBytes, 4, 64));
  const CreateItem item{.key = test::key(500), .fingerprint = 500, .tokens = 1, .base_position = 5, .parent = 9};
  const Granted granted = rig.store->create({rig.owner, rig.layout, kMaxPriority, 0, {&item, 1}})[0];
  CHECK(granted.status == Grant::Granted);
  const Seal seal{granted.handle, false};
  CHECK(rig.store->seal(rig.owner, {&seal, 1})[0] == Done::Ok);
  CHECK(eventually([&] { return rig.on_disk_as_well(500); }));
  CHECK_EQ(rig.tier->stats().reused, 0u);
  CHECK_EQ(rig.tier->stats().removed, 1u);
  CHECK_EQ(rig.files().size(), kRoom);
}

// `kvstored fsck` without --repair may run beside a daemon, which writes over what is being read.
TEST(a_check_beside_it_finds_nothing_wrong) {
  DiskRig rig(kRoom * kFileBytes);
  put_one_by_one(rig, 0, kRoom);
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> checks{0};
  std::thread checking([&] {
    while (!stop.load()) {
      fsck(rig.directory, {},
           {.finding =
                [](Finding kind, const std::string&, const std::string& why, Action) {
                  if (kind == Finding::Corrupt) CHECK_EQ(why, "");
                },
            .progress = {}});
      ++checks;
    }
  });
  uint64_t next = 1000;
  CHECK(eventually([&] {
    for (int i = 0; i < 8; ++i) rig.put(next++, kMaxPriority);
    return checks.load() >= 300 && rig.tier->stats().reused >= 500;
  }));
  stop.store(true);
  checking.join();
}

// A block's directory follows from its key, wherever there is room to be made.
TEST(a_file_of_another_directory_is_removed) {
  DiskRig rig(kRoom * kFileBytes);
  const std::string second = rig.directory + "-second";
  rig.also = [&](DiskTier::Options& options) {
    Choice choice = choose_engine(second, 8);
    options.directories.push_back({second, std::make_unique<RealFiles>(second, choice.direct), std::move(choice.engine)});
  };
  fs::create_directory(second);
  rig.restart(false);
  for (uint64_t i = 0; i < 60; ++i) CHECK(rig.put_on_disk(i));
  CHECK(idle(rig));
  const DiskTier::Stats stats = rig.tier->stats();
  CHECK(stats.reused > 0 && stats.removed > 0);
  CHECK_EQ(stats.reused + stats.removed, stats.evicted);
  CHECK_EQ(stats.evicted, 60 - kRoom);
  rig.restart(false);
  CHECK_EQ(found(rig, 0, 60), kRoom);
  rig.stop();
  fs::remove_all(second);
}

}  // namespace
}  // namespace kv
