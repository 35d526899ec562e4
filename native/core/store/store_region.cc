// Regions: memory that a client divides by itself, and blocks that are sealed where they lie in it.
//
// A region is a CREATED record with a number as its fingerprint, cut in pages by the arena, whose extent stays what it was
// granted. Of a block published out of it the pages change hands; what is left of the region is what the arena says that its
// record holds. So a published block is a block as any other: found, read, written to disk, evicted, adopted. Given back, its
// pages are the region's again. What is inside a region nobody but its client knows; when the session ends, it is quarantined as
// any block that was not sealed.
//
// A block whose buffers lie apart has a list of pieces (store_pieces.cc), the last of which stands behind its layers and is no
// part of the region.
//
// Invariant: at any moment each page of a region belongs to one record: the arena's word. In the table a region's record has what
// no other record names of its extent.

#include <map>

#include "core/base/atomics.h"
#include "core/base/error.h"
#include "core/base/futex.h"
#include "core/base/polling.h"
#include "core/format/meta.h"
#include "core/store/each_pin.h"

namespace kv {
namespace {

constexpr uint64_t kFreedAtOnce = 16ull << 20;  // of a region: some 50 us
constexpr size_t kBlocksOfASlice = 256;

// The checksums of a block in pieces, and zeros.
bool write_behind(Pool& pool, Extent extent, std::span<const uint32_t> sums) {
  std::vector<uint8_t> bytes(extent.length);
  std::copy_n(reinterpret_cast<const uint8_t*>(sums.data()), sums.size_bytes(), bytes.begin());
  return pool.write(extent.offset, bytes.data(), bytes.size());
}

bool inside(Extent piece, Extent all) { return piece.offset >= all.offset && piece.end() <= all.end(); }

std::string text_of(const Publish& item, const Layout& layout) {
  return "a block of " + std::to_string(item.wanted.tokens) + " tokens at " + std::to_string(item.offset) + " in " +
         std::to_string(item.pieces.size()) + " pieces cannot be: its layout has 1 to " + std::to_string(layout.block_tokens) +
         " tokens, a block 0 to " + std::to_string(kMaxPieces) + " pieces, which are its layers of " +
         std::to_string(layout.layers_bytes(std::min(item.wanted.tokens, layout.block_tokens))) +
         " bytes one behind the other with at most " + std::to_string(kMaxBehind) + " behind them, and memory pages of " +
         std::to_string(kPageBytes);
}

bool is_whole(const Publish& item, const Layout& layout, uint64_t capacity) {
  const uint32_t tokens = item.wanted.tokens;
  if (tokens == 0 || tokens > layout.block_tokens || item.wanted.base_position > kMaxBasePosition) return false;
  if (item.pieces.empty()) return item.offset % kPageBytes == 0 && item.offset <= capacity;
  if (item.pieces.size() > kMaxPieces || !layout.in_whole_pages(tokens)) return false;
  if (layout.extent_bytes(tokens) - layout.layers_bytes(tokens) > kMaxBehind) return false;
  if (!item.sums.empty() && item.sums.size() != layout.num_layers()) return false;
  uint64_t bytes = 0;
  for (const Extent& piece : item.pieces) {
    if (piece.length == 0 || piece.length > capacity || piece.offset > capacity || (piece.offset | piece.length) % kPageBytes)
      return false;
    bytes += piece.length;
  }
  return bytes == layout.layers_bytes(tokens);
}

}  // namespace

// Of a session that lives: a daemon that adopts quarantines all that is open, and who resumes goes on.
bool Store::is_region(uint32_t record, uint32_t owner) {
  if (record >= index_.max_blocks() || own_pins_.contains(record)) return false;
  const State state = control(record).state();
  return (state == State::Created || state == State::Quarantined) &&
         index_.upkeep(record).owner.load(std::memory_order_relaxed) == owner && layout_of(shape_of(record).layout).is_one_page();
}

// A region whose memory goes a part at a time: true if it had more than one, and the last is not gone.
bool Store::free_part(uint32_t record) {
  const Extent extent = extent_of(record);
  if (extent.length <= kFreedAtOnce || !layout_of(shape_of(record).layout).is_one_page()) return false;
  const Extent left{extent.offset, extent.length - kFreedAtOnce};
  blocks_.used_bytes -= arena_.release_held({left.end(), kFreedAtOnce}, record);
  Record& r = index_.record(record);
  const Writing writing(r.sequence);
  r.extent.store(left.pack(), std::memory_order_relaxed);
  return true;
}

RegionChange Store::publish_one(const CreateRequest& request, const Publish& item, const KnownLayout& known, Session& owner,
                                double now) {
  Granted said;
  const uint64_t length = known.layout.extent_bytes(item.wanted.tokens);
  std::vector<Extent> pieces = item.pieces;
  const bool apart = !pieces.empty();
  if (!apart) pieces.push_back({item.offset, length});
  const uint32_t lines = apart ? list_records(pieces.size() + 1) : 0;
  const uint32_t region = arena_.holder(pieces[0]);
  uint32_t found;
  if (!has_records(lines + 1) || !is_claimable(item.wanted.key, now, said, found) || !is_region(region, request.owner))
    return {.status = static_cast<uint8_t>(said.status)};
  const uint32_t list = blocks_.free_head, block = records_behind(list, lines);
  size_t taken = 0;
  for (; taken < pieces.size(); ++taken) {  // one by one: two may be the same
    const Extent& piece = pieces[taken];
    if (arena_.holder(piece) != region || !inside(piece, extent_of(region))) break;
    arena_.hand_over(piece, region, block);
  }
  const uint64_t tail = apart ? length - known.layout.layers_bytes(item.wanted.tokens) : 0;
  std::optional<uint64_t> behind;
  const auto undo = [&]() REQUIRES(mutex_) {
    if (behind) arena_.release({*behind, tail}, block);
    while (taken > 0) arena_.hand_over(pieces[--taken], block, region);
    return RegionChange{.status = static_cast<uint8_t>(Grant::NoSpace)};
  };
  if (taken < pieces.size()) return undo();
  note_holes();
  if (apart) {
    if (!(behind = arena_.allocate(tail, block)) || !write_behind(pool_, {*behind, tail}, item.sums)) return undo();
    pieces.push_back({*behind, tail});
    write_list(list, pieces);
    pieces.pop_back();
  }
  const Extent extent = apart ? Extent::in_list(list, length) : pieces[0];
  if (!enter(request, item.wanted, layout_slot(known.id), extent, found, now)) {  // a zombie in no list
    blocks_.used_bytes -= length;
    if (apart) free_list(extent);
    free_record(block, Event::LastPinGone);
    return undo();
  }
  blocks_.used_bytes -= length - tail;  // counted as the region's until now
  index_.insert_contents(block);
  add_unsealed(owner, block);
  const RegionChange out{static_cast<uint8_t>(Grant::Granted), {block, control(block).generation()}};
  counters_.creates += 1;
  seal_one(request.owner, {out.block, apart ? !item.sums.empty() : item.checksummed});
  index_.upkeep(block).link.store(region, std::memory_order_relaxed);          // for take_one(), which does not believe it
  fresh_.add(out.block, length, monotonic_ns(), options_.capacity_bytes / 2);  // until its owner has pinned it
  if (anybody_waits()) futex_wake_all(progress_[block]);
  return out;
}

// In slices: what was published stays, whatever becomes of its session meanwhile.
std::vector<RegionChange> Store::publish(const CreateRequest& request, std::span<const Publish> items) {
  LayoutTable::Known known;
  {
    const Entry entry(*this);
    check_pool();
    static_cast<void>(session_of(request.owner));
    known = layouts_.by_id(request.layout);
  }
  uint64_t tail = 0, tails = 0;
  for (const Publish& item : items) {
    if (!is_whole(item, known->layout, pool_.capacity())) throw Error(Code::InvalidArgument, text_of(item, known->layout));
    if (item.pieces.empty()) continue;
    const uint32_t tokens = item.wanted.tokens;
    tail = std::max(tail, known->layout.extent_bytes(tokens) - known->layout.layers_bytes(tokens)), tails += 1;
  }
  const Entry entry(*this);
  const auto there = [&]() REQUIRES(mutex_) { return tails == 0 || arena_.room(tail, tails) == tails; };
  while (!there() && !draining_ && pool_.frontier() < pool_.capacity() && grow_pool()) continue;
  if (!there() && !draining_) make_room(tail, tails);
  std::vector<RegionChange> out;
  Session* owner = nullptr;
  double now = use_now();
  const auto still_there = [&]() REQUIRES(mutex_) {  // as in create()
    owner = &session_of(request.owner);
    static_cast<void>(layouts_.by_id(request.layout));
    now = std::min(now, clock_.value);
  };
  still_there();
  Slice slice(kBlocksOfASlice, 1);
  for (const Publish& item : items) {
    out.push_back(publish_one(request, item, *known, *owner, now));
    if (slice.over()) mutex_.give_way(), still_there(), slice.again();
  }
  return out;
}

// Of the records asked for, zombies all: those that another session reads, the daemon itself, or their owner more than once. In
// slices: nobody can pin what is a zombie already.
RecordSet Store::held_by_others(uint32_t owner, const RecordSet& asked) {
  RecordSet held;
  held.resize(index_.max_blocks());
  std::map<uint32_t, uint32_t> of_owner;
  uint64_t pins = 0;
  fence_full();  // between the change of the generations and the reading of the pins, as in scan_zombies
  Slice slice(kSlice);
  each_pin_of_in_slices(
      slice, 0, ~0u, [&](uint32_t session, uint32_t record, uint64_t generation, uint32_t pages) REQUIRES(mutex_) {
        ++pins;
        if (!asked.contains(record) || generation + 1 != control(record).generation() || !honoured(record, pages)) return;
        if ((session != owner || ++of_owner[record] > 1) && !held.contains(record)) held.add(record);
      });
  pins_.read += pins_.last_scan = pins;
  return held;
}

// Of a zombie that nobody else holds: its memory is the region's again. Gone: the region is not there, or was never its own; then
// the memory waits for its owner's pin and goes as any other's.
Back Store::take_one(const TakeBack& item, uint32_t owner) {
  const uint32_t record = item.block.record;
  const Control now = control(record);
  if (now.state() != State::Zombie || now.generation() != item.block.generation + 1) return Back::Gone;  // meanwhile
  const Extent extent = extent_of(record);
  const uint32_t region = index_.upkeep(record).link.load(std::memory_order_relaxed);
  std::vector<Extent> pieces = pieces_of(extent);
  const Extent behind = extent.in_pieces() ? pieces.back() : Extent{0, 0};
  if (extent.in_pieces()) pieces.pop_back();
  if (!is_region(region, owner) || index_.upkeep(region).fingerprint.load(std::memory_order_relaxed) != item.region)
    return Back::Gone;
  for (const Extent& piece : pieces)
    if (!inside(piece, extent_of(region)) || arena_.holder(piece) != record) return Back::Gone;
  for (const Extent& piece : pieces) arena_.hand_over(piece, record, region);
  blocks_.used_bytes -= behind.length;
  if (behind.length) arena_.release(behind, record), free_list(extent), room_.chances += 1;
  const auto& zombies = pins_.zombies;
  const auto place = std::find_if(zombies.begin(), zombies.end(), [&](const Zombie& zombie) { return zombie.record == record; });
  KV_INVARIANT(place != zombies.end());
  pins_.remove_zombie(static_cast<size_t>(place - zombies.begin()));
  if (!demote(record)) free_record(record, Event::LastPinGone);
  return Back::Taken;
}

std::vector<RegionChange> Store::take_back(uint32_t owner_id, uint32_t layout, std::span<const TakeBack> items) {
  const Entry entry(*this);
  check_pool();
  static_cast<void>(session_of(owner_id));
  const LayoutTable::Known known = layouts_.by_id(layout);
  if (!known->layout.is_one_page())
    throw Error(Code::InvalidArgument, "a block of a region's layout has " +
                                           std::to_string(known->layout.extent_bytes(known->layout.block_tokens)) +
                                           " bytes, the limit is " + std::to_string(kPageBytes));
  std::vector<RegionChange> out(items.size(), RegionChange{.status = static_cast<uint8_t>(Back::Gone)});
  RecordSet asked;
  asked.resize(index_.max_blocks());
  Slice slice(kBlocksOfASlice, 1);
  for (size_t i = 0; i < items.size(); ++i) {
    const auto [record, generation] = items[i].block;
    if (record >= index_.max_blocks() || asked.contains(record)) continue;
    if (index_.upkeep(record).owner.load(std::memory_order_relaxed) != owner_id) continue;
    const Control now = control(record);
    if (now.state() == State::Sealed && now.generation() == generation)
      to_zombie(record, Event::Evict);
    else if (now.state() != State::Zombie || now.generation() != generation + 1 || now.flags() & kFlagQuarantined)
      continue;
    asked.add(record);
    out[i].status = static_cast<uint8_t>(Back::Held);
    if (slice.over()) mutex_.give_way(), slice.again();
  }
  const RecordSet held = held_by_others(owner_id, asked);
  for (size_t i = 0; i < items.size(); ++i) {
    if (out[i].status != static_cast<uint8_t>(Back::Held) || held.contains(items[i].block.record)) continue;
    const Back word = take_one(items[i], owner_id);
    out[i].status = static_cast<uint8_t>(word);
    if (word == Back::Taken) out[i].block = items[i].block;
    if (slice.over()) mutex_.give_way(), slice.again();
  }
  return out;
}

}  // namespace kv
