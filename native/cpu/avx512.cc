// The path for CPUs with AVX-512 F, BW, DQ and VL.
#include "cpu/codec_rows.h"
#include "cpu/paths.h"

namespace kvk {

const Path kAvx512Path{"avx512", quantise_rows, dequantise_rows, rotate_rows};

}  // namespace kvk
