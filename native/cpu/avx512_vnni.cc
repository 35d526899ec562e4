// The path for CPUs with AVX-512 VNNI and BF16: int8 and int4 multiplied as integers, bf16 in pairs, the rest as fp32.
#include "cpu/awq_task.h"
#include "cpu/awq_tiles.h"
#include "cpu/codec_rows.h"
#include "cpu/linear_rows.h"
#include "cpu/paths.h"
#include "cpu/product_rows.h"
#include "cpu/products_vnni.h"

namespace kvk {

const Path kAvx512VnniPath{"avx512_vnni", quantise_rows,   dequantise_rows, rotate_rows, attend_rows<Vnni>, multiply_awq_codes,
                           unpack_awq,    multiply_linear, normalise_rows,  turn_rows,   gate_floats,       product_rows};

}  // namespace kvk
