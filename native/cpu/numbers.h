// fp16 and bf16 as the CPU paths read and write them: one element, or a row of them to and from floats.
//
// Owns the conversions; never allocates. Invariant: every path rounds alike (to nearest, half to even), so bytes do not depend
// on the instruction set. Everything here is local to the file that includes it: each is compiled for another instruction
// set, and a shared inline function would let the linker pick the one that some machine cannot run.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace kvk {
namespace {

constexpr float kLargestHalf = 65504.0f;

inline float from_bf16(uint16_t x) { return __builtin_bit_cast(float, static_cast<uint32_t>(x) << 16); }

inline uint16_t to_bf16(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16 | 0x40) : rounded);  // a NaN stays one
}

inline float from_half(uint16_t x) {
#if defined(__F16C__)
  return _cvtsh_ss(x);
#else
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16, rest = x & 0x7fff;
  if (rest >= 0x7c00) return __builtin_bit_cast(float, sign | 0x7f800000 | (rest & 0x3ff) << 13);
  // 2^112 takes the exponent from fp16's bias to fp32's, for subnormal numbers too.
  return __builtin_bit_cast(float, sign | __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, rest << 13) * 0x1p112f));
#endif
}

inline uint16_t to_half(float x) {
#if defined(__F16C__)
  return static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#else
  const uint32_t bits = __builtin_bit_cast(uint32_t, x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (rest >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // rounds beyond the largest
  if (rest < 0x38800000)  // subnormal: adding a half puts the units of fp16 into the last bits
    return static_cast<uint16_t>(sign | (__builtin_bit_cast(uint32_t, __builtin_bit_cast(float, rest) + 0.5f) - 0x3f000000));
  return static_cast<uint16_t>(sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
#endif
}

// Element `i` of a row of `dtype`.
inline float element(uint32_t dtype, const void* row, uint32_t i) {
  if (dtype == KVK_F32) return static_cast<const float*>(row)[i];
  const uint16_t bits = static_cast<const uint16_t*>(row)[i];
  return dtype == KVK_BF16 ? from_bf16(bits) : from_half(bits);
}

inline void load_row(uint32_t dtype, const void* row, uint32_t n, float* out) {
  if (dtype == KVK_F32) {
    std::memcpy(out, row, n * sizeof(float));
    return;
  }
  const auto* bits = static_cast<const uint16_t*>(row);
  uint32_t i = 0;
  if (dtype == KVK_BF16) {
    for (; i < n; ++i) out[i] = from_bf16(bits[i]);
    return;
  }
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bits + i))));
#endif
  for (; i < n; ++i) out[i] = from_half(bits[i]);
}

inline void store_row(uint32_t dtype, const float* in, uint32_t n, void* row) {
  if (dtype == KVK_F32) {
    std::memcpy(row, in, n * sizeof(float));
    return;
  }
  auto* bits = static_cast<uint16_t*>(row);
  uint32_t i = 0;
  if (dtype == KVK_BF16) {
    for (; i < n; ++i) bits[i] = to_bf16(in[i]);
    return;
  }
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bits + i), _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < n; ++i) bits[i] = to_half(in[i]);
}

template <class T>
T* at(T* base, int64_t bytes) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(base) + static_cast<uintptr_t>(bytes));
}

// out = R(turn) row, or R(-turn) row where `back`; elements from rotary_dim on are copied. Not in place.
inline void turn_row(const float* row, const float* turn, bool back, uint32_t rope, uint32_t rotary_dim, uint32_t n, float* out) {
  const uint32_t half = rotary_dim / 2;
  const float sign = back ? -1.0f : 1.0f;
  const float *cosine = turn, *sine = turn + half;
  if (rope == KVK_ROPE_HALF) {
    for (uint32_t i = 0; i < half; ++i) out[i] = row[i] * cosine[i] - row[i + half] * (sign * sine[i]);
    for (uint32_t i = 0; i < half; ++i) out[i + half] = row[i + half] * cosine[i] + row[i] * (sign * sine[i]);
  } else {
    for (uint32_t i = 0; i < half; ++i) {
      out[2 * i] = row[2 * i] * cosine[i] - row[2 * i + 1] * (sign * sine[i]);
      out[2 * i + 1] = row[2 * i + 1] * cosine[i] + row[2 * i] * (sign * sine[i]);
    }
  }
  for (uint32_t i = rotary_dim; i < n; ++i) out[i] = row[i];
}

}  // namespace
}  // namespace kvk
