// The decode kernel for head dimensions up to 128.
#include "cuda/decode.h"
#include "cuda/launch.h"

template int kvk::launch<kvk::Decode<128>>(const Attention&, const Grid&);
