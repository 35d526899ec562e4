// The path for CPUs with AMX (TILE, BF16, INT8) besides AVX512-FP16: many rows of queries over bf16, int8 and int4 in tile
// registers; few rows, and other codecs, as avx512_fp16 has them.
#include "cpu/awq_task.h"
#include "cpu/awq_tiles.h"
#include "cpu/codec_rows.h"
#include "cpu/linear_amx.h"
#include "cpu/paths.h"
#include "cpu/product_rows.h"
#include "cpu/products_vnni.h"
#include "cpu/tile_amx.h"
#include "cpu/tile_fp16.h"

namespace kvk {
namespace {

// Fewer rows leave most of a tile's sixteen empty, and there the packing is what takes time. Codes under eight are still faster
// without it (docs/kernels.md).
constexpr uint32_t kManyRows = 8, kFewUnderCodes = 8;

struct Amx : FewOfAll<kFewUnderCodes> {
  static bool few(const kvk_attention& a, const Task& task, const Tile& tile, uint32_t rows, const float* q, Held& held,
                  Scratch& s) {
    if (tile.segment->codec == KVK_F16) return FewOfAll<kFewRows>::few(a, task, tile, rows, q, held, s);
    return FewOfAll<kFewUnderCodes>::few(a, task, tile, rows, q, held, s);
  }
  static bool scores(const Tile& tile, uint32_t rows, uint32_t head_dim, uint32_t width, const float* q, Held& held, Scratch& s) {
    const bool many = rows >= kManyRows;
    if (quantised(tile.segment->codec))
      (many ? scores_codes_amx : scores_vnni)(tile, rows, head_dim, width, q, held, s);
    else if (tile.segment->codec == KVK_BF16)
      (many ? scores_bf16_amx : scores_bf16)(tile, rows, head_dim, width, q, held, s);
    else
      return false;
    return true;
  }
  static bool values(const Tile& tile, uint32_t rows, uint32_t head_dim, uint32_t width, Scratch& s) {
    const bool many = rows >= kManyRows;
    if (quantised(tile.segment->codec))
      (many ? values_codes_amx : values_vnni)(tile, rows, head_dim, width, s);
    else if (tile.segment->codec == KVK_BF16)
      (many ? values_bf16_amx : values_bf16)(tile, rows, head_dim, width, s);
    else if (tile.segment->codec == KVK_F16)
      values_fp16(tile, rows, head_dim, width, s);
    else
      return false;
    return true;
  }
};

void attend_amx(const kvk_attention& a, const Task& task, Scratch s) {
  const Registers registers;
  attend_rows<Amx>(a, task, s);
}

}  // namespace

const Path kAmxPath{"amx",      quantise_rows,       dequantise_rows, rotate_rows, attend_amx,  multiply_awq_codes,
                    unpack_awq, multiply_linear_amx, normalise_rows,  turn_rows,   gate_floats, product_rows};

}  // namespace kvk
