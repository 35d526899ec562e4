// Rows of K or V on their way into shared memory.
//
// Owns which bytes are copied how. Invariant: tokens that are not there and channels beyond head_dim become 0, since what lay
// there before may be no number.
#pragma once

#include "cuda/segments.h"

namespace kvk {

// `kTokens` rows from the first of a tile on, by `kWorkers` threads of which this is `worker`: asynchronously where all is
// aligned to 16 bytes, else element by element. Elements of another type than the kind's become that type.
template <uint32_t kDim, Kind kKind, uint32_t kTokens, uint32_t kWorkers>
KVK_DEVICE_FN void load_rows(const kvk_attention& a, const kvk_segment& s, const void* from, int64_t stride, const Tile& tile,
                             uint8_t* to, uint32_t to_stride, uint32_t worker) {
  constexpr uint32_t kBits = bits_of_kind(kKind), kRowBytes = kDim * kBits / 8, kChunks = kRowBytes / 16;
  const uint32_t bytes = a.head_dim * kBits / 8;
  from = at(from, static_cast<int64_t>(tile.start) * stride);
  const bool native = is_quantised(kKind) || s.codec == (kKind == kBf16 ? KVK_BF16 : KVK_F16);
  if (native && ((reinterpret_cast<uintptr_t>(from) | static_cast<uintptr_t>(stride) | bytes) & 15) == 0) {
    if constexpr (kWorkers % kChunks == 0) {  // a thread has one column
      constexpr uint32_t kStep = kWorkers / kChunks;
      const uint32_t chunk = worker % kChunks;
      uint32_t token = worker / kChunks;
      const uint32_t count = 16 * chunk < bytes ? tile.count : 0;
      const void* row = at(from, token * stride + 16 * chunk);
      to += token * to_stride + 16 * chunk;
#pragma unroll 4
      for (uint32_t i = 0; i < kTokens / kStep; ++i, token += kStep, row = at(row, kStep * stride), to += kStep * to_stride)
        copy_async(to, token < count ? row : from, token < count ? 16 : 0);
    } else {
#pragma unroll 1
      for (uint32_t i = worker; i < kTokens * kChunks; i += kWorkers) {
        const uint32_t token = i / kChunks, chunk = i % kChunks;
        const bool there = token < tile.count && 16 * chunk < bytes;
        copy_async(to + token * to_stride + 16 * chunk, there ? at(from, token * stride + 16 * chunk) : from, there ? 16 : 0);
      }
    }
    return;
  }
  constexpr uint32_t kEach = is_quantised(kKind) ? kRowBytes : kDim;
#pragma unroll 1
  for (uint32_t i = worker; i < kTokens * kEach; i += kWorkers) {
    const uint32_t token = i / kEach, j = i % kEach;
    const bool there = token < tile.count && j < (is_quantised(kKind) ? bytes : a.head_dim);
    const void* row = at(from, there ? token * stride : 0);
    if (is_quantised(kKind))
      to[token * to_stride + j] = there ? static_cast<const uint8_t*>(row)[j] : 0;
    else
      reinterpret_cast<uint16_t*>(to + token * to_stride)[j] = !there           ? 0
                                                               : kKind == kBf16 ? to_bf16(element(s.codec, row, j))
                                                                                : to_half(element(s.codec, row, j));
  }
}

// The group of K's scales that a token of the segment's block has.
KVK_DEVICE_FN const uint16_t* scales_of(const uint16_t* base, const kvk_segment& s, uint32_t kv_head, uint32_t token,
                                        uint32_t head_dim) {
  return at(base, kv_head * s.k_scale_head_stride) + static_cast<uint64_t>(token / s.k_group) * head_dim;
}

// V's scale (low half) and zero point of a token of the tile; 0 behind its end.
KVK_DEVICE_FN uint32_t load_token_scale(const kvk_segment& s, uint32_t kv_head, const Tile& tile, uint32_t token) {
  if (token >= tile.count) return 0;
  const int64_t head = kv_head * s.v_scale_head_stride;
  return at(s.v_scale, head)[tile.start + token] | static_cast<uint32_t>(at(s.v_zero, head)[tile.start + token]) << 16;
}

}  // namespace kvk
