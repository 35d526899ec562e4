// The kernels of many rows for head dimensions up to 64: 64 rows a block, and 128.
#include "cuda/launch.h"
#include "cuda/prefill.h"

template int kvk::launch<kvk::Prefill<64, 1>>(const Attention&, const Grid&);
template int kvk::launch<kvk::Prefill<64, 2>>(const Attention&, const Grid&);
