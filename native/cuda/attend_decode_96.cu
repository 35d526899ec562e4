// The decode kernel for head dimensions up to 96.
#include "cuda/decode.h"
#include "cuda/launch.h"

template int kvk::launch<kvk::Decode<96, 4>>(const Attention&, const Grid&);
template int kvk::launch<kvk::Decode<96, 8>>(const Attention&, const Grid&);
template int kvk::launch<kvk::Decode<96, 16>>(const Attention&, const Grid&);
