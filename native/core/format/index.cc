#include "core/format/index.h"

#include <algorithm>
#include <bit>

#include "core/base/error.h"

namespace kv {
namespace {

// Keys between a prefetch and its use: 64 cold keys take 2.8 us with 8, 3.4 with 16, 4.5 with 64.
constexpr size_t kKeysAhead = 8;
constexpr size_t kRow = 4;  // keys whose records are a step apart before the next is guessed

// Bit i: slot i has the key's tag, or is empty and the tag 0. Without a branch: where in its bucket a key stands cannot be
// foreseen, and a misprediction costs as much as the scan.
uint32_t candidates(const Bucket& bucket, const Key& key) {
  const uint64_t tag = key.words[1] << 32;
  uint32_t out = 0;
#pragma GCC unroll 7
  for (uint32_t i = 0; i < kBucketSlots; ++i)
    out |= static_cast<uint32_t>((bucket.slot[i].load(std::memory_order_relaxed) ^ tag) >> 32 == 0) << i;
  return out;
}

uint32_t record_in(const std::atomic<uint64_t>& slot) { return static_cast<uint32_t>(slot.load(std::memory_order_relaxed)) - 1; }

}  // namespace

Index::Index(std::byte* table)
    : header_(reinterpret_cast<TableHeader*>(table)),
      records_(reinterpret_cast<Record*>(table + header_->records_offset)),
      upkeep_(reinterpret_cast<Upkeep*>(table + header_->upkeep_offset)),
      buckets_(reinterpret_cast<Bucket*>(table + header_->buckets_offset)),
      finder_(reinterpret_cast<FinderBucket*>(table + header_->finder_offset), header_->finder_buckets),
      bucket_count_(header_->buckets),
      reach_(std::min(kMaxProbe, bucket_count_)),
      max_blocks_(header_->max_blocks) {}

uint32_t Index::prefetch_record(const Key& key) const {
  const Bucket& b = buckets_[home(key)];
  const uint32_t which = candidates(b, key);
  const uint32_t number = which ? record_in(b.slot[std::countr_zero(which)]) : kAbsent;
  if (number >= max_blocks_) return kAbsent;
  __builtin_prefetch(&records_[number]);
  return number;
}

// True if the record holds this key. `torn` is set if it changed while it was read.
bool Index::read_record(uint32_t number, const Key& key, Snapshot& out, bool& torn) const {
  const Record& r = records_[number];
  const uint32_t before = r.sequence.load(std::memory_order_acquire);
  if (before & 1) return torn = true, false;
  out.record = number;
  out.control.word = r.control.load(std::memory_order_acquire);
  bool same = true;
  for (size_t i = 0; i < 4; ++i) same &= r.key[i].load(std::memory_order_relaxed) == key.words[i];
  out.extent = Extent::unpack(r.extent.load(std::memory_order_relaxed));
  out.shape = Shape::unpack(r.shape.load(std::memory_order_relaxed));
  out.expiry_s = r.expiry_s.load(std::memory_order_relaxed);
  fence_acquire();
  if (r.sequence.load(std::memory_order_relaxed) != before) return torn = true, false;
  return same;
}

Find Index::probe(const Key& key, Snapshot& out) const {
  const uint32_t start = home(key);
  for (uint32_t step = 0; step < reach_; ++step) {
    const Bucket& b = bucket(start, step);
    const uint32_t before = b.sequence.load(std::memory_order_acquire);
    if (before & 1) return Find::Torn;
    bool torn = false;
    for (uint32_t which = candidates(b, key); which; which &= which - 1) {
      const uint32_t number = record_in(b.slot[std::countr_zero(which)]);
      if (number < max_blocks_ && read_record(number, key, out, torn)) return Find::Hit;
    }
    const uint32_t overflow = b.overflow.load(std::memory_order_relaxed);
    fence_acquire();
    if (torn || b.sequence.load(std::memory_order_relaxed) != before) return Find::Torn;
    if (overflow == 0) return Find::Miss;
  }
  return Find::Miss;  // insert() never goes further
}

Find Index::find(const Key& key, Snapshot& out) const {
  for (uint32_t i = 0; i < kProbeTries; ++i) {
    const Find answer = probe(key, out);
    if (answer != Find::Torn) return answer;
  }
  return Find::Torn;
}

bool Index::holds(uint32_t likely, const Key& key, Snapshot& out) const {
  bool torn = false;
  return likely < max_blocks_ && read_record(likely, key, out, torn) && out.control.state() == State::Sealed;
}

Find Index::find(const Key& key, uint32_t likely, Snapshot& out) const {
  return holds(likely, key, out) ? Find::Hit : find(key, out);
}

// Three passes, so that the cache misses of all keys overlap. From key `from` on; with `to_row` only up to the end of the first
// kRow keys in a row. The first key it did not come to.
size_t Index::find_by_buckets(std::span<const Key> keys, size_t from, bool to_row, Find* found, Snapshot* where) const {
  const size_t n = keys.size();
  uint32_t likely[kKeysAhead];  // of the keys between the second pass and the third
  uint32_t step = 0;
  size_t in_row = 0;
  for (size_t i = from; i < n + 2 * kKeysAhead; ++i) {
    if (i < n) prefetch_bucket(keys[i]);
    if (i >= from + 2 * kKeysAhead) {
      const size_t k = i - 2 * kKeysAhead;
      found[k] = find(keys[k], likely[k % kKeysAhead], where[k]);
      const bool next = k > from && found[k] == Find::Hit && where[k].record - where[k - 1].record == step;
      in_row = next ? in_row + 1 : 1;
      if (to_row && in_row == kRow) return k + 1;
      if (k > from) step = where[k].record - where[k - 1].record;  // modulo 2^32, as what it is added to
    }
    if (i >= from + kKeysAhead && i < n + kKeysAhead) likely[i % kKeysAhead] = prefetch_record(keys[i - kKeysAhead]);
  }
  return n;
}

// The same as long as the records go on by the step of the last two: the first key that is elsewhere.
size_t Index::find_in_row(std::span<const Key> keys, size_t from, Find* found, Snapshot* where) const {
  const uint32_t step = where[from - 1].record - where[from - 2].record;
  uint32_t likely = where[from - 1].record + step;
  for (size_t k = from; k < keys.size(); ++k, likely += step) {
    if (const uint32_t ahead = likely + kKeysAhead * step; ahead < max_blocks_) __builtin_prefetch(&records_[ahead]);
    if (!holds(likely, keys[k], where[k])) return k;
    found[k] = Find::Hit;
  }
  return keys.size();
}

void Index::find_each(std::span<const Key> keys, std::span<Find> found, std::span<Snapshot> where) const {
  bool rows = true;
  for (size_t at = 0; at < keys.size();) {
    at = find_by_buckets(keys, at, rows, found.data(), where.data());
    if (at == keys.size()) return;
    const size_t end = find_in_row(keys, at, found.data(), where.data());
    rows = end - at >= kKeysAhead;  // else it was not worth what is asked for ahead, and comes again
    at = end;
  }
}

size_t Index::sightings(uint64_t word, std::span<Sighting> out, bool on_disk) const {
  uint32_t candidates[2 * kFinderSlots];
  const size_t count = finder_.find(word, candidates);
  size_t found = 0;
  for (size_t i = 0; i < count && found < out.size(); ++i) {
    if (candidates[i] >= max_blocks_) continue;
    const Record& r = records_[candidates[i]];
    const uint32_t before = r.sequence.load(std::memory_order_acquire);
    Sighting& seen = out[found];
    for (size_t k = 0; k < 4; ++k) seen.key.words[k] = r.key[k].load(std::memory_order_relaxed);
    seen.record = candidates[i];
    seen.tokens = Shape::unpack(r.shape.load(std::memory_order_relaxed)).tokens;
    const Upkeep& u = upkeep_[candidates[i]];
    const uint64_t fingerprint = u.fingerprint.load(std::memory_order_relaxed);
    const uint32_t parent = u.parent.load(std::memory_order_relaxed);
    const State state = Control{r.control.load(std::memory_order_acquire)}.state();
    fence_acquire();
    if (before & 1 || r.sequence.load(std::memory_order_relaxed) != before) continue;
    seen.on_disk = state == State::Disk;
    if (state != State::Sealed && !(on_disk && seen.on_disk)) continue;
    if (Finder::by_fingerprint(fingerprint) == word || Finder::by_parent(parent) == word) ++found;
  }
  return found;
}

std::vector<Extent> Index::pieces(Extent block, uint64_t limit) const {
  std::vector<Extent> out;
  uint64_t left = block.length, at = block.first_piece();
  while (at != kAbsent) {
    if (at >= max_blocks_ || out.size() == kMaxPieces) return {};
    const Record& r = records_[at];
    const Extent piece = Extent::unpack(r.extent.load(std::memory_order_relaxed));
    if (control(static_cast<uint32_t>(at)).state() != State::Piece || piece.length == 0 || piece.length > left ||
        piece.end() > limit)
      return {};
    out.push_back(piece), left -= piece.length;
    at = r.key[0].load(std::memory_order_relaxed);
  }
  if (left != 0) out.clear();
  return out;
}

void Index::prefetch_erase(uint32_t record) const {
  const Record& r = records_[record];
  Key key;
  for (size_t i = 0; i < 4; ++i) key.words[i] = r.key[i].load(std::memory_order_relaxed);
  prefetch_bucket(key);
  prefetch_contents(record);
}

std::array<uint64_t, 2> Index::contents(uint32_t record) const {
  const Upkeep& u = upkeep_[record];
  return {Finder::by_fingerprint(u.fingerprint.load(std::memory_order_relaxed)),
          Finder::by_parent(u.parent.load(std::memory_order_relaxed))};
}

void Index::prefetch_contents(uint32_t record) const {
  for (const uint64_t word : contents(record)) finder_.prefetch(word);
}

void Index::insert_contents(uint32_t record) {
  for (const uint64_t word : contents(record)) finder_.insert(word, record);
}

void Index::erase_contents(uint32_t record) {
  for (const uint64_t word : contents(record)) finder_.erase(word, record);
}

uint32_t Index::find_exclusive(const Key& key) const {
  Snapshot snapshot;
  return probe(key, snapshot) == Find::Hit ? snapshot.record : kAbsent;
}

bool Index::insert_key(const Key& key, uint32_t record) {
  const uint32_t start = home(key);
  for (uint32_t step = 0; step < reach_; ++step) {
    Bucket& b = bucket(start, step);
    for (auto& slot : b.slot) {
      if (slot.load(std::memory_order_relaxed)) continue;
      // The way is marked before the entry stands, so that no reader stops short of it.
      for (uint32_t passed = 0; passed < step; ++passed) {
        Bucket& p = bucket(start, passed);
        Writing writing(p.sequence);
        p.overflow.store(p.overflow.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
      }
      Writing writing(b.sequence);
      slot.store(slot_word(key, record), std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

void Index::erase(const Key& key, uint32_t record) {
  const uint32_t start = home(key);
  for (uint32_t step = 0; step < reach_; ++step) {
    Bucket& b = bucket(start, step);
    for (auto& slot : b.slot) {
      if (slot.load(std::memory_order_relaxed) != slot_word(key, record)) continue;
      {
        Writing writing(b.sequence);
        slot.store(0, std::memory_order_relaxed);
      }
      erase_contents(record);
      for (uint32_t passed = 0; passed < step; ++passed) {
        Bucket& p = bucket(start, passed);
        Writing writing(p.sequence);
        p.overflow.store(p.overflow.load(std::memory_order_relaxed) - 1, std::memory_order_relaxed);
      }
      return;
    }
  }
  KV_INVARIANT(!"an indexed record is in its bucket");
}

void Index::replace(const Key& key, uint32_t from, uint32_t to) {
  const uint32_t start = home(key);
  for (uint32_t step = 0; step < reach_; ++step) {
    Bucket& b = bucket(start, step);
    for (auto& slot : b.slot) {
      if (slot.load(std::memory_order_relaxed) != slot_word(key, from)) continue;
      erase_contents(from);
      insert_contents(to);
      Writing writing(b.sequence);
      slot.store(slot_word(key, to), std::memory_order_relaxed);
      return;
    }
  }
  KV_INVARIANT(!"an indexed record is in its bucket");
}

void Index::clear() {
  for (uint32_t i = 0; i < bucket_count_; ++i) {
    Writing writing(buckets_[i].sequence);
    buckets_[i].overflow.store(0, std::memory_order_relaxed);
    for (auto& slot : buckets_[i].slot) slot.store(0, std::memory_order_relaxed);
  }
  finder_.clear();
}

}  // namespace kv
