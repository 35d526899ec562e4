// What came to a store and what went from it, for those who tell other hosts: the last changes, each a mark of its key with the
// lowest bit set while the block is there. Owns the ring. Never waits: the store notes under its own lock, in some ten
// nanoseconds, and nothing at all while nobody listens. Invariant: who has read to a place gets every change behind it in order,
// or is told that some are gone.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <vector>

#include "core/format/block.h"

namespace kv {

// What hosts tell each other of a key: 63 of its bits, for a digest has no others that are better.
inline uint64_t mark_of(const Key& key, bool held) { return (key.words[2] & ~uint64_t{1}) | (held ? 1 : 0); }

class Journal {
 public:
  static constexpr size_t kEntries = 8192;

  void listen(int more) { listeners_.fetch_add(more, std::memory_order_relaxed); }
  bool heard() const { return listeners_.load(std::memory_order_relaxed) != 0; }  // else nothing need be found out to note it

  void note(const Key& key, bool held) {
    std::lock_guard lock(mutex_);
    ring_[head_++ % kEntries] = mark_of(key, held);
    if (waiting_) changed_.notify_all();
  }

  uint64_t head() const {
    std::lock_guard lock(mutex_);
    return head_;
  }

  // Appends what came since `from`, which moves on. False: some of it is gone.
  bool read(uint64_t& from, std::vector<uint64_t>& out) const {
    std::lock_guard lock(mutex_);
    if (head_ - from > kEntries) return false;
    for (; from != head_; ++from) out.push_back(ring_[from % kEntries]);
    return true;
  }

  // Until something is behind `from`, or it is over (and wake() was called), or the time is up.
  void wait(uint64_t from, std::chrono::milliseconds most, const std::atomic<bool>& over) {
    std::unique_lock lock(mutex_);
    waiting_ += 1;
    changed_.wait_for(lock, most, [&] { return head_ != from || over.load(); });
    waiting_ -= 1;
  }
  void wake() {
    std::lock_guard lock(mutex_);
    changed_.notify_all();
  }

 private:
  std::atomic<int> listeners_{0};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  uint32_t waiting_ = 0;
  uint64_t head_ = 0;
  std::array<uint64_t, kEntries> ring_{};
};

}  // namespace kv
