// Goal: no time to live is lost at the turn of a second.
//
// Method: a clock of this program's own, which the tier's thread may see jump at any of its looks.
//
// Proven against the tier as it was: it fails.
#include <pthread.h>
#include <time.h>

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

using test::DiskRig;
using test::eventually;
using test::key;

// However the loaded block is judged, it is not one that lives for ever.
TEST(a_block_loaded_in_its_last_second_expires) {
  for (int look = 0; look < 8; ++look) {
    DiskRig rig;
    CHECK(rig.put(1, kDefaultPriority, 1000) && rig.store->touch(key(1)));
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

}  // namespace
}  // namespace kv
