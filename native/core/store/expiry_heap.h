// Which record ends when: a heap of (second, record), the earliest on top. Entries outlive their blocks: whoever takes one asks
// whether it is about the block that lies there now. Not thread-safe: the store's lock guards it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

namespace kv {

struct Expiry {
  uint32_t second, record;
  friend auto operator<=>(const Expiry&, const Expiry&) = default;
};

class ExpiryHeap {
 public:
  bool empty() const { return entries_.empty(); }
  size_t size() const { return entries_.size(); }
  const Expiry& earliest() const { return entries_.front(); }

  void add(Expiry expiry) {
    entries_.push_back(expiry);
    std::push_heap(entries_.begin(), entries_.end(), std::greater<>());
  }
  Expiry pop() {
    std::pop_heap(entries_.begin(), entries_.end(), std::greater<>());
    const Expiry earliest = entries_.back();
    entries_.pop_back();
    return earliest;
  }
  // Throws out what has piled up: entries that are about no block, and the same entry twice.
  template <class IsCurrent>
  void clean(IsCurrent&& is_current) {
    std::erase_if(entries_, [&](const Expiry& entry) { return !is_current(entry); });
    std::sort(entries_.begin(), entries_.end());
    entries_.erase(std::unique(entries_.begin(), entries_.end()), entries_.end());  // sorted is a heap
  }

 private:
  std::vector<Expiry> entries_;
};

}  // namespace kv
