// Which record ends when: a heap of (second, record), the earliest on top. Entries outlive their blocks: whoever takes one asks
// whether it is about the block that lies there now. What outlived its block is swept out a few entries at each that comes, once
// there are more than records. Not thread-safe: the store's lock guards it.
//
// Invariant: at most a quarter more entries than records.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>

#include "core/store/record_set.h"
#include "core/store/steady_array.h"

namespace kv {

struct Expiry {
  uint32_t second, record;
  friend auto operator<=>(const Expiry&, const Expiry&) = default;
};

class ExpiryHeap {
 public:
  explicit ExpiryHeap(uint32_t records) : records_(records), entries_(records + uint64_t{records} / 4 + 1) {
    there_.resize(records);
  }

  bool empty() const { return entries_.empty(); }
  size_t size() const { return entries_.size(); }
  const Expiry& earliest() const { return entries_.front(); }

  // The record ends at another second from now on: an entry that it has is not about it.
  void changed(uint32_t record) { there_.remove(record); }

  // Once for a record and the second at which it ends. Sweeps kSwept entries for one that comes: a pass ends before an eighth of
  // the records has come anew, and what a pass misses, because a step of the heap carried it past, is no more than came.
  template <class IsCurrent>
  void add(Expiry expiry, IsCurrent&& is_current) {
    if (there_.contains(expiry.record)) return;
    if (entries_.size() >= records_) sweep(is_current);
    if (entries_.size() >= records_ + records_ / 4) clean(is_current);
    there_.add(expiry.record);
    entries_.push_back(expiry);
    std::push_heap(entries_.begin(), entries_.end(), std::greater<>());
  }
  Expiry pop() {
    std::pop_heap(entries_.begin(), entries_.end(), std::greater<>());
    const Expiry earliest = entries_.back();
    entries_.pop_back();
    there_.remove(earliest.record);
    return earliest;
  }

  static constexpr int kSwept = 32;

 private:
  template <class IsCurrent>
  void sweep(IsCurrent&& is_current) {
    for (int step = 0; step < kSwept; ++step) {
      if (next_ == 0 || next_ > entries_.size()) next_ = entries_.size();
      if (is_current(entries_[next_ - 1]))
        --next_;
      else
        remove_at(next_ - 1);  // what lies there now has not been looked at
    }
  }
  void remove_at(size_t at) {
    there_.remove(entries_[at].record);
    const Expiry last = entries_.back();
    entries_.pop_back();
    if (at == entries_.size()) return;
    size_t up;
    for (; at > 0 && last < entries_[up = (at - 1) / 2]; at = up) entries_[at] = entries_[up];
    for (size_t child; (child = 2 * at + 1) < entries_.size(); at = child) {
      if (child + 1 < entries_.size() && entries_[child + 1] < entries_[child]) ++child;
      if (last <= entries_[child]) break;
      entries_[at] = entries_[child];
    }
    entries_[at] = last;
  }
  // All at once: where records get the same second again and again there are entries that are alike.
  template <class IsCurrent>
  void clean(IsCurrent&& is_current) {
    Expiry* const end = std::remove_if(entries_.begin(), entries_.end(), [&](const Expiry& entry) { return !is_current(entry); });
    std::sort(entries_.begin(), end);  // sorted is a heap
    entries_.shrink(static_cast<size_t>(std::unique(entries_.begin(), end) - entries_.begin()));
    there_.clear();
    for (const Expiry& entry : entries_) there_.add(entry.record);
  }

  const uint32_t records_;
  SteadyArray<Expiry> entries_;
  RecordSet there_;  // records that surely have an entry for the second at which they end
  size_t next_ = 0;  // behind the one that is swept next
};

}  // namespace kv
