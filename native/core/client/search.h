// Searching a prompt for blocks at any offset, as rsync does: the fingerprint of every window, asked of the finder.
//
// Reads shared memory and calls nobody. Never verifies: what it names are candidates, whose tokens the caller compares under
// a pin. Invariant: the places of one block do not overlap, so a prompt of one repeated token gives few of them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/format/index.h"

namespace kv {

struct Placed {
  size_t start;  // of the window that has the block's fingerprint
  Sighting block;
};

inline constexpr size_t kMaxSightings = 8;  // at one offset, or of one parent's children

// Windows of `window` consecutive ids of `tokens`; `base` is the identity's fingerprint base. Ordered by start. Requires
// 0 < window <= kMaxBlockTokens.
// A block may hold more tokens than the window that its fingerprint is of. on_disk: also blocks that lie only there.
std::vector<Placed> search(const Index& index, uint64_t base, std::span<const int32_t> tokens, size_t window,
                           bool on_disk = false);

// Blocks that continue this one.
std::vector<Sighting> children(const Index& index, const Key& parent, bool on_disk = false);

}  // namespace kv
