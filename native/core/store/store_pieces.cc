// Blocks in pieces: a block whose buffers lie apart in a region is one record that is found, pinned and evicted, and a PIECE for
// each stretch of its memory. A PIECE has the shape and number of the region that it was cut from, and is found by nobody: the
// block names the first, each names the next and the block. All of them go with the block.
//
// Invariant: the PIECEs of a block are as long as it together, and no PIECE is without a block but while the lock is held.

#include "core/store/store.h"

#include <utility>

#include "core/base/error.h"
#include "core/base/futex.h"
#include "core/store/each_piece.h"

namespace kv {
namespace {
constexpr uint64_t kNextKey = 0x9e3779b97f4a7c15;  // of a part that is left: none has the home bucket of the one before
}  // namespace

std::vector<Extent> Store::pieces_of(uint32_t record) {
  std::vector<Extent> out;
  each_piece(record, [&](uint32_t, Extent piece) { out.push_back(piece); });
  return out;
}

uint32_t Store::block_of(uint32_t record) const {
  if (control(record).state() != State::Piece) return record;
  return static_cast<uint32_t>(index_.record(record).key[1].load(std::memory_order_relaxed));
}

bool Store::is_of_block(uint32_t piece) {
  const uint32_t block = block_of(piece);
  if (block >= index_.max_blocks() || !extent_of(block).in_pieces()) return false;
  const State state = control(block).state();
  return (state == State::Sealed || state == State::Zombie) && arena_.holder(extent_of(piece)) == piece;
}

// Of memory that is counted as the run's until it is cut out of it.
uint32_t Store::enter_piece(Extent extent, uint32_t run) {
  const uint32_t record = blocks_.free_head;
  Record& r = index_.record(record);
  Upkeep &u = index_.upkeep(record), &from = index_.upkeep(run);
  blocks_.free_head = u.link.load(std::memory_order_relaxed);
  const Shape shape = shape_of(run);
  {
    Writing writing(r.sequence);
    u.owner.store(from.owner.load(std::memory_order_relaxed), std::memory_order_relaxed);
    for (size_t i = 0; i < 4; ++i) r.key[i].store(Index::kAbsent, std::memory_order_relaxed);
    r.extent.store(extent.pack(), std::memory_order_relaxed);
    r.shape.store(shape.pack(), std::memory_order_relaxed);
    u.fingerprint.store(from.fingerprint.load(std::memory_order_relaxed), std::memory_order_relaxed);
    u.created_s.store(from.created_s.load(std::memory_order_relaxed), std::memory_order_relaxed);
    set_expiry(record, 0);
    u.parent.store(0, std::memory_order_relaxed);
    u.rank.store(0, std::memory_order_relaxed);
  }
  layouts_.came(shape.layout);
  blocks_.records += 1, blocks_.pieces += 1;
  transition(record, Event::Create, State::Piece, 0);
  return record;
}

void Store::free_piece(uint32_t record) {
  blocks_.pieces -= 1;
  free_record(record, Event::LastPinGone);
}

// A PIECE for each, the first of them. Nothing: one is not of an open run of the owner's, and what was cut is runs again.
std::optional<uint32_t> Store::carve_pieces(std::span<const Extent> pieces, Key rest, Session& owner, double now,
                                            RegionChange& out) {
  // Before the first of them: a daemon that knows nothing of them must not adopt this table.
  std::atomic_ref<uint64_t>(index_.header().capacity_bytes).fetch_or(kTableHasPieces, std::memory_order_seq_cst);
  uint32_t first = Index::kAbsent, last = Index::kAbsent;
  Key key = rest;
  for (const Extent& extent : pieces) {
    key.words[0] += kNextKey;
    bool good = is_in_open_run(extent, owner.id);  // not where two pieces overlap
    const uint32_t piece = good ? enter_piece(extent, arena_.holder(extent)) : Index::kAbsent;
    if (good && !carve(extent, piece, key, owner, now, out)) free_piece(piece), good = false;
    if (!good) {
      rest.words[1] += 1;
      if (first != Index::kAbsent) return_pieces(first, rest, owner, out);
      return std::nullopt;
    }
    if (first == Index::kAbsent)
      first = piece;
    else
      index_.record(last).key[0].store(piece, std::memory_order_relaxed);
    last = piece;
  }
  return first;
}

void Store::name_block(uint32_t first, uint32_t block) {
  for (uint32_t at = first; at != Index::kAbsent; at = next_piece(at))
    index_.record(at).key[1].store(block, std::memory_order_relaxed);
}

// By itself it is a run: it needs no other record, for there may be none. False: its key cannot be entered.
bool Store::piece_to_run(uint32_t record, const Key& key, Session& owner, RegionChange& out) {
  if (index_.find_exclusive(key) != Index::kAbsent) return false;
  Record& r = index_.record(record);
  {
    Writing writing(r.sequence);
    for (size_t i = 0; i < 4; ++i) r.key[i].store(key.words[i], std::memory_order_relaxed);
  }
  if (!index_.insert_key(key, record)) return false;
  transition(record, Event::TakeBack, State::Created, 0);
  publish_progress(record, Phase::Writing);
  blocks_.pieces -= 1, blocks_.created += 1, blocks_.used_bytes += extent_of(record).length;
  index_.insert_contents(record);
  add_unsealed(owner, record);
  out.opened.push_back({record, control(record).generation()});
  return true;
}

// Each is a run again, or part of those beside it. False: some could not be, and wait for their client, which is told of them as
// of open parts, or for the session's end.
bool Store::return_pieces(uint32_t first, Key key, Session& owner, RegionChange& out) {
  for (uint32_t at = first, next; at != Index::kAbsent; at = next) {
    next = next_piece(at);
    key.words[0] += kNextKey;
    const uint64_t region = index_.upkeep(at).fingerprint.load(std::memory_order_relaxed);
    if (join_runs(extent_of(at), at, region, owner, out)) {
      free_piece(at);
    } else if (!piece_to_run(at, key, owner, out)) {
      quarantine_pieces(at, owner, out);
      return false;
    }
  }
  return true;
}

void Store::quarantine_piece(uint32_t record) {
  blocks_.pieces -= 1, blocks_.quarantined += 1, blocks_.used_bytes += extent_of(record).length;
  transition(record, Event::SessionEnd, State::Quarantined, 0);
}

void Store::quarantine_pieces(uint32_t first, Session& owner, RegionChange& out) {
  for (uint32_t at = first, next; at != Index::kAbsent; at = next) {
    next = next_piece(at);
    out.opened.push_back({at, control(at).generation()});  // as keep_only() and abort() know one that was quarantined
    quarantine_piece(at);
    add_unsealed(owner, at);
  }
}

// The memory of a block that nobody holds any more; its record stays.
void Store::release_memory(uint32_t block) {
  blocks_.used_bytes -= extent_of(block).length;
  each_piece(block, [&](uint32_t record, Extent extent) REQUIRES(mutex_) {
    arena_.release(extent, record);
    if (record != block) free_piece(record);
  });
  room_.chances += 1;
}

// ---------------------------------------------------------------- adoption

// Takes the memory of a block in pieces, and adds them to `pieces_taken`. False: they are not whole, and not it but its memory
// may be kept.
bool Store::claim_pieces(uint32_t block, RecordSet& pieces_taken) {
  const Extent extent = extent_of(block);
  const std::vector<Extent> pieces = index_.pieces(extent, pool_.frontier());
  size_t claimed = 0;
  auto at = static_cast<uint32_t>(extent.first_piece());
  for (; claimed < pieces.size(); ++claimed, at = next_piece(at))
    if (block_of(at) != block || pieces_taken.contains(at) || !layouts_.is_known(shape_of(at).layout) ||
        !layouts_.in(shape_of(at).layout)->layout.is_one_page() || !arena_.claim(pieces[claimed], at))
      break;
  const bool whole = !pieces.empty() && claimed == pieces.size();
  at = static_cast<uint32_t>(extent.first_piece());
  for (size_t i = 0; i < claimed; ++i, at = next_piece(at)) {
    if (!whole)
      arena_.release(pieces[i], at);
    else
      layouts_.came(shape_of(at).layout), pieces_taken.add(at), blocks_.records += 1, blocks_.pieces += 1;
  }
  return whole;
}

// Behind all blocks: a PIECE that none of them has was cut out of a run by a daemon that was killed before the block was there.
// Its writer may still write to it. False if it is FREE.
bool Store::adopt_piece(uint32_t record) {
  const Shape shape = shape_of(record);
  if (!layouts_.is_known(shape.layout) || !layouts_.in(shape.layout)->layout.is_one_page() ||
      !arena_.claim(extent_of(record), record))
    return false;
  layouts_.came(shape.layout);
  blocks_.records += 1, blocks_.pieces += 1;
  quarantine_piece(record);
  const uint32_t owner = index_.upkeep(record).owner.load();
  sessions_.seen(owner);
  if (const auto session = sessions_.find(owner); session != sessions_.end()) {
    add_unsealed(*session->second, record);
  } else {
    blocks_.quarantined -= 1;
    transition(record, Event::SessionLockFree, State::Zombie, kFlagQuarantined);
    pins_.add_zombie(record);
  }
  return true;
}

}  // namespace kv
