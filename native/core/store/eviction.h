// Which block goes first. Evict by value: how often a block was used lately, times the tokens it saves per byte it holds, times
// its priority. The policy only names victims; the store evicts them. It never includes the store and never reads a clock.
//
// Score. A use at time t adds weight * 2^((t - origin) / half life). All scores decay at one rate, so instead of decaying every
// block with time, new uses count for more: the order of two scores never changes by waiting, no block is ever rescanned, and a
// queue ordered by score stays right. (ds4 scores its files `(decayed hits + 1) * tokens / size` and rescans all of them; this is
// the same value without the rescan. The trick is that of forward decay: Cormode et al., ICDE 2009.) Time is what the store makes
// it: seconds, and what new blocks took (store_clock.cc). A double overflows after 1,000 half lives; scale() then divides all
// scores, which keeps their order.
//   weight = tokens / bytes * 2^((priority - 35) / 10) * (1 - 2^-52 * position)
// The last factor breaks ties: of blocks used at the same moments the later one in a prompt goes first, since a block without its
// predecessors serves no prefix. It never outweighs a use 0.4 ms later (2 us up to a million tokens): prompts leave whole, in the
// order they came, and what came together stays together in the queue, the table and the pool however often it turns over.
//
// Queues. One 8-ary heap per size class, since only a block of the same class makes room without breaking up a slab. Scores lie
// in the heap beside the records' numbers: ordering by a score read from the record would cost a cache miss per comparison. The
// eight children of a node share a cache line, and the lines below them are fetched while they are compared: of half a million
// only the lowest levels are in no cache (LaMarca & Ladner, "The influence of caches on the performance of heaps", 1996). Every
// operation is O(log n) in the blocks of one class. A record's place in its heap is kept by the caller (`Places`).
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "core/format/block.h"
#include "core/store/steady_array.h"

#include "core/base/polling.h"

namespace kv {

inline constexpr double kHalfLifeSeconds = 3600;
inline constexpr double kHalfLifePools = 0.25;  // of new blocks: as long a time as the seconds

inline double block_weight(uint32_t tokens, uint64_t bytes, uint32_t priority, uint32_t base_position) {
  static const std::array<double, kMaxPriority + 1> by_priority = [] {
    std::array<double, kMaxPriority + 1> out;
    for (uint32_t p = 0; p <= kMaxPriority; ++p) out[p] = std::exp2((static_cast<double>(p) - kDefaultPriority) / 10);
    return out;
  }();
  const double value = static_cast<double>(tokens) / static_cast<double>(bytes);
  return value * by_priority[priority] * (1 - 0x1p-52 * base_position);
}

// What one use at `seconds` since the origin adds to a score of weight 1.
inline double use_value(double seconds) { return std::exp2(seconds / kHalfLifeSeconds); }

// Where a record stands in its eviction queue: beside each other, because every step of a queue moves a dozen.
struct RecordPlaces {
  std::vector<uint32_t>* places;
  uint32_t place(uint32_t record) const { return (*places)[record]; }
  void set_place(uint32_t record, uint32_t place) { (*places)[record] = place; }
};

// What became of some victims.
struct Tried {
  size_t looked_at, parked, evicted;
};

// Places: uint32_t place(uint32_t record), void set_place(uint32_t record, uint32_t place).
template <class Places>
class EvictionPolicy {
 public:
  static constexpr uint32_t kNone = ~0u;

  // Of at most so many records, and so many bytes of blocks: as many entries as a class may have.
  explicit EvictionPolicy(Places places, uint32_t records = 1 << 20, uint64_t bytes = ~0ull)
      : places_(places), records_(records), bytes_(bytes) {}

  void insert(uint64_t size_class, uint32_t record, double score) {
    Heap& heap = heap_of(size_class);
    heap.push(score, record);
    rise(heap, heap.size() - 1);
  }

  void remove(uint64_t size_class, uint32_t record) { remove_at(heaps_.find(size_class), places_.place(record)); }

  void moved(uint64_t size_class, uint32_t record, double score) {
    Heap& heap = heaps_.find(size_class)->second;
    const uint32_t place = places_.place(record);
    heap.score(place) = score;
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
    return found == heaps_.end() ? Least{} : found->second.least();
  }
  Least least() const {
    Least best;
    for (const auto& [size_class, heap] : heaps_)
      if (best.record == kNone || heap.least().score < best.score) best = heap.least();
    return best;
  }
  // The same, and takes it out. Never reads the victim's record.
  Least pop_least(std::optional<uint64_t> size_class) {
    auto found = size_class ? heaps_.find(*size_class) : heaps_.begin();
    if (!size_class)
      for (auto other = found; other != heaps_.end(); ++other)
        if (other->second.least().score < found->second.least().score) found = other;
    if (found == heaps_.end()) return {};
    const Least least = found->second.least();
    remove_at(found, 0);
    return least;
  }

  // Any of a class, or of all, in no order: costs no step of a heap.
  uint32_t pop_any(std::optional<uint64_t> size_class) {
    auto found = size_class ? heaps_.find(*size_class) : heaps_.begin();
    if (found == heaps_.end()) return kNone;
    Heap& heap = found->second;
    const uint32_t record = heap.record(heap.size() - 1);
    heap.pop();
    if (heap.size() == 0) spare_ = heaps_.extract(found);
    return record;
  }

