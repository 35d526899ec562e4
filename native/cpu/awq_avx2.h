// Rows times the packed words of an AWQ layer, for CPUs with AVX2: codes stay bytes, and x becomes whole numbers
// (cpu/awq_numbers.h), of which products of two are added up in sixteen bits, eight times, and then in 32.
//
// Owns the loops over columns that one task has. Never writes outside of its columns. Invariant: those numbers'. Local to the
// including file (cpu/numbers.h says why).
#pragma once

#include "cpu/awq_numbers.h"

namespace kvk {
namespace {

static_assert(kLane == 8);
constexpr uint32_t kAwqShortSums = 8;  // 2 * 15 * 128 of each: the ninth could overflow

// x: the part's first element in this row; a part has a multiple of four.
template <uint32_t D>
inline void awq_digits(const float* x, AwqSlice slice, AwqNumbers<D>& out, uint32_t row) {
  constexpr int kBits = 8 * D - 2;  // without the sign: the highest byte keeps one to spare
  const uint32_t steps = (slice.inputs + 7) / 8;
  __m256 value[kAwqPart / 8];
  __m256 most = _mm256_setzero_ps(), endless = _mm256_setzero_ps();
  for (uint32_t i = 0; i < steps; ++i) {
    value[i] = _mm256_castsi256_ps(awq_words(reinterpret_cast<const uint32_t*>(x + 8 * i), slice.inputs - 8 * i));
    const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), value[i]);
    endless = _mm256_or_ps(endless, _mm256_cmp_ps(size, _mm256_set1_ps(__builtin_inff()), _CMP_NLT_UQ));
    most = _mm256_max_ps(most, size);
  }
  const bool wrong = _mm256_movemask_ps(endless) != 0;
  const uint32_t top = __builtin_bit_cast(uint32_t, Floats8::largest(most)) >> 23;
  // Powers of two, so that neither multiplication rounds; smaller numbers than 2^-100 are far below any sum.
  const int exponent = (top < 27 ? 27 : static_cast<int>(top)) - 127 + 1 - kBits;
  const __m256 many = _mm256_set1_ps(__builtin_bit_cast(float, static_cast<uint32_t>(127 - exponent) << 23));
  out.unit[slice.part][row] = wrong ? __builtin_nanf("") : __builtin_bit_cast(float, static_cast<uint32_t>(127 + exponent) << 23);
  const __m256i lowest = _mm256_set1_epi32(0x0c080400);  // byte 0 of each of four numbers
  __m256i sums[D] = {};
  for (uint32_t i = 0; i < steps; ++i) {
    __m256i whole = wrong ? _mm256_setzero_si256() : _mm256_cvtps_epi32(_mm256_mul_ps(value[i], many));
    for (uint32_t d = 0; d < D; ++d) {
      const __m256i next = _mm256_srai_epi32(_mm256_add_epi32(whole, _mm256_set1_epi32(128)), 8);
      sums[d] = _mm256_add_epi32(sums[d], _mm256_sub_epi32(whole, _mm256_slli_epi32(next, 8)));
      const __m256i bytes = _mm256_shuffle_epi8(whole, lowest);
      int8_t* to = out.digit[row][d] + slice.at + 8 * i;
      const int first = _mm256_extract_epi32(bytes, 0), second = _mm256_extract_epi32(bytes, 4);
      std::memcpy(to, &first, 4);
      if (slice.inputs - 8 * i >= 8) std::memcpy(to + 4, &second, 4);
      whole = next;
    }
  }
  for (uint32_t d = 0; d < D; ++d) {
    alignas(32) int32_t part[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(part), sums[d]);
    int32_t sum = 0;
    for (int32_t each : part) sum += each;
    out.sum[slice.part][row][d] = static_cast<float>(sum);
  }
}

// The scales and zeros of eight words in the order in which awq_bytes() has their columns: [2 * word % 4 + upper nibble].
struct AwqColumns {
  __m256 scale[8], zero[8];

