// The finder: a second hash table over the block table, by what a search knows: a block's fingerprint, or its parent.
//
// Writer (Index, under the store's lock): insert, erase, clear. Reader, in any process: find. It names candidates and proves
// nothing: a reader compares the record, pins the block and checks its tokens. Derived and lossy: an entry whose two buckets
// are full takes the place of a copy, where there are many (stored before it, it will be evicted before it), or is left out; a
// block without an entry is found by its key only; an answer that misses a block which changes meanwhile costs that block's
// reuse, not its correctness. So slots need no sequence, and an entry takes four bytes.
//
// Never reads a record. Invariant: a slot is 0 or names a record below max_blocks that was indexed when it was written.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kv {

// A slot is tag:8 | record + 1:24, 0 if empty. An entry lies in one of the two buckets its word leads to.
inline constexpr uint32_t kFinderSlots = 16;
struct alignas(64) FinderBucket {
  std::atomic<uint32_t> slot[kFinderSlots];
};
static_assert(sizeof(FinderBucket) == 64);

class Finder {
 public:
  // What is looked for. A fingerprint is below 2^61, so the two never meet. 0 is nothing.
  static constexpr uint64_t by_fingerprint(uint64_t fingerprint) { return fingerprint; }
  // The low word of a parent's key.
  static constexpr uint64_t by_parent(uint32_t parent) { return parent == 0 ? 0 : uint64_t{1} << 62 | parent; }

  Finder() = default;
  Finder(FinderBucket* buckets, uint32_t count) : buckets_(buckets), count_(count) {}

  // Two entries a block: all of them have room up to about 80 % of max_blocks, nine tenths at 100 % (two-choice hashing).
  static uint32_t buckets_for(uint32_t max_blocks) { return max_blocks / 9 + 2; }

  void prefetch(uint64_t word) const;  // the cache lines that find() will read
  // Writes up to out.size() records that may have this word and says how many.
  size_t find(uint64_t word, std::span<uint32_t> out) const;

  bool insert(uint64_t word, uint32_t record);  // false: no room, and it is left out
  void erase(uint64_t word, uint32_t record);   // nothing if it was left out
  void clear();                                 // every entry

 private:
  struct Place {
    uint32_t first, second, tag;
  };
  Place place(uint64_t word) const;

  FinderBucket* buckets_ = nullptr;
  uint32_t count_ = 0;
};

}  // namespace kv
