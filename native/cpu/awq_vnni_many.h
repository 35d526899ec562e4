// More than a few rows times the packed words of an AWQ layer: a panel's codes are unpacked once for all rows, and stay in the
// first cache while the rows' digits go by.
//
// Owns the loops over rows of one panel's part. Never writes outside of the sums it is given. Invariant: the sums of a part are
// whole numbers and what becomes of them is awq_vnni.h's, so a row's bits are those that few rows have there. Local to the
// including file (cpu/numbers.h says why).
#pragma once

#include "cpu/awq_vnni.h"

namespace kvk {
namespace {

constexpr uint32_t kAwqMany = 5;    // rows from which on unpacking once is worth it
constexpr uint32_t kAwqDigits = 6;  // rows of digits at one time: their sums with four registers of codes stay in registers

// [four inputs][2 * word + upper nibble]: a register of codes each.
struct AwqCodes {
  alignas(64) uint8_t byte[kAwqPart / 4][8][64];
};

inline void awq_unpack(const uint32_t* words, const uint32_t* ahead, uint64_t stride, __mmask16 here, uint32_t inputs,
                       AwqCodes& out) {
  const __m512i lower = _mm512_set1_epi8(15);
  for (uint32_t k = 0; k < inputs; k += 4, words += 4 * stride, ahead += 4 * stride) {
    for (uint64_t i = 0; i < 4; ++i) _mm_prefetch(reinterpret_cast<const char*>(ahead + i * stride), _MM_HINT_T1);
    const __m512i row0 = _mm512_maskz_loadu_epi32(here, words), row1 = _mm512_maskz_loadu_epi32(here, words + stride);
    const __m512i row2 = _mm512_maskz_loadu_epi32(here, words + 2 * stride),
                  row3 = _mm512_maskz_loadu_epi32(here, words + 3 * stride);
#pragma GCC unroll 4
    for (uint32_t w = 0; w < 4; ++w) {
      const __m512i bytes = awq_bytes(w, row0, row1, row2, row3);
      _mm512_store_si512(out.byte[k / 4][2 * w], _mm512_and_si512(bytes, lower));
      _mm512_store_si512(out.byte[k / 4][2 * w + 1], _mm512_and_si512(_mm512_srli_epi16(bytes, 4), lower));
    }
  }
}

// Sums of F rows of digits, kAwqPart bytes from each other, with four registers of codes from `half` on.
template <uint32_t F>
[[gnu::noinline]] void awq_sum_unpacked(const AwqCodes& codes, uint32_t half, uint32_t inputs, const int8_t* digits,
                                        __m512i (*out)[8]) {
  __m512i sum[F][4];
#pragma GCC unroll 6
  for (uint32_t f = 0; f < F; ++f)
#pragma GCC unroll 4
    for (uint32_t c = 0; c < 4; ++c) sum[f][c] = _mm512_setzero_si512();
  for (uint32_t k = 0; k < inputs; k += 4) {
    const uint8_t (*from)[64] = codes.byte[k / 4] + half;
    __m512i code[4];
#pragma GCC unroll 4
    for (uint32_t c = 0; c < 4; ++c) code[c] = _mm512_load_si512(from[c]);
#pragma GCC unroll 6
    for (uint32_t f = 0; f < F; ++f) {
      __m512i four;
      asm("vpbroadcastd %1, %0" : "=v"(four) : "m"(*reinterpret_cast<const int32_t(*)>(digits + f * kAwqPart + k)));
#pragma GCC unroll 4
      for (uint32_t c = 0; c < 4; ++c) asm("vpdpbusd %2, %1, %0" : "+v"(sum[f][c]) : "v"(code[c]), "v"(four));
    }
  }
#pragma GCC unroll 6
  for (uint32_t f = 0; f < F; ++f)
#pragma GCC unroll 4
    for (uint32_t c = 0; c < 4; ++c) out[f][half + c] = sum[f][c];
}

// R rows from `row` on, as long as there are so many.
template <uint32_t R, uint32_t D>
inline void awq_rows(const kvk_awq& a, const AwqColumns& columns, const AwqCodes& codes, uint32_t inputs, const AwqNumbers<D>& x,
                     uint32_t& row, float (*total)[8][kLane], uint64_t total_stride) {
  for (; row + R <= a.rows; row += R) {
    __m512i sum[R * D][8];
    awq_sum_unpacked<R * D>(codes, 0, inputs, x.digit[row][0], sum);
    awq_sum_unpacked<R * D>(codes, 4, inputs, x.digit[row][0], sum);
#pragma GCC unroll 3
    for (uint32_t r = 0; r < R; ++r)
      for (uint32_t i = 0; i < 8; ++i) {
        __m512i found[D];
#pragma GCC unroll 3
        for (uint32_t d = 0; d < D; ++d) found[d] = sum[r * D + d][i];
        awq_add_part<D>(found, columns.zero[i], columns.scale[i], x, row + r, total[(row + r) * total_stride][i]);
      }
  }
}

template <uint32_t D>
inline void awq_many(const kvk_awq& a, const AwqColumns& columns, const uint32_t* words, const uint32_t* ahead, uint32_t count,
                     uint32_t inputs, const AwqNumbers<D>& x, float (*total)[8][kLane], uint64_t total_stride) {
  AwqCodes codes;
  const __mmask16 here = count >= 16 ? 0xffff : static_cast<__mmask16>((1u << count) - 1);
  awq_unpack(words, ahead, a.outputs / 8, here, inputs, codes);
  uint32_t row = 0;
  awq_rows<kAwqDigits / D>(a, columns, codes, inputs, x, row, total, total_stride);
  if constexpr (D == 2) awq_rows<2>(a, columns, codes, inputs, x, row, total, total_stride);
  awq_rows<1>(a, columns, codes, inputs, x, row, total, total_stride);
}

}  // namespace
}  // namespace kvk
