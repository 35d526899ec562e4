// What is multiplied how on CPUs with AVX-512 VNNI and BF16: codes as integers, bf16 in pairs; the rest is not taken, and goes
// as fp32. A header, because the path with AVX512-FP16 does the same and is compiled for that instruction set.
#pragma once

#include "cpu/attend_rows.h"
#include "cpu/tile_bf16.h"
#include "cpu/tile_few.h"
#include "cpu/tile_vnni.h"

namespace kvk {
namespace {

struct Vnni : FewRows<kFewRows> {
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
