// Starting a kernel: the one place where a GPU and the emulation differ for the driver (cuda/attend.h).
//
// Owns nothing. A kernel is a type with run(Attention, shared memory), kMostWarps and kBlocksAtOnce; nvcc compiles each in a file
// of its own (cuda/attend_*.cu).
#pragma once

#include "cuda/attention.h"

namespace kvk {

struct Grid {
  uint32_t blocks, warps;
  uint64_t shared_bytes;
};

template <class Kernel>
int launch(const Attention& p, const Grid& grid);

// What the plan of a call depends on.
struct Device {
  uint32_t capability;  // 90 for 9.0
  uint32_t processors;
  uint64_t shared_block;  // bytes that a block may have
  uint64_t shared_processor;
};

int device_now(Device* device);

}  // namespace kvk

#if defined(__CUDACC__)

#include "cuda/errors.h"

namespace kvk {

template <class Kernel>
__global__ void __launch_bounds__(32 * Kernel::kWarps, Kernel::kMinBlocksPerSM) entry(const __grid_constant__ Attention p) {
  extern __shared__ __align__(128) uint8_t shared[];
  Kernel::run(p, shared);
}

template <class Kernel>
int launch(const Attention& p, const Grid& grid) {
  if (grid.shared_bytes > 48 << 10)
    if (int status = checked(
            cudaFuncSetAttribute(entry<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(grid.shared_bytes)),
            "shared memory for attention"))
      return status;
  entry<Kernel><<<grid.blocks, 32 * grid.warps, grid.shared_bytes, static_cast<cudaStream_t>(p.a.stream)>>>(p);
  return launched("attention");
}

}  // namespace kvk

#else

namespace kvk {

template <class Kernel>
int launch(const Attention& p, const Grid& grid) {
  struct Call {
    static void body(const void* p) { Kernel::run(*static_cast<const Attention*>(p), emulation::shared()); }
  };
  emulation::run(grid.blocks, 32 * grid.warps, grid.shared_bytes, Call::body, &p);
  return KVK_OK;
}

}  // namespace kvk

#endif
