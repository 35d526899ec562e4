// The path for CPUs with AVX512-FP16 besides VNNI and BF16: as avx512_vnni, and fp16 values multiplied as fp16.
#include "cpu/attend_rows.h"
#include "cpu/codec_rows.h"
#include "cpu/paths.h"
#include "cpu/tile_bf16.h"
#include "cpu/tile_few.h"
#include "cpu/tile_fp16.h"
#include "cpu/tile_vnni.h"

namespace kvk {
namespace {

struct Fp16 : FewRows<kFewRows> {
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
    else if (tile.segment->codec == KVK_F16)
      values_fp16(tile, rows, head_dim, width, s);
    else
      return false;
    return true;
  }
};

}  // namespace

const Path kAvx512Fp16Path{"avx512_fp16", quantise_rows, dequantise_rows, rotate_rows, attend_rows<Fp16>};

}  // namespace kvk
