// Eight or sixteen floats at once: what the fp32 tiles and the softmax are written in, for AVX2 and AVX-512 alike.
//
// Owns two types with the same static functions; `Vector` is the wider that there is. Never touches memory beyond `count`
// elements where a count is given. Invariant: local to the including file (cpu/numbers.h says why).
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace kvk {
namespace {

struct Floats8 {
  static constexpr uint32_t kLanes = 8;
  using T = __m256;
  static T zero() { return _mm256_setzero_ps(); }
  static T all(float x) { return _mm256_set1_ps(x); }
  static T load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, T x) { _mm256_storeu_ps(p, x); }
  static T add(T a, T b) { return _mm256_add_ps(a, b); }
  static T sub(T a, T b) { return _mm256_sub_ps(a, b); }
  static T mul(T a, T b) { return _mm256_mul_ps(a, b); }
  static T div(T a, T b) { return _mm256_div_ps(a, b); }
  static T fma(T a, T b, T c) { return _mm256_fmadd_ps(a, b, c); }
  static T max(T a, T b) { return _mm256_max_ps(a, b); }
  static T round(T a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static T scale_by_power(T a, T whole) {  // -126 <= whole <= 128
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
    return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
  }
  static float sum(T a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
  }
  static float largest(T a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
  }
  static T between(int start, int stop, T a, T b) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32(start), lane);
    const __m256i within = _mm256_cmpgt_epi32(_mm256_set1_epi32(stop), lane);
    return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(_mm256_andnot_si256(before, within)));
  }
};

#if defined(__AVX512F__)
struct Floats16 {
  static constexpr uint32_t kLanes = 16;
  using T = __m512;
  static T zero() { return _mm512_setzero_ps(); }
  static T all(float x) { return _mm512_set1_ps(x); }
  static T load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, T x) { _mm512_storeu_ps(p, x); }
  static T add(T a, T b) { return _mm512_add_ps(a, b); }
  static T sub(T a, T b) { return _mm512_sub_ps(a, b); }
  static T mul(T a, T b) { return _mm512_mul_ps(a, b); }
  static T div(T a, T b) { return _mm512_div_ps(a, b); }
  static T fma(T a, T b, T c) { return _mm512_fmadd_ps(a, b, c); }
  static T max(T a, T b) { return _mm512_max_ps(a, b); }
  static T round(T a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static T scale_by_power(T a, T whole) { return _mm512_scalef_ps(a, whole); }
  static float sum(T a) { return _mm512_reduce_add_ps(a); }
  static float largest(T a) { return _mm512_reduce_max_ps(a); }
  // Lanes start <= i < stop of a, others of b.
  static T between(int start, int stop, T a, T b) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 inside =
        _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(start)) & _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(stop));
    return _mm512_mask_blend_ps(inside, b, a);
  }
};
using Vector = Floats16;
#else
using Vector = Floats8;
#endif

// 2^x to a unit in the last place or two, for x <= 128, which is infinity; what is below -126 counts as -126. A NaN stays one.
template <class V = Vector>
inline typename V::T exp2(typename V::T x) {
  using T = typename V::T;
  const T low = V::all(-126.0f);
  const T whole = V::round(V::max(low, x));  // max(low, NaN) is NaN: the second operand wins
  const T rest = V::sub(V::max(low, x), whole);
  T p = V::all(1.5353362e-4f);
  p = V::fma(p, rest, V::all(1.3398874e-3f));
  p = V::fma(p, rest, V::all(9.6184373e-3f));
  p = V::fma(p, rest, V::all(5.5503324e-2f));
  p = V::fma(p, rest, V::all(2.4022648e-1f));
  p = V::fma(p, rest, V::all(6.9314720e-1f));
  p = V::fma(p, rest, V::all(1.0f));
  return V::scale_by_power(p, whole);
}

// out[c * out_stride + t] = the c-th four bytes of row t, for t < kLanes and `columns` of them; rows may end anywhere in the
// last column: `bytes` of each are read, the rest counts as 0. `rows` are kLanes pointers.
#if defined(__AVX512F__)
inline void transpose(const uint8_t* const* rows, uint32_t bytes, uint32_t* out, uint32_t out_stride) {
  for (uint32_t start = 0; start < bytes; start += 64) {
    const uint32_t left = bytes - start;
    const __mmask64 read = left >= 64 ? ~__mmask64{0} : (__mmask64{1} << left) - 1;
    __m512i a[16], b[16];
    if (left >= 64) {
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i] + start);
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) a[i] = _mm512_maskz_loadu_epi8(read, rows[i] + start);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
      b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
      b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {  // a[i + j]: of each quarter of the rows, column j, tokens i..i+3
      a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
      a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
      a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
      a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    const uint32_t columns = left >= 64 ? 16 : (left + 3) / 4;
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {  // the quarters of four registers, exchanged
      const __m512i low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88), high = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
      const __m512i low2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88),
                    high2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
      b[j] = _mm512_shuffle_i32x4(low, low2, 0x88);
      b[8 + j] = _mm512_shuffle_i32x4(low, low2, 0xdd);
      b[4 + j] = _mm512_shuffle_i32x4(high, high2, 0x88);
      b[12 + j] = _mm512_shuffle_i32x4(high, high2, 0xdd);
    }
    uint32_t* to = out + start / 4 * out_stride;
    if (columns == 16) {
#pragma GCC unroll 16
      for (uint32_t c = 0; c < 16; ++c) _mm512_store_si512(to + c * out_stride, b[c]);
    } else {
#pragma GCC unroll 16
      for (uint32_t c = 0; c < 16; ++c)
        if (c < columns) _mm512_store_si512(to + c * out_stride, b[c]);
    }
  }
}
#else
inline void transpose(const uint8_t* const* rows, uint32_t bytes, uint32_t* out, uint32_t out_stride) {  // whole 32 bytes
  for (uint32_t start = 0; start < bytes; start += 32) {
    __m256 a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(rows[i] + start));
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
      b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
      a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
      a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
      a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
      a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
    float* to = reinterpret_cast<float*>(out + start / 4 * out_stride);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      _mm256_storeu_ps(to + j * out_stride, _mm256_permute2f128_ps(a[j], a[4 + j], 0x20));
      _mm256_storeu_ps(to + (4 + j) * out_stride, _mm256_permute2f128_ps(a[j], a[4 + j], 0x31));
    }
  }
}
#endif

}  // namespace
}  // namespace kvk
