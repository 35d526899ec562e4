// Quantising, dequantising and turning, row by row: the loops that every path compiles for its own instruction set.
//
// Owns the arithmetic of kvk_quantise, kvk_dequantise and kvk_rotate, for one head; the arguments were checked. Never
// allocates. Invariant: no operation here may be contracted or reordered (-ffp-contract=off), so that all paths write the same
// bytes.
#pragma once

#include "cpu/numbers.h"

namespace kvk {
namespace {

inline uint16_t next_below(uint16_t half) { return half == 0 ? 0x8001 : half & 0x8000 ? half + 1 : half - 1; }

inline uint16_t half_not_above(float x) {
  const uint16_t half = to_half(x);
  return from_half(half) > x ? next_below(half) : half;
}

inline uint16_t half_not_below(float x) {  // x >= 0
  const uint16_t half = to_half(x);
  return from_half(half) < x ? static_cast<uint16_t>(half + 1) : half;
}

// Scale and zero of values between low and high. False if fp16 cannot hold them, or low or high is not finite.
inline bool scale_of(float low, float high, float levels, uint16_t* scale, uint16_t* zero) {
  if (!(low >= -kLargestHalf) || !(high <= kLargestHalf)) return false;
  *zero = half_not_above(low + 0.0f);  // one zero, whichever of the two was met first
  *scale = half_not_below((high - from_half(*zero)) / levels);
  return true;
}

inline void codes_of(const float* x, const float* scale, const float* zero, float levels, uint32_t n, int32_t* codes) {
  for (uint32_t i = 0; i < n; ++i) {
    const float steps = __builtin_nearbyintf((x[i] - zero[i]) / (scale[i] == 0 ? __builtin_inff() : scale[i]));
    codes[i] = static_cast<int32_t>(steps > levels ? levels : steps);
  }
}

inline void store_codes(uint32_t codec, const int32_t* codes, uint32_t n, uint8_t* out) {
  if (codec == KVK_INT8)
    for (uint32_t i = 0; i < n; ++i) out[i] = static_cast<uint8_t>(codes[i]);
  else
    for (uint32_t i = 0; i < n / 2; ++i) out[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
}

inline void load_codes(uint32_t codec, const uint8_t* in, uint32_t n, float* codes) {
  if (codec == KVK_INT8)
    for (uint32_t i = 0; i < n; ++i) codes[i] = in[i];
  else
    for (uint32_t i = 0; i < n / 2; ++i) codes[2 * i] = in[i] & 15, codes[2 * i + 1] = in[i] >> 4;
}

struct Rows {  // scratch of one thread, for rows of up to KVK_MAX_HEAD_DIM
  float x[KVK_MAX_HEAD_DIM], low[KVK_MAX_HEAD_DIM], high[KVK_MAX_HEAD_DIM];
  int32_t codes[KVK_MAX_HEAD_DIM];
};

// K of one head: per channel over each group of tokens. V (group 0): per token over the channels.
inline bool quantise_group(const kvk_conversion& c, uint32_t head, uint32_t start, uint32_t stop, float levels, Rows& rows) {
  const uint32_t n = c.head_dim;
  uint16_t* scale = at(c.scale, head * c.scale_head_stride) + (c.group ? start / c.group * n : start);
  uint16_t* zero = at(c.zero, head * c.scale_head_stride) + (c.group ? start / c.group * n : start);
  bool finite = true;
  for (uint32_t t = start; t < stop; ++t) {
    load_row(c.dtype, at(c.elements, head * c.head_stride + t * c.token_stride), n, rows.x);
    if (t == start) std::memcpy(rows.low, rows.x, n * sizeof(float)), std::memcpy(rows.high, rows.x, n * sizeof(float));
    for (uint32_t i = 0; i < n; ++i) {
      finite &= __builtin_fabsf(rows.x[i]) <= kLargestHalf;
      rows.low[i] = rows.x[i] < rows.low[i] ? rows.x[i] : rows.low[i];
      rows.high[i] = rows.x[i] > rows.high[i] ? rows.x[i] : rows.high[i];
    }
  }
  if (!finite) return false;
  if (c.group == 0) {  // one scale for the row
    float low = rows.low[0], high = rows.high[0];
    for (uint32_t i = 1; i < n; ++i) {
      low = rows.low[i] < low ? rows.low[i] : low;
      high = rows.high[i] > high ? rows.high[i] : high;
    }
    if (!scale_of(low, high, levels, scale, zero)) return false;
    for (uint32_t i = 0; i < n; ++i) rows.high[i] = from_half(*scale), rows.low[i] = from_half(*zero);
  } else {
    for (uint32_t i = 0; i < n; ++i) {
      if (!scale_of(rows.low[i], rows.high[i], levels, scale + i, zero + i)) return false;
      rows.high[i] = from_half(scale[i]), rows.low[i] = from_half(zero[i]);
    }
  }
  for (uint32_t t = start; t < stop; ++t) {
    load_row(c.dtype, at(c.elements, head * c.head_stride + t * c.token_stride), n, rows.x);
    codes_of(rows.x, rows.high, rows.low, levels, n, rows.codes);
    store_codes(c.codec, rows.codes, n,
                static_cast<uint8_t*>(at(c.codes, head * c.codes_head_stride + t * c.codes_token_stride)));
  }
  return true;
}

bool quantise_rows(const kvk_conversion& c) {
  Rows rows;
  const float levels = c.codec == KVK_INT8 ? 255.0f : 15.0f;
  const uint32_t step = c.group ? c.group : 1;
  for (uint32_t head = 0; head < c.heads; ++head)
    for (uint32_t start = 0; start < c.tokens; start += step)
      if (!quantise_group(c, head, start, start + step < c.tokens ? start + step : c.tokens, levels, rows)) return false;
  return true;
}

void dequantise_rows(const kvk_conversion& c) {
  Rows rows;
  const uint32_t n = c.head_dim;
  for (uint32_t head = 0; head < c.heads; ++head) {
    const uint16_t* scales = at(c.scale, head * c.scale_head_stride);
    const uint16_t* zeros = at(c.zero, head * c.scale_head_stride);
    for (uint32_t t = 0; t < c.tokens; ++t) {
      if (c.group != 0 && t % c.group == 0) {
        load_row(KVK_F16, scales + t / c.group * n, n, rows.high);
        load_row(KVK_F16, zeros + t / c.group * n, n, rows.low);
      }
      load_codes(c.codec, static_cast<const uint8_t*>(at(c.codes, head * c.codes_head_stride + t * c.codes_token_stride)), n,
                 rows.x);
      if (c.group != 0) {
        for (uint32_t i = 0; i < n; ++i) rows.x[i] = rows.x[i] * rows.high[i] + rows.low[i];
      } else {
        const float scale = from_half(scales[t]), zero = from_half(zeros[t]);
        for (uint32_t i = 0; i < n; ++i) rows.x[i] = rows.x[i] * scale + zero;
      }
      // Made of what fp16 holds; the rounding of scales takes it beyond, where fp16 has infinity.
      for (uint32_t i = 0; i < n; ++i) rows.x[i] = rows.x[i] > kLargestHalf ? kLargestHalf : rows.x[i];
      store_row(c.dtype, rows.x, n, at(c.elements, head * c.head_stride + t * c.token_stride));
    }
  }
}

void rotate_rows(const kvk_rotation& r) {
  Rows rows;
  for (uint32_t head = 0; head < r.heads; ++head)
    for (uint32_t t = 0; t < r.tokens; ++t) {
      load_row(r.dtype, at(r.in, head * r.in_head_stride + t * r.in_token_stride), r.head_dim, rows.x);
      turn_row(rows.x, r.turn, false, r.rope, r.rotary_dim, r.head_dim, rows.high);
      store_row(r.dtype, rows.high, r.head_dim, at(r.out, head * r.out_head_stride + t * r.out_token_stride));
    }
}

}  // namespace
}  // namespace kvk
