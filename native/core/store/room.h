// What the store remembers of making room: where there was none, and what it has set aside. Plain state; the store's lock guards
// it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "core/store/arena.h"

namespace kv {

struct Room {
  uint64_t chances = 0;                             // what was freed or sealed, or added to the pool: each might make room
  uint64_t refused_length = ~0ull, refused_at = 0;  // for which there was no room, and chances and releases then
  std::optional<Extent> reserved;                   // freed as the last resort of make_room, for the next grant
  std::pair<uint64_t, size_t> ahead{};              // length and number of the last batch's blocks
};

}  // namespace kv
