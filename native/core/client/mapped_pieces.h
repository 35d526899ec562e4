// A block in pieces as one run of addresses: its pieces mapped one behind the other, or, where they are short or a process has
// very many mappings, copied. Read-only. Owns the addresses and not the pin: it goes before the block is let go of.
#pragma once

#include <span>

#include "core/format/block.h"

namespace kv {

class MappedPieces {
 public:
  // Of pages of that mapping, which outlives it. Throws std::bad_alloc.
  MappedPieces(const std::byte* pool, std::span<const Extent> pieces);
  ~MappedPieces();
  MappedPieces(const MappedPieces&) = delete;
  const std::byte* data() const { return bytes_; }

  static constexpr uint64_t kLeastMapped = 64 << 10;  // bytes of a piece, on average
  static constexpr size_t kMostMapped = 16'384;       // pieces in a process: the kernel allows it some 65,000 mappings in all

 private:
  std::byte* bytes_;
  size_t length_ = 0, mapped_ = 0;
};

}  // namespace kv
