// KIVI quantising, thread by thread: K per channel over a group of tokens, V per token.
//
// Owns the arithmetic and the places of what one thread reads and writes; host and device alike. Never allocates. Invariant:
// the operations are those of native/cpu/codec_rows.h, so the bytes are the CPU library's.
#pragma once

#include "cuda/numbers.h"

namespace kvk {

KVK_BOTH uint16_t half_not_above(float x) {
  const uint16_t half = to_half(x);
  if (from_half(half) <= x) return half;
  return half == 0 ? 0x8001 : half & 0x8000 ? half + 1 : half - 1;
}

KVK_BOTH uint16_t half_not_below(float x) {  // x >= 0
  const uint16_t half = to_half(x);
  return from_half(half) < x ? static_cast<uint16_t>(half + 1) : half;
}

// What the values that share a scale have in common.
struct Extent {
  float low, high;
  bool finite;

  KVK_BOTH void add(float x) {
    finite &= (x < 0 ? -x : x) <= kLargestHalf;
    low = x < low ? x : low;
    high = x > high ? x : high;
  }
  KVK_BOTH void add(const Extent& other) {
    finite &= other.finite;
    low = other.low < low ? other.low : low;
    high = other.high > high ? other.high : high;
  }
};

KVK_BOTH Extent nothing_yet() { return {float_of(0x7f800000), float_of(0xff800000), true}; }

struct Scaled {
  uint16_t scale, zero;
  float divisor, from;
};

// Of values that are all finite.
KVK_BOTH Scaled scaled(const Extent& e, float levels) {
  Scaled s;
  s.zero = half_not_above(plus(e.low, 0.0f));  // one zero, whichever of the two was met first
  s.from = from_half(s.zero);
  s.scale = half_not_below(divided(minus(e.high, s.from), levels));
  const float scale = from_half(s.scale);
  s.divisor = scale == 0 ? float_of(0x7f800000) : scale;
  return s;
}

KVK_BOTH uint32_t code_of(float x, const Scaled& s, float levels) {
  const float steps = to_whole(divided(minus(x, s.from), s.divisor));
  return static_cast<uint32_t>(steps > levels ? levels : steps);
}

KVK_BOTH float levels_of(uint32_t codec) { return codec == KVK_INT8 ? 255.0f : 15.0f; }

KVK_BOTH const void* row_of(const kvk_conversion& c, uint32_t head, uint32_t token) {
  return at(static_cast<const void*>(c.elements), head * c.head_stride + static_cast<int64_t>(token) * c.token_stride);
}

KVK_BOTH uint8_t* codes_of(const kvk_conversion& c, uint32_t head, uint32_t token) {
  return static_cast<uint8_t*>(at(c.codes, head * c.codes_head_stride + static_cast<int64_t>(token) * c.codes_token_stride));
}

// Two neighbouring elements of a row.
template <int Dtype>
KVK_BOTH void two_of(const void* row, uint32_t channel, float* x) {
  if constexpr (Dtype == KVK_F32) {
    const Words2 two = *static_cast<const Words2*>(at(row, channel * 4));
    x[0] = float_of(two.w[0]), x[1] = float_of(two.w[1]);
  } else {
    const uint32_t word = *static_cast<const uint32_t*>(at(row, channel * 2));
    x[0] = Dtype == KVK_BF16 ? float_of(word << 16) : from_half(static_cast<uint16_t>(word));
    x[1] = Dtype == KVK_BF16 ? float_of(word & 0xffff0000) : from_half(static_cast<uint16_t>(word >> 16));
  }
}

KVK_BOTH void put_two(uint32_t codec, uint8_t* codes, uint32_t channel, uint32_t low, uint32_t high) {
  if (codec == KVK_INT4)
    codes[channel / 2] = static_cast<uint8_t>(low | high << 4);
  else
    *reinterpret_cast<uint16_t*>(codes + channel) = static_cast<uint16_t>(low | high << 8);
}

// K: two neighbouring channels of one head over one group of tokens. False if a value cannot be held.
template <int Dtype>
KVK_BOTH bool quantise_channels(const kvk_conversion& c, uint32_t head, uint32_t group, uint32_t channel) {
  const uint32_t start = group * c.group, stop = start + c.group < c.tokens ? start + c.group : c.tokens;
  const float levels = levels_of(c.codec);
  Extent extent[2] = {nothing_yet(), nothing_yet()};
#if defined(__CUDACC__)
#pragma unroll 8
#endif
  for (uint32_t t = start; t < stop; ++t) {
    float x[2];
    two_of<Dtype>(row_of(c, head, t), channel, x);
    extent[0].add(x[0]);
    extent[1].add(x[1]);
  }
  if (!extent[0].finite || !extent[1].finite) return false;
  const Scaled first = scaled(extent[0], levels), second = scaled(extent[1], levels);
  const uint64_t place = static_cast<uint64_t>(group) * c.head_dim + channel;
  uint16_t* scale = at(c.scale, head * c.scale_head_stride) + place;
  uint16_t* zero = at(c.zero, head * c.scale_head_stride) + place;
  scale[0] = first.scale, scale[1] = second.scale;
  zero[0] = first.zero, zero[1] = second.zero;
#if defined(__CUDACC__)
#pragma unroll 4
#endif
  for (uint32_t t = start; t < stop; ++t) {
    float x[2];
    two_of<Dtype>(row_of(c, head, t), channel, x);
    put_two(c.codec, codes_of(c, head, t), channel, code_of(x[0], first, levels), code_of(x[1], second, levels));
  }
  return true;
}

// V: what one lane of `lanes` sees of a row. The lanes' extents are then added up, by whoever runs them.
template <int Dtype>
KVK_BOTH Extent row_extent(const kvk_conversion& c, const void* row, uint32_t lane, uint32_t lanes) {
  Extent extent = nothing_yet();
  for (uint32_t channel = 2 * lane; channel < c.head_dim; channel += 2 * lanes) {
    float x[2];
    two_of<Dtype>(row, channel, x);
    extent.add(x[0]);
    extent.add(x[1]);
  }
  return extent;
}

template <int Dtype>
KVK_BOTH void quantise_row(const kvk_conversion& c, uint32_t head, uint32_t token, const Extent& all, uint32_t lane,
                           uint32_t lanes) {
  const float levels = levels_of(c.codec);
  const Scaled s = scaled(all, levels);
  if (lane == 0) {
    at(c.scale, head * c.scale_head_stride)[token] = s.scale;
    at(c.zero, head * c.scale_head_stride)[token] = s.zero;
  }
  const void* row = row_of(c, head, token);
  uint8_t* codes = codes_of(c, head, token);
  for (uint32_t channel = 2 * lane; channel < c.head_dim; channel += 2 * lanes) {
    float x[2];
    two_of<Dtype>(row, channel, x);
    put_two(c.codec, codes, channel, code_of(x[0], s, levels), code_of(x[1], s, levels));
  }
}

// Whether pairs of channels can be read and written at once.
KVK_BOTH bool in_pairs(const kvk_conversion& c) {
  const uint32_t element = c.dtype == KVK_F32 ? 8 : 4, code = c.codec == KVK_INT8 ? 2 : 1;
  return c.head_dim % 2 == 0 && is_aligned(c.elements, element) && c.head_stride % element == 0 &&
         c.token_stride % element == 0 && is_aligned(c.codes, code) && c.codes_head_stride % code == 0 &&
         c.codes_token_stride % code == 0;
}

// The naive kernel's work: everything that shares one scale, element by element.
KVK_BOTH bool quantise_plainly(const kvk_conversion& c, uint32_t head, uint32_t token, uint32_t channel) {
  const uint32_t tokens = c.group == 0 ? 1 : token + c.group < c.tokens ? c.group : c.tokens - token;
  const uint32_t channels = c.group == 0 ? c.head_dim : 1;
  const float levels = levels_of(c.codec);
  Extent extent = nothing_yet();
  for (uint32_t t = token; t < token + tokens; ++t)
    for (uint32_t i = channel; i < channel + channels; ++i) extent.add(element(c.dtype, row_of(c, head, t), i));
  if (!extent.finite) return false;
  const Scaled s = scaled(extent, levels);
  const uint64_t place = c.group == 0 ? token : static_cast<uint64_t>(token / c.group) * c.head_dim + channel;
  at(c.scale, head * c.scale_head_stride)[place] = s.scale;
  at(c.zero, head * c.scale_head_stride)[place] = s.zero;
  return true;
}

// The codes of two channels of one token (of one, where head_dim is odd), once the scales are there.
KVK_BOTH void encode_plainly(const kvk_conversion& c, uint32_t head, uint32_t token, uint32_t channel) {
  const float levels = levels_of(c.codec);
  for (uint32_t i = channel; i < channel + 2 && i < c.head_dim; ++i) {
    const uint64_t place = c.group == 0 ? token : static_cast<uint64_t>(token / c.group) * c.head_dim + i;
    const float scale = from_half(at(c.scale, head * c.scale_head_stride)[place]);
    const Scaled s{0, 0, scale == 0 ? float_of(0x7f800000) : scale, from_half(at(c.zero, head * c.scale_head_stride)[place])};
    const uint32_t code = code_of(element(c.dtype, row_of(c, head, token), i), s, levels);
    uint8_t* codes = codes_of(c, head, token);
    if (c.codec == KVK_INT8)
      codes[i] = static_cast<uint8_t>(code);
    else
      codes[i / 2] = static_cast<uint8_t>(i % 2 == 0 ? code : codes[i / 2] | code << 4);
  }
}

}  // namespace kvk
