// Looking at a store: statistics, listings, and the check that everything derived agrees with the block table.

#include <algorithm>

#include "core/base/error.h"
#include "core/store/each_piece.h"
#include "core/store/each_pin.h"

namespace kv {
namespace {

void expect(bool good, const std::string& what) {
  if (!good) throw Error(Code::Integrity, what);
}

void check_apart(std::vector<Extent> extents, uint64_t frontier) {
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) { return a.offset < b.offset; });
  for (size_t i = 1; i < extents.size(); ++i)
    expect(extents[i - 1].end() <= extents[i].offset, "extents overlap at " + std::to_string(extents[i].offset));
  expect(extents.empty() || extents.back().end() <= frontier, "an extent reaches over the frontier");
}

}  // namespace

// What the sessions hold is counted first, in slices; all else is of one moment.
Stats Store::stats() {
  const BuriedSessions::Rites after(buried_);
  const Lock lock(mutex_);
  reap_in_slices();
  scan_zombies(true);
  const std::map<uint32_t, PinsNamed> held = held_by_each();
  Stats s = counters_;
  s.used_bytes = blocks_.used_bytes;
  s.capacity_bytes = options_.capacity_bytes;
  s.frontier_bytes = pool_.frontier();
  s.faulted_bytes = pool_.faulted();
  s.huge_bytes = pool_.huge();
  s.slack_bytes = arena_.slack_bytes();
  s.zombies = pins_.zombies.size();
  s.created = blocks_.created;
  s.quarantined = blocks_.quarantined;
  s.on_disk = disk_.blocks.size();
  s.pending_writes = disk_.writes.size();
  s.blocks =
      blocks_.records - blocks_.created - blocks_.quarantined - s.zombies - s.on_disk - disk_.tombstones.size() - blocks_.pieces;
  s.max_blocks = options_.max_blocks;
  s.epoch = index_.header().epoch.load(std::memory_order_relaxed);
  s.longest_hold_ns = mutex_.holds().longest_ns, s.long_holds = mutex_.holds().count_over;
  s.fenced = !fence_.empty();
  s.draining = draining_;
  s.pins = 0, s.sessions = 0;
  for (size_t owner = 0; owner < kPinOwners; ++owner) s.held[owner] = own_pins_.held(static_cast<PinOwner>(owner));
  for (auto& [id, by] : held) {
    s.pins += by.words;
    const auto session = sessions_.find(id);
    if (session == sessions_.end()) continue;
    PinsHeld& all = s.held[static_cast<size_t>(session->second->terms.owner)];
    all.count += by.count, all.bytes += by.bytes;
  }
  for (auto& [id, session] : sessions_) {
    if (!session->file) continue;
    s.sessions += session->attached;
    s.hits += credible(*session, session->file->page().hits);
    s.misses += credible(*session, session->file->page().misses);
  }
  return s;
}

// Its client writes the page, and may write anything. An earlier daemon's time with a resumed session is in the allowance.
uint64_t Store::credible(const Session& session, const std::atomic<uint64_t>& claimed) {
  constexpr uint64_t kKeysPerMs = 1'000'000, kAllowance = uint64_t{1} << 32;  // 30 times what one thread looks up
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - session.since).count();
  return std::min(claimed.load(std::memory_order_relaxed), kAllowance + kKeysPerMs * static_cast<uint64_t>(ms));
}

std::string Store::problem() {
  const Lock lock(mutex_);
  return fence_.empty() ? pool_.problem() : "fenced: " + fence_;
}

std::optional<Description> Store::describe(const Key& key) {
  const Lock lock(mutex_);
  Snapshot snapshot;
  if (index_.find(key, snapshot) != Find::Hit) return std::nullopt;
  const uint32_t created = index_.upkeep(snapshot.record).created_s.load(std::memory_order_relaxed);
  snapshot.shape = told(snapshot.shape);
  return Description{key,     snapshot.record,       snapshot.control.state(), snapshot,
                     created, rank(snapshot.record), uses(snapshot.record)};
}

// Lets others in between.
std::vector<Description> Store::list(uint32_t& next, uint32_t limit, std::span<const uint8_t> key_prefix, double min_uses) {
  constexpr uint64_t kLooks = 4096;  // without a pause
  std::vector<Description> out;
  while (out.size() < limit && next < index_.max_blocks()) {
    const Lock lock(mutex_);
    const uint64_t end = std::min<uint64_t>(index_.max_blocks(), uint64_t{next} + kLooks);
    while (out.size() < limit && next < end) {
      const uint32_t record = next++;
      const Control c = control(record);
      if (c.state() == State::Free || c.state() == State::Piece || (c.state() == State::Disk && c.flags() & kFlagDeleted))
        continue;
      if (min_uses > 0 && (c.state() != State::Sealed || uses(record) < min_uses)) continue;
      const Key key = key_of(record);
      if (!std::equal(key_prefix.begin(), key_prefix.end(), reinterpret_cast<const uint8_t*>(&key))) continue;
      const uint32_t expiry_s = index_.record(record).expiry_s.load(std::memory_order_relaxed);
      const Snapshot snapshot{record, c, extent_of(record), told(shape_of(record)), expiry_s};
      const uint32_t created = index_.upkeep(record).created_s.load(std::memory_order_relaxed);
      out.push_back({key, record, c.state(), snapshot, created, rank(record), uses(record)});
    }
  }
  if (next >= index_.max_blocks()) next = Index::kAbsent;
  return out;
}

