// Where a block lies, stretch by stretch: a part of the store that is a template.
#pragma once

#include "core/store/store.h"

namespace kv {

// Calls f(record, extent) for each PIECE of a block in pieces, which f may free, or for the block itself.
template <class F>
void Store::each_piece(uint32_t block, F&& f) {
  const Extent whole = extent_of(block);
  if (!whole.in_pieces()) return f(block, whole);
  uint64_t left = whole.length;
  for (auto at = static_cast<uint32_t>(whole.first_piece()), next = at; left > 0; at = next) {
    KV_INVARIANT(at < index_.max_blocks() && control(at).state() == State::Piece);
    const Extent piece = extent_of(at);
    KV_INVARIANT(piece.length > 0 && piece.length <= left);
    next = next_piece(at), left -= piece.length;
    f(at, piece);
  }
}

}  // namespace kv
