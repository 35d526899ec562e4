// Blocks that go to other hosts, and come from there. Who reads one holds it against reuse by a pin of the daemon's, as the disk
// tier's writes do; nothing is read here.

#include <time.h>

#include "core/base/error.h"
#include "core/store/store.h"

namespace kv {

// Memory, disk, then the other hosts.
Presence Store::promote(const Key& key, uint32_t priority) {
  const Presence here = lookup(key).presence;
  if (here == Presence::Resident || here == Presence::Pending) return here;
  LowerTier* below = lower();
  if (const Presence there = below ? below->promote(key, priority) : here; there != Presence::Missing) return there;
  Fetcher* peers = peers_.load(std::memory_order_acquire);
  return peers ? peers->fetch(key, priority) : Presence::Missing;
}

std::optional<ReadJob> Store::begin_read(const Key& key) {
  Lock lock = enter();
  Snapshot found;
  if (index_.find(key, found) != Find::Hit || expired(found.expiry_s)) return std::nullopt;
  const Control now = found.control;
  if (now.state() != State::Sealed && now.state() != State::Created) return std::nullopt;
  if (now.state() == State::Sealed) use(found.record, use_now());
  IoPin& pin = io_pins_[found.record];
  pin.generation = now.generation();
  pin.count += 1;
  const Upkeep& u = index_.upkeep(found.record);
  return ReadJob{{found.record, now.generation()},
                 found.extent,
                 found.shape,
                 u.fingerprint.load(std::memory_order_relaxed),
                 found.expiry_s,
                 u.parent.load(std::memory_order_relaxed),
                 now.state() == State::Sealed,
                 (now.flags() & kFlagChecksummed) != 0,
                 layouts_.in(found.shape.layout)};
}

void Store::end_read(Handle handle) {
  Lock lock(mutex_);
  const auto pin = io_pins_.find(handle.record);
  KV_INVARIANT(pin != io_pins_.end() && pin->second.generation == handle.generation);
  pins_gone_ += 1;
  if (--pin->second.count == 0) io_pins_.erase(pin);
  scan_zombies(control(handle.record).state() == State::Zombie);
}

bool Store::is_sealed(Handle handle) const {
  const Control now = control(handle.record);
  return now.generation() == handle.generation && now.state() == State::Sealed;
}

}  // namespace kv
