// The part of a segment that is looked at together, a tile: where its rows of K and V lie, and the asking ahead for the next
// one's.
//
// Never multiplies. Invariant: local to the including file (cpu/numbers.h says why).
#pragma once

#include "cpu/attend.h"
#include "cpu/numbers.h"

namespace kvk {
namespace {

// The part of one segment that a tile looks at: tokens start..start + count of the segment's block.
struct Tile {
  const kvk_segment* segment;
  uint32_t kv_head, start, count;
  const kvk_segment* next_segment;  // of the tile that comes after this one, or null
  uint32_t next_start;
};

inline const uint8_t* key_row(const Tile& tile, uint32_t token) {
  const kvk_segment& s = *tile.segment;
  return static_cast<const uint8_t*>(at(s.k, tile.kv_head * s.k_head_stride + (tile.start + token) * s.k_token_stride));
}

inline const uint8_t* value_row(const Tile& tile, uint32_t token) {
  const kvk_segment& s = *tile.segment;
  return static_cast<const uint8_t*>(at(s.v, tile.kv_head * s.v_head_stride + (tile.start + token) * s.v_token_stride));
}

// Bytes of a key or value.
inline uint32_t row_bytes(const Tile& tile, uint32_t head_dim) {
  switch (tile.segment->codec) {
    case KVK_F32: return 4 * head_dim;
    case KVK_INT8: return head_dim;
    case KVK_INT4: return head_dim / 2;
    default: return 2 * head_dim;
  }
}

// Asks for the bytes of the tile that comes next while this one is packed and multiplied: a few cache lines at every step, so
// that memory and arithmetic are busy at the same time. The processor's own prefetching does not see through the reordering
// of rows.
struct Ahead {
  const char* next;
  uint32_t of_pack, of_product;  // lines at every step

  void packing() { ask(of_pack); }
  void multiplying() { ask(of_product); }
  void ask(uint32_t lines) {
    for (uint32_t i = 0; i < lines; ++i, next += 64) _mm_prefetch(next, _MM_HINT_T1);
  }
};

// Steps of a product of rows x depth with depth x columns that takes `high` rows and `wide` columns at once.
inline uint32_t steps_of(uint32_t rows, uint32_t depth, uint32_t columns, uint32_t high, uint32_t wide) {
  return (rows + high - 1) / high * ((columns + wide - 1) / wide) * depth;
}

// The keys, or the values, of the next tile, whose rows have `bytes`: a third while packing, if that has steps, the rest while
// multiplying.
inline Ahead ahead_of(const Tile& tile, bool values, uint32_t bytes, uint32_t packs, uint32_t steps) {
  const kvk_segment* s = tile.next_segment;
  const int64_t token_stride = s == nullptr ? 0 : values ? s->v_token_stride : s->k_token_stride;
  if (s == nullptr || tile.next_start >= s->first + s->tokens || token_stride < bytes || token_stride >= 2 * int64_t{bytes})
    return {nullptr, 0, 0};
  const uint32_t left = s->first + s->tokens - tile.next_start;
  const int64_t head_stride = values ? s->v_head_stride : s->k_head_stride;
  const uint32_t lines = static_cast<uint32_t>((left < kTile ? left : kTile) * token_stride / 64);
  const uint32_t of_pack = packs == 0 ? 0 : (lines / 3 + packs - 1) / packs,
                 rest = lines > of_pack * packs ? lines - of_pack * packs : 0;
  return {static_cast<const char*>(at(values ? s->v : s->k, tile.kv_head * head_stride + tile.next_start * token_stride)),
          of_pack, (rest + steps - 1) / steps};
}

// `count` rows of keys or values from `token` of the tile on; behind the tile's last one `beyond`, or that last one again.
inline void rows_from(const Tile& tile, bool values, uint32_t token, uint32_t count, const uint8_t* beyond, const uint8_t** row) {
  const int64_t stride = values ? tile.segment->v_token_stride : tile.segment->k_token_stride;
  const uint8_t* at_row = values ? value_row(tile, token) : key_row(tile, token);
  const uint32_t there = tile.count - token < count ? tile.count - token : count;
  for (uint32_t i = 0; i < there; ++i, at_row += stride) row[i] = at_row;
  for (uint32_t i = there; i < count; ++i) row[i] = beyond != nullptr ? beyond : row[there - 1];
}

constexpr bool quantised(uint32_t codec) { return codec == KVK_INT8 || codec == KVK_INT4; }
constexpr float middle(uint32_t codec) { return codec == KVK_INT8 ? 128.0f : 8.0f; }

}  // namespace
}  // namespace kvk
