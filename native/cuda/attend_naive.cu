// The naive kernel.
#include "cuda/launch.h"
#include "cuda/naive.h"

template int kvk::launch<kvk::Naive>(const Attention&, const Grid&);
