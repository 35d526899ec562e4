// Regions: memory that a client divides by itself, and blocks that are sealed where they lie in it.
//
// A region is a set of runs: CREATED records of one session, with one number as their fingerprint, each cut in pages by the
// arena. A block published out of it takes a part of one run: what is left of that stays a run, or two. So a published block is a
// block as any other, with an extent of its own: found, read, written to disk, evicted, adopted. Given back, it becomes a run
// again, and one with the runs beside it. What is inside a run nobody but its client knows; when the session ends, runs are
// quarantined as any block that was not sealed.
//
// Invariant: at any moment each page of a region belongs to one record, and to the same one in the table and in the arena.

#include <map>

#include "core/base/atomics.h"
#include "core/base/error.h"
#include "core/base/futex.h"
#include "core/base/polling.h"
#include "core/store/each_pin.h"

namespace kv {
namespace {
constexpr size_t kBlocksOfASlice = 256;
}  // namespace

// For a block and for what is left behind it.
bool Store::has_two_records() {
  auto two = [&]() REQUIRES(mutex_) {
    return blocks_.free_head != Index::kAbsent &&
           index_.upkeep(blocks_.free_head).link.load(std::memory_order_relaxed) != Index::kAbsent;
  };
  for (int tries = 0; tries < 2 && !two() && disk_.spare_records(); ++tries) free_spare_record();
  return two();
}

bool Store::is_open_run(uint32_t record, uint32_t owner) {
  return record != Arena::kNobody && control(record).state() == State::Created && !own_pins_.contains(record) &&
         index_.upkeep(record).owner.load(std::memory_order_relaxed) == owner && layout_of(shape_of(record).layout).is_one_page();
}

// The run of that region which has this page, or kNobody.
uint32_t Store::run_at(uint64_t offset, uint32_t owner, uint64_t region) {
  const uint32_t record = arena_.holder({offset, kPageBytes});
  const bool good = is_open_run(record, owner) && index_.upkeep(record).fingerprint.load(std::memory_order_relaxed) == region;
  return good ? record : Arena::kNobody;
}

void Store::move_run(uint32_t record, Extent to) {
  Record& r = index_.record(record);
  const Writing writing(r.sequence);
  r.extent.store(to.pack(), std::memory_order_relaxed);
}

// Its memory is another's already. Nobody reads it: none of its layers was ever there.
void Store::end_run(Session& owner, uint32_t record) {
  drop_unsealed(owner, record);
  blocks_.created -= 1, blocks_.used_bytes -= extent_of(record).length;
  index_.erase(key_of(record), record);
  transition(record, Event::Abort, State::Zombie, 0);
  publish_progress(record, Phase::Ended);
  free_record(record, Event::LastPinGone);
}

void Store::undo_entry(uint32_t record, bool indexed) {
  blocks_.used_bytes -= extent_of(record).length;
  if (indexed) {
    blocks_.created -= 1;
    index_.insert_contents(record);  // as erase() expects
    index_.erase(key_of(record), record);
    transition(record, Event::Abort, State::Zombie, 0);
  }
  free_record(record, Event::LastPinGone);
}

RegionChange Store::publish_one(const CreateRequest& request, const Publish& item, const KnownLayout& known, Session& owner,
                                double now) {
  Granted said;
  auto refused = [&] { return RegionChange{.status = static_cast<uint8_t>(said.status)}; };
  const Extent run{item.offset, known.layout.extent_bytes(item.wanted.tokens)};
  const uint32_t whole = arena_.holder(run);
  uint32_t found;
  if (!has_two_records() || !is_claimable(item.wanted.key, now, said, found) || !is_open_run(whole, request.owner) ||
      index_.find_exclusive(item.rest) != Index::kAbsent || item.rest == item.wanted.key)
    return refused();
  const Extent before = extent_of(whole);
  if (run.offset < before.offset || run.end() > before.end()) return refused();  // its slot may be longer than it is
  const Extent left{before.offset, run.offset - before.offset}, right{run.end(), before.end() - run.end()};
  const uint64_t region = index_.upkeep(whole).fingerprint.load(std::memory_order_relaxed);
  const Shape shape = shape_of(whole);
  const uint32_t block = blocks_.free_head;
  if (!enter(request, item.wanted, layout_slot(known.id), run, found, now)) return undo_entry(block, false), refused();
  RegionChange out{.status = static_cast<uint8_t>(Grant::Granted)};
  // What is left on the longer side stays this record's: each page of the other changes hands, with the lock held.
  const auto& [shorter, longer] = std::minmax(left, right, [](const Extent& a, const Extent& b) { return a.length < b.length; });
  if (shorter.length) {
    const uint32_t rest = blocks_.free_head;
    const CreateRequest same{request.owner, 0, shape.priority, 0, {}};
    const CreateItem part{.key = item.rest, .fingerprint = region, .tokens = shape.tokens};
    if (!enter(same, part, shape.layout, shorter, Index::kAbsent, now))
      return undo_entry(rest, false), undo_entry(block, true), refused();
    index_.insert_contents(rest);
    add_unsealed(owner, rest);
    arena_.hand_over(shorter, whole, rest);
    out.opened = {rest, control(rest).generation()};
  }
  arena_.hand_over(run, whole, block);
  blocks_.used_bytes -= before.length;
  if (!longer.length) {
    out.ended = {whole, control(whole).generation()};
    blocks_.used_bytes += before.length;
    end_run(owner, whole);
  } else {
    move_run(whole, longer);
    blocks_.used_bytes += extent_of(whole).length;
  }
  index_.insert_contents(block);
  add_unsealed(owner, block);
  out.block = {block, control(block).generation()};
  counters_.creates += 1;
  seal_one(request.owner, {out.block, item.checksummed});
  fresh_.add(out.block, run.length, monotonic_ns(), options_.capacity_bytes / 2);  // until its owner has pinned it
  if (anybody_waits()) futex_wake_all(progress_[block]);
  return out;
}

Store::Session* Store::still_there(uint32_t owner, const KnownLayout& known) {
  const auto found = sessions_.find(owner);
  const uint32_t slot = layout_slot(known.id);
  const bool there = found != sessions_.end() && !found->second->ended && layouts_.is_known(slot);
  return there && layouts_.in(slot)->id == known.id ? &*found->second : nullptr;
}

std::vector<RegionChange> Store::publish(const CreateRequest& request, std::span<const Publish> items) {
  const Entry entry(*this);
  check_pool();
  Session* owner = &session_of(request.owner);
  const LayoutTable::Known known = layouts_.by_id(request.layout);
  for (const Publish& item : items)
    if (item.wanted.tokens == 0 || item.wanted.tokens > known->layout.block_tokens ||
        item.wanted.base_position > kMaxBasePosition || item.offset % kPageBytes || item.offset > pool_.capacity())
      throw Error(Code::InvalidArgument, "a block of " + std::to_string(item.wanted.tokens) + " tokens at " +
                                             std::to_string(item.offset) + " cannot be: its layout has 1 to " +
                                             std::to_string(known->layout.block_tokens) + " tokens, memory has pages of " +
                                             std::to_string(kPageBytes));
  std::vector<RegionChange> out(items.size(), RegionChange{.status = static_cast<uint8_t>(Grant::NoSpace)});
  double now = use_now();
  Slice slice(kBlocksOfASlice, 1);
  for (size_t i = 0; i < items.size(); ++i) {
    if (slice.over()) {
      mutex_.give_way(), slice.again();
      if (!(owner = still_there(request.owner, *known))) break;  // what was done is answered all the same
      now = std::min(now, clock_.value);                         // all scores may have been divided
    }
    out[i] = publish_one(request, items[i], *known, *owner, now);
  }
  return out;
}

// Of the records asked for, zombies all: those that another session reads, the daemon itself, or their owner more than once.
RecordSet Store::held_by_others(uint32_t owner) {
  RecordSet held;
  held.resize(index_.max_blocks());
  std::map<uint32_t, uint32_t> of_owner;
  uint64_t pins = 0;
  fence_full();  // between the change of the generations and the reading of the pins, as in scan_zombies
  each_pin_of([&](uint32_t session, uint32_t record, uint64_t generation, uint32_t pages) REQUIRES(mutex_) {
    ++pins;
    if (!pins_.asked.contains(record) || generation + 1 != control(record).generation() || !honoured(record, pages)) return;
    if ((session != owner || ++of_owner[record] > 1) && !held.contains(record)) held.add(record);
  });
  pins_.read += pins_.last_scan = pins;
  return held;
}

// Of a zombie that nobody holds: its memory goes to the run before it, to the one behind, or becomes one.
RegionChange Store::take_one(const CreateRequest& request, const TakeBack& item, uint32_t layout_slot, Session& owner) {
  RegionChange out{.status = static_cast<uint8_t>(Back::Held)};
  const uint32_t record = item.block.record;
  const Control now = control(record);
  if (now.state() != State::Zombie || now.generation() != item.block.generation + 1)  // it went while the lock was given away
    return {.status = static_cast<uint8_t>(Back::Gone)};
  const Extent extent = extent_of(record);
  const uint32_t before = extent.offset ? run_at(extent.offset - kPageBytes, owner.id, item.region) : Arena::kNobody;
  const uint32_t behind = run_at(extent.end(), owner.id, item.region);
  uint32_t into = before != Arena::kNobody ? before : behind;
  if (into == Arena::kNobody) {
    if (!has_two_records() || index_.find_exclusive(item.key) != Index::kAbsent) return out;
    into = blocks_.free_head;
    const CreateItem run{.key = item.key, .fingerprint = item.region, .tokens = 1};
    if (!enter(request, run, layout_slot, extent, Index::kAbsent, use_now())) return undo_entry(into, false), out;
    index_.insert_contents(into);
    add_unsealed(owner, into);
    out.opened = {into, control(into).generation()};
    arena_.hand_over(extent, record, into);
    blocks_.used_bytes -= extent.length;
  } else {
    if (before != Arena::kNobody && behind != Arena::kNobody) {
      uint32_t last = behind;
      if (extent_of(last).length > extent_of(into).length) std::swap(into, last);  // the fewer pages change hands
      const Extent there = extent_of(last);
      arena_.hand_over(there, last, into);
      blocks_.used_bytes += there.length;  // end_run() takes it off
      out.ended = {last, control(last).generation()};
      end_run(owner, last);
      const Extent kept = extent_of(into);
      arena_.hand_over(extent, record, into);
      move_run(into, {std::min(there.offset, kept.offset), there.length + extent.length + kept.length});
    } else {
      const Extent there = extent_of(into);
      arena_.hand_over(extent, record, into);
      move_run(into, {std::min(there.offset, extent.offset), there.length + extent.length});
    }
  }
  const auto& zombies = pins_.zombies;
  const auto place = std::find_if(zombies.begin(), zombies.end(), [&](const Zombie& zombie) { return zombie.record == record; });
  KV_INVARIANT(place != zombies.end());
  pins_.remove_zombie(static_cast<size_t>(place - zombies.begin()));
  if (!demote(record)) free_record(record, Event::LastPinGone);
  out.status = static_cast<uint8_t>(Back::Taken), out.block = item.block;
  return out;
}

std::vector<RegionChange> Store::take_back(uint32_t owner_id, uint32_t layout, std::span<const TakeBack> items) {
  const Entry entry(*this);
  check_pool();
  Session* owner = &session_of(owner_id);
  const LayoutTable::Known known = layouts_.by_id(layout);
  if (!known->layout.is_one_page())
    throw Error(Code::InvalidArgument, "a block of a region's layout has " +
                                           std::to_string(known->layout.extent_bytes(known->layout.block_tokens)) +
                                           " bytes, the limit is " + std::to_string(kPageBytes));
  std::vector<RegionChange> out(items.size(), RegionChange{.status = static_cast<uint8_t>(Back::Gone)});
  for (size_t i = 0; i < items.size(); ++i) {
    const auto [record, generation] = items[i].block;
    if (record >= index_.max_blocks() || pins_.asked.contains(record)) continue;
    if (index_.upkeep(record).owner.load(std::memory_order_relaxed) != owner_id) continue;
    const Control now = control(record);
    if (now.state() == State::Sealed && now.generation() == generation)
      to_zombie(record, Event::Evict);
    else if (now.state() != State::Zombie || now.generation() != generation + 1 || now.flags() & kFlagQuarantined)
      continue;
    pins_.asked.add(record);
    out[i].status = static_cast<uint8_t>(Back::Held);
  }
  const RecordSet held = held_by_others(owner_id);
  const auto is_asked = [&](size_t i) { return out[i].status == static_cast<uint8_t>(Back::Held); };
  for (size_t i = 0; i < items.size(); ++i)
    if (is_asked(i)) pins_.asked.remove(items[i].block.record);
  const CreateRequest request{owner_id, layout, kDefaultPriority, 0, {}};
  Slice slice(kBlocksOfASlice, 1);  // nobody can pin what is a zombie already
  for (size_t i = 0; i < items.size(); ++i) {
    if (!is_asked(i) || held.contains(items[i].block.record)) continue;
    if (slice.over()) {
      mutex_.give_way(), slice.again();
      if (!(owner = still_there(owner_id, *known))) break;
    }
    out[i] = take_one(request, items[i], layout_slot(known->id), *owner);
  }
  return out;
}

}  // namespace kv
