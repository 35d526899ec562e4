// Who holds blocks, and on what terms: a session by what its client said, the daemon's own reads by what they are for.
//
// A client's pins are asked back when they are older than its deadline, or more than its bytes (the oldest first), or when
// somebody asks. Asking takes nothing: memory that a process maps cannot be taken from it. Views of what was asked back say
// BlockLost from then on, the client lets go of the rest, and the block waits for its pins as any other does. How old a pin is
// nobody writes down: the daemon counts rounds in the session's page, and whoever pins remembers the round.
//
// Invariants: a round that was asked back stays so; the blocks that the daemon itself reads for an owner are within its bytes
// together, each counted once however many read it, or there is only one.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <unordered_map>

#include "core/base/error.h"
#include "core/format/block.h"
#include "core/format/store_types.h"

namespace kv {

// The rounds of one session's pins.
class PinAge {
 public:
  PinRounds rounds() const { return {now_, now_ - static_cast<uint32_t>(ended_ns_.size())}; }
  // Where an earlier daemon stopped: all that it did not ask back is as old as this one.
  void resume(PinRounds said, uint64_t now_ns) {
    now_ = std::max(1u, said.now), began_ns_ = now_ns;
    ended_ns_.assign(std::min<uint32_t>(now_ - std::clamp(said.asked_back, 1u, now_), kMostRounds), now_ns);
  }
  // Asks back what is older than the deadline; and a round more, the oldest, if there is too much.
  void look(const PinTerms& terms, uint64_t now_ns, bool too_much) {
    const uint64_t deadline_ns = uint64_t{terms.deadline_ms} * 1'000'000;
    const uint64_t round_ns = deadline_ns ? deadline_ns / kRounds : kRoundNs;
    if (now_ns - began_ns_ >= round_ns && (ended_ns_.size() < kMostRounds || too_much)) begin(now_ns);
    while (deadline_ns && !ended_ns_.empty() && now_ns - ended_ns_.front() >= deadline_ns) ended_ns_.pop_front();
    if (too_much && !ended_ns_.empty()) ended_ns_.pop_front();
  }
  void ask_all_back(uint64_t now_ns) { begin(now_ns), ended_ns_.clear(); }

 private:
  static constexpr uint64_t kRounds = 8, kMostRounds = 64, kRoundNs = 1'000'000'000;  // in a deadline; kept; without one
  void begin(uint64_t now_ns) { ended_ns_.push_back(now_ns), now_ += 1, began_ns_ = now_ns; }
  uint32_t now_ = 1;
  uint64_t began_ns_ = 0;
  std::deque<uint64_t> ended_ns_;  // of the rounds before this one that were not asked back
};

// The daemon's own reads in flight, by record.
class OwnPins {
 public:
  struct Held {
    uint64_t generation = 0;
    std::array<uint32_t, kPinOwners> by{};  // reads, by owner
  };
  // What an owner may hold of so much memory. Clients' reads by message are as many as there are calls.
  static constexpr uint64_t most_bytes(PinOwner owner, uint64_t capacity) {
    return owner == PinOwner::Disk ? capacity / 2 : owner == PinOwner::Peer ? capacity / 4 : ~0ull;
  }
  bool may_take(PinOwner owner, uint64_t bytes, uint64_t capacity) const {
    const PinsHeld& now = held(owner);
    return now.count == 0 || now.bytes + bytes <= most_bytes(owner, capacity);
  }
  bool is_held_for(PinOwner owner, uint32_t record) const {
    const auto pin = pins_.find(record);
    return pin != pins_.end() && pin->second.by[static_cast<size_t>(owner)] > 0;
  }
  void take(PinOwner owner, const Handle& block, uint64_t bytes) {
    Held& pin = pins_[block.record];
    pin.generation = block.generation;
    PinsHeld& all = held_[static_cast<size_t>(owner)];
    all.count += 1, all.bytes += pin.by[static_cast<size_t>(owner)]++ ? 0 : bytes;
  }
  void drop(PinOwner owner, const Handle& block, uint64_t bytes) {
    const auto pin = pins_.find(block.record);
    KV_INVARIANT(pin != pins_.end() && pin->second.generation == block.generation);
    Held& of = pin->second;
    uint32_t& reads = of.by[static_cast<size_t>(owner)];
    PinsHeld& all = held_[static_cast<size_t>(owner)];
    KV_INVARIANT(reads > 0 && all.count > 0 && all.bytes >= bytes);
    all.count -= 1, all.bytes -= --reads ? 0 : bytes;
    if (std::ranges::all_of(of.by, [](uint32_t left) { return left == 0; })) pins_.erase(pin);
  }
  bool contains(uint32_t record) const { return pins_.contains(record); }
  const PinsHeld& held(PinOwner owner) const { return held_[static_cast<size_t>(owner)]; }
  auto begin() const { return pins_.begin(); }
  auto end() const { return pins_.end(); }

 private:
  std::unordered_map<uint32_t, Held> pins_;
  std::array<PinsHeld, kPinOwners> held_{};
};

struct PinsLeft {
  uint64_t pages, pins;
  bool hold(PinAllowance wanted) const { return uint64_t{wanted.slots} * wanted.pages <= pages && wanted.slots <= pins; }
};

}  // namespace kv
