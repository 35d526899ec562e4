// Numbers as the CUDA kernels read and write them, in device code and, compiled by g++, in the tests of the same loops.
//
// Owns fp16 and bf16 and products and sums that no compiler may contract. Never allocates. Invariant: every function gives the
// same bits on the device and on the host (a NaN may be another NaN), and those of native/cpu/numbers.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define KVK_BOTH __host__ __device__ __forceinline__
#define KVK_UNROLL _Pragma("unroll")
#else
#define KVK_BOTH inline
#define KVK_UNROLL
#endif

namespace kvk {

constexpr float kLargestHalf = 65504.0f;

KVK_BOTH float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
#endif
}

KVK_BOTH uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
#endif
}

// Rounded each by itself: the CPU library writes the same bytes.
KVK_BOTH float times(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

KVK_BOTH float plus(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

KVK_BOTH float minus(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fsub_rn(a, b);
#else
  return a - b;
#endif
}

KVK_BOTH float divided(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

KVK_BOTH float to_whole(float x) {  // half to even
#if defined(__CUDA_ARCH__)
  return rintf(x);
#else
  return __builtin_nearbyintf(x);
#endif
}

KVK_BOTH float from_bf16(uint32_t x) { return float_of(x << 16); }

KVK_BOTH uint16_t to_bf16(float x) {
#if defined(__CUDA_ARCH__)
  return __bfloat16_as_ushort(__float2bfloat16_rn(x));
#else
  const uint32_t bits = bits_of(x), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16 | 0x40) : rounded);
#endif
}

KVK_BOTH float from_half(uint16_t x) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(x));
#else
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16, rest = x & 0x7fff;
  if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  return float_of(sign | bits_of(float_of(rest << 13) * 0x1p112f));
#endif
}

KVK_BOTH uint16_t to_half(float x) {
#if defined(__CUDA_ARCH__)
  return __half_as_ushort(__float2half_rn(x));
#else
  const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (rest >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  if (rest < 0x38800000) return static_cast<uint16_t>(sign | (bits_of(float_of(rest) + 0.5f) - 0x3f000000));
  return static_cast<uint16_t>(sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
#endif
}

// One element of a row; dtype: KVK_F32, KVK_F16, KVK_BF16.
KVK_BOTH float element(uint32_t dtype, const void* row, uint32_t i) {
  if (dtype == KVK_F32) return static_cast<const float*>(row)[i];
  const uint16_t bits = static_cast<const uint16_t*>(row)[i];
  return dtype == KVK_BF16 ? from_bf16(bits) : from_half(bits);
}

KVK_BOTH void put(uint32_t dtype, void* row, uint32_t i, float x) {
  if (dtype == KVK_F32)
    static_cast<float*>(row)[i] = x;
  else
    static_cast<uint16_t*>(row)[i] = dtype == KVK_BF16 ? to_bf16(x) : to_half(x);
}

// What one thread loads or stores at once.
struct alignas(16) Words4 {
  uint32_t w[4];
};
struct alignas(8) Words2 {
  uint32_t w[2];
};

template <class T>
KVK_BOTH T* at(T* base, int64_t bytes) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(base) + static_cast<uintptr_t>(bytes));
}

KVK_BOTH bool is_aligned(const void* pointer, uint32_t to) { return reinterpret_cast<uintptr_t>(pointer) % to == 0; }

}  // namespace kvk
