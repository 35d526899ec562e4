// The head of what the library writes into a block's meta area (kvclient/blocks/meta.py). Token ids and extra ids follow, and the
// reuse identity where there is room left for it. The daemon reads nothing of it but the content key and the identity, for the
// header of a block's file, and believes nothing of that. And where in the pool the bytes of a block in pieces lie.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

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

// Whether a meta area is one that the library wrote for `tokens` tokens, whose ids are these: `ids_bytes` bytes of int32. Every
// other string of bytes, however it is damaged, holds none.
inline bool meta_holds(const std::byte* area, uint64_t area_bytes, uint32_t tokens, const void* ids, uint64_t ids_bytes) {
  MetaHead head;
  if (area_bytes < sizeof head) return false;
  std::memcpy(&head, area, sizeof head);
  const bool known_words = head.extra_words == 0 || head.extra_words == 1 || head.extra_words == 4;
  if (head.magic != kMetaMagic || head.tokens != tokens || !known_words || head.has_identity > 1) return false;
  if (area_bytes < identity_offset(head) + sizeof(Key) * head.has_identity || ids_bytes != 4ull * tokens) return false;
  return std::memcmp(area + sizeof head, ids, ids_bytes) == 0;
}

// ---------------------------------------------------------------- where its bytes lie

// Calls f(offset in the pool, bytes) until it says false. False then, or if the pieces are shorter.
template <class F>
bool each_stretch(std::span<const Extent> pieces, uint64_t offset, uint64_t bytes, F&& f) {
  for (const Extent& piece : pieces) {
    if (offset >= piece.length) {
      offset -= piece.length;
      continue;
    }
    const uint64_t here = std::min(bytes, piece.length - offset);
    if (here && !f(piece.offset + offset, here)) return false;
    offset = 0, bytes -= here;
  }
  return bytes == 0;
}

// Where a byte behind its layers lies in the pool: all of them lie in the last piece.
inline uint64_t place_of(std::span<const Extent> pieces, uint64_t offset) {
  uint64_t place = 0;
  each_stretch(pieces, offset, 1, [&](uint64_t at, uint64_t) { return place = at, false; });
  return place;
}

}  // namespace kv
