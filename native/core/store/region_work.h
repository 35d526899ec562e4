// One message about a region, while the store gives its lock away between two steps of it: whose the region is, and for how long
// the lock has been held. Plain state; the store's lock guards it.
#pragma once

#include <cstdint>

#include "core/store/layout_table.h"
#include "core/store/session_table.h"
#include "core/store/slice.h"

namespace kv {

struct RegionWork {
  uint32_t owner_id;
  const KnownLayout& known;  // of the blocks, or of the region where they become part of it again
  SessionState* owner;       // null: it went meanwhile
  double now = 0;            // as a use counts
  bool layout_stays = true;
  Slice slice{256, 1};  // blocks of a short work; the clock is looked at after each step
};

}  // namespace kv
