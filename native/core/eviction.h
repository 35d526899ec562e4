// Which block goes first. Evict by value: how often a block was used lately, times the tokens it saves per byte it holds, times
// its priority. The policy only names victims; the store evicts them. It never includes the store and never reads a clock.
//
// Score. A use at time t adds weight * 2^((t - origin) / half life). All scores decay at one rate, so instead of decaying
// every block with time, new uses count for more: the order of two scores never changes by waiting, no block is ever rescanned,
// and a queue ordered by score stays right. (ds4 scores its files `(decayed hits + 1) * tokens / size` and rescans all of them;
// this is the same value without the rescan. The trick is that of forward decay: Cormode et al., ICDE 2009.) With a half life of one
// hour a double overflows after 42 days; rebase() then divides all scores, which keeps their order.
//   weight = tokens / bytes * 2^((priority - 35) / 10) * (1 + 2^-10 / (1 + position / tokens))
// The last factor breaks ties: of blocks used equally often the later one in a prompt goes first, since a block without its
// predecessors serves no prefix.
//
// Queues. One binary heap per size class, since only a block of the same class makes room without breaking up a slab. Every operation
// is O(log n) in the blocks of one class. The place of a record in its heap is kept by the caller (`Ranks`), 4 bytes.
#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <vector>

namespace kv {

inline constexpr double kHalfLifeSeconds = 3600;
inline constexpr uint32_t kDefaultPriority = 35;

inline double block_weight(uint32_t tokens, uint64_t bytes, uint32_t priority, uint32_t base_position) {
  const double value = static_cast<double>(tokens) / static_cast<double>(bytes);
  const double index = static_cast<double>(base_position) / tokens;
  return value * std::exp2((static_cast<double>(priority) - kDefaultPriority) / 10) * (1 + std::exp2(-10) / (1 + index));
}

// What one use at `seconds` since the origin adds to a score of this weight.
inline double use_value(double weight, double seconds) { return weight * std::exp2(seconds / kHalfLifeSeconds); }

// Ranks: double score(uint32_t record), uint32_t place(uint32_t record), void set_place(uint32_t record, uint32_t place).
template <class Ranks>
class EvictionPolicy {
 public:
  static constexpr uint32_t kNone = ~0u;

  explicit EvictionPolicy(Ranks ranks) : ranks_(ranks) {}

  void insert(uint64_t size_class, uint32_t record) {
    std::vector<uint32_t>& heap = heaps_[size_class];
    heap.push_back(record);
    rise(heap, static_cast<uint32_t>(heap.size() - 1));
  }

  void remove(uint64_t size_class, uint32_t record) {
    auto found = heaps_.find(size_class);
    std::vector<uint32_t>& heap = found->second;
    const uint32_t place = ranks_.place(record);
    const uint32_t last = heap.back();
    heap.pop_back();
    if (last != record) {
      put(heap, place, last);
      sink(heap, place);
      rise(heap, ranks_.place(last));
    }
    if (heap.empty()) heaps_.erase(found);
  }

  // The record's score has changed.
  void moved(uint64_t size_class, uint32_t record) {
    std::vector<uint32_t>& heap = heaps_.find(size_class)->second;
    sink(heap, ranks_.place(record));
    rise(heap, ranks_.place(record));
  }

  // The least valuable of a class, or of all classes; kNone if there is none.
  uint32_t least(uint64_t size_class) const {
    auto found = heaps_.find(size_class);
    return found == heaps_.end() ? kNone : found->second.front();
  }
  uint32_t least() const {
    uint32_t best = kNone;
    for (const auto& [size_class, heap] : heaps_)
      if (best == kNone || ranks_.score(heap.front()) < ranks_.score(best)) best = heap.front();
    return best;
  }

  bool contains(uint64_t size_class, uint32_t record) const {
    auto found = heaps_.find(size_class);
    if (found == heaps_.end()) return false;
    const uint32_t place = ranks_.place(record);
    return place < found->second.size() && found->second[place] == record;
  }

  size_t size() const {
    size_t total = 0;
    for (const auto& [size_class, heap] : heaps_) total += heap.size();
    return total;
  }

 private:
  void put(std::vector<uint32_t>& heap, uint32_t place, uint32_t record) {
    heap[place] = record;
    ranks_.set_place(record, place);
  }

  void rise(std::vector<uint32_t>& heap, uint32_t place) {
    const uint32_t record = heap[place];
    while (place > 0 && ranks_.score(record) < ranks_.score(heap[(place - 1) / 2])) {
      put(heap, place, heap[(place - 1) / 2]);
      place = (place - 1) / 2;
    }
    put(heap, place, record);
  }

  void sink(std::vector<uint32_t>& heap, uint32_t place) {
    const uint32_t record = heap[place];
    for (uint32_t child; (child = 2 * place + 1) < heap.size(); place = child) {
      if (child + 1 < heap.size() && ranks_.score(heap[child + 1]) < ranks_.score(heap[child])) ++child;
      if (ranks_.score(record) <= ranks_.score(heap[child])) break;
      put(heap, place, heap[child]);
    }
    put(heap, place, record);
  }

  Ranks ranks_;
  std::map<uint64_t, std::vector<uint32_t>> heaps_;
};

}  // namespace kv
