// What the loops of cpu/linear_rows.h read and write: fp32, or bf16.
//
// Owns how elements become floats, how floats are rounded to elements, and how a step of a sum multiplies them: bf16 in pairs
// where there is an instruction for it (vdpbf16ps), as fp32 elsewhere. Invariant: rounding is to nearest, half to even, as
// torch's; a NaN stays one. Local to the including file (cpu/numbers.h says why).
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/linear.h"
#include "cpu/numbers.h"
#include "cpu/vector.h"

namespace kvk {
namespace {

// `Factor` is what kStep elements are in registers; a sum's lanes are Vector's.
struct Float32 {
  using Element = float;
  using Factor = Vector::T;
  static constexpr uint32_t kStep = Vector::kLanes;
  static constexpr uint32_t kInputs = 768;  // of more, a tile of x and its weights do not fit into the first cache (docs/log.md)
  static Factor factor(const float* p) { return Vector::load(p); }
  static Vector::T fma(Factor a, Factor b, Vector::T sum) { return Vector::fma(a, b, sum); }
  static Vector::T load(const float* p) { return Vector::load(p); }
  static void store(float* p, Vector::T x) { Vector::store(p, x); }
  static Vector::T rounded(Vector::T x) { return x; }
  static float from(float x) { return x; }
  static float to(float x) { return x; }
};

struct Bfloat16Floats {
  using Element = uint16_t;
  static constexpr uint32_t kInputs = kLinearInputs;
#if defined(__AVX512F__)
  static Vector::T load(const uint16_t* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static Vector::T rounded(Vector::T x) {
    const __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i near = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    near = _mm512_mask_or_epi32(near, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), bits, _mm512_set1_epi32(0x400000));
    return _mm512_castsi512_ps(_mm512_and_si512(near, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static void store(uint16_t* p, Vector::T x) {
    const __m512i bits = _mm512_srli_epi32(_mm512_castps_si512(rounded(x)), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(bits));
  }
#else
  static Vector::T load(const uint16_t* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static Vector::T rounded(Vector::T x) {
    const __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i near = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i none = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256 kept = _mm256_blendv_ps(_mm256_castsi256_ps(near), _mm256_castsi256_ps(none), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_and_ps(kept, _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static void store(uint16_t* p, Vector::T x) {
    const __m256i bits = _mm256_srli_epi32(_mm256_castps_si256(rounded(x)), 16);
    const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), halves);
  }
#endif
  static float from(uint16_t x) { return from_bf16(x); }
  static uint16_t to(float x) { return to_bf16(x); }
};

#if defined(__AVX512BF16__)
struct Bfloat16 : Bfloat16Floats {
  using Factor = __m512bh;
  static constexpr uint32_t kStep = 32;
  static Factor factor(const uint16_t* p) { return __builtin_bit_cast(__m512bh, _mm512_loadu_si512(p)); }
  static Factor half(const uint16_t* p) {  // the last sixteen
    return __builtin_bit_cast(__m512bh, _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
  }
  static Vector::T fma(Factor a, Factor b, Vector::T sum) { return _mm512_dpbf16_ps(sum, a, b); }
};
#else
struct Bfloat16 : Bfloat16Floats {
  using Factor = Vector::T;
  static constexpr uint32_t kStep = Vector::kLanes;
  static Factor factor(const uint16_t* p) { return load(p); }
  static Vector::T fma(Factor a, Factor b, Vector::T sum) { return Vector::fma(a, b, sum); }
};
#endif

}  // namespace
}  // namespace kvk