  bool contains(uint64_t size_class, uint32_t record) const {
    auto found = heaps_.find(size_class);
    if (found == heaps_.end()) return false;
    const uint32_t place = places_.place(record);
    return place < found->second.size() && found->second.record(place) == record;
  }

  size_t size() const {
    size_t total = 0;
    for (const auto& [size_class, heap] : heaps_) total += heap.size();
    return total;
  }

 private:
  static constexpr uint32_t kArity = 8;
  static constexpr size_t kLine = 64;
  static_assert(kArity * sizeof(double) == kLine);
  static constexpr uint32_t kHot = 1 << 6;  // the first nodes, whose children are in a cache anyhow

  struct Heap {
    // The root is element 7: then the children of any node, 8 p + 1 to 8 p + 8, fill a cache line.
    static constexpr uint32_t kRoot = kArity - 1;
    SteadyArray<double> scores;
    SteadyArray<uint32_t> records;

    explicit Heap(size_t most) : scores(most + kRoot), records(most + kRoot) {
      while (records.size() < kRoot) push(0, 0);
    }

    uint32_t size() const { return static_cast<uint32_t>(records.size()) - kRoot; }
    double& score(uint64_t place) { return scores[place + kRoot]; }
    double score(uint64_t place) const { return scores[place + kRoot]; }
    uint32_t& record(uint64_t place) { return records[place + kRoot]; }
    uint32_t record(uint64_t place) const { return records[place + kRoot]; }
    Least least() const { return {record(0), score(0)}; }
    void push(double score, uint32_t record) { scores.push_back(score), records.push_back(record); }
    // Without branches: which of eight is the least cannot be predicted.
    uint64_t least_of(uint64_t begin, uint64_t end) const {
      uint64_t least = begin;
      double value = score(begin);
      for (uint64_t at = begin + 1; at < end; ++at) {
        const double other = score(at);
        least = other < value ? at : least;
        value = std::min(other, value);
      }
      return least;
    }
    // Of this node and the seven beside it.
    void prefetch_children(uint64_t place, uint64_t size) const {
      const uint64_t first = place * kArity + 1;
      for (uint64_t at = first; at < std::min(first + kArity * kArity, size); at += kArity) {
        __builtin_prefetch(&scores[at + kRoot]);
        __builtin_prefetch(&records[at + kRoot]);
      }
    }
    void pop() { scores.pop_back(), records.pop_back(); }
  };

  // Extents are up to an eighth shorter than their class.
  Heap& heap_of(uint64_t size_class) {
    const auto found = heaps_.find(size_class);
    if (found != heaps_.end()) return found->second;
    if (spare_ && spare_.key() == size_class) return heaps_.insert(std::move(spare_)).position->second;
    const uint64_t fit = size_class ? bytes_ / size_class : records_;
    const uint64_t most = fit < records_ ? std::min<uint64_t>(records_, fit * 2 + kHot) : records_;
    return heaps_.emplace(size_class, Heap(most)).first->second;
  }

  void remove_at(typename std::map<uint64_t, Heap>::iterator found, uint32_t place) {
    Heap& heap = found->second;
    const uint32_t last = heap.size() - 1;
    const double score = heap.score(last);
    const uint32_t record = heap.record(last);
    heap.pop();
    if (place != last) {
      put(heap, place, score, record);
      settle(heap, place);
    }
    if (heap.size() == 0) spare_ = heaps_.extract(found);
  }

  void put(Heap& heap, uint32_t place, double score, uint32_t record) {
    heap.score(place) = score;
    heap.record(place) = record;
    places_.set_place(record, place);
  }

  void settle(Heap& heap, uint32_t place) {
    if (place > 0 && heap.score(place) < heap.score((place - 1) / kArity))
      rise(heap, place);
    else
      sink(heap, place);
  }

  void rise(Heap& heap, uint32_t place) {
    const double score = heap.score(place);
    const uint32_t record = heap.record(place);
    for (uint32_t up; place > 0 && score < heap.score(up = (place - 1) / kArity); place = up)
      put(heap, place, heap.score(up), heap.record(up));
    put(heap, place, score, record);
  }

  void sink(Heap& heap, uint32_t place) {
    const double score = heap.score(place);
    const uint32_t record = heap.record(place);
    const uint64_t size = heap.size();
    for (uint64_t child; (child = uint64_t{place} * kArity + 1) < size;) {
      if (place >= kHot) heap.prefetch_children(child, size);
      const uint64_t least = heap.least_of(child, std::min(child + kArity, size));
      if (score <= heap.score(least)) break;
      put(heap, place, heap.score(least), heap.record(least));
      place = static_cast<uint32_t>(least);
    }
    put(heap, place, score, record);
  }

  Places places_;
  const uint32_t records_;
  const uint64_t bytes_;
  std::map<uint64_t, Heap> heaps_;  // none is empty
  typename std::map<uint64_t, Heap>::node_type
      spare_{};  // the last that emptied: where blocks come and go it is wanted again soon
};

struct UseClock {
  double value = 0, sealed = 0;       // what use_now() said last; the part of the pool, or table, that was sealed since
  uint64_t read_ns = monotonic_ns();  // when it did
};

}  // namespace kv
