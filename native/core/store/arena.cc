#include "core/store/arena.h"

#include <algorithm>
#include <bit>

#include "core/base/error.h"
#include "core/format/layout.h"

namespace kv {
namespace {
constexpr uint64_t kMinUnit = 64ull << 10;
constexpr uint64_t kMaxUnit = 2ull << 20;
constexpr uint64_t kUnitsWanted = 256;  // a pool should have at least so many units
constexpr uint64_t kMaxSlabUnits = 32;  // a slab longer than this holds a single block
constexpr uint64_t kWasteDivisor = 16;  // a slab may waste one part in so many
constexpr int kSlotPagesBits = 40;

uint64_t unit_bytes_for(uint64_t capacity_bytes) {
  return std::clamp(std::bit_floor(std::max<uint64_t>(capacity_bytes / kUnitsWanted, 1)), kMinUnit, kMaxUnit);
}
}  // namespace

Arena::Arena(uint64_t capacity_bytes, std::atomic<uint64_t>* geometry)
    : unit_(unit_bytes_for(capacity_bytes)), geometry_(geometry), unit_slab_(capacity_bytes / unit_, kNobody) {}

uint64_t Arena::geometry_words(uint64_t capacity_bytes) { return capacity_bytes / unit_bytes_for(capacity_bytes) + 1; }

void Arena::set_frontier(uint64_t bytes) {
  const auto ready = static_cast<uint32_t>(std::min<uint64_t>(bytes / unit_, unit_slab_.size()));
  if (ready <= units_ready_) return;
  give_units(units_ready_, ready - units_ready_);
  units_ready_ = ready;
}

// Sixteen classes to a doubling, at least a page apart: at most 6 % of a block is lost to rounding.
uint64_t Arena::size_class(uint64_t length) {
  return round_up(length, std::max<uint64_t>(kPageBytes, std::bit_floor(length) / 16));
}

// The shortest slab that wastes little of itself.
uint64_t Arena::slab_bytes_for(uint64_t length) const {
  const uint64_t slot = size_class(length);
  const uint64_t least = (slot + unit_ - 1) / unit_;
  uint64_t best = least;
  double best_waste = 2;
  for (uint64_t units = least; units <= std::max(least, kMaxSlabUnits); ++units) {
    const uint64_t bytes = units * unit_;
    const double waste = static_cast<double>(bytes % slot) / static_cast<double>(bytes);
    if (waste < best_waste) best = units, best_waste = waste;
    if (waste <= 1.0 / kWasteDivisor) break;
  }
  return std::min<uint64_t>(best, std::max<uint64_t>(least, unit_slab_.size() / 8)) * unit_;
}

Extent Arena::slot_extent(const Slab& slab, uint32_t slot) const {
  const uint64_t begin = slab.first_unit * unit_ + slot * slab.slot_bytes;
  const uint64_t end = std::min(begin + slab.slot_bytes, (slab.first_unit + slab.units) * unit_);
  return {begin, end - begin};
}

std::optional<uint32_t> Arena::find_units(uint32_t count) {
  if (count >= hopeless_run_) return std::nullopt;
  for (const auto& [first, length] : free_runs_)
    if (length >= count) return first;
  hopeless_run_ = count;
  return std::nullopt;
}

void Arena::take_units(uint32_t first, uint32_t count) {
  const auto after = free_runs_.upper_bound(first);
  KV_INVARIANT(after != free_runs_.begin());
  const auto run = std::prev(after);
  const uint32_t begin = run->first, end = begin + run->second;
  KV_INVARIANT(begin <= first && first + count <= end);
  free_runs_.erase(run);
  if (begin < first) free_runs_.emplace(begin, first - begin);
  if (first + count < end) free_runs_.emplace(first + count, end - first - count);
}

void Arena::give_units(uint32_t first, uint32_t count) {
  const auto above = free_runs_.lower_bound(first);
  if (above != free_runs_.end() && above->first == first + count) {
    count += above->second;
    free_runs_.erase(above);
  }
  const auto below = free_runs_.lower_bound(first);
  if (below != free_runs_.begin() && std::prev(below)->first + std::prev(below)->second == first)
    std::prev(below)->second += count;
  else
    free_runs_.emplace(first, count);
  hopeless_run_ = kNobody;
}

// One more than fit for the tail that is too short for a slot.
uint32_t Arena::slot_count(const Slab& slab) const {
  return normal_slots(slab) + (slab.units * unit_ % slab.slot_bytes != 0 ? 1 : 0);
}

void Arena::part(Slab& slab) {
  if (slab.all == kNobody) return;
  slab.slots.assign(slot_count(slab), slab.all);
  slab.all = kNobody;
}

uint32_t Arena::add_slab(uint32_t first_unit, uint32_t units, uint64_t slot_bytes, uint32_t all) {
  if (unused_slabs_.empty()) {
    unused_slabs_.push_back(static_cast<uint32_t>(slabs_.size()));
    slabs_.emplace_back();
  }
  const uint32_t id = unused_slabs_.back();
  unused_slabs_.pop_back();
  Slab& slab = slabs_[id];
  slab = Slab{
      .first_unit = first_unit, .units = units, .used = 0, .slot_bytes = slot_bytes, .slots = {}, .free = {}, .listed = false};
  slab.all = all;
  if (all != kNobody) {
    slab.used = slot_count(slab);
  } else {
    slab.slots.assign(slot_count(slab), kNobody);
    for (uint32_t i = normal_slots(slab); i-- > 0;) slab.free.push_back(i);
  }
  std::fill_n(unit_slab_.begin() + first_unit, units, id);
  take_units(first_unit, units);
  if (geometry_)
    geometry_[first_unit].store(uint64_t{units} << kSlotPagesBits | slot_bytes / kPageBytes, std::memory_order_relaxed);
  return id;
}

bool Arena::has_room(uint64_t length) {
  const uint64_t slot = size_class(length);
  const auto found = classes_.find(slot);
  if (found != classes_.end())
    for (uint32_t id : found->second)
      if (!slabs_[id].free.empty()) return true;
  return find_units(static_cast<uint32_t>((slot + unit_ - 1) / unit_)).has_value();
}

size_t Arena::room(uint64_t length, size_t most) {
  const uint64_t slot = size_class(length);
  const uint64_t slab = slab_bytes_for(length) / unit_, shortest = (slot + unit_ - 1) / unit_;
  size_t count = 0;
  for (auto run = free_runs_.begin(); run != free_runs_.end() && count < most; ++run)
    count += run->second / slab * (slab * unit_ / slot) + run->second % slab / shortest * (shortest * unit_ / slot);
  const auto found = classes_.find(slot);
  if (found != classes_.end())
    for (auto id = found->second.rbegin(); id != found->second.rend() && count < most; ++id) count += slabs_[*id].free.size();
  return std::min(count, most);
}

void Arena::list(uint32_t id) {
  if (slabs_[id].listed || slabs_[id].free.empty()) return;
  slabs_[id].listed = true;
  classes_[slabs_[id].slot_bytes].push_back(id);
}

Arena::Slab* Arena::new_slab(uint64_t length) {
  const uint64_t slot = size_class(length);
  if ((slot + unit_ - 1) / unit_ >= hopeless_run_) return nullptr;  // a full pool says so at every create
  uint64_t units = slab_bytes_for(length) / unit_;
  std::optional<uint32_t> first = find_units(static_cast<uint32_t>(units));
  if (!first) {  // a shorter one may still fit
    units = (slot + unit_ - 1) / unit_;
    first = find_units(static_cast<uint32_t>(units));
  }
  if (!first) return nullptr;
  const uint32_t id = add_slab(*first, static_cast<uint32_t>(units), slot);
  list(id);
  return &slabs_[id];
}

std::optional<uint64_t> Arena::allocate(uint64_t length, uint32_t record) {
  std::vector<uint32_t>& candidates = classes_[size_class(length)];
  while (!candidates.empty() && slabs_[candidates.back()].free.empty()) {
    slabs_[candidates.back()].listed = false;
    candidates.pop_back();
  }
  Slab* slab = candidates.empty() ? new_slab(length) : &slabs_[candidates.back()];
  if (!slab) return std::nullopt;
  const uint32_t slot = slab->free.back();
  slab->free.pop_back();
  slab->slots[slot] = record;
  slab->used += 1;
  slack_ += slab->slot_bytes - length;
  return slot_extent(*slab, slot).offset;
}

// Calls f(slab id, what of the extent lies in it) for every slab that the extent overlaps.
template <class F>
void Arena::each_slab(Extent extent, F&& f) const {
  for (uint64_t at = extent.offset; at < extent.end();) {
    const uint32_t id = unit_slab_[at / unit_];
    KV_INVARIANT(id != kNobody);
    const uint64_t end = std::min(extent.end(), slab_extent(slabs_[id]).end());
    f(id, Extent{at, end - at});
    at = end;
  }
}

// Calls f(slab id, slot) for every slot that the extent overlaps. Stops early if f returns false.
template <class F>
void Arena::each_slot(Extent extent, F&& f) const {
  for (uint64_t at = extent.offset; at < extent.end();) {
    const uint32_t id = unit_slab_[at / unit_];
    KV_INVARIANT(id != kNobody);
    const Slab& slab = slabs_[id];
    const auto slot = static_cast<uint32_t>((at - slab.first_unit * unit_) / slab.slot_bytes);
    const uint64_t next = slot_extent(slab, slot).end();
    if (!f(id, slot)) return;
    at = next;
  }
}

void Arena::prefetch(Extent extent) const {
  const Slab& slab = slabs_[unit_slab_[extent.offset / unit_]];
  if (slab.all != kNobody) return;
  __builtin_prefetch(&slab.slots[(extent.offset - slab.first_unit * unit_) / slab.slot_bytes], 1);
  __builtin_prefetch(slab.free.data() + slab.free.size(), 1);
}

void Arena::release(Extent extent, uint32_t record) {
  uint64_t slots_bytes = 0;
  each_slab(extent, [&](uint32_t id, Extent here) {
    Slab& slab = slabs_[id];
    if (slab.all == record && here.length == slab_extent(slab).length) {
      slab.all = kNobody, slab.used = 0, slots_bytes += here.length;
      return dissolve_if_empty(id);
    }
    part(slab);
    each_slot(here, [&](uint32_t, uint32_t slot) {
      KV_INVARIANT(slab.slots[slot] == record);
      slab.slots[slot] = kNobody;
      slab.used -= 1;
      slots_bytes += slot_extent(slab, slot).length;
      if (slot < normal_slots(slab)) slab.free.push_back(slot);
      return true;
    });
    dissolve_if_empty(id);
  });
  slack_ -= slots_bytes - extent.length;
}

void Arena::dissolve_if_empty(uint32_t id) {
  Slab& slab = slabs_[id];
  if (slab.used > 0) return list(id);
  if (slab.listed) {
    std::vector<uint32_t>& peers = classes_[slab.slot_bytes];
    peers.erase(std::find(peers.begin(), peers.end(), id));
    if (peers.empty()) classes_.erase(slab.slot_bytes);
  }
  std::fill_n(unit_slab_.begin() + slab.first_unit, slab.units, kNobody);
  give_units(slab.first_unit, slab.units);
  if (geometry_) geometry_[slab.first_unit].store(0, std::memory_order_relaxed);
  slab = Slab{};
  unused_slabs_.push_back(id);
}

// Cuts the slab that the geometry remembers over this unit, if it fits between what stands already.
bool Arena::restore_slab(uint32_t unit) {
  if (!geometry_) return false;
  uint32_t first = unit;
  uint64_t word = 0;
  while ((word = geometry_[first].load(std::memory_order_relaxed)) == 0 && first > 0 && unit - first < kMaxSlabUnits) --first;
  const uint64_t units = word >> kSlotPagesBits;
  const uint64_t slot = (word & ((1ull << kSlotPagesBits) - 1)) * kPageBytes;
  if (units == 0 || slot == 0 || first + units <= unit || first + units > units_ready_ || slot > units * unit_) return false;
  for (uint64_t u = first; u < first + units; ++u)
    if (unit_slab_[u] != kNobody) return false;
  list(add_slab(first, static_cast<uint32_t>(units), slot));
  return true;
}

bool Arena::claim(Extent extent, uint32_t record) {
  if (extent.length == 0 || extent.end() > units_ready_ * unit_) return false;
  const auto first = static_cast<uint32_t>(extent.offset / unit_);
  const auto last = static_cast<uint32_t>((extent.end() - 1) / unit_);
  bool free = true;
  for (uint32_t unit = first; unit <= last && free; ++unit) {
    if (unit_slab_[unit] == kNobody) continue;
    const uint64_t begin = std::max(extent.offset, unit * unit_);
    each_slot({begin, std::min(extent.end(), (unit + 1) * unit_) - begin},
              [&](uint32_t id, uint32_t slot) { return free = slabs_[id].who(slot) == kNobody; });
  }
  if (!free) return false;
  for (uint32_t unit = first; unit <= last; ++unit) {
    if (unit_slab_[unit] != kNobody || restore_slab(unit)) continue;
    // Units that the extent fills are one slot; of the units at its ends it takes only its pages, so that its neighbour can stand
    // there.
    auto filled = [&](uint32_t u) { return u * unit_ >= extent.offset && (u + 1) * unit_ <= extent.end(); };
    uint32_t run = 1;
    while (filled(unit) && unit + run <= last && filled(unit + run) && unit_slab_[unit + run] == kNobody) ++run;
    list(add_slab(unit, run, filled(unit) ? run * unit_ : kPageBytes));
  }
  take_slots(extent, record);
  return true;
}

// All of them are free. Those of a slab leave its list of free ones in one pass: a region has thousands.
void Arena::take_slots(Extent extent, uint32_t record) {
  uint64_t slots_bytes = 0;
  each_slab(extent, [&](uint32_t id, Extent here) {
    Slab& slab = slabs_[id];
    each_slot(here, [&](uint32_t, uint32_t slot) {
      slab.slots[slot] = record;
      slab.used += 1;
      slots_bytes += slot_extent(slab, slot).length;
      return true;
    });
    std::erase_if(slab.free, [&](uint32_t slot) { return slab.slots[slot] != kNobody; });
  });
  slack_ += slots_bytes - extent.length;
}

std::optional<uint64_t> Arena::allocate_pages(uint64_t length, uint32_t record) {
  const auto units = static_cast<uint32_t>((length + unit_ - 1) / unit_), whole = static_cast<uint32_t>(length / unit_);
  const std::optional<uint32_t> first = find_units(units);
  if (!first) return std::nullopt;
  for (uint32_t unit = *first; unit < *first + whole; ++unit) add_slab(unit, 1, kPageBytes, record);
  if (whole < units) {
    list(add_slab(*first + whole, 1, kPageBytes));
    take_slots({(*first + whole) * unit_, length % unit_}, record);
  }
  return *first * unit_;
}

uint32_t Arena::holder(Extent extent) const {
  if (extent.length == 0 || extent.end() > units_ready_ * unit_) return kNobody;
  uint32_t who = kNobody;
  for (uint64_t at = extent.offset; at < extent.end();) {
    const uint32_t id = unit_slab_[at / unit_];
    if (id == kNobody) return kNobody;
    const Slab& slab = slabs_[id];
    const auto slot = static_cast<uint32_t>((at - slab.first_unit * unit_) / slab.slot_bytes);
    Extent there = slot_extent(slab, slot);
    if (there.offset != at || there.end() > extent.end() || slab.who(slot) == kNobody) return kNobody;
    if (at != extent.offset && slab.who(slot) != who) return kNobody;
    if (const Extent all = slab_extent(slab); slab.all != kNobody && all.end() <= extent.end()) there.length = all.end() - at;
    who = slab.who(slot), at = there.end();
  }
  return who;
}

void Arena::hand_over(Extent extent, uint32_t from, uint32_t to) {
  each_slab(extent, [&](uint32_t id, Extent here) {
    Slab& slab = slabs_[id];
    if (slab.all != kNobody && here.length == slab_extent(slab).length) {
      KV_INVARIANT(slab.all == from);
      slab.all = to;
      return;
    }
    if (here.length == slab_extent(slab).length) {
      KV_INVARIANT(slab.slots.front() == from && slab.slots.back() == from && slab.free.empty());
      slab.slots.clear(), slab.all = to;
      return;
    }
    part(slab);
    each_slot(here, [&](uint32_t, uint32_t slot) {
      KV_INVARIANT(slab.slots[slot] == from);
      slab.slots[slot] = to;
      return true;
    });
  });
}

}  // namespace kv
