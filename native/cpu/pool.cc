#include "cpu/pool.h"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

namespace kvk {
namespace {

class Pool {
 public:
  explicit Pool(pid_t owner) : owner_(owner) {}
  pid_t owner() const { return owner_; }

  void run(uint32_t threads, uint64_t count, void (*work)(void*, uint32_t, uint64_t), void* context) {
    std::unique_lock turn(turn_, std::try_to_lock);
    if (threads > count) threads = static_cast<uint32_t>(count);
    if (threads <= 1 || !turn.owns_lock()) {
      for (uint64_t i = 0; i < count; ++i) work(context, 0, i);
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      grow(threads - 1);
      work_ = work, context_ = context, count_ = count;
      next_.store(0, std::memory_order_relaxed);
      wanted_ = threads - 1 < started_ ? threads - 1 : started_;
      left_ = wanted_;
      ++call_;
    }
    called_.notify_all();
    take(0);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return left_ == 0; });
  }

 private:
  void grow(uint32_t threads) {
    for (; started_ < threads; ++started_) try {
        std::thread([this, worker = started_ + 1, seen = call_] { serve(worker, seen); }).detach();
      } catch (const std::exception&) {
        return;  // no thread, or no memory for one: fewer will do
      }
  }

  void serve(uint32_t worker, uint64_t seen) {
    std::unique_lock lock(mutex_);
    for (;;) {
      called_.wait(lock, [&] { return call_ != seen; });
      seen = call_;
      if (worker > wanted_) continue;
      lock.unlock();
      take(worker);
      lock.lock();
      if (--left_ == 0) done_.notify_one();
    }
  }

  void take(uint32_t worker) {
    for (uint64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) work_(context_, worker, i);
  }

  const pid_t owner_;
  std::mutex turn_;  // whoever holds it has the threads
  std::mutex mutex_;
  std::condition_variable called_, done_;
  // Below: written under mutex_ by the caller, before the workers are called.
  void (*work_)(void*, uint32_t, uint64_t) = nullptr;
  void* context_ = nullptr;
  uint64_t count_ = 0, call_ = 0;
  uint32_t started_ = 0, wanted_ = 0, left_ = 0;
  std::atomic<uint64_t> next_{0};
};

Pool* pool() {
  static std::atomic<Pool*> current{nullptr};
  Pool* known = current.load(std::memory_order_acquire);
  if (known != nullptr && known->owner() == getpid()) return known;
  // Never freed: its threads may run until the process ends; a parent's is not ours to free.
  auto* fresh = new (std::nothrow) Pool(getpid());
  if (fresh == nullptr || current.compare_exchange_strong(known, fresh)) return fresh;
  delete fresh;
  return known;
}

}  // namespace

void run_on(uint32_t threads, uint64_t count, void (*work)(void*, uint32_t, uint64_t), void* context) {
  Pool* shared = threads > 1 ? pool() : nullptr;
  if (shared != nullptr) return shared->run(threads < kMaxThreads ? threads : kMaxThreads, count, work, context);
  for (uint64_t i = 0; i < count; ++i) work(context, 0, i);
}

}  // namespace kvk
