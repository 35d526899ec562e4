// A few rows times the packed words of an AWQ layer, for AVX-512 without VNNI and for groups whose size four does not divide:
// codes become fp32 in registers.
//
// Owns the loops over columns that one task has. Never writes outside of its columns. Invariant: a column's sum is taken in one
// order, whatever the rows, the threads and the cut into tasks, so a call's bits depend on nothing but the path; and all
// paths but the naive one share this order. Local to the including file (cpu/numbers.h says why).
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/awq.h"
#include "cpu/numbers.h"
#include "cpu/vector.h"

namespace kvk {
namespace {

constexpr int kNibbleColumn[8] = {0, 2, 4, 6, 1, 3, 5, 7};

// Words at once, of eight columns each: as many as there are floats in a register. `count` of them are there. nibble<n>() is the
// n-th of each word times kNibbleUnit[n]: left where it is in the word, which saves a shift for each of them. The top one would
// be a sign there and is moved.
#if defined(__AVX512F__)
using AwqWords = __m512i;

inline AwqWords awq_words(const uint32_t* words, uint32_t count) {
  if (count >= 16) return _mm512_loadu_si512(words);
  return _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << count) - 1), words);
}

inline AwqWords awq_all(uint32_t word) { return _mm512_set1_epi32(static_cast<int>(word)); }

inline __m512 awq_nibble(AwqWords words, int n) {
  if (n == 7) return _mm512_cvtepi32_ps(_mm512_srli_epi32(words, 28));
  return _mm512_cvtepi32_ps(_mm512_and_si512(words, _mm512_set1_epi32(15 << 4 * n)));
}
#else
using AwqWords = __m256i;

inline AwqWords awq_words(const uint32_t* words, uint32_t count) {
  if (count >= 8) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_maskload_epi32(reinterpret_cast<const int*>(words),
                               _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lane));
}

inline AwqWords awq_all(uint32_t word) { return _mm256_set1_epi32(static_cast<int>(word)); }

inline __m256 awq_nibble(AwqWords words, int n) {
  if (n == 7) return _mm256_cvtepi32_ps(_mm256_srli_epi32(words, 28));
  return _mm256_cvtepi32_ps(_mm256_and_si256(words, _mm256_set1_epi32(15 << 4 * n)));
}
#endif

using AwqFloats = Vector::T;
constexpr uint32_t kLane = Vector::kLanes;
using AwqSums = float[8][kLane];  // of a row and panel: [nibble][word]

// Powers of two: dividing by them rounds nothing.
constexpr float kNibbleUnit[8] = {1, 16, 256, 4096, 65536, 1048576, 16777216, 1};

// Eight rows of eight, the other way round.
inline void awq_turn(__m256 (&a)[8]) {
  __m256 b[8], c[8];
  for (int i = 0; i < 4; ++i) {
    b[2 * i] = _mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    c[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    c[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xEE);
    c[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    c[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xEE);
  }
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm256_permute2f128_ps(c[i], c[i + 4], 0x20);
    a[i + 4] = _mm256_permute2f128_ps(c[i], c[i + 4], 0x31);
  }
}

// The scales of eight words, by column; of those behind `count` they are zero.
inline void awq_scales(const uint16_t* scales, uint32_t count, __m256 (&column)[8]) {
  for (uint32_t j = 0; j < 8; ++j)
    column[j] =
        j < count ? _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + 8 * j))) : _mm256_setzero_ps();
  awq_turn(column);
}

// The panel's scales and zeros of one group, by nibble.
struct AwqGroup {
  AwqFloats scale[8], zero[8];

  AwqGroup(const kvk_awq& a, uint32_t group, uint32_t word, uint32_t count) {
    const uint16_t* scales = a.scales + uint64_t{group} * a.outputs + 8 * word;
    __m256 column[8];
    awq_scales(scales, count, column);
#if defined(__AVX512F__)
    __m256 more[8];
    awq_scales(scales + 64, count > 8 ? count - 8 : 0, more);
#endif
    const AwqWords zeros =
        a.zeros == nullptr ? awq_all(0x88888888u) : awq_words(a.zeros + uint64_t{group} * (a.outputs / 8) + word, count);
#pragma GCC unroll 8
    for (int n = 0; n < 8; ++n) {
      const AwqFloats unit = Vector::all(1 / kNibbleUnit[n]);
#if defined(__AVX512F__)
      const int c = kNibbleColumn[n];
      scale[n] = Vector::mul(_mm512_insertf32x8(_mm512_castps256_ps512(column[c]), more[c], 1), unit);
#else
      scale[n] = Vector::mul(column[kNibbleColumn[n]], unit);
#endif
      zero[n] = awq_nibble(zeros, n);
    }
  }
};

