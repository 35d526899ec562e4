// A store's layouts: told by blob, kept while a block has them, and then while their slots are not needed for others.

#include <algorithm>

#include "core/base/error.h"
#include "core/format/protocol.h"
#include "core/store/store.h"

namespace kv {
namespace {
constexpr int kMostEvicted = 4;                // layouts whose blocks are pinned, before a new one is refused
constexpr uint32_t kRecordsInASlice = 16'384;  // looked at in one hold of the lock: some 100 us
}  // namespace

const Layout& Store::layout_of(uint32_t slot) const {
  KV_INVARIANT(layouts_.is_known(slot));  // a block has it
  return layouts_.in(slot)->layout;
}

bool Store::older_readers() {
  reap_sessions(kReapSlice);
  return std::any_of(sessions_.begin(), sessions_.end(),
                     [](const auto& entry) { return entry.second->file && entry.second->protocol < protocol::kVersionLayouts; });
}

uint32_t Store::register_layout(std::span<const uint8_t> blob, uint32_t session) {
  Layout layout = Layout::parse(blob);
  const Key digest = layout_digest(layout);
  const Entry entry(*this);
  auto known = [&]() REQUIRES(mutex_) -> std::optional<uint32_t> {
    const LayoutTable::Known found = layouts_.by_digest(digest);
    if (!found) return std::nullopt;
    if (const auto by = sessions_.find(session); by != sessions_.end()) by->second->layouts.set(layout_slot(found->id));
    return found->id;
  };
  if (const auto id = known()) return *id;
  const bool older = older_readers();
  LayoutTable::Held held;
  for (auto& [id, holder] : sessions_) held |= holder->layouts;
  std::optional<uint32_t> slot = layouts_.take(held, older);
  uint64_t after = 0;
  for (int tries = 0; !slot && !older && tries < kMostEvicted; ++tries) {
    auto victim = layouts_.victim(held, after);
    if (!victim && held.any()) held.reset(), after = 0, victim = layouts_.victim(held, after);
    if (!victim) break;
    evict_layout(*victim);
    slot = layouts_.take(held, older);
  }
  if (const auto id = known()) return slot ? layouts_.give_back(*slot), *id : *id;
  if (!slot) throw Error(Code::NoSpace, layouts_.full(older));
  for (auto& [id, holder] : sessions_) holder->layouts.reset(*slot);
  if (layouts_.on_disk(*slot)) forget_layout_on_disk(*slot);
  if (known()) {  // registered by another meanwhile
    layouts_.give_back(*slot);
    return *known();
  }
  layouts_.put(*slot, std::move(layout));
  return *known();
}

// Its sealed blocks go; what is pinned of them or being written keeps it. In slices.
void Store::evict_layout(uint32_t slot) {
  for (uint32_t record = 0; record < index_.max_blocks() && layouts_.blocks(slot); ++record) {
    if (record % kRecordsInASlice == kRecordsInASlice - 1) scan_zombies(), mutex_.give_way();
    const uint32_t block = block_of(record);  // a piece has the layout of its region
    if (shape_of(record).layout != slot || control(block).state() != State::Sealed) continue;
    to_zombie(block, Event::Evict);
    counters_.evictions += 1;
  }
  scan_zombies();
}

// Their files name it by its digest, so they lose nothing but what `ls` shows of them. In slices.
void Store::forget_layout_on_disk(uint32_t slot) {
  for (uint32_t record = 0; record < index_.max_blocks() && layouts_.on_disk(slot); ++record) {
    if (record % kRecordsInASlice == kRecordsInASlice - 1) mutex_.give_way();
    const Shape shape = shape_of(record);
    if (control(record).state() != State::Disk || shape.tokens == 0 || shape.layout != slot) continue;
    layouts_.went_from_disk(slot);
    Record& r = index_.record(record);
    Writing writing(r.sequence);
    r.shape.store(Shape{kUnknownLayout, shape.priority, 0, 0}.pack(), std::memory_order_relaxed);
  }
}

LayoutTable::Known Store::find_layout(const Key& digest) {
  const Lock lock(mutex_);
  return layouts_.by_digest(digest);
}

LayoutTable::Known Store::layout(uint32_t id) {
  const Lock lock(mutex_);
  const uint32_t slot = layout_slot(id);
  return layouts_.is_known(slot) && layouts_.in(slot)->id == id ? layouts_.in(slot) : nullptr;
}

std::vector<LayoutInfo> Store::layouts() {
  const Lock lock(mutex_);
  std::vector<LayoutInfo> out;
  for (uint32_t slot = 0; slot < layouts_.size(); ++slot) {
    if (!layouts_.is_known(slot)) continue;
    const auto held =
        std::count_if(sessions_.begin(), sessions_.end(), [slot](auto& entry) { return entry.second->layouts[slot]; });
    out.push_back({layouts_.in(slot), layouts_.blocks(slot), layouts_.on_disk(slot), static_cast<uint32_t>(held)});
  }
  return out;
}

// A record as others see it: with the id of its layout in place of the slot.
Shape Store::told(Shape shape) const {
  if (shape.tokens != 0 && layouts_.is_known(shape.layout)) shape.layout = layouts_.in(shape.layout)->id;
  return shape;
}

// ---------------------------------------------------------------- records come and go

void Store::free_record(uint32_t record, Event event) {
  const Shape shape = shape_of(record);
  if (control(record).state() != State::Disk)
    layouts_.went(shape.layout);
  else if (shape.tokens != 0)
    layouts_.went_from_disk(shape.layout);
  transition(record, event, State::Free, 0);
  blocks_.records -= 1;
  index_.upkeep(record).link.store(blocks_.free_head, std::memory_order_relaxed);
  blocks_.free_head = record;
}

// Of a block adopted on disk: its layout may be one that went.
void Store::adopt_layout_on_disk(uint32_t record) {
  const Shape shape = shape_of(record);
  if (shape.tokens != 0 && layouts_.is_known(shape.layout) && shape.priority <= kMaxPriority)
    layouts_.came_on_disk(shape.layout);
  else
    index_.record(record).shape.store(Shape{kUnknownLayout, std::min(shape.priority, kMaxPriority), 0, 0}.pack());
}

}  // namespace kv
