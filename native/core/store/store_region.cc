// Regions: memory that a client divides by itself, and blocks that are sealed where they lie in it.
//
// A region is a set of runs: CREATED records of one session, with one number as their fingerprint, each cut in pages by the
// arena. A block published out of it takes a part of one run: what is left of that stays a run, or two. So a published block is a
// block as any other, with an extent of its own: found, read, written to disk, evicted, adopted. A block whose buffers lie apart
// takes a part for each of its pieces (store_pieces.cc). Given back, its memory becomes runs again, and one with the runs beside
// it. What is inside a run nobody but its client knows; when the session ends, runs are quarantined as any block that was not
// sealed.
//
// Invariant: whenever the lock is free each page of a region belongs to one record, and to the same one in the table and in the
// arena. Between two steps of one operation the table may name a page twice, never not at all (Store::adopt_records).

#include <algorithm>
#include <map>

#include "core/base/atomics.h"
#include "core/base/error.h"
#include "core/base/futex.h"
#include "core/base/polling.h"
#include "core/store/each_pin.h"

namespace kv {
namespace {
// Inside the pool, and none over another. It sorts them, so it is no work for who has the lock.
bool lie_apart(std::span<const Extent> pieces, uint64_t capacity) {
  std::vector<Extent> sorted(pieces.begin(), pieces.end());
  for (const Extent& piece : sorted)
    if (piece.length == 0 || piece.length > capacity || piece.offset > capacity - piece.length) return false;
  std::sort(sorted.begin(), sorted.end(), [](const Extent& a, const Extent& b) { return a.offset < b.offset; });
  for (size_t i = 1; i < sorted.size(); ++i)
    if (sorted[i - 1].end() > sorted[i].offset) return false;
  return true;
}

// Whoever reads one goes by its layout; and what stands behind its layers, which is small, is read in one piece.
void check_item(const Publish& item, const Layout& layout, uint64_t capacity) {
  const uint32_t tokens = item.wanted.tokens;
  if (tokens == 0 || tokens > layout.block_tokens || item.wanted.base_position > kMaxBasePosition || item.offset % kPageBytes ||
      item.offset > capacity)
    throw Error(Code::InvalidArgument, "a block of " + std::to_string(tokens) + " tokens at " + std::to_string(item.offset) +
                                           " cannot be: its layout has 1 to " + std::to_string(layout.block_tokens) +
                                           " tokens, memory has pages of " + std::to_string(kPageBytes));
  if (item.pieces.empty()) return;
  const uint64_t length = layout.extent_bytes(tokens), layers = layout.layers_bytes(tokens);
  uint64_t bytes = 0;
  const bool good = item.pieces.size() <= kMaxPieces && lie_apart(item.pieces, capacity);
  for (const Extent& piece : item.pieces) bytes += piece.length;
  if (!good || bytes != length || length - item.pieces.back().length > layers)
    throw Error(Code::InvalidArgument, std::to_string(item.pieces.size()) + " pieces of " + std::to_string(bytes) +
                                           " bytes cannot be a block of " + std::to_string(tokens) +
                                           " tokens: they must be at most " + std::to_string(kMaxPieces) +
                                           ", inside the pool and apart, " + std::to_string(length) +
                                           " bytes, and the last has all from byte " + std::to_string(layers) + " on");
}

// The keys of what is left of a region count up from the one that its client named, in their first word.
bool may_stand_beside(const Key& rest, const Key& key) {
  return !std::equal(rest.words.begin() + 1, rest.words.end(), key.words.begin() + 1);
}
}  // namespace

bool Store::may_have_records(uint64_t count) { return index_.max_blocks() - blocks_.records + disk_.spare_records() >= count; }

bool Store::has_records(uint64_t count) {
  while (index_.max_blocks() - blocks_.records < count && disk_.spare_records()) free_spare_record();
  return index_.max_blocks() - blocks_.records >= count;
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

// Takes `part` out of the run that it lies in, for the record `to`, which is entered already. What is left on the longer side
// stays that run: each page of the other changes hands, with the lock held. False: what is left could not be entered, and nothing
// was changed.
bool Store::carve(Extent part, uint32_t to, const Key& rest, RegionWork& work, RegionChange& out) {
  const uint32_t run = arena_.holder(part);
  const Extent before = extent_of(run);
  const Extent left{before.offset, part.offset - before.offset}, right{part.end(), before.end() - part.end()};
  const auto& [shorter, longer] = std::minmax(left, right, [](const Extent& a, const Extent& b) { return a.length < b.length; });
  if (shorter.length) {
    const Shape shape = shape_of(run);
    const uint32_t opened = blocks_.free_head;
    const CreateRequest same{work.owner_id, 0, shape.priority, 0, {}};
    const CreateItem item{
        .key = rest, .fingerprint = index_.upkeep(run).fingerprint.load(std::memory_order_relaxed), .tokens = shape.tokens};
    if (index_.find_exclusive(rest) != Index::kAbsent) return false;
    if (!enter(same, item, shape.layout, shorter, Index::kAbsent, work.now)) return undo_entry(opened, false), false;
    index_.insert_contents(opened);
    add_unsealed(*work.owner, opened);
    arena_.hand_over(shorter, run, opened);
    out.opened.push_back({opened, control(opened).generation()});
  }
  arena_.hand_over(part, run, to);
  if (longer.length) {
    move_run(run, longer);
    blocks_.used_bytes -= before.length - longer.length;
  } else {
    out.ended.push_back({run, control(run).generation()});
    end_run(*work.owner, run);  // takes off what it had
  }
  return true;
}

bool Store::is_in_open_run(Extent part, uint32_t owner) {
  const uint32_t run = arena_.holder(part);
  if (!is_open_run(run, owner)) return false;
  const Extent there = extent_of(run);
  return part.offset >= there.offset && part.end() <= there.end();  // its slot may be longer than it is
}

// In slices, one in pieces.
RegionChange Store::publish_one(const CreateRequest& request, const Publish& item, RegionWork& work) {
  Granted said;
  RegionChange out;
  uint32_t found;
  const uint64_t length = work.known.layout.extent_bytes(item.wanted.tokens);
  const std::vector<Extent> pieces = item.pieces.empty() ? std::vector<Extent>{{item.offset, length}} : item.pieces;
  const uint32_t slot = layout_slot(work.known.id);
  const auto open = [&](const Extent& piece) REQUIRES(mutex_) { return is_in_open_run(piece, request.owner); };
  const bool good = std::all_of(pieces.begin(), pieces.end(), open) && is_claimable(item.wanted.key, work.now, said, found) &&
                    may_stand_beside(item.rest, item.wanted.key) && may_have_records(2 * pieces.size() + 1);
  out.status = static_cast<uint8_t>(said.status);
  if (!good) return out;
  uint32_t block;
  if (pieces.size() == 1) {
    if (!has_records(3)) return out;
    found = index_.find_exclusive(item.wanted.key);  // its file may have been forgotten
    block = blocks_.free_head;
    if (!enter(request, item.wanted, slot, pieces[0], found, work.now)) return undo_entry(block, false), out;
    if (!carve(pieces[0], block, item.rest, work, out)) return undo_entry(block, true), out;
  } else {
    const uint32_t first = cut_pieces(pieces, item.rest, work, out);
    if (first == Index::kAbsent) return out;
    // Others had the lock.
    const bool claimable = is_claimable(item.wanted.key, work.now, said, found);
    block = blocks_.free_head;
    const Extent extent = Extent::in_pieces_from(first, length);
    if (!claimable || !enter(request, item.wanted, slot, extent, found, work.now)) {
      if (claimable) undo_entry(block, false);
      out.status = static_cast<uint8_t>(said.status);
      Key rest = item.rest;  // each of its keys may be a run's
      rest.words[1] += 1;
      return_pieces(first, rest, work, out);
      return out;
    }
    name_block(first, block);
  }
  index_.insert_contents(block);
  add_unsealed(*work.owner, block);
  out.status = static_cast<uint8_t>(Grant::Granted);
  out.block = {block, control(block).generation()};
  counters_.creates += 1;
  seal_one(request.owner, {out.block, item.checksummed});
  fresh_.add(out.block, length, monotonic_ns(), options_.capacity_bytes / 2);  // until its owner has pinned it
  if (anybody_waits()) futex_wake_all(progress_[block]);
  return out;
}

// Between two steps: others have the lock where it is time. False: nothing more is to be done.
bool Store::goes_on(RegionWork& work) {
  if (work.slice.over()) {
    mutex_.give_way(), work.slice.again();
    const auto found = sessions_.find(work.owner_id);
    work.owner = found != sessions_.end() && !found->second->ended ? &*found->second : nullptr;
    const uint32_t slot = layout_slot(work.known.id);
    work.layout_stays = layouts_.is_known(slot) && layouts_.in(slot)->id == work.known.id;
    work.now = std::min(work.now, clock_.value);  // all scores may have been divided
  }
  return work.owner && work.layout_stays;
}

std::vector<RegionChange> Store::publish(const CreateRequest& request, std::span<const Publish> items) {
  const auto known = [&] {
    const Entry entry(*this);
    check_pool(), session_of(request.owner);
    return layouts_.by_id(request.layout);
  }();
  for (const Publish& item : items) check_item(item, known->layout, pool_.capacity());
  const Entry entry(*this);
  check_pool();
  layouts_.by_id(request.layout);
  RegionWork work{request.owner, *known, &session_of(request.owner), use_now()};
  std::vector<RegionChange> out(items.size(), RegionChange{.status = static_cast<uint8_t>(Grant::NoSpace)});
  for (size_t i = 0; i < items.size() && goes_on(work); ++i) out[i] = publish_one(request, items[i], work);
  return out;  // what was done is answered whatever went meanwhile
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

// Memory of `from`, which keeps its count, becomes part of the run before it, of the one behind, or of both, which are one then.
// False: it touches none.
bool Store::join_runs(Extent part, uint32_t from, uint64_t region, Session& owner, RegionChange& out) {
  const uint32_t before = part.offset ? run_at(part.offset - kPageBytes, owner.id, region) : Arena::kNobody;
  const uint32_t behind = run_at(part.end(), owner.id, region);
  uint32_t into = before != Arena::kNobody ? before : behind;
  if (into == Arena::kNobody) return false;
  uint32_t last = into == before ? behind : Arena::kNobody;
  if (last != Arena::kNobody && extent_of(last).length > extent_of(into).length) std::swap(into, last);  // the fewer change hands
  Extent whole = part;
  const auto with = [&](const Extent& there) { whole = {std::min(whole.offset, there.offset), whole.length + there.length}; };
  with(extent_of(into));
  arena_.hand_over(part, from, into);
  blocks_.used_bytes += part.length;
  if (last == Arena::kNobody) return move_run(into, whole), true;
  const Extent there = extent_of(last);
  with(there);
  arena_.hand_over(there, last, into);
  blocks_.used_bytes += there.length;  // end_run() takes it off
  move_run(into, whole);
  out.ended.push_back({last, control(last).generation()});
  end_run(owner, last);
  return true;
}

bool Store::open_run(Extent part, uint32_t from, const TakeBack& item, RegionWork& work, RegionChange& out) {
  if (!has_records(1) || index_.find_exclusive(item.key) != Index::kAbsent) return false;
  const uint32_t run = blocks_.free_head;
  const CreateRequest request{work.owner_id, 0, kDefaultPriority, 0, {}};
  const CreateItem wanted{.key = item.key, .fingerprint = item.region, .tokens = 1};
  if (!enter(request, wanted, layout_slot(work.known.id), part, Index::kAbsent, use_now())) return undo_entry(run, false), false;
  index_.insert_contents(run);
  add_unsealed(*work.owner, run);
  out.opened.push_back({run, control(run).generation()});
  arena_.hand_over(part, from, run);
  return true;
}

// Of a zombie that nobody holds. In slices, one in pieces.
RegionChange Store::take_one(const TakeBack& item, RegionWork& work) {
  RegionChange out{.status = static_cast<uint8_t>(Back::Held)};
  const uint32_t record = item.block.record;
  const Control now = control(record);
  if (now.state() != State::Zombie || now.generation() != item.block.generation + 1)  // it went while the lock was given away
    return {.status = static_cast<uint8_t>(Back::Gone)};
  const Extent extent = extent_of(record);
  bool whole = true;
  if (extent.in_pieces()) {
    // Where some of its memory is free already, all of it is the store's.
    const bool all = extent.length == full_length(record);
    const std::optional<bool> taken = all ? take_pieces_back(record, item.key, work, out) : std::nullopt;
    if (!taken) return out.status = static_cast<uint8_t>(Back::Gone), out;
    whole = *taken;
  } else if (!join_runs(extent, record, item.region, *work.owner, out) && !open_run(extent, record, item, work, out)) {
    return out;
  } else {
    blocks_.used_bytes -= extent.length;
  }
  const auto& zombies = pins_.zombies;
  const auto place = std::find_if(zombies.begin(), zombies.end(), [&](const Zombie& zombie) { return zombie.record == record; });
  KV_INVARIANT(place != zombies.end());
  pins_.remove_zombie(static_cast<size_t>(place - zombies.begin()));
  if (!demote(record)) free_record(record, Event::LastPinGone);
  out.status = static_cast<uint8_t>(whole ? Back::Taken : Back::Gone), out.block = item.block;
  return out;
}

std::vector<RegionChange> Store::take_back(uint32_t owner_id, uint32_t layout, std::span<const TakeBack> items) {
  const Entry entry(*this);
  check_pool();
  const LayoutTable::Known known = layouts_.by_id(layout);
  RegionWork work{owner_id, *known, &session_of(owner_id)};
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
  size_t pieces = protocol::kMaxPiecesPerMessage;               // that may be told of in one answer
  for (size_t i = 0; i < items.size() && goes_on(work); ++i) {  // nobody can pin what is a zombie already
    if (!is_asked(i) || held.contains(items[i].block.record)) continue;
    if (const uint32_t record = items[i].block.record; control(record).state() == State::Zombie) {
      const size_t its = pieces_of(record).size();
      if (its > pieces) continue;  // held: it is asked for again
      pieces -= its;
    }
    out[i] = take_one(items[i], work);
  }
  return out;
}

}  // namespace kv
