// The head of what the library writes into a block's meta area (kvclient/blocks/meta.py). Token ids and extra ids follow, and the
// reuse identity where there is room left for it. The daemon reads nothing of it but the content key and the identity, for the
// header of a block's file, and believes nothing of that.
#pragma once

#include <cstdint>

#include "core/format/block.h"

namespace kv {

inline constexpr uint32_t kMetaMagic = 0x314d564b;  // "KVM1"
struct MetaHead {
  uint32_t magic, tokens, extra_words;
  uint32_t has_identity;  // 1: 32 bytes of it behind the extra ids
  Key parent, content;
};
static_assert(sizeof(MetaHead) == 80);

// Where the identity lies, counted from the start of the meta area.
inline uint64_t identity_offset(const MetaHead& head) {
  return sizeof head + 4ull * head.tokens + 8ull * head.tokens * head.extra_words;
}

}  // namespace kv
