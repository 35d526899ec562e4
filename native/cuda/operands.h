// fp16, bf16 and codes as operands: two elements in a 32-bit word, the first in the low half.
//
// Owns their packing and the arithmetic on pairs; single numbers are cuda/numbers.h's. Invariant: all round to nearest, half to
// even. Codes become fp16 without arithmetic: 0x6400 | code is the fp16 number 1024 + code.
#pragma once

#include "cuda/device.h"
#include "cuda/numbers.h"
#include "kernels.h"

namespace kvk {

constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

#if defined(__CUDACC__)

KVK_DEVICE_FN uint32_t add_halves(uint32_t a, uint32_t b) {
  uint32_t c;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
// At most 65504: what a code and its scale make may be rounded beyond it.
KVK_DEVICE_FN uint32_t clamp_halves(uint32_t a) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("min.f16x2 %0, %0, %1;" : "+r"(a) : "r"(0x7bff7bff));
#endif
  return a;
}
KVK_DEVICE_FN uint32_t fma_halves(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

#else

// In float the product of two halves is exact; the sum is rounded once more only where it is inexact in double's 53 bits: never.
inline uint16_t fma_half(uint16_t a, uint16_t b, uint16_t c) {
  const double exact = static_cast<double>(from_half(a)) * from_half(b) + from_half(c);
  const float near = static_cast<float>(exact);
  // Odd rounding to float keeps the second rounding, to half, right.
  uint32_t bits = bits_of(near);
  if (static_cast<double>(near) != exact && exact == exact) {
    if ((std::fabs(static_cast<double>(near)) > std::fabs(exact))) --bits;
    bits |= 1;
  }
  return to_half(float_of(bits));
}
inline uint32_t fma_halves(uint32_t a, uint32_t b, uint32_t c) {
  const auto lo = fma_half(static_cast<uint16_t>(a), static_cast<uint16_t>(b), static_cast<uint16_t>(c));
  const auto hi = fma_half(static_cast<uint16_t>(a >> 16), static_cast<uint16_t>(b >> 16), static_cast<uint16_t>(c >> 16));
  return lo | static_cast<uint32_t>(hi) << 16;
}
inline uint32_t add_halves(uint32_t a, uint32_t b) { return fma_halves(a, 0x3c003c00, b); }
inline uint32_t clamp_halves(uint32_t a) {
  const uint32_t low = a & 0xffff, high = a >> 16;
  return (low == 0x7c00 ? 0x7bff : low) | (high == 0x7c00 ? 0x7bff : high) << 16;
}

#endif

KVK_DEVICE_FN uint32_t pack_halves(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
#else
  return to_half(low) | static_cast<uint32_t>(to_half(high)) << 16;
#endif
}

KVK_DEVICE_FN uint32_t pack_bf16(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
#else
  return to_bf16(low) | static_cast<uint32_t>(to_bf16(high)) << 16;
#endif
}

KVK_DEVICE_FN float low_half(uint32_t word) { return from_half(static_cast<uint16_t>(word)); }
KVK_DEVICE_FN float high_half(uint32_t word) { return from_half(static_cast<uint16_t>(word >> 16)); }

// Code `i` of a row of KVK_INT8 or KVK_INT4.
KVK_DEVICE_FN uint32_t code(uint32_t codec, const void* row, uint32_t i) {
  const auto* bytes = static_cast<const uint8_t*>(row);
  return codec == KVK_INT8 ? bytes[i] : bytes[i / 2] >> 4 * (i % 2) & 15;
}

}  // namespace kvk
