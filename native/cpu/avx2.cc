// The path for CPUs with AVX2, FMA and F16C.
#include "cpu/codec_rows.h"
#include "cpu/paths.h"

namespace kvk {

const Path kAvx2Path{"avx2", quantise_rows, dequantise_rows, rotate_rows};

}  // namespace kvk