  AwqColumns(const kvk_awq& a, uint32_t group, uint32_t word, uint32_t count) {
    const uint16_t* scales = a.scales + uint64_t{group} * a.outputs + 8 * word;
    const __m256i zeros =
        a.zeros == nullptr ? awq_all(0x88888888u) : awq_words(a.zeros + uint64_t{group} * (a.outputs / 8) + word, count);
    const __m256i order = _mm256_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15,  //
                                           0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    const __m256i byte = _mm256_setr_epi32(0, 8, 16, 24, 0, 8, 16, 24), nibble = _mm256_set1_epi32(15);
    const __m256i spread[4] = {_mm256_shuffle_epi32(zeros, 0x00), _mm256_shuffle_epi32(zeros, 0x55),
                               _mm256_shuffle_epi32(zeros, 0xaa), _mm256_shuffle_epi32(zeros, 0xff)};
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; ++i) {
      const __m128i low = i < count ? eight(scales + 8 * i) : _mm_setzero_si128();
      const __m128i high = i + 4 < count ? eight(scales + 8 * (i + 4)) : _mm_setzero_si128();
      const __m256i halves = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(_mm256_set_m128i(high, low), order), 0xd8);
      scale[2 * i] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
      scale[2 * i + 1] = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
      const __m256i bytes = _mm256_srlv_epi32(spread[i], byte);
      zero[2 * i] = _mm256_cvtepi32_ps(_mm256_and_si256(bytes, nibble));
      zero[2 * i + 1] = _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(bytes, 4), nibble));
    }
  }

 private:
  static __m128i eight(const uint16_t* scales) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales)); }
};

// Words i of each half of four rows, as bytes that belong together: [lane 4 h + j] has byte j of word 4 h + i, of each row.
inline __m256i awq_bytes(uint32_t i, __m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i ab = i < 2 ? _mm256_unpacklo_epi8(a, b) : _mm256_unpackhi_epi8(a, b);
  const __m256i cd = i < 2 ? _mm256_unpacklo_epi8(c, d) : _mm256_unpackhi_epi8(c, d);
  return i % 2 == 0 ? _mm256_unpacklo_epi16(ab, cd) : _mm256_unpackhi_epi16(ab, cd);
}

// In assembly: of intrinsics g++ 12 copies each sum in every step.
inline void awq_add_products(__m256i& sum, __m256i codes, __m256i four) {
  asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(_mm256_maddubs_epi16(codes, four)));
}

// Sums of R rows over one part of the inputs, of N words of each half: [row][2 * word + upper nibble][digit].
template <uint32_t D, uint32_t R, uint32_t N>
using AwqWhole = __m256i[R][2 * N][D];

