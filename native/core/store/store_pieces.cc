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

// Also of a zombie whose memory goes.
uint64_t Store::full_length(uint32_t block) const {
  const Extent extent = extent_of(block);
  const Shape shape = shape_of(block);
  return extent.in_pieces() ? layout_of(shape.layout).extent_bytes(shape.tokens) : extent.length;
}

bool Store::is_loose(uint32_t record) const {
  return control(record).state() == State::Piece && named_block(record) == Index::kAbsent;
}

uint32_t Store::block_of(uint32_t record) const {
  return control(record).state() == State::Piece && !is_loose(record) ? named_block(record) : record;
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

// Of no block yet. kAbsent: it is of no open run of the owner's, or what would be left could not be entered.
uint32_t Store::cut_piece(Extent extent, const Key& rest, RegionWork& work, RegionChange& out) {
  if (!is_in_open_run(extent, work.owner_id)) return Index::kAbsent;  // not where two pieces overlap
  const uint32_t piece = enter_piece(extent, arena_.holder(extent));
  if (!carve(extent, piece, rest, work, out)) return free_piece(piece), Index::kAbsent;
  blocks_.came_loose(extent.length);
  return piece;
}

// A PIECE for each, the first of them, loose. kAbsent: one could not be cut, and what was is runs again. In slices: who calls
// this must not rely on what it found before.
uint32_t Store::cut_pieces(std::span<const Extent> pieces, Key rest, RegionWork& work, RegionChange& out) {
  // Before the first of them: a daemon that knows nothing of them must not adopt this table.
  std::atomic_ref<uint64_t>(index_.header().capacity_bytes).fetch_or(kTableHasPieces, std::memory_order_seq_cst);
  uint32_t first = Index::kAbsent, last = Index::kAbsent;
  Key key = rest;
  for (const Extent& extent : pieces) {
    key.words[0] += kNextKey;
    const bool good = goes_on(work) && has_records(3);  // the piece, what is left beside it, and at last the block
    const uint32_t piece = good ? cut_piece(extent, key, work, out) : Index::kAbsent;
    if (piece == Index::kAbsent) {
      rest.words[1] += 1;
      return_pieces(first, rest, work, out);
      return Index::kAbsent;
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
  for (uint32_t at = first; at != Index::kAbsent; at = next_piece(at)) {
    index_.record(at).key[1].store(block, std::memory_order_relaxed);
    blocks_.went_from_loose(extent_of(at).length);
  }
}

// The first piece of a zombie, loose, and the zombie is shorter by it. kAbsent: it has none any more.
uint32_t Store::take_piece(uint32_t zombie) {
  const Extent extent = extent_of(zombie);
  if (extent.length == 0) return Index::kAbsent;
  const auto first = static_cast<uint32_t>(extent.first_piece());
  const uint64_t length = extent_of(first).length;
  move_run(zombie, Extent::in_pieces_from(next_piece(first), extent.length - length));
  for (const size_t word : {0, 1}) index_.record(first).key[word].store(Index::kAbsent, std::memory_order_relaxed);
  blocks_.used_bytes -= length, blocks_.came_loose(length);
  return first;
}

// By itself it is a run: it needs no other record, for there may be none. False: its key cannot be entered.
bool Store::piece_to_run(uint32_t record, const Key& key, RegionWork& work, RegionChange& out) {
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
  add_unsealed(*work.owner, record);
  out.opened.push_back({record, control(record).generation()});
  return true;
}

// A loose one is a run again, or part of those beside it. False: it could not be, and waits for its client, which is told of it
// as of an open part, or for the session's end.
bool Store::return_piece(uint32_t piece, const Key& key, RegionWork& work, RegionChange& out) {
  const uint64_t region = index_.upkeep(piece).fingerprint.load(std::memory_order_relaxed);
  const Extent extent = extent_of(piece);
  blocks_.went_from_loose(extent.length);
  if (work.owner && join_runs(extent, piece, region, *work.owner, out)) return free_piece(piece), true;
  if (work.owner && piece_to_run(piece, key, work, out)) return true;
  out.opened.push_back({piece, control(piece).generation()});  // as keep_only() and abort() know one that was quarantined
  quarantine_piece(piece);
  return false;
}

// All that were cut for a block that is not to be. In slices.
void Store::return_pieces(uint32_t first, Key key, RegionWork& work, RegionChange& out) {
  for (uint32_t at = first, next; at != Index::kAbsent; at = next) {
    next = next_piece(at);
    key.words[0] += kNextKey;
    goes_on(work);
    return_piece(at, key, work, out);
  }
}

// A zombie's, which nobody holds any more, each a part of its region again; false, one of them could not be. Nothing: others took
// of it meanwhile, or the owner went, and what is left is for who frees zombies. In slices.
std::optional<bool> Store::take_pieces_back(uint32_t zombie, Key key, RegionWork& work, RegionChange& out) {
  const uint64_t generation = control(zombie).generation();
  bool whole = true;
  for (uint64_t left = extent_of(zombie).length; left > 0;) {
    const bool on = goes_on(work);
    const Control now = control(zombie);  // its flags may change
    if (!on || now.state() != State::Zombie || now.generation() != generation || extent_of(zombie).length != left)
      return std::nullopt;
    const uint32_t piece = take_piece(zombie);
    left -= extent_of(piece).length;
    key.words[0] += kNextKey;
    whole &= return_piece(piece, key, work, out);
  }
  return whole;
}

// Its writer may still write to it.
void Store::quarantine_piece(uint32_t record) {
  blocks_.pieces -= 1, blocks_.quarantined += 1, blocks_.used_bytes += extent_of(record).length;
  transition(record, Event::SessionEnd, State::Quarantined, 0);
  const uint32_t owner = index_.upkeep(record).owner.load();
  if (const auto session = sessions_.find(owner); session != sessions_.end()) {
    add_unsealed(*session->second, record);
  } else {
    blocks_.quarantined -= 1;
    transition(record, Event::SessionLockFree, State::Zombie, kFlagQuarantined);
    pins_.add_zombie(record);
  }
}

// Of a zombie in pieces that nobody holds any more. False: there was no time for all of it.
bool Store::free_pieces(uint32_t zombie, Slice& slice) {
  for (uint32_t piece; (piece = take_piece(zombie)) != Index::kAbsent;) {
    const Extent extent = extent_of(piece);
    arena_.release(extent, piece);
    blocks_.went_from_loose(extent.length);
    free_piece(piece);
    room_.chances += 1;
    if (slice.over_now()) return extent_of(zombie).length == 0;
  }
  return true;
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
  sessions_.seen(index_.upkeep(record).owner.load());
  quarantine_piece(record);
  return true;
}

}  // namespace kv
