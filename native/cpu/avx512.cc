// The path for CPUs with AVX-512 F, BW, DQ and VL but no VNNI: codes and few rows as AVX2 has them (cpu/products_avx2.h), the
// rest as fp32, sixteen at once.
#include "cpu/attend_rows.h"
#include "cpu/awq_rows.h"
#include "cpu/awq_tiles.h"
#include "cpu/codec_rows.h"
#include "cpu/linear_rows.h"
#include "cpu/paths.h"
#include "cpu/product_rows.h"
#include "cpu/products_avx2.h"

namespace kvk {

const Path kAvx512Path{"avx512",     quantise_rows, dequantise_rows, rotate_rows,    attend_rows<ProductsAvx2>,
                       multiply_awq, unpack_awq,    multiply_linear, normalise_rows, turn_rows,
                       gate_floats,  product_rows};

}  // namespace kvk
