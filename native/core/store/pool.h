// The pool's memory in the daemon: grows the file by fallocate in steps behind the daemon's back, faults it in, makes it of huge
// pages where the file system has not, and reads and writes its bytes only through calls that answer EFAULT where a client has
// truncated the file. Knows offsets, not blocks.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "core/format/segment.h"

namespace kv {

class Pool {
 public:
  // `huge_after_ms`: from the time that all of it is in memory until it is made of huge pages; 0: it is left as it is.
  Pool(int fd, uint64_t capacity, uint64_t frontier, uint64_t huge_after_ms);
  ~Pool();

  // Starts the thread that grows and faults in to the capacity. `grown(frontier)` is called after each step, in order.
  void start(std::function<void(uint64_t)> grown, std::function<void(uint64_t)> faulted);
  void stop();

  // Adds one step now. False if the pool has its full size, or the file system has no room: then problem() says so until there
  // is some again, for which it looks once a second.
  bool grow();

  static bool collapses_pages();  // whether this kernel makes huge pages of small ones without harm
  uint64_t capacity() const { return capacity_; }
  uint64_t frontier() const { return frontier_.load(std::memory_order_acquire); }
  uint64_t faulted() const { return faulted_.load(std::memory_order_acquire); }
  uint64_t huge() const { return huge_.load(std::memory_order_relaxed); }  // bytes of huge pages, as far as it was looked at
  std::string problem() const;
  bool truncated() const;  // the file is shorter than the frontier: a client cut it

  // False if the memory is not there any more.
  bool read(uint64_t offset, void* out, size_t length) const;
  bool write(uint64_t offset, const void* data, size_t length) const;

  int fd() const { return fd_.get(); }

 private:
  void run(std::function<void(uint64_t)> faulted);
  void make_huge();
  bool rests(std::chrono::nanoseconds time);  // false: it is to stop

  Fd fd_;
  const uint64_t capacity_;
  Mapping mapping_;
  std::atomic<uint64_t> frontier_;
  const uint64_t huge_after_ms_;
  std::atomic<uint64_t> faulted_{0}, huge_{0};
  std::atomic<bool> stop_{false};
  std::mutex grow_mutex_;     // one grower at a time; taken before the store's lock, never inside it
  uint64_t again_ns_ = 0;     // under grow_mutex_: fallocate refused, and is not asked before; 0: it gave what was asked last
  mutable std::mutex mutex_;  // guards problem_
  std::condition_variable stopping_;
  std::string problem_;
  std::function<void(uint64_t)> grown_;
  std::thread thread_;
};

}  // namespace kv
