// The decode kernel for head dimensions up to 256.
#include "cuda/decode.h"
#include "cuda/launch.h"

template int kvk::launch<kvk::Decode<256, 4>>(const Attention&, const Grid&);
template int kvk::launch<kvk::Decode<256, 8>>(const Attention&, const Grid&);
