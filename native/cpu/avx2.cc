// The path for CPUs with AVX2, FMA and F16C: a few rows' codes as integers (cpu/products_avx2.h), all else as fp32.
#include "cpu/attend_rows.h"
#include "cpu/codec_rows.h"
#include "cpu/paths.h"
#include "cpu/products_avx2.h"

namespace kvk {
namespace {

struct Avx2 : FewAvx2 {
  static bool scores(const Tile&, uint32_t, uint32_t, uint32_t, const float*, Held&, Scratch&) { return false; }
  static bool values(const Tile&, uint32_t, uint32_t, uint32_t, Scratch&) { return false; }
};

}  // namespace

const Path kAvx2Path{"avx2", quantise_rows, dequantise_rows, rotate_rows, attend_rows<Avx2>};

}  // namespace kvk
