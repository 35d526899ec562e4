// Goal: no time to live is lost on the way to disk and back: neither at the turn of a second nor where a file lay there before;
// and what a clock was ahead for outlives nothing that came later.
//
// Method: a clock of this program's own, which the tier's thread may see jump at any of its looks.
//
// Proven against the tier as it was: each fails.
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cstring>

#include "check.h"
#include "tier_fixture.h"

namespace {
std::atomic<int64_t> ahead_s{0};  // of the real time
std::atomic<int> looks_left{-1};  // of the tier's thread, until it is a second later

bool is_the_tiers() {
  char name[16] = {};
  return ::pthread_getname_np(::pthread_self(), name, sizeof name) == 0 && std::strcmp(name, "kv-disk") == 0;
}
}  // namespace

extern "C" time_t time(time_t* out) noexcept {
  timespec now;
  ::clock_gettime(CLOCK_REALTIME, &now);
  if (looks_left.load() >= 0 && is_the_tiers() && looks_left.fetch_sub(1) == 0) ahead_s += 1;
  const time_t result = now.tv_sec + ahead_s.load();
  if (out) *out = result;
  return result;
}

namespace kv {
namespace {

namespace fs = test::fs;
using test::DiskRig;
using test::eventually;
using test::key;
using test::kFewDirectories;

uint32_t expiry_on_disk(const DiskRig& rig) {
  alignas(FileHeader) std::byte page[kBlockFileHeaderBytes] = {};
  const Fd fd(::open((rig.directory + "/" + path_of(key(1), kFewDirectories)).c_str(), O_RDONLY));
  CHECK_EQ(::read(fd.get(), page, sizeof page), static_cast<ssize_t>(sizeof page));
  return reinterpret_cast<const FileHeader*>(page)->expiry_s;
}

// However the loaded block is judged, it is not one that lives for ever.
TEST(a_block_loaded_in_its_last_second_expires) {
  for (int look = 0; look < 8; ++look) {
    DiskRig rig;
    CHECK(rig.put(1, kDefaultPriority, 1000) && test::touch(*rig.store, key(1)));
    CHECK(eventually([&] { return rig.on_disk_as_well(1); }));
    const uint32_t expiry_s = rig.store->lookup(key(1)).snapshot.expiry_s;
    rig.fill(1000);
    CHECK_EQ(rig.presence(1), Presence::OnDisk);
    ahead_s += static_cast<int64_t>(expiry_s) - 1 - ::time(nullptr);
    looks_left = look;
    if (rig.tier->promote(key(1), 35) == Presence::Pending) CHECK(eventually([&] { return !rig.busy(); }));
    looks_left = -1;
    const Found found = rig.store->lookup(key(1));
    if (found.presence == Presence::Resident) CHECK(found.snapshot.expiry_s != 0);
    ahead_s = 0;
  }
}

// Put again with another end than the file says, the file goes with it: it would end the block too late, or too soon.
TEST(a_block_put_again_has_its_new_end_on_disk_as_well) {
  DiskRig rig;
  CHECK(rig.put_on_disk(1));
  CHECK_EQ(expiry_on_disk(rig), 0u);
  for (const uint32_t ttl_s : {5000u, 1000u, 500u, 9000u, 0u}) {  // shorter, longer, for ever
    rig.fill(1000 + ttl_s);
    CHECK_EQ(rig.presence(1), Presence::OnDisk);
    if (ttl_s != 5000 && ttl_s != 1000) rig.store->drop_disk(key(1));  // as for want of records: only the tier knows of the file
    const uint64_t before = rig.tier->stats().written;
    CHECK(rig.put(1, kDefaultPriority, ttl_s) && test::touch(*rig.store, key(1)));
    CHECK(eventually([&] { return rig.tier->stats().written == before + 1 && rig.on_disk_as_well(1); }));
    CHECK_EQ(expiry_on_disk(rig), rig.store->lookup(key(1)).snapshot.expiry_s);
    CHECK_EQ(rig.tier->stats().files, 1u);
    CHECK_EQ(rig.tier->stats().bytes, rig.bytes_on_disk());
  }
  rig.store->check_integrity();
}

// The same of a file that a daemon without a table has only listed: before the block was put, or after.
TEST(a_block_put_for_ever_does_not_end_with_a_file_that_was_only_listed) {
  for (const bool put_first : {false, true}) {
    DiskRig rig;
    CHECK(rig.put(1, kDefaultPriority, 1000) && test::touch(*rig.store, key(1)));
    CHECK(eventually([&] { return rig.on_disk_as_well(1); }));
    CHECK(expiry_on_disk(rig) != 0);
    rig.restart(false);
    CHECK_EQ(rig.presence(1), Presence::OnDisk);
    if (put_first) rig.tier.reset(), rig.store->drop_disk(key(1));
    CHECK(rig.put(1) && test::touch(*rig.store, key(1)));
    if (put_first) rig.start_tier();
    CHECK(eventually([&] { return rig.on_disk_as_well(1) && !rig.busy(); }));
    CHECK_EQ(expiry_on_disk(rig), 0u);
    CHECK_EQ(rig.tier->stats().files, 1u);
    rig.store->check_integrity();
  }
}

// There was no memory for it, so nothing took the file's place.
TEST(a_put_that_is_refused_leaves_the_file_where_it_is) {
  for (const bool listed : {false, true})
    for (const uint32_t ttl_s : {0u, 1000u}) {
      DiskRig rig;
      CHECK(rig.put(1, kDefaultPriority, 5000) && test::touch(*rig.store, key(1)));
      CHECK(eventually([&] { return rig.on_disk_as_well(1); }));
      if (listed) rig.restart(false);
      std::vector<Handle> open;
      for (uint64_t i = 1000;; ++i) {
        const CreateItem item{.key = key(i), .tokens = 1};
        const Granted granted = rig.store->create({rig.owner, rig.layout, kDefaultPriority, 0, {&item, 1}})[0];
        if (granted.status != Grant::Granted) break;
        open.push_back(granted.handle);
      }
      CHECK_EQ(rig.presence(1), Presence::OnDisk);
      CHECK(!rig.put(1, kDefaultPriority, ttl_s));
      CHECK_EQ(rig.presence(1), Presence::OnDisk);
      for (const Handle handle : open) CHECK(rig.store->abort(rig.owner, handle) == Done::Ok);
      rig.store->settle();
      CHECK(rig.load(1) && rig.right(1));
      rig.store->check_integrity();
    }
}

// Of two dozen files written while it was, each of sixty new ones takes the place of the oldest of sixteen.
TEST(files_of_a_clock_that_ran_a_day_ahead_make_way_for_new_ones) {
  constexpr uint64_t kFiles = 24, kNew = 60;
  constexpr int64_t kDayS = 86400;
  DiskRig rig(kFiles * 17 * kPageBytes);
  const auto lying = [&](uint64_t from, uint64_t count) {
    uint64_t out = 0;
    for (uint64_t i = from; i < from + count; ++i) out += fs::exists(rig.directory + "/" + path_of(key(i), kFewDirectories));
    return out;
  };
  const auto put_some = [&](uint64_t from, uint64_t count) {
    const uint64_t before = rig.tier->stats().written;
    for (uint64_t i = from; i < from + count; ++i) CHECK(rig.put(i) && test::touch(*rig.store, key(i)));
    // On a slow disk some leave memory before they are written.
    CHECK(eventually([&] { return rig.tier->stats().written >= before + count * 3 / 4 && !rig.busy(); }));
  };
  ahead_s = kDayS;
  put_some(0, kFiles);
  CHECK(lying(0, kFiles) > kFiles / 2);
  ahead_s = 0;
  put_some(100, kNew);
  CHECK(lying(0, kFiles) < kFiles / 2);

  const timespec tomorrow{.tv_sec = ::time(nullptr) + kDayS, .tv_nsec = 0}, times[2] = {tomorrow, tomorrow};
  for (const fs::path& path : rig.files())  // of which one may go meanwhile
    CHECK(::utimensat(AT_FDCWD, path.c_str(), times, 0) == 0 || errno == ENOENT);
  rig.restart(false);
  CHECK(lying(100, kNew) > kFiles / 2);
  put_some(200, kNew);
  CHECK(lying(100, kNew) < kFiles / 2);
}

}  // namespace
}  // namespace kv
