// The kernels of many rows for head dimensions up to 128: 64 rows a block, and 128.
#include "cuda/launch.h"
#include "cuda/prefill.h"

template int kvk::launch<kvk::Prefill<128, 1>>(const Attention&, const Grid&);
template int kvk::launch<kvk::Prefill<128, 2>>(const Attention&, const Grid&);
