// A mutex that long work gives away in between: whoever waits for it has it before the work goes on.
//
// std::mutex alone would not do: a waiter takes tens of microseconds to wake, and who unlocks and locks again has it before.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <mutex>

namespace kv {

class SlicedMutex {
 public:
  void lock() {
    if (mutex_.try_lock()) return;
    waiting_.fetch_add(1, std::memory_order_relaxed);
    mutex_.lock();
    waiting_.fetch_sub(1, std::memory_order_relaxed);
  }
  bool try_lock() { return mutex_.try_lock(); }
  void unlock() { mutex_.unlock(); }

  // By its holder, who must not rely on anything it found before: lets those that wait have it, one after the other, a bounded
  // number of looks long.
  void give_way() {
    gave_way_ += 1;
    if (waiting_.load(std::memory_order_relaxed) == 0) return;
    mutex_.unlock();
    for (int look = 0; look < kLooks && waiting_.load(std::memory_order_relaxed) > 0; ++look) ::sched_yield();
    mutex_.lock();
  }
  uint64_t gave_way() const { return gave_way_; }  // how often; asked by its holder

 private:
  static constexpr int kLooks = 1000;
  std::mutex mutex_;
  std::atomic<uint32_t> waiting_{0};
  uint64_t gave_way_ = 0;
};

}  // namespace kv
