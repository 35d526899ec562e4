// The decode kernel for head dimensions up to 64.
#include "cuda/decode.h"
#include "cuda/launch.h"

template int kvk::launch<kvk::Decode<64>>(const Attention&, const Grid&);
