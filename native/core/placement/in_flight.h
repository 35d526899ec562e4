// How much of this host's memory blocks may take that are on their way from others: of one peer, and of all. Such memory is
// nobody's to evict, so a peer that is slow, or lies of sizes, could have all of a pool.
//
// Safe from all threads. Invariant: what is counted is within both bounds, or of one block alone: so none is too large to come.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace kv::peer {

class InFlight {
 public:
  explicit InFlight(uint64_t most, InFlight* all = nullptr) : most_(most), all_(all) {}

  // A block's. False: nothing was taken, others have to be here first.
  bool take(uint64_t bytes) {
    if (!take_here(bytes)) return false;
    if (all_ && !all_->take_here(bytes)) return give_here(bytes), false;
    return true;
  }
  void give(uint64_t bytes) {
    give_here(bytes);
    if (all_) all_->give_here(bytes);
  }
  uint64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }
  uint64_t blocks() const { return blocks_.load(std::memory_order_relaxed); }
  // Blocks of so many bytes that may be asked for where `expected` are taken, or will be: one, where none are.
  uint64_t room_for(uint64_t each, uint64_t expected) const {
    const uint64_t fit = (most_ - std::min(most_, expected)) / std::max<uint64_t>(each, 1);
    return expected ? fit : std::max<uint64_t>(fit, 1);
  }
  uint64_t most() const { return most_; }

 private:
  bool take_here(uint64_t bytes) {
    uint64_t now = bytes_.load(std::memory_order_relaxed);
    do {
      if (now && (bytes > most_ || now > most_ - bytes)) return false;
    } while (!bytes_.compare_exchange_weak(now, now + bytes, std::memory_order_relaxed));
    blocks_.fetch_add(1, std::memory_order_relaxed);
    return true;
  }
  void give_here(uint64_t bytes) {
    bytes_.fetch_sub(bytes, std::memory_order_relaxed);
    blocks_.fetch_sub(1, std::memory_order_relaxed);
  }

  const uint64_t most_;
  InFlight* const all_;
  std::atomic<uint64_t> bytes_{0}, blocks_{0};
};

}  // namespace kv::peer
