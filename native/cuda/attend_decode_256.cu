// The decode kernel for head dimensions up to 256.
#include "cuda/decode.h"
#include "cuda/launch.h"

template int kvk::launch<kvk::Decode<256>>(const Attention&, const Grid&);
