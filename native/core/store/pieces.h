// Bytes of a block read and written over the ends of its pieces. Owns nothing; false as Pool::read says it, or if the pieces are
// shorter.
#pragma once

#include <cstdint>
#include <span>

#include "core/format/meta.h"
#include "core/store/pool.h"

namespace kv {

inline bool read_pieces(const Pool& pool, std::span<const Extent> pieces, uint64_t offset, void* out, uint64_t bytes) {
  auto* to = static_cast<uint8_t*>(out);
  return each_stretch(pieces, offset, bytes,
                      [&](uint64_t at, uint64_t here) { return to += here, pool.read(at, to - here, here); });
}

inline bool write_pieces(const Pool& pool, std::span<const Extent> pieces, uint64_t offset, const void* data, uint64_t bytes) {
  auto* from = static_cast<const uint8_t*>(data);
  return each_stretch(pieces, offset, bytes,
                      [&](uint64_t at, uint64_t here) { return from += here, pool.write(at, from - here, here); });
}

}  // namespace kv
