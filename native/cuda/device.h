// What a kernel may do with its threads and its memory: barriers, shuffles, asynchronous copies, tensor cores.
//
// nvcc compiles each to its instruction; g++ compiles the same kernels against cuda/emulation, lane by lane as the PTX manual
// has it. Owns no arithmetic of attention. Invariant: kernels reach the hardware through this file only, so that what the
// emulation ran is what the GPU runs.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define KVK_DEVICE_FN __device__ __forceinline__
#else
#define KVK_DEVICE_FN inline
#include <cmath>

#include "tests/emulation/cuda/lanes.h"
#endif

#include "cuda/numbers.h"

namespace kvk {

constexpr float kInfinity = __builtin_huge_valf();

struct alignas(16) Floats4 {
  float x[4];
};

#if defined(__CUDACC__)

KVK_DEVICE_FN uint32_t thread_index() { return threadIdx.x; }
KVK_DEVICE_FN uint32_t threads_in_block() { return blockDim.x; }
KVK_DEVICE_FN uint32_t block_index() { return blockIdx.x; }
KVK_DEVICE_FN void sync_block() { __syncthreads(); }
KVK_DEVICE_FN void sync_warp() { __syncwarp(); }
template <class T>
KVK_DEVICE_FN T shuffle(T value, uint32_t from) {
  return __shfl_sync(~0u, value, from);
}
template <class T>
KVK_DEVICE_FN T shuffle_xor(T value, uint32_t mask) {
  return __shfl_xor_sync(~0u, value, mask);
}
template <class T>
KVK_DEVICE_FN T shuffle_up(T value, uint32_t by) {
  return __shfl_up_sync(~0u, value, by);
}
KVK_DEVICE_FN uint32_t ballot(bool value) { return __ballot_sync(~0u, value); }
KVK_DEVICE_FN uint32_t first_bit(uint32_t bits) { return __ffs(static_cast<int>(bits)) - 1; }

KVK_DEVICE_FN uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// 16 bytes to shared memory, of which the first `there` (16 or 0) are read and the others 0.
KVK_DEVICE_FN void copy_async(void* to, const void* from, uint32_t there) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there) : "memory");
#else
  *static_cast<Words4*>(to) = there != 0 ? *static_cast<const Words4*>(from) : Words4{};
#endif
}
KVK_DEVICE_FN void copy_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int kGroups>
KVK_DEVICE_FN void copy_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
#endif
}

// What was read of memory is read again, and so takes no registers in between.
KVK_DEVICE_FN void forget_memory() { asm volatile("" ::: "memory"); }

KVK_DEVICE_FN uint32_t add_atomically(uint32_t* to, uint32_t value) { return atomicAdd(to, value); }
KVK_DEVICE_FN void fence_device() { __threadfence(); }

KVK_DEVICE_FN float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
KVK_DEVICE_FN float larger_of(float x, float y) { return fmaxf(x, y); }  // a NaN is passed over
KVK_DEVICE_FN float size_of(float x) { return fabsf(x); }
KVK_DEVICE_FN float log2_fast(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
KVK_DEVICE_FN uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) { return __byte_perm(a, b, selector); }

// c[16][8] += a[16][16] b[16][8], fp32 sums. Lane 4 g + t holds of a rows g and g + 8, columns 2t, 2t + 1, 2t + 8, 2t + 9: a[0]
// and a[2] of row g, a[1] and a[3] of row g + 8; of b the same as rows, column g; of c rows g and g + 8, columns 2t, 2t + 1.
KVK_DEVICE_FN void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(b0));
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}
// From sm_80 on; before, kernels hold bf16 as fp16 (kHasBf16).
KVK_DEVICE_FN void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}
// The same of whole numbers: a[16][32] from 0 to 255, b[32][8] from -128 to 127. Lane 4 g + t holds of a row g (a[0], a[2]) and
// g + 8, columns 4t .. 4t + 3 and, in a[2] and a[3], 16 more; of b the same as rows, column g.
KVK_DEVICE_FN void mma_u8(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  const uint32_t b[2] = {b0, b1};
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i)
    asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.u8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
                 : "+r"(c[i % 2 * 2]), "+r"(c[i % 2 * 2 + 1])
                 : "r"(a[i]), "r"(b[i / 2]));
