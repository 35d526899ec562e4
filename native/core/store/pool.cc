#include "core/store/pool.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/base/polling.h"
#include "core/format/block.h"

namespace kv {
namespace {
constexpr uint64_t kFaultStep = 256ull << 10;      // who maps memory meanwhile, a create of a new class, waits for one
constexpr std::chrono::milliseconds kAgain{1000};  // from a refusal of the file system to the next try
constexpr int kCollapse = 25;                      // MADV_COLLAPSE, which older headers lack
constexpr int kMostRefused = 16;                   // huge pages that the machine had not, in a row
constexpr int kRestsTimes = 4;                     // as long as the last one took: a fifth of a processor
constexpr int kMostPasses = 10;                    // the last begins eight minutes behind the one before
}  // namespace

// Linux 6.6: before 6.4 a reader could see a page of the file system that was not filled yet.
bool Pool::collapses_pages() {
  utsname about;
  unsigned major = 0, minor = 0;
  if (::uname(&about) != 0 || std::sscanf(about.release, "%u.%u", &major, &minor) != 2) return false;
  return major > 6 || (major == 6 && minor >= 6);
}

Pool::Pool(int fd, uint64_t capacity, uint64_t frontier, uint64_t huge_after_ms)
    : fd_(::fcntl(fd, F_DUPFD_CLOEXEC, 3)),
      capacity_(capacity),
      mapping_(fd, capacity, true),
      frontier_(frontier),
      huge_after_ms_(huge_after_ms) {}

Pool::~Pool() { stop(); }

void Pool::start(std::function<void(uint64_t)> grown, std::function<void(uint64_t)> faulted) {
  grown_ = std::move(grown);
  thread_ = std::thread([this, faulted = std::move(faulted)] { run(faulted); });
}

void Pool::stop() {
  {
    std::lock_guard lock(mutex_);
    stop_.store(true);
  }
  stopping_.notify_all();
  if (thread_.joinable()) thread_.join();
}

bool Pool::grow() {
  // Held over the callback: steps are told in their order, and who finds nothing left to grow finds all of it told.
  std::lock_guard one_at_a_time(grow_mutex_);
  const uint64_t before = frontier_.load(std::memory_order_relaxed);
  if (before >= capacity_ || monotonic_ns() < again_ns_) return false;
  const uint64_t step = std::min(kGrowStep, capacity_ - before);
  if (::fallocate(fd_.get(), 0, static_cast<off_t>(before), static_cast<off_t>(step)) != 0) {
    std::lock_guard lock(mutex_);
    problem_ = errno_text("the pool stays at " + std::to_string(before) + " of " + std::to_string(capacity_) + " bytes");
    again_ns_ = monotonic_ns() + 1'000'000ull * static_cast<uint64_t>(kAgain.count());
    return false;
  }
  if (std::exchange(again_ns_, 0)) {
    std::lock_guard lock(mutex_);
    problem_.clear();
  }
  frontier_.store(before + step, std::memory_order_release);
  if (grown_) grown_(before + step);
  return true;
}

// MADV_POPULATE_WRITE answers an error where touching would be a SIGBUS.
void Pool::run(std::function<void(uint64_t)> faulted) {
  ::pthread_setname_np(::pthread_self(), "kv-fault");
  uint64_t at = 0;
  while (!stop_.load(std::memory_order_relaxed)) {
    if (at >= frontier() && !grow() && at >= frontier()) {  // a create may have taken the last step
      if (at >= capacity_) return make_huge();
      rests(kAgain);
      continue;
    }
    const uint64_t step = std::min(kFaultStep, frontier() - at);
    if (::madvise(mapping_.data() + at, step, MADV_POPULATE_WRITE) != 0) {
      std::lock_guard lock(mutex_);
      problem_ = errno_text("faulting in at " + std::to_string(at));
      return;
    }
    // The pages stay; only this process's page table entries go. With a million of them the daemon's end would take
    // 100 ms longer per 4 GiB, and it reads and writes the pool rarely.
    ::madvise(mapping_.data() + at, step, MADV_DONTNEED);
    at += step;
    faulted_.store(at, std::memory_order_release);
    faulted(at);
  }
}

bool Pool::rests(std::chrono::nanoseconds time) {
  std::unique_lock lock(mutex_);
  return !stopping_.wait_for(lock, time, [this] { return stop_.load(); });
}

// A client that first writes a part of the pool takes a page fault every 4 KiB, as much processor as the copy; of huge pages one
// every 2 MiB. Later and at a pace, for it costs half a millisecond a page, and ten where a hypervisor takes back what is free.
// What is held or touched just then is tried again, some times. Who touches the page meanwhile waits for the kernel.
void Pool::make_huge() {
  if (!huge_after_ms_ || !collapses_pages() || !rests(std::chrono::milliseconds(huge_after_ms_))) return;
  std::vector<bool> made(capacity_ / kHugePageBytes);
  bool any = false;
  for (int pass = 0; pass < kMostPasses && huge() < made.size() * kHugePageBytes; ++pass) {
    int refused = 0;
    for (size_t i = 0; i < made.size() && refused < kMostRefused; ++i) {
      if (made[i]) continue;
      std::byte* const piece = mapping_.data() + i * kHugePageBytes;
      const uint64_t began_ns = monotonic_ns();
      if (truncated()) return;  // what a client cut off would be there again, as zeros
      const int error = ::madvise(piece, kHugePageBytes, kCollapse) == 0 ? 0 : errno;
      if (error == EINVAL && !any) return;  // the kernel has no such pages
      made[i] = error == 0, any = any || made[i];
      refused = error == 0 || error == EAGAIN ? 0 : refused + 1;
      if (made[i]) huge_.fetch_add(kHugePageBytes, std::memory_order_relaxed);
      ::madvise(piece, kHugePageBytes, MADV_DONTNEED);  // as run() does
      if (!rests(std::chrono::nanoseconds((monotonic_ns() - began_ns) * kRestsTimes))) return;
    }
    if (!rests(kAgain * (1 << pass))) return;
  }
}

std::string Pool::problem() const {
  std::lock_guard lock(mutex_);
  return problem_;
}

bool Pool::truncated() const {
  const uint64_t exists = frontier();  // before the size: a step may be added between the two looks
  struct stat st;
  return ::fstat(fd_.get(), &st) != 0 || static_cast<uint64_t>(st.st_size) < exists;
}

bool Pool::read(uint64_t offset, void* out, size_t length) const {
  iovec local{out, length};
  iovec remote{mapping_.data() + offset, length};
  return ::process_vm_readv(::getpid(), &local, 1, &remote, 1, 0) == static_cast<ssize_t>(length);
}

bool Pool::write(uint64_t offset, const void* data, size_t length) const {
  iovec local{const_cast<void*>(data), length};
  iovec remote{mapping_.data() + offset, length};
  return ::process_vm_writev(::getpid(), &local, 1, &remote, 1, 0) == static_cast<ssize_t>(length);
}

}  // namespace kv
