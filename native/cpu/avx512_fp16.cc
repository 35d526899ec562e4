// The path for CPUs with AVX512-FP16 besides VNNI and BF16: as avx512_vnni, and fp16 values multiplied as fp16.
#include "cpu/awq_task.h"
#include "cpu/awq_tiles.h"
#include "cpu/codec_rows.h"
#include "cpu/linear_rows.h"
#include "cpu/paths.h"
#include "cpu/product_rows.h"
#include "cpu/products_vnni.h"
#include "cpu/tile_fp16.h"

namespace kvk {
namespace {

struct Fp16 : Vnni {
  static bool values(const Tile& tile, uint32_t rows, uint32_t head_dim, uint32_t width, Scratch& s) {
    if (tile.segment->codec != KVK_F16) return Vnni::values(tile, rows, head_dim, width, s);
    values_fp16(tile, rows, head_dim, width, s);
    return true;
  }
};

}  // namespace

const Path kAvx512Fp16Path{"avx512_fp16", quantise_rows,   dequantise_rows, rotate_rows, attend_rows<Fp16>, multiply_awq_codes,
                           unpack_awq,    multiply_linear, normalise_rows,  turn_rows,   gate_floats,       product_rows};

}  // namespace kvk
