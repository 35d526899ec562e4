// Which peer has which block, as they told: a bit of each peer per mark of a key. One look costs one probe of a small table,
// however many peers there are. Owns nothing of the blocks: what is said here is a hint, and a peer that lies costs messages.
//
// Invariants: what is known of one peer is bounded (kMostHeld); a peer that was forgotten is named for no key; a peer that has
// more than could be kept is not `complete`, so its silence proves nothing.
#pragma once

#include <array>
#include <atomic>
#include <mutex>
#include <vector>

#include "core/format/block.h"

namespace kv::peer {

inline constexpr size_t kMaxPeers = 64;           // a bit each
inline constexpr uint64_t kMostHeld = 256 << 10;  // blocks of one peer that are known

class Directory {
 public:
  using Mask = uint64_t;

  // Of one peer, by one thread at a time.
  void forget(size_t peer);
  void tell(size_t peer, uint64_t mark);  // as Journal has it: the lowest bit says whether it is there
  void completed(size_t peer);            // all that it has was told

  Mask holders(const Key& key) const;
  Mask complete() const { return complete_.load(std::memory_order_relaxed); }
  uint64_t held(size_t peer) const { return held_[peer].load(std::memory_order_relaxed); }

 private:
  static constexpr size_t kShards = 64, kFirstSlots = 16, kMostSlots = 32 << 10;
  struct Slot {
    uint64_t mark = 0;  // 0: never used, so that a search ends there
    Mask peers = 0;
  };
  struct Shard {
    mutable std::mutex mutex;
    std::vector<Slot> slots = std::vector<Slot>(kFirstSlots);
    size_t used = 0, alive = 0;  // slots with a mark, also of blocks that have gone; of blocks that somebody has
  };
  static uint64_t place_of(uint64_t mark) { return mark * 0x9e3779b97f4a7c15ull >> 20; }
  static Slot* find(std::vector<Slot>& slots, uint64_t mark);
  static bool make_room(Shard& shard);
  Shard& shard_of(uint64_t mark) { return shards_[mark >> 58]; }

  std::array<Shard, kShards> shards_;
  std::array<std::atomic<uint64_t>, kMaxPeers> held_{};
  std::atomic<Mask> complete_{0}, overfull_{0};
};

}  // namespace kv::peer
