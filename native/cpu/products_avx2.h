// What is multiplied how with AVX2: codes as integers where their shape fits; under a few query rows short elements as fp32 in
// registers, all else as fp32.
//
// Owns the choice. Invariants: says the same of a segment and a number of rows each time it is asked; K and V in fp32 have one
// order of sums however many rows ask, since a suffix behind reused KV is promised the bits of a full prefill there.
#pragma once

#include "cpu/decode_float_avx2.h"
#include "cpu/decode_int_avx2.h"
#include "cpu/prefill_int_avx2.h"

namespace kvk {
namespace {

struct ProductsAvx2 {
  static bool fits(uint32_t codec, uint32_t rows, uint32_t head_dim) {
    return codec != KVK_F32 && rows <= kFewRows && head_dim % 8 == 0;
  }
  static uint32_t most_tokens(const kvk_segment& segment, uint32_t rows, uint32_t head_dim) {
    return fits(segment.codec, rows, head_dim) ? most_of_four(segment.codec) : kTile;
  }
  static bool few(const kvk_attention& a, const Task& task, const Tile& tile, uint32_t rows, const float* q, Held& held,
                  Scratch& s) {
    if (!fits(tile.segment->codec, rows, a.head_dim)) return false;
    const auto attend = of(tile.segment->codec, a.head_dim);
    attend(a, task, tile, rows, q, held, s);
    return true;
  }
  static bool scores(const Tile& tile, uint32_t rows, uint32_t head_dim, uint32_t, const float* q, Held& held, Scratch& s) {
    const uint32_t codec = tile.segment->codec;
    if (!fits_words(codec, head_dim)) return false;
    (codec == KVK_INT8 ? scores_rows<KVK_INT8> : scores_rows<KVK_INT4>)(tile, rows, head_dim, q, held, s);
    return true;
  }
  static bool values(const Tile& tile, uint32_t rows, uint32_t head_dim, uint32_t, Scratch& s) {
    const uint32_t codec = tile.segment->codec;
    if (!fits_words(codec, head_dim)) return false;
    (codec == KVK_INT8 ? values_rows<KVK_INT8> : values_rows<KVK_INT4>)(tile, rows, head_dim, s);
    return true;
  }
  static auto of(uint32_t codec, uint32_t head_dim)
      -> void (*)(const kvk_attention&, const Task&, const Tile&, uint32_t, const float*, Held&, Scratch&) {
    switch (codec) {
      case KVK_INT8: return fits_words(codec, head_dim) ? attend_words<KVK_INT8> : attend_four<KVK_INT8>;
      case KVK_INT4: return fits_words(codec, head_dim) ? attend_words<KVK_INT4> : attend_four<KVK_INT4>;
      case KVK_BF16: return attend_four<KVK_BF16>;
      default: return attend_four<KVK_F16>;
    }
  }
};

}  // namespace
}  // namespace kvk
