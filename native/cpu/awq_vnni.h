// Rows times the packed words of an AWQ layer, for CPUs with AVX-512 VNNI: codes stay bytes, and x becomes whole numbers
// (cpu/awq_numbers.h).
//
// Owns the loops over columns that one task has. Never writes outside of its columns. Invariant: those numbers'. Local to the
// including file (cpu/numbers.h says why).
#pragma once

#include "cpu/awq_numbers.h"

namespace kvk {
namespace {

inline __mmask16 awq_lanes(uint32_t left) { return left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1); }

// x: the part's first element in this row.
template <uint32_t D>
inline void awq_digits(const float* x, AwqSlice slice, AwqNumbers<D>& out, uint32_t row) {
  constexpr int kBits = 8 * D - 2;  // without the sign: the highest byte keeps one to spare
  const uint32_t steps = (slice.inputs + 15) / 16;
  __m512 value[kAwqPart / 16];
  __m512 most = _mm512_setzero_ps();
  __mmask16 endless = 0;
  for (uint32_t i = 0; i < steps; ++i) {
    value[i] = _mm512_maskz_loadu_ps(awq_lanes(slice.inputs - 16 * i), x + 16 * i);
    const __m512 size = _mm512_abs_ps(value[i]);
    endless |= _mm512_cmp_ps_mask(size, _mm512_set1_ps(__builtin_inff()), _CMP_NLT_UQ);
    most = _mm512_max_ps(most, size);
  }
  const uint32_t top = __builtin_bit_cast(uint32_t, _mm512_reduce_max_ps(most)) >> 23;
  // Powers of two, so that neither multiplication rounds; smaller numbers than 2^-100 are far below any sum.
  const int exponent = (top < 27 ? 27 : static_cast<int>(top)) - 127 + 1 - kBits;
  const __m512 many = _mm512_set1_ps(__builtin_bit_cast(float, static_cast<uint32_t>(127 - exponent) << 23));
  out.unit[slice.part][row] =
      endless ? __builtin_nanf("") : __builtin_bit_cast(float, static_cast<uint32_t>(127 + exponent) << 23);
  __m512i sums[D] = {};
  for (uint32_t i = 0; i < steps; ++i) {
    __m512i whole = endless ? _mm512_setzero_si512() : _mm512_cvtps_epi32(_mm512_mul_ps(value[i], many));
    for (uint32_t d = 0; d < D; ++d) {
      const __m512i next = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
      sums[d] = _mm512_add_epi32(sums[d], _mm512_sub_epi32(whole, _mm512_slli_epi32(next, 8)));
      _mm_mask_storeu_epi8(out.digit[row][d] + slice.at + 16 * i, awq_lanes(slice.inputs - 16 * i), _mm512_cvtepi32_epi8(whole));
      whole = next;
    }
  }
  for (uint32_t d = 0; d < D; ++d) out.sum[slice.part][row][d] = static_cast<float>(_mm512_reduce_add_epi32(sums[d]));
}

// The scales and zeros of sixteen words in the order in which awq_bytes() has their columns: [2 * word % 4 + upper nibble].
struct AwqColumns {
  __m512 scale[8], zero[8];

  AwqColumns(const kvk_awq& a, uint32_t group, uint32_t word, uint32_t count) {
    const uint16_t* scales = a.scales + uint64_t{group} * a.outputs + 8 * word;
    __m512i four[4];
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t left = count > 4 * i ? 4 * (count - 4 * i) : 0;
      const __mmask16 here = left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
      four[i] = _mm512_maskz_loadu_epi32(here, scales + 32 * i);
    }
    const __m512i a01 = _mm512_shuffle_i32x4(four[0], four[1], 0x44), b01 = _mm512_shuffle_i32x4(four[0], four[1], 0xee);
    const __m512i a23 = _mm512_shuffle_i32x4(four[2], four[3], 0x44), b23 = _mm512_shuffle_i32x4(four[2], four[3], 0xee);
    const __m512i word_of[4] = {_mm512_shuffle_i32x4(a01, a23, 0x88), _mm512_shuffle_i32x4(a01, a23, 0xdd),
                                _mm512_shuffle_i32x4(b01, b23, 0x88), _mm512_shuffle_i32x4(b01, b23, 0xdd)};
    const __m512i order = _mm512_set_epi16(31, 27, 30, 26, 23, 19, 22, 18, 15, 11, 14, 10, 7, 3, 6, 2,  //
                                           29, 25, 28, 24, 21, 17, 20, 16, 13, 9, 12, 8, 5, 1, 4, 0);
    const __m512i zeros =
        a.zeros == nullptr ? awq_all(0x88888888u) : awq_words(a.zeros + uint64_t{group} * (a.outputs / 8) + word, count);
    const __m512i spread[4] = {_mm512_shuffle_epi32(zeros, _MM_PERM_AAAA), _mm512_shuffle_epi32(zeros, _MM_PERM_BBBB),
                               _mm512_shuffle_epi32(zeros, _MM_PERM_CCCC), _mm512_shuffle_epi32(zeros, _MM_PERM_DDDD)};
    const __m512i byte = _mm512_set4_epi32(24, 16, 8, 0), nibble = _mm512_set1_epi32(15);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512i halves = _mm512_permutexvar_epi16(order, word_of[i]), bytes = _mm512_srlv_epi32(spread[i], byte);
      scale[2 * i] = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
      scale[2 * i + 1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
      zero[2 * i] = _mm512_cvtepi32_ps(_mm512_and_si512(bytes, nibble));
      zero[2 * i + 1] = _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(bytes, 4), nibble));
    }
  }
};

