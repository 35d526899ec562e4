// Records: who is free, how many are what, which claims the finder has not learned of. Plain state; the store's lock guards it.
#pragma once

#include <cstdint>
#include <vector>

#include "core/format/index.h"
#include "core/format/store_types.h"

namespace kv {

struct RecordCounts {
  uint32_t free_head = Index::kAbsent;
  uint64_t used_bytes = 0, records = 0, created = 0, quarantined = 0, pieces = 0;
  uint64_t loose = 0;            // PIECEs of no block, whose bytes are used all the same
  uint64_t longest_pages = 1;    // of the blocks there have been
  std::vector<Handle> unlisted;  // claimed, and not yet in the finder

  void came_loose(uint64_t bytes) { loose += 1, used_bytes += bytes; }
  void went_from_loose(uint64_t bytes) { loose -= 1, used_bytes -= bytes; }
};

struct Suspects {  // looked at on a client's word in this second
  uint64_t second = 0, bytes = 0;
};

}  // namespace kv
