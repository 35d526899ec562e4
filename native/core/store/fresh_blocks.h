// Blocks that were just loaded for somebody who has had no time to pin them: no victims for a moment. At most so many, and so
// many bytes; the oldest go first. Not thread-safe: the store's lock guards it.
#pragma once

#include <cstdint>
#include <deque>

#include "core/format/store_types.h"

namespace kv {

class FreshBlocks {
 public:
  void add(Handle block, uint64_t bytes, uint64_t now_ns, uint64_t most_bytes) {
    blocks_.push_back({block, bytes, now_ns});
    bytes_ += bytes;
    while (blocks_.size() > kMost || bytes_ > most_bytes) drop_oldest();
  }
  // Those that still are, in the order they came.
  const auto& at(uint64_t now_ns) {
    while (!blocks_.empty() && now_ns - blocks_.front().since_ns > kFreshNs) drop_oldest();
    return blocks_;
  }
  bool empty() const { return blocks_.empty(); }
  void clear() { blocks_.clear(), bytes_ = 0; }

 private:
  static constexpr size_t kMost = 256;
  static constexpr uint64_t kFreshNs = 1'000'000'000;
  struct Fresh {
    Handle block;
    uint64_t bytes, since_ns;
  };
  void drop_oldest() { bytes_ -= blocks_.front().bytes, blocks_.pop_front(); }

  std::deque<Fresh> blocks_;
  uint64_t bytes_ = 0;
};

}  // namespace kv
