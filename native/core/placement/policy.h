// Who is asked for a block, and who is served: rules without sockets, clocks or threads, so that a simulation of a thousand hosts
// runs the same code (native/tests/hosts_simulation.h).
//
// A host asks one of those that are known to have a block, the least loaded of a few; if nobody is known, a few whose silence
// proves nothing. A host sends one block to a few others at a time; who comes beyond that is told whom it was sent to, and takes
// it from there, also while it still arrives: so a prompt that all want spreads as a tree and no host has a queue of all.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/format/block.h"
#include "core/format/store_types.h"
#include "core/placement/directory.h"

namespace kv::peer {

inline constexpr int kMostConsidered = 4;         // of the holders of a block: two would do, the others may be slow
inline constexpr int kMostBlind = 2;              // peers that are asked for a block which nobody is known to have
inline constexpr uint32_t kMostCopiesAtOnce = 2;  // of one block that one host sends
inline constexpr size_t kMostReferrals = 4;
inline constexpr uint32_t kMostTries = 64;  // of one block: those that are busy are asked again

// Of the peers in `open`, which is asked. `cost(peer)`: seconds until it would have sent, by what is known of it. `turn`: any
// number, another at each call.
template <class Cost>
std::optional<size_t> choose(Directory::Mask open, uint64_t turn, Cost&& cost) {
  std::optional<size_t> best;
  double best_cost = 0;
  for (int k = 0; k < kMostConsidered && open; ++k) {
    turn = (turn ^ turn >> 31) * 0x9e3779b97f4a7c15ull;
    const int from = static_cast<int>(turn >> 58);
    const auto rotated = std::rotr(open, from);
    const size_t peer = (static_cast<size_t>(std::countr_zero(rotated)) + static_cast<size_t>(from)) % kMaxPeers;
    open &= ~(Directory::Mask{1} << peer);
    const double its = cost(peer);
    if (!best || its < best_cost) best = peer, best_cost = its;
  }
  return best;
}

inline constexpr uint64_t kWordMs = 25;  // until what nobody is known to have is a miss: word of what was just put is on its way
inline constexpr uint64_t kTurnMs = 4, kLongestTurnMs = 64;  // until one that was busy is asked again

// The way of one block that somebody here wants.
struct Route {
  Directory::Mask asked = 0, referred = 0;  // peers that were asked; that are said to get it
  Directory::Mask first = 0;                // that who wants it was told of: asked before any other, and without their word
  int blind = 0;                            // of those asked, the ones that were not known to have it
  uint32_t tries = 0;
  bool busy = false;  // one that has it had no turn to give
};
enum class Step { Ask, WaitForTurn, WaitForWord, GiveUp };
struct Next {
  Step step;
  size_t peer = 0;
  uint64_t wait_ms = 0;
};

// Where it goes now. `usable`: peers that can be asked.
template <class Cost>
Next next_step(const Directory& directory, Directory::Mask usable, const Key& key, Route& route, uint64_t turn, Cost&& cost) {
  const Directory::Mask open = usable & ~route.asked;
  auto ask = [&](size_t peer) {
    route.asked |= Directory::Mask{1} << peer;
    return Next{Step::Ask, peer};
  };
  if (const auto chosen = choose(route.first & open, turn, cost)) return ask(*chosen);
  if (const auto chosen = choose((directory.holders(key) | route.referred) & open, turn, cost)) return ask(*chosen);
  if (route.blind < kMostBlind) {
    if (const auto chosen = choose(open & ~directory.complete(), turn, cost)) {
      route.blind += 1;
      return ask(*chosen);
    }
  }
  if (route.busy && route.tries < kMostTries) {
    const uint64_t pause_ms = std::min(kTurnMs << std::min(route.tries++, 4u), kLongestTurnMs);
    return {Step::WaitForTurn, 0, pause_ms + turn % kTurnMs};
  }
  if ((route.asked & ~route.first) || route.tries++) return {Step::GiveUp};
  return {Step::WaitForWord, 0, kWordMs};
}

// Once the wait for a turn is over: all may be asked again.
inline void ask_again(Route& route) { route.asked = 0, route.busy = false; }

// Whom a host sends what, so that it sends nothing to all. Bounded: a block that is sent to nobody is forgotten.
class Admission {
 public:
  // Whether the block may be sent to that node now; it counts until end(). If not, `instead` has nodes that it was sent to.
  bool begin(const Key& key, const std::string& node, std::vector<std::string>& instead) {
    std::lock_guard lock(mutex_);
    Sending& it = sending_[key];
    if (it.now >= kMostCopiesAtOnce) {
      for (const std::string& other : it.last)
        if (other != node) instead.push_back(other);
      turned_away_ += 1;
      return false;
    }
    it.now += 1;
    if (it.last.size() == kMostReferrals) it.last.erase(it.last.begin());
    it.last.push_back(node);
    return true;
  }
  void end(const Key& key) {
    std::lock_guard lock(mutex_);
    const auto at = sending_.find(key);
    if (at != sending_.end() && --at->second.now == 0) sending_.erase(at);
  }
  uint64_t turned_away() const {
    std::lock_guard lock(mutex_);
    return turned_away_;
  }

 private:
  struct Sending {
    uint32_t now = 0;
    std::vector<std::string> last;
  };
  mutable std::mutex mutex_;
  std::unordered_map<Key, Sending, KeyHash> sending_;
  uint64_t turned_away_ = 0;
};

}  // namespace kv::peer
