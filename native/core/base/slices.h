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
#include "core/base/thread_annotations.h"

namespace kv {

class CAPABILITY("mutex") SlicedMutex {
 public:
  // Without a pause, since it was made or told to forget.
  struct Holds {
    uint64_t longest_ns = 0, count_over = 0;
  };
  static constexpr uint64_t kLongNs = 500'000;        // what count_over counts
  static inline uint64_t (*clock)() = &monotonic_ns;  // a benchmark's may count a thread's own time

  void lock() ACQUIRE() {
    if (!mutex_.try_lock()) {
      waiting_.fetch_add(1, std::memory_order_relaxed);
      mutex_.lock();
      waiting_.fetch_sub(1, std::memory_order_relaxed);
    }
    began_ns_ = clock();
  }
  bool try_lock() TRY_ACQUIRE(true) {
    if (!mutex_.try_lock()) return false;
    began_ns_ = clock();
    return true;
  }
  void unlock() RELEASE() {
    note();
    mutex_.unlock();
  }

  // By its holder, who must not rely on anything it found before: lets those that wait have it, one after the other, a bounded
  // number of looks long.
  void give_way() REQUIRES(this) {
    gave_way_ += 1;
    note();
    if (waiting() > 0) {
      mutex_.unlock();
      for (int look = 0; look < kLooks && waiting() > 0; ++look) ::sched_yield();
      mutex_.lock();
    }
    began_ns_ = clock();
  }
  uint32_t waiting() const { return waiting_.load(std::memory_order_relaxed); }  // that lock() has not let in yet
  // Asked by its holder.
  uint64_t gave_way() const REQUIRES(this) { return gave_way_; }  // how often
  const Holds& holds() const REQUIRES(this) { return holds_; }
  void forget_holds() REQUIRES(this) { holds_ = {}; }

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

// Holds it while it lives.
class SCOPED_CAPABILITY SlicedLock {
 public:
  explicit SlicedLock(SlicedMutex& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~SlicedLock() RELEASE() { mutex_.unlock(); }
  SlicedLock(const SlicedLock&) = delete;

 private:
  SlicedMutex& mutex_;
};

// Lets go of it while it lives: whoever makes one must not rely on anything it found before.
class SCOPED_CAPABILITY SlicedUnlock {
 public:
  explicit SlicedUnlock(SlicedMutex& mutex) RELEASE(mutex) : mutex_(mutex) { mutex_.unlock(); }
  ~SlicedUnlock() RELEASE() { mutex_.lock(); }
  SlicedUnlock(const SlicedUnlock&) = delete;

 private:
  SlicedMutex& mutex_;
};

}  // namespace kv
