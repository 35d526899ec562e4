// The engine of threads: each takes a transfer and does it with preadv and pwritev.

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>

#include "core/base/error.h"
#include "core/files/engine.h"

namespace kv {
namespace {

constexpr uint32_t kMaxThreads = 4;  // as many as reach a device

// Moves all of it, or to the end of the file, or to the first error.
int64_t move_all(const Transfer& transfer) {
  iovec parts[2] = {transfer.parts[0], transfer.parts[1]};
  uint64_t offset = transfer.offset;
  uint32_t first = 0;
  while (first < transfer.count) {
    const int count = static_cast<int>(transfer.count - first);
    const ssize_t moved = transfer.write ? ::pwritev(transfer.fd, parts + first, count, static_cast<off_t>(offset))
                                         : ::preadv(transfer.fd, parts + first, count, static_cast<off_t>(offset));
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return -errno;
    if (moved == 0) break;
    offset += static_cast<uint64_t>(moved);
    for (auto rest = static_cast<size_t>(moved); first < transfer.count;) {
      const size_t step = std::min(rest, parts[first].iov_len);
      parts[first] = {static_cast<std::byte*>(parts[first].iov_base) + step, parts[first].iov_len - step};
      rest -= step;
      if (parts[first].iov_len != 0) break;
      ++first;
    }
  }
  return static_cast<int64_t>(offset - transfer.offset);
}

}  // namespace

ThreadEngine::ThreadEngine(uint32_t depth) : depth_(std::clamp<uint32_t>(depth, 1, kMaxDepth)) {
  event_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event_) throw Error(Code::Unavailable, errno_text("eventfd"));
  waiting_.reserve(depth_);
  done_.reserve(depth_);
  for (uint32_t i = 0; i < std::min(depth_, kMaxThreads); ++i) threads_.emplace_back([this] { work(); });
}

ThreadEngine::~ThreadEngine() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  more_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadEngine::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    more_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    Transfer* transfer = waiting_.back();
    waiting_.pop_back();
    lock.unlock();
    transfer->result = move_all(*transfer);
    lock.lock();
    done_.push_back(transfer);
    const uint64_t wakeup = 1;
    KV_INVARIANT(::write(event_.get(), &wakeup, sizeof wakeup) == sizeof wakeup);
  }
}

bool ThreadEngine::submit(Transfer* transfer) {
  {
    std::lock_guard lock(mutex_);
    if (in_flight_ == depth_) return false;
    ++in_flight_;
    waiting_.insert(waiting_.begin(), transfer);
  }
  more_.notify_one();
  return true;
}

size_t ThreadEngine::completed(std::span<Transfer*> done) {
  std::lock_guard lock(mutex_);
  uint64_t rung = 0;
  if (::read(event_.get(), &rung, sizeof rung) < 0) KV_INVARIANT(errno == EAGAIN);
  const size_t count = std::min(done.size(), done_.size());
  std::copy_n(done_.begin(), count, done.begin());
  done_.erase(done_.begin(), done_.begin() + static_cast<ptrdiff_t>(count));
  in_flight_ -= static_cast<uint32_t>(count);
  const uint64_t wakeup = 1;
  if (!done_.empty()) KV_INVARIANT(::write(event_.get(), &wakeup, sizeof wakeup) == sizeof wakeup);
  return count;
}

uint32_t ThreadEngine::in_flight() const {
  std::lock_guard lock(mutex_);
  return in_flight_;
}

}  // namespace kv
