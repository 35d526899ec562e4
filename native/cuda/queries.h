// Rows of queries as a segment's keys meet them, eight channels at a time: as they are, or turned back.
//
// Never writes. Invariant: what lies beyond head_dim is 0 and not read.
#pragma once

#include "cuda/segments.h"

namespace kvk {

// Eight elements of a row of queries from `channel` on, 0 beyond head_dim.
KVK_DEVICE_FN void load_eight(const kvk_attention& a, const void* row, uint32_t channel, float (&x)[8]) {
  if (a.dtype != KVK_F32 && channel + 8 <= a.head_dim && (reinterpret_cast<uintptr_t>(row) & 15) == 0) {
    const auto words = *static_cast<const Words4*>(at(row, 2 * channel));
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      const auto bits = static_cast<uint16_t>(words.w[i / 2] >> 16 * (i % 2));
      x[i] = a.dtype == KVK_BF16 ? from_bf16(bits) : from_half(bits);
    }
    return;
  }
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) x[i] = channel + i < a.head_dim ? element(a.dtype, row, channel + i) : 0.0f;
}

// The same of a row turned back.
KVK_DEVICE_FN void load_turned(const kvk_attention& a, const void* row, const float* turn, uint32_t channel, float (&x)[8]) {
  const uint32_t half = a.rotary_dim / 2;
  if (turn == nullptr || channel >= a.rotary_dim) return load_eight(a, row, channel, x);
  if (a.rope == KVK_ROPE_HALF && half % 8 == 0) {
    const bool second = channel >= half;
    const uint32_t pair = second ? channel - half : channel;
    float other[8];
    load_eight(a, row, channel, x);
    load_eight(a, row, second ? pair : channel + half, other);
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i)
      x[i] = x[i] * turn[pair + i] + other[i] * (second ? -turn[half + pair + i] : turn[half + pair + i]);
    return;
  }
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) x[i] = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < 8 && channel + i < a.head_dim; ++i) {
    const float y = turned_back(a, turn, channel + i, [&](uint32_t j) { return element(a.dtype, row, j); });
#pragma unroll
    for (uint32_t j = 0; j < 8; ++j) x[j] = i == j ? y : x[j];
  }
}

}  // namespace kvk
