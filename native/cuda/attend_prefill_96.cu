// The kernels of many rows for head dimensions up to 96: 64 rows a block, and 128.
#include "cuda/launch.h"
#include "cuda/prefill.h"

template int kvk::launch<kvk::Prefill<96, 1>>(const Attention&, const Grid&);
template int kvk::launch<kvk::Prefill<96, 2>>(const Attention&, const Grid&);