// In assembly: of intrinsics g++ 12 keeps the sums on the stack.
inline void awq_dot(__m512i& sum, __m512i codes, const int8_t* four) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*reinterpret_cast<const int32_t(*)>(four)));
}

// Words i of each quarter of four rows, as bytes that belong together: [lane 4 q + j] has byte j of word 4 q + i, of each row.
inline __m512i awq_bytes(uint32_t i, __m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = i < 2 ? _mm512_unpacklo_epi8(a, b) : _mm512_unpackhi_epi8(a, b);
  const __m512i cd = i < 2 ? _mm512_unpacklo_epi8(c, d) : _mm512_unpackhi_epi8(c, d);
  return i % 2 == 0 ? _mm512_unpacklo_epi16(ab, cd) : _mm512_unpackhi_epi16(ab, cd);
}

// Sums of R rows over one part of the inputs, of words I to I + 4 / R of each quarter: [row][2 * word + upper nibble][digit].
template <uint32_t D, uint32_t R>
using AwqWhole = __m512i[R][8 / R][D];

// Not inline, and without what becomes of the sums: g++ 12 keeps them in registers only so. digits: of the first row; those of
// the next ones follow.
template <uint32_t D, uint32_t R, uint32_t I, bool Ahead>
[[gnu::noinline]] void awq_sum_codes(AwqRun run, AwqRun ahead, __mmask16 here, uint32_t inputs, const int8_t* digits,
                                     AwqWhole<D, R>& out) {
  const uint32_t *words = run.words, *next = ahead.words;
  const uint64_t stride = run.stride;
  const __m512i lower = _mm512_set1_epi8(15), upper = _mm512_set1_epi8(static_cast<char>(0xf0));
  AwqWhole<D, R> sum;
#pragma GCC unroll 4
  for (uint32_t r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (uint32_t i = 0; i < 8 / R; ++i)
#pragma GCC unroll 3
      for (uint32_t d = 0; d < D; ++d) sum[r][i][d] = _mm512_setzero_si512();
  for (uint32_t k = 0; k < inputs; k += 4, words += 4 * stride, next += 4 * ahead.stride) {
    if constexpr (Ahead)  // each of the passes that R makes asks for its share
      for (uint64_t i = I; i < I + 4 / R; ++i) _mm_prefetch(reinterpret_cast<const char*>(next + i * ahead.stride), _MM_HINT_T1);
    const __m512i row0 = _mm512_maskz_loadu_epi32(here, words), row1 = _mm512_maskz_loadu_epi32(here, words + stride);
    const __m512i row2 = _mm512_maskz_loadu_epi32(here, words + 2 * stride),
                  row3 = _mm512_maskz_loadu_epi32(here, words + 3 * stride);
#pragma GCC unroll 4
    for (uint32_t w = 0; w < 4 / R; ++w) {
      const __m512i bytes = awq_bytes(I + w, row0, row1, row2, row3);
      const __m512i low = _mm512_and_si512(bytes, lower), high = _mm512_and_si512(bytes, upper);
#pragma GCC unroll 4
      for (uint32_t r = 0; r < R; ++r)
#pragma GCC unroll 3
        for (uint32_t d = 0; d < D; ++d) {
          awq_dot(sum[r][2 * w][d], low, digits + (r * D + d) * kAwqPart + k);
          awq_dot(sum[r][2 * w + 1][d], high, digits + (r * D + d) * kAwqPart + k);
        }
    }
  }
#pragma GCC unroll 4
  for (uint32_t r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (uint32_t i = 0; i < 8 / R; ++i)
#pragma GCC unroll 3
      for (uint32_t d = 0; d < D; ++d) out[r][i][d] = sum[r][i][d];
}

// What one part adds to sixteen columns of a row: whole numbers below 2^24, less what the zero points make of it.
template <uint32_t D>
inline void awq_add_part(const __m512i (&found)[D], __m512 zero, __m512 column_scale, const AwqNumbers<D>& x,
                         uint32_t part_number, uint32_t row, float* place) {
  __m512 part[D];
#pragma GCC unroll 3
  for (uint32_t d = 0; d < D; ++d)
    part[d] = _mm512_fnmadd_ps(zero, _mm512_set1_ps(x.sum[part_number][row][d]), _mm512_cvtepi32_ps(found[d]));
  __m512 whole = _mm512_fmadd_ps(part[1], _mm512_set1_ps(256), part[0]);
  if constexpr (D == 3) whole = _mm512_fmadd_ps(part[2], _mm512_set1_ps(65536), whole);
  const __m512 scale = _mm512_mul_ps(column_scale, _mm512_set1_ps(x.unit[part_number][row]));
  _mm512_store_ps(place, _mm512_fmadd_ps(scale, whole, _mm512_load_ps(place)));
}

// One part's share of R rows from `row` on. ahead: what to fetch meanwhile.
template <uint32_t D, uint32_t R, uint32_t I>
inline void awq_quarter(const AwqColumns& columns, AwqRun run, AwqRun ahead, uint32_t count, AwqSlice slice,
                        const AwqNumbers<D>& x, uint32_t row, float (*total)[8][kLane], uint64_t total_stride) {
  AwqWhole<D, R> sum;
  const int8_t* digits = x.digit[row][0] + slice.at;
  if (R > 1 || ahead.words != nullptr)
    awq_sum_codes<D, R, I, true>(run, ahead, awq_lanes(count), slice.inputs, digits, sum);
  else
    awq_sum_codes<D, R, I, false>(run, ahead, awq_lanes(count), slice.inputs, digits, sum);
  for (uint32_t r = 0; r < R; ++r)
    for (uint32_t i = 0; i < 8 / R; ++i) {
      __m512i found[D];
#pragma GCC unroll 3
      for (uint32_t d = 0; d < D; ++d) found[d] = i % 2 == 0 ? sum[r][i][d] : _mm512_srai_epi32(sum[r][i][d], 4);
      float* place = total[(row + r) * total_stride][2 * I + i];
      awq_add_part<D>(found, columns.zero[2 * I + i], columns.scale[2 * I + i], x, slice.part, row + r, place);
    }
}

template <uint32_t R, uint32_t D>
inline void awq_some_rows(uint32_t rows, const AwqColumns& columns, AwqRun run, AwqRun ahead, uint32_t count, AwqSlice slice,
                          const AwqNumbers<D>& x, uint32_t& row, float (*total)[8][kLane], uint64_t total_stride) {
  for (; row + R <= rows; row += R) {
    awq_quarter<D, R, 0>(columns, run, ahead, count, slice, x, row, total, total_stride);
    if constexpr (R == 2) awq_quarter<D, R, 2>(columns, run, ahead, count, slice, x, row, total, total_stride);
    if constexpr (R == 4) {
      awq_quarter<D, R, 1>(columns, run, ahead, count, slice, x, row, total, total_stride);
      awq_quarter<D, R, 2>(columns, run, ahead, count, slice, x, row, total, total_stride);
      awq_quarter<D, R, 3>(columns, run, ahead, count, slice, x, row, total, total_stride);
    }
  }
}

// What one part of the inputs adds to a panel of sixteen words.
template <uint32_t D>
inline void awq_panel(uint32_t rows, const AwqColumns& columns, AwqRun run, AwqRun ahead, uint32_t count, AwqSlice slice,
                      const AwqNumbers<D>& x, float (*total)[8][kLane], uint64_t total_stride) {
  uint32_t row = 0;
  awq_some_rows<4>(rows, columns, run, ahead, count, slice, x, row, total, total_stride);
  awq_some_rows<2>(rows, columns, run, ahead, count, slice, x, row, total, total_stride);
  awq_some_rows<1>(rows, columns, run, ahead, count, slice, x, row, total, total_stride);
}

}  // namespace
}  // namespace kvk
