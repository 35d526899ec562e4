// Which parts of a mapping were used lately, and which only some time ago: a bit for each 2 MiB, so that those of a large pool
// lie in the nearest cache and a use of what was used already costs a nanosecond. Owns no memory of the mapping.
//
// Thread-safe. A use that meets a sweep may be taken for none, which costs a few page faults, and is known all the same: what was
// used lately is there, once both have returned.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/format/block.h"

namespace kv {

class RecentChunks {
 public:
  static constexpr uint64_t kChunk = 2 << 20;
  explicit RecentChunks(uint64_t bytes) : bytes_(bytes), there_((bytes / kChunk + 64) / 64), recent_(there_.size()) {}

  // True if a part of it was not used since the last sweep.
  bool use(Extent extent) {
    bool any = false;
    for (uint64_t chunk = extent.offset / kChunk; chunk * kChunk < extent.end(); ++chunk) {
      const uint64_t bit = uint64_t{1} << chunk % 64;
      if (recent_[chunk / 64].load(std::memory_order_relaxed) & bit) continue;
      recent_[chunk / 64].fetch_or(bit);  // first: a sweep that takes it from there_ behind this finds it here
      if (!(there_[chunk / 64].fetch_or(bit) & bit)) count_.fetch_add(1);
      any = true;
    }
    return any;
  }
  // Calls f(extent) for each that was not used since the last sweep, and forgets it.
  template <class F>
  void sweep(F&& f) {
    for (size_t word = 0; word < there_.size(); ++word) {
      if (!there_[word].load()) continue;
      uint64_t idle = ~recent_[word].exchange(0);
      idle &= there_[word].load();
      idle = there_[word].fetch_and(~idle) & idle;
      count_.fetch_sub(static_cast<uint64_t>(std::popcount(idle)));
      const uint64_t used = recent_[word].load() & idle;  // since the exchange
      count_.fetch_add(static_cast<uint64_t>(std::popcount(~there_[word].fetch_or(used) & used)));
      idle &= ~used;
      for (; idle; idle &= idle - 1) {
        const uint64_t at = (word * 64 + static_cast<uint64_t>(std::countr_zero(idle))) * kChunk;
        f(Extent{at, std::min(kChunk, bytes_ - at)});
      }
    }
  }
  uint64_t bytes() const { return count_.load() * kChunk; }  // of what was used and not swept

 private:
  const uint64_t bytes_;
  std::vector<std::atomic<uint64_t>> there_, recent_;
  std::atomic<uint64_t> count_{0};
};

}  // namespace kv
