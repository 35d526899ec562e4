// A mutex that long work gives away in between: whoever waits for it has it before the work goes on. It knows for how long it was
// held without a pause, which is how long anybody may have waited.
//
// std::mutex alone would not do: a waiter takes tens of microseconds to wake, and who unlocks and locks again has it before.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "core/base/polling.h"

namespace kv {

class SlicedMutex {
 public:
  // Without a pause, since it was made or told to forget.
  struct Holds {
    uint64_t longest_ns = 0, count_over = 0;
  };
  static constexpr uint64_t kLongNs = 500'000;        // what count_over counts
  static inline uint64_t (*clock)() = &monotonic_ns;  // a benchmark's may count a thread's own time

  void lock() {
    if (!mutex_.try_lock()) {
      waiting_.fetch_add(1, std::memory_order_relaxed);
      mutex_.lock();
      waiting_.fetch_sub(1, std::memory_order_relaxed);
    }
    began_ns_ = clock();
  }
  bool try_lock() {
    if (!mutex_.try_lock()) return false;
    began_ns_ = clock();
    return true;
  }
  void unlock() {
    note();
    mutex_.unlock();
  }

  // By its holder, who must not rely on anything it found before: lets those that wait have it, one after the other, a bounded
  // number of looks long.
  void give_way() {
    gave_way_ += 1;
    note();
    if (waiting_.load(std::memory_order_relaxed) > 0) {
      mutex_.unlock();
      for (int look = 0; look < kLooks && waiting_.load(std::memory_order_relaxed) > 0; ++look) ::sched_yield();
      mutex_.lock();
    }
    began_ns_ = clock();
  }
  // Asked by its holder.
  uint64_t gave_way() const { return gave_way_; }  // how often
  const Holds& holds() const { return holds_; }
  void forget_holds() { holds_ = {}; }

 private:
  static constexpr int kLooks = 1000;
  void note() {
    const uint64_t held_ns = clock() - began_ns_;
    holds_.longest_ns = std::max(holds_.longest_ns, held_ns);
    holds_.count_over += held_ns > kLongNs;
  }
  std::mutex mutex_;
  std::atomic<uint32_t> waiting_{0};
  uint64_t gave_way_ = 0, began_ns_ = 0;
  Holds holds_;
};

}  // namespace kv
