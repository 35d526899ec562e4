// kvk_copy_pages: a layer's pages between registered host memory and the device's blocks, in one launch.
//
// Never allocates, never waits. A copy over the bus needs few threads: `blocks` bounds them, so that a copy beside a computation
// leaves it the rest of the device. Invariant: pages do not overlap; which thread copies what changes no byte.
#include "cuda/codec_checks.h"
#include "cuda/errors.h"
#include "cuda/pages_tile.h"

namespace kvk {
namespace {

constexpr uint32_t kMostBlocks = 1056;  // 8 of 256 threads on each of 132 multiprocessors: more only queue

// Page addresses are read on the device alone: whether all are aligned is found out there, by every block of threads.
__device__ bool all_aligned(const kvk_pages& a) {
  bool aligned = true;
  for (uint32_t page = threadIdx.x; page < a.count; page += kPageThreads)
    aligned &= is_aligned(a.from[page], 16) && is_aligned(a.to[page], 16);
  return __syncthreads_and(aligned) != 0;
}

__global__ void __launch_bounds__(kPageThreads) copy_pages(const __grid_constant__ kvk_pages a) {
  const uint64_t first = static_cast<uint64_t>(blockIdx.x) * kPageThreads + threadIdx.x;
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * kPageThreads;
  if (strides_fit(a, 16) && all_aligned(a))
    copy_words<Words4>(a, first, step);
  else
    copy_words<uint8_t>(a, first, step);
}

// One thread a byte.
__global__ void copy_naively(const __grid_constant__ kvk_pages a) {
  const uint64_t index = static_cast<uint64_t>(blockIdx.x) * kPageThreads + threadIdx.x;
  if (index >= words_of(a, 1)) return;
  const Places places = places_of(a, index, 1);
  *static_cast<uint8_t*>(places.to) = *static_cast<const uint8_t*>(places.from);
}

}  // namespace
}  // namespace kvk

extern "C" int kvk_copy_pages(const kvk_pages* args) {
  if (int status = kvk::check_version(args)) return status;
  const kvk_pages& a = *args;
  const uint64_t bytes = kvk::words_of(a, 1);
  if (bytes == 0) return KVK_OK;
  if (a.from == nullptr || a.to == nullptr) return kvk::fail(KVK_INVALID, "a null pointer for %u pages", a.count);
  auto* stream = static_cast<cudaStream_t>(a.stream);
  if (a.path == KVK_CPU_REFERENCE) {
    const uint64_t blocks = (bytes + kvk::kPageThreads - 1) / kvk::kPageThreads;
    if (blocks > INT32_MAX)
      return kvk::fail(KVK_INVALID, "%llu bytes; too many for the naive kernel", static_cast<unsigned long long>(bytes));
    kvk::copy_naively<<<static_cast<uint32_t>(blocks), kvk::kPageThreads, 0, stream>>>(a);
    return kvk::launched("copy_naively");
  }
  const uint64_t each = uint64_t{kvk::kPageThreads} * kvk::kWordsInFlight * 16;
  const uint64_t useful = (bytes + each - 1) / each, most = a.blocks == 0 ? kvk::kMostBlocks : a.blocks;
  kvk::copy_pages<<<static_cast<uint32_t>(useful < most ? useful : most), kvk::kPageThreads, 0, stream>>>(a);
  return kvk::launched("copy_pages");
}
