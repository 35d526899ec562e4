#include "core/placement/directory.h"

#include "core/store/journal.h"

namespace kv::peer {

// The slot of the mark, or the first free one of its way; never full, so there is one.
Directory::Slot* Directory::find(std::vector<Slot>& slots, uint64_t mark) {
  for (size_t i = place_of(mark);; ++i) {
    Slot& slot = slots[i & (slots.size() - 1)];
    if (slot.mark == mark || slot.mark == 0) return &slot;
  }
}

// Marks of blocks that have gone from everywhere are left out when the table is made anew, larger if many are left. Of the
// largest one half is used, and it is made anew only if an eighth of that has gone: not at every word.
bool Directory::make_room(Shard& shard) {
  if (2 * (shard.used + 1) <= shard.slots.size()) return true;
  size_t wanted = shard.slots.size();
  if (4 * shard.alive > wanted && wanted < kMostSlots) wanted *= 2;
  if (16 * shard.alive > 7 * wanted) return false;
  std::vector<Slot> fresh(wanted);
  for (const Slot& slot : shard.slots)
    if (slot.peers) *find(fresh, slot.mark) = slot;
  shard.slots = std::move(fresh), shard.used = shard.alive;
  return true;
}

// Shard by shard: who looks waits for one of them at most.
void Directory::forget(size_t peer) {
  const Mask bit = Mask{1} << peer;
  complete_.fetch_and(~bit, std::memory_order_relaxed);
  overfull_.fetch_and(~bit, std::memory_order_relaxed);
  for (Shard& shard : shards_) {
    std::lock_guard lock(shard.mutex);
    for (Slot& slot : shard.slots) {
      shard.alive -= slot.peers == bit;
      slot.peers &= ~bit;
    }
  }
  held_[peer].store(0, std::memory_order_relaxed);
}

void Directory::tell(size_t peer, uint64_t mark) {
  const Mask bit = Mask{1} << peer;
  const bool there = mark & 1;
  mark = (mark & ~uint64_t{1}) | 2;  // never 0
  Shard& shard = shard_of(mark);
  bool full = false;
  {
    std::lock_guard lock(shard.mutex);
    Slot* slot = find(shard.slots, mark);
    const bool known = slot->mark == mark && slot->peers & bit;
    if (there == known) return;
    if (!there) {
      shard.alive -= slot->peers == bit;
      slot->peers &= ~bit;
      held_[peer].fetch_sub(1, std::memory_order_relaxed);
      return;
    }
    full = held_[peer].load(std::memory_order_relaxed) >= kMostHeld || (slot->mark != mark && !make_room(shard));
    if (!full) {
      slot = find(shard.slots, mark);
      if (slot->mark != mark) *slot = {mark, 0}, shard.used += 1;
      shard.alive += slot->peers == 0;
      slot->peers |= bit;
      held_[peer].fetch_add(1, std::memory_order_relaxed);
    }
  }
  if (full) overfull_.fetch_or(bit, std::memory_order_relaxed), complete_.fetch_and(~bit, std::memory_order_relaxed);
}

void Directory::completed(size_t peer) {
  const Mask bit = Mask{1} << peer;
  if (!(overfull_.load(std::memory_order_relaxed) & bit)) complete_.fetch_or(bit, std::memory_order_relaxed);
}

Directory::Mask Directory::holders(const Key& key) const {
  const uint64_t mark = mark_of(key, false) | 2;
  const Shard& shard = shards_[mark >> 58];
  std::lock_guard lock(shard.mutex);
  const Slot* slot = find(const_cast<std::vector<Slot>&>(shard.slots), mark);
  return slot->mark == mark ? slot->peers : 0;
}

}  // namespace kv::peer