// One group's part of R rows, nibbles B to B + N, then those after them.
template <uint32_t R, int N, int B>
inline void awq_part(const kvk_awq& a, const AwqGroup& g, AwqRun run, uint32_t count, const float* const* x, const float* sums,
                     AwqRun ahead, AwqSums* total, uint64_t total_stride) {
  AwqFloats dot[R][N];
  for (uint32_t r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) dot[r][n] = Vector::zero();
  for (uint32_t k = 0; k < a.group; ++k) {
    const AwqWords packed = awq_words(run.words + k * run.stride, count);
    if constexpr (B == 0) _mm_prefetch(reinterpret_cast<const char*>(ahead.words + k * ahead.stride), _MM_HINT_T1);
    AwqFloats code[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) code[n] = awq_nibble(packed, B + n);
#pragma GCC unroll 8
    for (uint32_t r = 0; r < R; ++r) {
      const AwqFloats factor = Vector::all(x[r][k]);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) dot[r][n] = Vector::fma(factor, code[n], dot[r][n]);
    }
  }
  for (uint32_t r = 0; r < R; ++r) {
    const AwqFloats sum = Vector::all(-sums[r]);
    for (int n = 0; n < N; ++n) {
      float* place = total[r * total_stride][B + n];
      const AwqFloats found = Vector::fma(g.zero[B + n], sum, dot[r][n]);
      Vector::store(place, Vector::fma(g.scale[B + n], found, Vector::load(place)));
    }
  }
  if constexpr (B + N < 8) awq_part<R, N, B + N>(a, g, run, count, x, sums, ahead, total, total_stride);
}

// The rows of x from their `start` on, for one group and panel, R at a time as long as there are so many.
template <uint32_t R>
inline uint32_t awq_some(const kvk_awq& a, const AwqGroup& g, AwqRun run, uint32_t count, uint32_t group, uint32_t row,
                         const float* sums, AwqRun ahead, AwqSums* total, uint64_t total_stride) {
  for (; row + R <= a.rows; row += R) {
    const float* x[R];
    for (uint32_t r = 0; r < R; ++r)
      x[r] = at(static_cast<const float*>(a.x), static_cast<int64_t>(row + r) * a.x_row_stride) + uint64_t{group} * a.group;
    awq_part<R, 8 / R, 0>(a, g, run, count, x, sums + row, ahead, total + row * total_stride, total_stride);
  }
  return row;
}

// What to fetch into the second cache while a run of a tile of `inputs` inputs is computed. In the checkpoint's order some words
// on in each row; behind the task's last words its first ones, of the inputs that follow. Of panels the next one, or the first
// one of those inputs. May lie behind the layer: it is only a hint.
constexpr uint32_t kAwqAhead = 32;

inline AwqRun awq_ahead(const kvk_awq& a, uint64_t input, uint32_t inputs, uint32_t start, uint32_t stop, uint32_t word) {
  const AwqRun run = awq_run(a, input, word);
  if (a.order == KVK_AWQ_PANELS) {
    if (word + kLane < stop) return awq_run(a, input, word + kLane);
    return input + inputs < a.inputs ? awq_run(a, input + inputs, start) : run;
  }
  if (word + kAwqAhead < stop || stop - start < kAwqAhead) return {run.words + kAwqAhead, run.stride};
  return {run.words + inputs * run.stride + kAwqAhead - (stop - start), run.stride};
}

inline float awq_sum(const float* x, uint32_t count) {
  float out = 0;
  for (uint32_t i = 0; i < count; ++i) out += x[i];
  return out;
}

void multiply_awq(const kvk_awq& a, uint32_t word_start, uint32_t word_stop) {
  alignas(64) AwqSums total[kAwqTaskSums / (8 * kLane)];
  const uint32_t panels = (word_stop - word_start + kLane - 1) / kLane;
  std::memset(total, 0, a.rows * panels * sizeof total[0]);
  float sums[KVK_CPU_AWQ_ROWS];
  for (uint32_t group = 0; group < a.inputs / a.group; ++group) {
    for (uint32_t r = 0; r < a.rows; ++r)
      sums[r] = awq_sum(at(static_cast<const float*>(a.x), static_cast<int64_t>(r) * a.x_row_stride) + uint64_t{group} * a.group,
                        a.group);
    for (uint32_t panel = 0; panel < panels; ++panel) {
      const uint32_t word = word_start + panel * kLane, count = word_stop - word < kLane ? word_stop - word : kLane;
      const AwqGroup g(a, group, word, count);
      const AwqRun run = awq_run(a, uint64_t{group} * a.group, word);
      const AwqRun ahead = awq_ahead(a, uint64_t{group} * a.group, a.group, word_start, word_stop, word);
      uint32_t row = awq_some<4>(a, g, run, count, group, 0, sums, ahead, total + panel, panels);
      row = awq_some<2>(a, g, run, count, group, row, sums, ahead, total + panel, panels);
      awq_some<1>(a, g, run, count, group, row, sums, ahead, total + panel, panels);
    }
  }
  for (uint32_t r = 0; r < a.rows; ++r) {
    float* out = at(static_cast<float*>(a.out), static_cast<int64_t>(r) * a.out_row_stride);
    for (uint32_t word = word_start; word < word_stop; ++word)
      for (int n = 0; n < 8; ++n) {
        const uint32_t column = 8 * word + static_cast<uint32_t>(kNibbleColumn[n]), local = word - word_start;
        const float bias = a.bias == nullptr ? 0 : static_cast<const float*>(a.bias)[column];
        out[column] = total[r * panels + local / kLane][n][local % kLane] + bias;
      }
  }
}

}  // namespace
}  // namespace kvk
