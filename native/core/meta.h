// The head of what the library writes into a block's meta area (kvclient/blocks/meta.py). Token ids and extra ids follow. The
// daemon reads nothing of it but the content key, for the header of a block's file, and believes nothing of that.
#pragma once

#include <cstdint>

#include "core/block.h"

namespace kv {

inline constexpr uint32_t kMetaMagic = 0x314d564b;  // "KVM1"
struct MetaHead {
  uint32_t magic, tokens, extra_words, zero;
  Key parent, content;
};
static_assert(sizeof(MetaHead) == 80);

}  // namespace kv
