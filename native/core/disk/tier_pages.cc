// The pool's pages in this process's page tables. A process is gone only when its page tables are, page by page, so they hold
// what the tier moves and nothing else, and they go in stop().

#include <sys/mman.h>

#include <algorithm>
#include <system_error>
#include <thread>

#include "core/disk/tier.h"

namespace kv {
namespace {
constexpr uint64_t kFaultAroundBytes = 64 << 10;
constexpr uint64_t kUnmapBytes = 64ull << 20;
constexpr unsigned kUnmapThreads = 4;
}  // namespace

// What is about to be moved, and no more: a copy into pages that are not there would take a fault for each. At a reading fault
// the kernel brings sixteen (fault_around_bytes), and shared memory is writable then all the same; where they are there already a
// look costs nothing. Under the guard, as all that touches the pool.
void DiskTier::fault_in(const Extent& extent) {
  for (uint64_t at = extent.offset; at < extent.end(); at = (at / kFaultAroundBytes + 1) * kFaultAroundBytes)
    static_cast<void>(*static_cast<const volatile std::byte*>(pool_.data() + at));
}

// By several threads: one takes 0.2 s for the million small pages of 4 GiB.
void DiskTier::unmap_pool() {
  pool_guard_.reset();
  std::atomic<uint64_t> next{0};
  const auto work = [&] {
    for (uint64_t at; (at = next.fetch_add(kUnmapBytes)) < pool_.size();)
      ::madvise(pool_.data() + at, std::min(kUnmapBytes, pool_.size() - at), MADV_DONTNEED);
  };
  std::vector<std::jthread> others;
  try {
    for (unsigned n = 1; n < std::min(std::thread::hardware_concurrency(), kUnmapThreads); ++n) others.emplace_back(work);
  } catch (const std::system_error&) {
    // No thread is to be had: those there are do it.
  }
  work();
  others.clear();
  pool_.reset();
}

}  // namespace kv
