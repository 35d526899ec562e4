// The path for CPUs with AVX2, FMA and F16C: codes as integers, the rest as fp32 (cpu/products_avx2.h).
#include "cpu/attend_rows.h"
#include "cpu/awq_task.h"
#include "cpu/awq_tiles.h"
#include "cpu/codec_rows.h"
#include "cpu/linear_rows.h"
#include "cpu/paths.h"
#include "cpu/product_rows.h"
#include "cpu/products_avx2.h"

namespace kvk {

const Path kAvx2Path{"avx2",
                     quantise_rows,
                     dequantise_rows,
                     rotate_rows,
                     attend_rows<ProductsAvx2>,
                     multiply_awq_codes,
                     unpack_awq,
                     multiply_linear,
                     normalise_rows,
                     turn_rows,
                     gate_floats,
                     product_rows};

}  // namespace kvk
