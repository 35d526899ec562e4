// Rows of K or V on their way into shared memory.
//
// Owns which bytes are copied how. Invariant: tokens that are not there and channels beyond head_dim become 0, since what lay
// there before may be no number.
#pragma once

#include "cuda/segments.h"

namespace kvk {

// Where a row's 16 bytes of number `chunk` go: row `low` + `high`, which have no bit in common, every `kStride` bytes.
template <uint32_t kStride>
struct RowsOf {
  static KVK_DEVICE_FN uint32_t place(uint32_t low, uint32_t chunk, uint32_t high) { return (low + high) * kStride + 16 * chunk; }
};

// `kTokens` rows from the first of a tile on, by `kWorkers` threads of which this is `worker`: asynchronously where all is
// aligned to 16 bytes, else element by element. Elements of another type than the kind's become that type.
template <uint32_t kDim, Kind kKind, uint32_t kTokens, uint32_t kWorkers, class Rows>
KVK_DEVICE_FN void load_rows(const kvk_attention& a, const kvk_segment& s, const void* from, int64_t stride, const Tile& tile,
                             uint8_t* to, Rows rows, uint32_t worker) {
  constexpr uint32_t kBits = bits_of_kind(kKind), kRowBytes = kDim * kBits / 8, kChunks = kRowBytes / 16;
  const uint32_t bytes = a.head_dim * kBits / 8;
  from = at(from, static_cast<int64_t>(tile.start) * stride);
  const bool native = is_quantised(kKind) || s.codec == (kKind == kBf16 ? KVK_BF16 : KVK_F16);
  if (native && ((reinterpret_cast<uintptr_t>(from) | static_cast<uintptr_t>(stride) | bytes) & 15) == 0) {
    if constexpr (kWorkers % kChunks == 0) {  // a thread has one column
      constexpr uint32_t kStep = kWorkers / kChunks;
      const uint32_t chunk = worker % kChunks, first = worker / kChunks;
      const void* row = at(from, first * stride + 16 * chunk);
      if (tile.count == kTokens && bytes == kRowBytes && stride == kRowBytes) {  // most tiles
#pragma unroll
        for (uint32_t i = 0; i < kTokens / kStep; ++i)
          copy_async(to + rows.place(first, chunk, i * kStep), at(row, i * kStep * kRowBytes), 16);
        return;
      }
      if (tile.count == kTokens && bytes == kRowBytes) {
#pragma unroll
        for (uint32_t i = 0; i < kTokens / kStep; ++i, row = at(row, kStep * stride))
          copy_async(to + rows.place(first, chunk, i * kStep), row, 16);
        return;
      }
      const uint32_t count = 16 * chunk < bytes ? tile.count : 0;
#pragma unroll 1
      for (uint32_t i = 0; i < kTokens; i += kStep, row = at(row, kStep * stride))
        copy_async(to + rows.place(first, chunk, i), first + i < count ? row : from, first + i < count ? 16 : 0);
    } else {
#pragma unroll 1
      for (uint32_t i = worker; i < kTokens * kChunks; i += kWorkers) {
        const uint32_t token = i / kChunks, chunk = i % kChunks;
        const bool there = token < tile.count && 16 * chunk < bytes;
        copy_async(to + rows.place(token, chunk, 0), there ? at(from, token * stride + 16 * chunk) : from, there ? 16 : 0);
      }
    }
    return;
  }
  constexpr uint32_t kEach = is_quantised(kKind) ? kRowBytes : kDim, kSize = is_quantised(kKind) ? 1 : 2;
#pragma unroll 1
  for (uint32_t i = worker; i < kTokens * kEach; i += kWorkers) {
    const uint32_t token = i / kEach, j = i % kEach;
    const bool there = token < tile.count && j < (is_quantised(kKind) ? bytes : a.head_dim);
    const void* row = at(from, there ? token * stride : 0);
    uint8_t* place = to + rows.place(token, j * kSize / 16, 0) + j * kSize % 16;
    if (is_quantised(kKind))
      *place = there ? static_cast<const uint8_t*>(row)[j] : 0;
    else
      *reinterpret_cast<uint16_t*>(place) = !there           ? 0
                                            : kKind == kBf16 ? to_bf16(element(s.codec, row, j))
                                                             : to_half(element(s.codec, row, j));
  }
}

// The group of K's scales that a token of the segment's block has.
KVK_DEVICE_FN const uint16_t* scales_of(const uint16_t* base, const kvk_segment& s, uint32_t kv_head, uint32_t token,
                                        uint32_t head_dim) {
  const uint32_t shift = 4 + (s.k_group >> 5) - (s.k_group >> 7);  // groups are of 32, 64 or 128 tokens
  return at(base, kv_head * s.k_scale_head_stride) + static_cast<uint64_t>(token >> shift) * head_dim;
}

// V's scale and zero point of a token. Who puts them together waits for them.
struct TokenWords {
  uint16_t scale, zero;
  KVK_DEVICE_FN uint32_t both() const { return scale | static_cast<uint32_t>(zero) << 16; }
};

// Of a token of the tile; 0 behind its end.
KVK_DEVICE_FN TokenWords load_token_words(const kvk_segment& s, uint32_t kv_head, const Tile& tile, uint32_t token) {
  if (token >= tile.count) return {0, 0};
  const int64_t head = kv_head * s.v_scale_head_stride;
  return {at(s.v_scale, head)[tile.start + token], at(s.v_zero, head)[tile.start + token]};
}

}  // namespace kvk
