// The decode kernel for head dimensions up to 96.
#include "cuda/decode.h"
#include "cuda/launch.h"

template int kvk::launch<kvk::Decode<96>>(const Attention&, const Grid&);
