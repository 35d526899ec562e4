// Which block goes first. Evict by value: how often a block was used lately, times the tokens it saves per byte it holds, times
// its priority. The policy only names victims; the store evicts them. It never includes the store and never reads a clock.
//
// Score. A use at time t adds weight * 2^((t - origin) / half life). All scores decay at one rate, so instead of decaying
// every block with time, new uses count for more: the order of two scores never changes by waiting, no block is ever rescanned,
// and a queue ordered by score stays right. (ds4 scores its files `(decayed hits + 1) * tokens / size` and rescans all of them;
// this is the same value without the rescan. The trick is that of forward decay: Cormode et al., ICDE 2009.) With a half life of
// one hour a double overflows after 42 days; rebase() then divides all scores, which keeps their order.
//   weight = tokens / bytes * 2^((priority - 35) / 10) * (1 + 2^-10 / (1 + position / tokens))
// The last factor breaks ties: of blocks used equally often the later one in a prompt goes first, since a block without its
// predecessors serves no prefix.
//
// Queues. One 4-ary heap per size class, since only a block of the same class makes room without breaking up a slab. Scores lie
// in the heap beside the records' numbers: ordering by a score read from the record would cost a cache miss per comparison. Every
// operation is O(log n) in the blocks of one class. A record's place in its heap is kept by the caller (`Places`).
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <vector>

#include "core/block.h"

namespace kv {

inline constexpr double kHalfLifeSeconds = 3600;
inline constexpr uint32_t kDefaultPriority = 35;

inline double block_weight(uint32_t tokens, uint64_t bytes, uint32_t priority, uint32_t base_position) {
  static const std::array<double, kMaxPriority + 1> by_priority = [] {
    std::array<double, kMaxPriority + 1> out;
    for (uint32_t p = 0; p <= kMaxPriority; ++p) out[p] = std::exp2((static_cast<double>(p) - kDefaultPriority) / 10);
    return out;
  }();
  const double value = static_cast<double>(tokens) / static_cast<double>(bytes);
  const double index = static_cast<double>(base_position) / tokens;
  return value * by_priority[priority] * (1 + (1.0 / 1024) / (1 + index));
}

// What one use at `seconds` since the origin adds to a score of weight 1.
inline double use_value(double seconds) { return std::exp2(seconds / kHalfLifeSeconds); }

// Places: uint32_t place(uint32_t record), void set_place(uint32_t record, uint32_t place).
template <class Places>
class EvictionPolicy {
 public:
  static constexpr uint32_t kNone = ~0u;

  explicit EvictionPolicy(Places places) : places_(places) {}

  void insert(uint64_t size_class, uint32_t record, double score) {
    Heap& heap = heaps_[size_class];
    heap.scores.push_back(score);
    heap.records.push_back(record);
    rise(heap, static_cast<uint32_t>(heap.records.size() - 1));
  }

  void remove(uint64_t size_class, uint32_t record) {
    auto found = heaps_.find(size_class);
    Heap& heap = found->second;
    const uint32_t place = places_.place(record);
    const double score = heap.scores.back();
    const uint32_t last = heap.records.back();
    heap.scores.pop_back();
    heap.records.pop_back();
    if (last != record) {
      put(heap, place, score, last);
      settle(heap, place);
    }
    if (heap.records.empty()) heaps_.erase(found);
  }

  void moved(uint64_t size_class, uint32_t record, double score) {
    Heap& heap = heaps_.find(size_class)->second;
    const uint32_t place = places_.place(record);
    heap.scores[place] = score;
    settle(heap, place);
  }

  // All scores were multiplied by this.
  void scale(double factor) {
    for (auto& [size_class, heap] : heaps_)
      for (double& score : heap.scores) score *= factor;
  }

  struct Least {
    uint32_t record = kNone;
    double score = 0;
  };
  // The least valuable of a class, or of all classes.
  Least least(uint64_t size_class) const {
    auto found = heaps_.find(size_class);
    return found == heaps_.end() ? Least{} : Least{found->second.records.front(), found->second.scores.front()};
  }
  Least least() const {
    Least best;
    for (const auto& [size_class, heap] : heaps_)
      if (best.record == kNone || heap.scores.front() < best.score) best = {heap.records.front(), heap.scores.front()};
    return best;
  }

  bool contains(uint64_t size_class, uint32_t record) const {
    auto found = heaps_.find(size_class);
    if (found == heaps_.end()) return false;
    const uint32_t place = places_.place(record);
    return place < found->second.records.size() && found->second.records[place] == record;
  }

  size_t size() const {
    size_t total = 0;
    for (const auto& [size_class, heap] : heaps_) total += heap.records.size();
    return total;
  }

 private:
  static constexpr uint32_t kArity = 4;
  struct Heap {
    std::vector<double> scores;
    std::vector<uint32_t> records;
  };

  void put(Heap& heap, uint32_t place, double score, uint32_t record) {
    heap.scores[place] = score;
    heap.records[place] = record;
    places_.set_place(record, place);
  }

  void settle(Heap& heap, uint32_t place) {
    if (place > 0 && heap.scores[place] < heap.scores[(place - 1) / kArity])
      rise(heap, place);
    else
      sink(heap, place);
  }

  void rise(Heap& heap, uint32_t place) {
    const double score = heap.scores[place];
    const uint32_t record = heap.records[place];
    for (uint32_t up; place > 0 && score < heap.scores[up = (place - 1) / kArity]; place = up)
      put(heap, place, heap.scores[up], heap.records[up]);
    put(heap, place, score, record);
  }

  void sink(Heap& heap, uint32_t place) {
    const double score = heap.scores[place];
    const uint32_t record = heap.records[place];
    const auto size = static_cast<uint32_t>(heap.records.size());
    for (uint64_t child; (child = uint64_t{place} * kArity + 1) < size;) {
      auto least = static_cast<uint32_t>(child);
      for (uint64_t c = child + 1; c < child + kArity && c < size; ++c)
        if (heap.scores[c] < heap.scores[least]) least = static_cast<uint32_t>(c);
      if (score <= heap.scores[least]) break;
      put(heap, place, heap.scores[least], heap.records[least]);
      place = least;
    }
    put(heap, place, score, record);
  }

  Places places_;
  std::map<uint64_t, Heap> heaps_;
};

}  // namespace kv
