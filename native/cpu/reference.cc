// The naive path: plain C++, for any CPU, and what the fast paths are measured against.
#include "cpu/codec_rows.h"
#include "cpu/paths.h"

namespace kvk {

const Path kReferencePath{"reference", quantise_rows, dequantise_rows, rotate_rows};

}  // namespace kvk