#endif
}
// A word of an 8 x 8 matrix of 16-bit elements, row lane / 4, elements 2 (lane % 4) and the next, becomes that of the transposed.
KVK_DEVICE_FN uint32_t transposed(uint32_t word) {
  uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(word));
  return out;
}
// Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8, and gets of each matrix row
// l / 4, elements 2 (l % 4) and the next; transposed: column l / 4, rows 2 (l % 4) and the next.
KVK_DEVICE_FN void load_matrices(uint32_t (&m)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared_address(row))
               : "memory");
}
KVK_DEVICE_FN void load_matrices_transposed(uint32_t (&m)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared_address(row))
               : "memory");
}

#else  // the emulation

inline uint32_t thread_index() { return emulation::here().thread; }
inline uint32_t threads_in_block() { return emulation::here().threads; }
inline uint32_t block_index() { return emulation::here().block; }
inline void sync_block() { emulation::sync_block(); }
void sync_warp();
uint32_t shuffle_bits(uint32_t value, uint32_t from);
template <class T>
inline T shuffle(T value, uint32_t from) {
  static_assert(sizeof(T) % 4 == 0);
  uint32_t words[sizeof(T) / 4];
  std::memcpy(words, &value, sizeof value);
  for (uint32_t& word : words) word = shuffle_bits(word, from);
  std::memcpy(&value, words, sizeof value);
  return value;
}
template <class T>
inline T shuffle_xor(T value, uint32_t mask) {
  return shuffle(value, (emulation::here().thread % 32) ^ mask);
}
template <class T>
inline T shuffle_up(T value, uint32_t by) {
  const uint32_t lane = emulation::here().thread % 32;
  return shuffle(value, lane < by ? lane : lane - by);
}
uint32_t ballot(bool value);
inline uint32_t first_bit(uint32_t bits) { return static_cast<uint32_t>(__builtin_ffs(static_cast<int>(bits)) - 1); }
inline void copy_async(void* to, const void* from, uint32_t there) { emulation::copy_async(to, from, 16, there); }
inline void copy_commit() { emulation::commit(); }
template <int kGroups>
inline void copy_wait() {
  emulation::wait(kGroups);
}
inline uint32_t add_atomically(uint32_t* to, uint32_t value) {
  const uint32_t before = *to;
  *to += value;
  return before;
}
inline void fence_device() {}
inline void forget_memory() {}
inline float exp2_fast(float x) { return std::exp2(x); }
inline float larger_of(float x, float y) { return std::fmax(x, y); }
inline float size_of(float x) { return std::fabs(x); }
inline float log2_fast(float x) { return std::log2(x); }
inline uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t out = 0;
  for (uint32_t i = 0; i < 4; ++i) out |= static_cast<uint32_t>(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return out;
}
void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
void mma_u8(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
uint32_t transposed(uint32_t word);
void load_matrices(uint32_t (&m)[4], const void* row);
void load_matrices_transposed(uint32_t (&m)[4], const void* row);

#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr bool kHasBf16 = false;
constexpr uint32_t kSharedMost = 64 << 10;  // bytes a block may have
#else
constexpr bool kHasBf16 = true;
constexpr uint32_t kSharedMost = 227 << 10;
#endif

KVK_DEVICE_FN uint32_t lane_index() { return thread_index() % 32; }
KVK_DEVICE_FN uint32_t warp_index() { return thread_index() / 32; }

// Over the eight lanes 4 g + t of the same t, which hold a column of an mma's result.
KVK_DEVICE_FN float largest_of_column(float x) {
#pragma unroll
  for (uint32_t mask = 4; mask < 32; mask *= 2) x = larger_of(x, shuffle_xor(x, mask));
  return x;
}
KVK_DEVICE_FN float sum_of_column(float x) {
#pragma unroll
  for (uint32_t mask = 4; mask < 32; mask *= 2) x += shuffle_xor(x, mask);
  return x;
}

// Over the four lanes 4 g .. 4 g + 3 that hold a row of an mma's result.
KVK_DEVICE_FN float largest_of_row(float x) {
  x = larger_of(x, shuffle_xor(x, 1));
  return larger_of(x, shuffle_xor(x, 2));
}
KVK_DEVICE_FN float sum_of_row(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}

}  // namespace kvk
