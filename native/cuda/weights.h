// Scores of a tile become weights: masks, softmax kept up from tile to tile, V's scales; in the registers of an mma's result.
//
// Owns the arithmetic that the tiled kernels share. Invariant: a key that a row does not see has weight 0, whatever its bytes.
#pragma once

#include "cuda/attention.h"
#include "cuda/segments.h"

namespace kvk {

// Of a token whose value is codes: what its weight is multiplied by (and the logarithm of that), and what the weight adds to
// every channel.
struct alignas(16) TokenScale {
  float log, scale, shift, unused;
};

// From a scale (low half) and a zero point; codes count from `centre` on.
KVK_DEVICE_FN TokenScale token_scale(uint32_t scale_and_zero, float centre) {
  const float scale = low_half(scale_and_zero), log = log2_fast(scale);
  return {log > kLeastScale ? log : kLeastScale, scale, high_half(scale_and_zero) + centre * scale, 0};
}

// Two rows of scores to base 2, capped if asked for.
template <uint32_t kBlocks>
KVK_DEVICE_FN void in_base_2(const kvk_attention& a, const float (&factor)[2], const float (&bias)[2],
                             float (&score)[kBlocks][4]) {
  if (a.softcap == 0) {
    const float by[2] = {factor[0] * kLog2E, factor[1] * kLog2E}, more[2] = {bias[0] * kLog2E, bias[1] * kLog2E};
#pragma unroll
    for (uint32_t i = 0; i < 4 * kBlocks; ++i) score[i / 4][i % 4] = score[i / 4][i % 4] * by[i % 4 / 2] + more[i % 4 / 2];
  } else {
#pragma unroll
    for (uint32_t i = 0; i < 4 * kBlocks; ++i)
      score[i / 4][i % 4] = capped(a, score[i / 4][i % 4] * factor[i % 4 / 2] + bias[i % 4 / 2]);
  }
}

// Keys that a row does not see get the score -infinity.
template <uint32_t kBlocks>
KVK_DEVICE_FN void apply_mask(const Seen (&keys)[2], float (&score)[kBlocks][4]) {
  const auto t = static_cast<int32_t>(lane_index() % 4);
#pragma unroll
  for (uint32_t i = 0; i < 4 * kBlocks; ++i) {
    const int32_t token = static_cast<int32_t>(i / 4 * 8 + i % 2) + 2 * t;
    if (token < keys[i % 4 / 2].start || token >= keys[i % 4 / 2].stop) score[i / 4][i % 4] = -kInfinity;
  }
}

// Scores become weights in 16 bits, as the next product's operand; `down` is what the rows' sums are to be multiplied by. Where
// values are codes (kQuantised) that come as kAbove + code - centre, the rows' shifts take both back.
template <bool kBf16Weights, bool kQuantised, uint32_t kBlocks>
KVK_DEVICE_FN void exp_and_pack(const TokenScale* tokens, float above, float (&score)[kBlocks][4], Row (&rows)[2],
                                float (&rescale)[2], uint32_t (&weight)[kBlocks / 2][4]) {
  const uint32_t t = lane_index() % 4;
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    Row& row = rows[h];
    float row_max = -kInfinity;
    if constexpr (kQuantised) forget_memory();
#pragma unroll
    for (uint32_t j = 0; j < kBlocks; ++j)
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        const float reach = score[j][2 * h + i] + (kQuantised ? tokens[8 * j + 2 * t + i].log : 0.0f);
        row_max = reach > row_max ? reach : row_max;
      }
    row_max = largest_of_row(row_max);
    const float now = row_max > row.reference ? row_max : row.reference, from = now == -kInfinity ? 0.0f : now;
    rescale[h] = factor_of(row.reference, now);
    row.reference = now, row.row_sum *= rescale[h], row.shift *= rescale[h];
    if constexpr (kQuantised) forget_memory();
#pragma unroll
    for (uint32_t j = 0; j < kBlocks; ++j) {
      float x[2];
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        x[i] = exp2_fast(score[j][2 * h + i] - from);
        row.row_sum += x[i];
        if constexpr (kQuantised) {
          const TokenScale& token = tokens[8 * j + 2 * t + i];
          row.shift += x[i] * token.shift;
          x[i] *= token.scale;
        }
      }
      const uint32_t both = kBf16Weights ? pack_bf16(x[0], x[1]) : pack_halves(x[0], x[1]);
      weight[j / 2][j % 2 * 2 + h] = both;
      if constexpr (kQuantised) row.shift -= (low_half(both) + high_half(both)) * above;
    }
  }
}

}  // namespace kvk
