// Looking at an arena: what stands where, in address order, and whether it agrees with itself.

#include <algorithm>

#include "core/base/error.h"
#include "core/store/arena.h"

namespace kv {

std::vector<Arena::Piece> Arena::pieces(bool by_slab, uint64_t from, uint64_t to) const {
  std::vector<Piece> out;
  auto unit = static_cast<uint32_t>(std::min<uint64_t>(from / unit_, units_ready_));
  if (unit < units_ready_ && unit_slab_[unit] != kNobody) unit = slabs_[unit_slab_[unit]].first_unit;
  while (unit < units_ready_ && unit * unit_ < to) {
    const uint32_t id = unit_slab_[unit];
    if (id == kNobody) {
      uint32_t run = 1;
      while (unit + run < units_ready_ && unit_slab_[unit + run] == kNobody) ++run;
      out.push_back({{unit * unit_, run * unit_}, {}});
      unit += run;
      continue;
    }
    const Slab& slab = slabs_[id];
    if (by_slab || slab.all != kNobody) out.push_back({slab_extent(slab), {}});
    if (slab.all != kNobody) out.back().records.push_back(slab.all);
    for (uint32_t slot = 0; slot < slab.slots.size(); ++slot) {
      const uint32_t record = slab.slots[slot];
      if (slot > 0 && record != kNobody && record == slab.slots[slot - 1]) {  // a region's, cut in pages: one piece
        if (!by_slab) out.back().extent.length += slot_extent(slab, slot).length;
        continue;
      }
      if (!by_slab) out.push_back({slot_extent(slab, slot), {}});
      if (record != kNobody) out.back().records.push_back(record);
    }
    unit += slab.units;
  }
  return out;
}

void Arena::check_integrity() const {
  for (uint32_t id = 0; id < slabs_.size(); ++id) {
    const Slab& slab = slabs_[id];
    if (slab.units == 0) continue;
    uint32_t used = 0;
    uint32_t normal_used = 0;
    if (slab.all != kNobody) {
      KV_INVARIANT(slab.slots.empty() && slab.free.empty());
      used = slot_count(slab), normal_used = normal_slots(slab);
    }
    for (uint32_t slot = 0; slot < slab.slots.size(); ++slot) {
      used += slab.slots[slot] != kNobody;
      normal_used += slab.slots[slot] != kNobody && slot < normal_slots(slab);
    }
    KV_INVARIANT(used == slab.used && used > 0);
    KV_INVARIANT(slab.free.size() + normal_used == normal_slots(slab));
    KV_INVARIANT(slab.free.empty() || slab.listed);
    for (uint32_t unit = slab.first_unit; unit < slab.first_unit + slab.units; ++unit) KV_INVARIANT(unit_slab_[unit] == id);
  }
  uint32_t unit = 0;
  for (const auto& [first, length] : free_runs_) {
    for (; unit < first; ++unit) KV_INVARIANT(unit_slab_[unit] != kNobody);
    KV_INVARIANT(length > 0 && first + length <= units_ready_ && (first == 0 || unit_slab_[first - 1] != kNobody));
    for (; unit < first + length; ++unit) KV_INVARIANT(unit_slab_[unit] == kNobody);
  }
  for (; unit < units_ready_; ++unit) KV_INVARIANT(unit_slab_[unit] != kNobody);
}

}  // namespace kv
