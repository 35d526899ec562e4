// The kernel of many rows for head dimensions up to 256: 64 rows a block.
#include "cuda/launch.h"
#include "cuda/prefill.h"

template int kvk::launch<kvk::Prefill<256, 1>>(const Attention&, const Grid&);
