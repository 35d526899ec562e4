// The decode kernel for head dimensions up to 64.
#include "cuda/decode.h"
#include "cuda/launch.h"

template int kvk::launch<kvk::Decode<64, 4>>(const Attention&, const Grid&);
template int kvk::launch<kvk::Decode<64, 8>>(const Attention&, const Grid&);
template int kvk::launch<kvk::Decode<64, 16>>(const Attention&, const Grid&);
