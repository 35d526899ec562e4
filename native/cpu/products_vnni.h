// What is multiplied how on CPUs with AVX-512 VNNI and BF16: codes as integers, bf16 in pairs, short elements under a few rows as
// fp32 in registers; the rest is not taken, and goes as fp32. A header, because the paths with AVX512-FP16 and AMX do the same
// and are compiled for those instruction sets.
#pragma once

#include "cpu/attend_rows.h"
#include "cpu/decode_float_avx2.h"
#include "cpu/decode_int_vnni.h"
#include "cpu/tile_bf16.h"
#include "cpu/tile_vnni.h"

namespace kvk {
namespace {

// Up to `kMost` rows.
template <uint32_t kMost>
struct FewOfAll : FewRows<kMost> {
  using Codes = FewRows<kMost>;
  // bf16 in pairs has two products an instruction, but a tile to lay out: of memory that no cache holds, four rows get more
  // without (docs/kernels.md).
  static bool as_floats(uint32_t codec, uint32_t rows, uint32_t head_dim) {
    return head_dim % 8 == 0 && ((codec == KVK_F16 && rows <= kMost) || (codec == KVK_BF16 && rows <= kFew));
  }
  static bool few(const kvk_attention& a, const Task& task, const Tile& tile, uint32_t rows, const float* q, Held& held,
                  Scratch& s) {
    const uint32_t codec = tile.segment->codec;
    if (!as_floats(codec, rows, a.head_dim)) return Codes::few(a, task, tile, rows, q, held, s);
    (codec == KVK_F16 ? attend_four<KVK_F16> : attend_four<KVK_BF16>)(a, task, tile, rows, q, held, s);
    return true;
  }
};

struct Vnni : FewOfAll<kFewRows> {
  static bool scores(const Tile& tile, uint32_t rows, uint32_t head_dim, uint32_t width, const float* q, Held& held, Scratch& s) {
    if (quantised(tile.segment->codec))
      scores_vnni(tile, rows, head_dim, width, q, held, s);
    else if (tile.segment->codec == KVK_BF16)
      scores_bf16(tile, rows, head_dim, width, q, held, s);
    else
      return false;
    return true;
  }
  static bool values(const Tile& tile, uint32_t rows, uint32_t head_dim, uint32_t width, Scratch& s) {
    if (quantised(tile.segment->codec))
      values_vnni(tile, rows, head_dim, width, s);
    else if (tile.segment->codec == KVK_BF16)
      values_bf16(tile, rows, head_dim, width, s);
    else
      return false;
    return true;
  }
};

}  // namespace
}  // namespace kvk