void Store::check_integrity() {
  const BuriedSessions::Rites after(buried_);
  const Lock lock(mutex_);
  reap_in_slices(), scan_zombies(true);
  arena_.check_integrity();
  uint64_t used = 0, records = 0, sealed = 0, created = 0, quarantined = 0, zombies = 0, unsealed = 0, on_disk = 0,
           tombstones = 0, pieces = 0, apart = 0, loose = 0;
  std::vector<uint64_t> of_layout(layouts_.size()), of_layout_on_disk(layouts_.size());
  std::vector<Extent> extents;
  for (uint32_t record = 0; record < index_.max_blocks(); ++record) {
    const State state = control(record).state();
    const std::string here = "record " + std::to_string(record) + " (" + std::string(kv::name(state)) + ")";
    expect((index_.record(record).sequence.load() & 1) == 0, here + " has an odd sequence");
    const bool tombstone = state == State::Disk && control(record).flags() & kFlagDeleted;
    const uint32_t indexed =
        state == State::Free || state == State::Piece ? Index::kAbsent : index_.find_exclusive(key_of(record));
    expect((indexed == record) == (state == State::Sealed || state == State::Created || (state == State::Disk && !tombstone)),
           here + " is wrongly indexed");
    if (state == State::Free) continue;
    records += 1;
    if (const Shape shape = shape_of(record); state != State::Disk || shape.tokens != 0)
      (state == State::Disk ? of_layout_on_disk : of_layout).at(shape.layout) += 1;
    if (tombstone) {
      tombstones += 1;
      const auto going = disk_.going.find(key_of(record));
      expect(going != disk_.going.end() && going->second == record && disk_.tombstones.contains(0, record),
             here + " remembers no file");
      continue;
    }
    on_disk += state == State::Disk, pieces += state == State::Piece;
    if (state == State::Disk) expect(disk_.blocks.contains(0, record), here + " is in no queue");
    const bool free_standing = state == State::Piece && is_loose(record);
    if (free_standing) used += extent_of(record).length, loose += 1, extents.push_back(extent_of(record));
    if (state == State::Piece)
      expect(free_standing ? arena_.holder(extent_of(record)) == record : is_of_block(record), here + " has not its memory");
    if (state == State::Disk || state == State::Piece) continue;
    const bool queued = control(record).flags() & kFlagQueued;
    expect(queued == (disk_.writes.contains(rank(record), record) || own_pins_.contains(record)) || own_pins_.contains(record),
           here + " is wrongly queued for the disk");
    used += extent_of(record).length;
    each_piece(record, [&](uint32_t piece, Extent extent) REQUIRES(mutex_) {
      expect(block_of(piece) == record, here + " has a piece of another's");
      extents.push_back(extent), apart += piece != record;
    });
    sealed += state == State::Sealed, created += state == State::Created;
    quarantined += state == State::Quarantined, zombies += state == State::Zombie;
    expect((state == State::Sealed) == (policy_.contains(class_of(record), record) || is_parked(record)),
           here + " is wrongly queued for eviction");
  }
  check_apart(std::move(extents), pool_.frontier());
  for (auto& [id, session] : sessions_) {
    for (size_t i = 0; i < session->unsealed.size(); ++i) {
      const uint32_t record = session->unsealed[i];
      expect(index_.upkeep(record).link.load() == i && index_.upkeep(record).owner.load() == id,
             "record " + std::to_string(record) + " stands in another place of its session");
    }
    unsealed += session->unsealed.size();
  }
  expect(used == blocks_.used_bytes,
         "used_bytes is " + std::to_string(blocks_.used_bytes) + ", the blocks hold " + std::to_string(used));
  expect(records == blocks_.records && on_disk == disk_.blocks.size() && tombstones == disk_.tombstones.size() &&
             pieces == blocks_.pieces && apart + loose == pieces && loose == blocks_.loose && created == blocks_.created &&
             quarantined == blocks_.quarantined && zombies == pins_.zombies.size(),
         "a count of records is wrong");
  expect(policy_.size() + pins_.parked.size() == sealed, "the eviction queues hold " +
                                                             std::to_string(policy_.size() + pins_.parked.size()) + " of " +
                                                             std::to_string(sealed) + " blocks");
  layouts_.check(of_layout, of_layout_on_disk);
  expect(unsealed == created + quarantined, "an unsealed block belongs to no session");
}

}  // namespace kv
