// The decode kernel for head dimensions up to 128.
#include "cuda/decode.h"
#include "cuda/launch.h"

template int kvk::launch<kvk::Decode<128, 4>>(const Attention&, const Grid&);
template int kvk::launch<kvk::Decode<128, 8>>(const Attention&, const Grid&);
template int kvk::launch<kvk::Decode<128, 16>>(const Attention&, const Grid&);
