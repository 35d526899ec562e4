// Blocks in pieces: the lists that say where they lie.
//
// A list lies in records that are FREE and in no list of free ones (Extent in block.h). It is written before a record names it
// and stays until that record's memory goes, so whoever has the block pinned reads it without a lock. What no block names is
// free: the next daemon derives that.
//
// Invariant: each record of a list is of one list.

#include <algorithm>

#include "core/base/error.h"
#include "core/store/store.h"

namespace kv {

// Before a region's extent is more than its record holds, or a block has a list: as long as this daemon serves the table.
void Store::note_holes() {
  uint64_t& word = index_.header().capacity_bytes;
  if (!(word & kTableHasHoles)) std::atomic_ref(word).store(word | kTableHasHoles, std::memory_order_release);
}

uint32_t Store::records_behind(uint32_t record, uint32_t count) const {
  for (; count > 0 && record != Index::kAbsent; --count) record = index_.upkeep(record).link.load(std::memory_order_relaxed);
  return record;
}

// So many that are free, after what only tells of files was given up for them.
bool Store::has_records(uint32_t count) {
  const auto enough = [&]() REQUIRES(mutex_) { return records_behind(blocks_.free_head, count - 1) != Index::kAbsent; };
  for (uint32_t tries = 0; tries < count && !enough() && disk_.spare_records(); ++tries) free_spare_record();
  return enough();
}

// Into the first free records, which has_records() saw.
void Store::write_list(uint32_t list, std::span<const Extent> pieces) {
  uint32_t record = list;
  for (size_t first = 0; first < pieces.size(); first += kListWords) {
    const Writing writing(index_.record(record).sequence);  // who came upon it in a bucket it was once in reads it as torn
    const auto count = static_cast<uint32_t>(std::min<size_t>(kListWords, pieces.size() - first));
    for (uint32_t i = 0; i < count; ++i) index_.list_word(record, i).store(pieces[first + i].pack(), std::memory_order_relaxed);
    record = index_.upkeep(record).link.load(std::memory_order_relaxed);
  }
  blocks_.free_head = record;
  blocks_.records += list_records(pieces.size());
}

void Store::free_list(Extent extent) {
  const uint32_t count = list_records(pieces_of(extent).size()), last = records_behind(extent.list(), count - 1);
  index_.upkeep(last).link.store(blocks_.free_head, std::memory_order_relaxed);
  blocks_.free_head = extent.list();
  blocks_.records -= count;
}

// Of a block of this table; one piece if it lies in one run.
std::vector<Extent> Store::pieces_of(Extent extent) const {
  if (!extent.in_pieces()) return {extent};
  std::vector<Extent> out = index_.pieces(extent, pool_.capacity());
  KV_INVARIANT(!out.empty());
  return out;
}

// Its memory and its list. How many bytes those were.
uint64_t Store::release_memory(uint32_t record) {
  const Extent extent = extent_of(record);
  if (!extent.in_pieces()) {
    if (layout_of(shape_of(record).layout).is_one_page()) return arena_.release_held(extent, record);  // maybe a region
    return arena_.release(extent, record), extent.length;
  }
  for (const Extent& piece : pieces_of(extent)) arena_.release(piece, record);
  free_list(extent);
  return extent.length;
}

// Adoption: all of its memory, or none. `lists`: records of the lists claimed so far.
bool Store::claim(uint32_t record, RecordSet& lists) {
  const Extent extent = extent_of(record);
  if (!extent.in_pieces()) return arena_.claim(extent, record);
  const std::vector<Extent> pieces = index_.pieces(extent, pool_.frontier());
  std::vector<uint32_t> list;
  for (uint32_t i = 0, at = extent.list(); i < list_records(pieces.size()); ++i) {
    if (control(at).state() != State::Free || lists.contains(at) || std::ranges::find(list, at) != list.end()) return false;
    list.push_back(at);
    at = index_.upkeep(at).link.load(std::memory_order_relaxed);
    if (at >= index_.max_blocks() && i + 1 < list_records(pieces.size())) return false;
  }
  size_t claimed = 0;
  while (claimed < pieces.size() && arena_.claim(pieces[claimed], record)) ++claimed;
  if (pieces.empty() || claimed < pieces.size()) {
    while (claimed > 0) arena_.release(pieces[--claimed], record);
    return false;
  }
  for (const uint32_t at : list) lists.add(at);
  blocks_.records += static_cast<uint32_t>(list.size());
  return true;
}

}  // namespace kv
