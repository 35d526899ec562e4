// Columns of an AWQ layer as numbers, for matrix products of many rows: a tile at a time, so that no more of a layer is ever
// unpacked than its product needs.
//
// Owns the loops of one task: some groups of inputs. Never writes outside of its rows of `out`. Invariant: an element is
// (q - z) * s in fp32, rounded once, so every path has the same bits. Local to the including file (cpu/numbers.h says why).
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/awq.h"
#include "cpu/numbers.h"

namespace kvk {
namespace {

// Nibbles of a word, in the order of its columns.
inline __m256i awq_codes(uint32_t word) {
  const __m256i shifts = _mm256_setr_epi32(0, 16, 4, 20, 8, 24, 12, 28);
  return _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(word)), shifts), _mm256_set1_epi32(15));
}

template <uint32_t Dtype>
inline void awq_store(void* row, uint32_t column, __m256 value) {
  if constexpr (Dtype == KVK_F32) {
    _mm256_storeu_ps(static_cast<float*>(row) + column, value);
  } else if constexpr (Dtype == KVK_F16) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<uint16_t*>(row) + column),
                     _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  } else {  // weights are finite: no NaN to keep
    const __m256i bits = _mm256_castps_si256(value), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i upper = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<uint16_t*>(row) + column),
                     _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1)));
  }
}

#if defined(__AVX512BF16__)
// Four words beside each other: a line of bf16. Nibbles in the order of their columns; these numbers are never subnormal.
inline __m512i awq_codes_of_two(__m512i words, int pair) {
  const __m512i place =
      _mm512_add_epi32(_mm512_set1_epi32(2 * pair), _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0));
  const __m512i shifts = _mm512_setr_epi32(0, 16, 4, 20, 8, 24, 12, 28, 0, 16, 4, 20, 8, 24, 12, 28);
  return _mm512_and_si512(_mm512_srlv_epi32(_mm512_permutexvar_epi32(place, words), shifts), _mm512_set1_epi32(15));
}

inline __m512i awq_four(const uint32_t* words) {
  return _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(words)));
}

inline void unpack_four(const kvk_awq& a, uint64_t group, uint32_t word) {
  const uint64_t stride = a.outputs / 8;
  const __m512i zeros =
      a.zeros == nullptr ? _mm512_set1_epi32(static_cast<int>(0x88888888u)) : awq_four(a.zeros + group * stride + word);
  const uint16_t* scales = a.scales + group * a.outputs + 8 * word;
  __m512i zero[2];
  __m512 scale[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    zero[i] = awq_codes_of_two(zeros, i);
    scale[i] = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales + 16 * i)));
  }
  const AwqRun run = awq_run(a, group * a.group, a.first / 8 + word);
  char* out = at(static_cast<char*>(a.out), static_cast<int64_t>(group * a.group) * a.out_row_stride) + 16 * word;
  const uint32_t* words = run.words;
  for (uint32_t k = 0; k < a.group; ++k, words += run.stride, out += a.out_row_stride) {
    const __m512i packed = awq_four(words);
    __m512 value[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i)
      value[i] = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(awq_codes_of_two(packed, i), zero[i])), scale[i]);
    _mm512_storeu_si512(out, __builtin_bit_cast(__m512i, _mm512_cvtne2ps_pbh(value[1], value[0])));
  }
}
#endif

template <uint32_t Dtype>
void unpack_groups(const kvk_awq& a, uint32_t start, uint32_t stop) {
  const uint64_t stride = a.outputs / 8;
  for (uint64_t group = start; group < stop; ++group)
    for (uint32_t word = 0; word < a.columns / 8; ++word) {
#if defined(__AVX512BF16__)
      const uint32_t at_word = a.first / 8 + word, panel_left = KVK_AWQ_PANEL_WORDS - at_word % KVK_AWQ_PANEL_WORDS;
      if (Dtype == KVK_BF16 && a.columns / 8 - word >= 4 && (a.order != KVK_AWQ_PANELS || panel_left >= 4)) {
        unpack_four(a, group, word);
        word += 3;
        continue;
      }
#endif
      const __m256i zero = awq_codes(a.zeros == nullptr ? 0x88888888u : a.zeros[group * stride + word]);
      const __m256 scale =
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a.scales + group * a.outputs + 8 * word)));
      const AwqRun run = awq_run(a, group * a.group, a.first / 8 + word);
      for (uint64_t k = 0; k < a.group; ++k) {
        void* row = at(static_cast<char*>(a.out), static_cast<int64_t>(group * a.group + k) * a.out_row_stride);
        const __m256i centred = _mm256_sub_epi32(awq_codes(run.words[k * run.stride]), zero);
        awq_store<Dtype>(row, 8 * word, _mm256_mul_ps(_mm256_cvtepi32_ps(centred), scale));
      }
    }
}

void unpack_awq(const kvk_awq& a, uint32_t start, uint32_t stop) {
  if (a.dtype == KVK_F32) return unpack_groups<KVK_F32>(a, start, stop);
  if (a.dtype == KVK_F16) return unpack_groups<KVK_F16>(a, start, stop);
  return unpack_groups<KVK_BF16>(a, start, stop);
}

}  // namespace
}  // namespace kvk