// Of words I to I + N. digits: of the first row; those of the next ones follow. Not inline, so that the sums stay in registers.
template <uint32_t D, uint32_t R, uint32_t N, uint32_t I, bool All>
[[gnu::noinline]] void awq_sum_codes(AwqRun run, AwqRun ahead, uint32_t count, uint32_t inputs, const int8_t* digits,
                                     AwqWhole<D, R, N>& out) {
  const uint32_t *words = run.words, *next = ahead.words;
  const uint64_t stride = run.stride;
  const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  for (uint32_t from = 0; from < inputs; from += 4 * kAwqShortSums) {
    const uint32_t to = inputs - from < 4 * kAwqShortSums ? inputs : from + 4 * kAwqShortSums;
    AwqWhole<D, R, N> sum;
#pragma GCC unroll 2
    for (uint32_t r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (uint32_t i = 0; i < 2 * N; ++i)
#pragma GCC unroll 3
        for (uint32_t d = 0; d < D; ++d) sum[r][i][d] = _mm256_setzero_si256();
    for (uint32_t k = from; k < to; k += 4, words += 4 * stride, next += 4 * ahead.stride) {
      for (uint64_t i = I; i < I + N; ++i)  // each of the passes asks for its share
        _mm_prefetch(reinterpret_cast<const char*>(next + i * ahead.stride), _MM_HINT_T1);
      const uint32_t here = All ? 8 : count;
      const __m256i row0 = awq_words(words, here), row1 = awq_words(words + stride, here);
      const __m256i row2 = awq_words(words + 2 * stride, here), row3 = awq_words(words + 3 * stride, here);
#pragma GCC unroll 2
      for (uint32_t w = 0; w < N; ++w) {
        const __m256i bytes = awq_bytes(I + w, row0, row1, row2, row3);
        const __m256i low = _mm256_and_si256(bytes, nibble), high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble);
#pragma GCC unroll 2
        for (uint32_t r = 0; r < R; ++r)
#pragma GCC unroll 3
          for (uint32_t d = 0; d < D; ++d) {
            int four;
            std::memcpy(&four, digits + (r * D + d) * kAwqPart + k, 4);
            const __m256i digit = _mm256_set1_epi32(four);
            awq_add_products(sum[r][2 * w][d], low, digit);
            awq_add_products(sum[r][2 * w + 1][d], high, digit);
          }
      }
    }
#pragma GCC unroll 2
    for (uint32_t r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (uint32_t i = 0; i < 2 * N; ++i)
#pragma GCC unroll 3
        for (uint32_t d = 0; d < D; ++d) {
          const __m256i whole = _mm256_madd_epi16(sum[r][i][d], ones);
          out[r][i][d] = from == 0 ? whole : _mm256_add_epi32(out[r][i][d], whole);
        }
  }
}

// What one part adds to eight columns of a row: whole numbers below 2^24, less what the zero points make of it.
template <uint32_t D>
inline void awq_add_part(const __m256i (&found)[D], __m256 zero, __m256 column_scale, const AwqNumbers<D>& x,
                         uint32_t part_number, uint32_t row, float* place) {
  __m256 part[D];
#pragma GCC unroll 3
  for (uint32_t d = 0; d < D; ++d)
    part[d] = _mm256_fnmadd_ps(zero, _mm256_set1_ps(x.sum[part_number][row][d]), _mm256_cvtepi32_ps(found[d]));
  __m256 whole = _mm256_fmadd_ps(part[1], _mm256_set1_ps(256), part[0]);
  if constexpr (D == 3) whole = _mm256_fmadd_ps(part[2], _mm256_set1_ps(65536), whole);
  const __m256 scale = _mm256_mul_ps(column_scale, _mm256_set1_ps(x.unit[part_number][row]));
  _mm256_store_ps(place, _mm256_fmadd_ps(scale, whole, _mm256_load_ps(place)));
}

// One part's share of R rows from `row` on, of words I to I + N, then of those behind. ahead: what to fetch meanwhile.
template <uint32_t R, uint32_t N, uint32_t I, uint32_t D>
inline void awq_share(const AwqColumns& columns, AwqRun run, AwqRun ahead, uint32_t count, AwqSlice slice, const AwqNumbers<D>& x,
                      uint32_t row, float (*total)[8][kLane], uint64_t total_stride) {
  AwqWhole<D, R, N> sum;
  const int8_t* digits = x.digit[row][0] + slice.at;
  if (count >= 8)
    awq_sum_codes<D, R, N, I, true>(run, ahead, count, slice.inputs, digits, sum);
  else
    awq_sum_codes<D, R, N, I, false>(run, ahead, count, slice.inputs, digits, sum);
  for (uint32_t r = 0; r < R; ++r)
    for (uint32_t i = 0; i < 2 * N; ++i)
      awq_add_part<D>(sum[r][i], columns.zero[2 * I + i], columns.scale[2 * I + i], x, slice.part, row + r,
                      total[(row + r) * total_stride][2 * I + i]);
  if constexpr (I + N < 4) awq_share<R, N, I + N>(columns, run, ahead, count, slice, x, row, total, total_stride);
}

// What one part of the inputs adds to a panel of eight words.
template <uint32_t D>
inline void awq_panel(uint32_t rows, const AwqColumns& columns, AwqRun run, AwqRun ahead, uint32_t count, AwqSlice slice,
                      const AwqNumbers<D>& x, float (*total)[8][kLane], uint64_t total_stride) {
  uint32_t row = 0;
  for (; row + 2 <= rows; row += 2) awq_share<2, 1, 0>(columns, run, ahead, count, slice, x, row, total, total_stride);
  if (row < rows) awq_share<1, 2, 0>(columns, run, ahead, count, slice, x, row, total, total_stride);
}

}  // namespace
}  // namespace kvk
