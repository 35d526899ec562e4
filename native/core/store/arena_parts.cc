// Parts of what a record holds: regions, which give pages away and get them back.

#include <algorithm>

#include "core/base/error.h"
#include "core/store/arena.h"

namespace kv {

void Arena::end_claims() {
  claiming_ = false;
  for (uint32_t id = 0; id < slabs_.size(); ++id) {
    Slab& slab = slabs_[id];
    if (slab.units == 0) continue;
    slab.free.clear();
    for (uint32_t slot = normal_slots(slab); slot-- > 0;)
      if (slab.slots[slot] == kNobody) slab.free.push_back(slot);
    list(id);
  }
}

// What of the extent is that record's, or kNobody's, as few extents as it can be.
std::vector<Extent> Arena::runs(Extent extent, uint32_t record) const {
  std::vector<Extent> out;
  const uint64_t end = std::min(extent.end(), units_ready_ * unit_);
  for (uint64_t at = extent.offset, next; at < end; at = next) {
    const uint32_t id = unit_slab_[at / unit_];
    uint32_t who = kNobody;
    if (id == kNobody) {
      next = (at / unit_ + 1) * unit_;
    } else {
      const Slab& slab = slabs_[id];
      const auto slot = static_cast<uint32_t>((at - slab.first_unit * unit_) / slab.slot_bytes);
      next = slot_extent(slab, slot).end(), who = slab.slots[slot];
    }
    next = std::min(next, end);
    if (who != record) continue;
    if (!out.empty() && out.back().end() == at)
      out.back().length += next - at;
    else
      out.push_back({at, next - at});
  }
  return out;
}

uint64_t Arena::release_held(Extent extent, uint32_t record) {
  uint64_t bytes = 0;
  for (const Extent& run : runs(extent, record)) release(run, record), bytes += run.length;
  return bytes;
}

uint64_t Arena::held(Extent extent, uint32_t record) const {
  uint64_t bytes = 0;
  for (const Extent& run : runs(extent, record)) bytes += run.length;
  return bytes;
}

uint64_t Arena::claim_free(Extent extent, uint32_t record) {
  uint64_t bytes = 0;
  for (const Extent& run : runs(extent, kNobody)) {
    KV_INVARIANT(claim(run, record));
    bytes += run.length;
  }
  return bytes;
}

uint32_t Arena::holder(Extent extent) const {
  if (extent.length == 0 || extent.end() > units_ready_ * unit_) return kNobody;
  uint32_t who = kNobody;
  for (uint64_t at = extent.offset; at < extent.end();) {
    const uint32_t id = unit_slab_[at / unit_];
    if (id == kNobody) return kNobody;
    const Slab& slab = slabs_[id];
    const auto slot = static_cast<uint32_t>((at - slab.first_unit * unit_) / slab.slot_bytes);
    const Extent there = slot_extent(slab, slot);
    if (there.offset != at || there.end() > extent.end() || slab.slots[slot] == kNobody) return kNobody;
    if (at != extent.offset && slab.slots[slot] != who) return kNobody;
    who = slab.slots[slot], at = there.end();
  }
  return who;
}

}  // namespace kv
