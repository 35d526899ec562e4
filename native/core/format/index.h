// The index: a hash table over the block table that any number of processes read without a call while one changes it.
//
// Writer (the store, under its lock): insert, erase, replace. An entry never moves between buckets, so a bucket read whole
// tells the truth about itself. Reader: find. It trusts nothing it read until the bucket's sequence and the record's
// sequence are found unchanged behind an acquire fence; a miss counts only if every bucket of the probe was read whole;
// after kProbeTries failed tries it answers Torn, and the caller asks the daemon. It never spins longer.
//
// What is indexed is also in the finder, by its fingerprint and its parent: sightings() reads from there.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/atomics.h"
#include "core/format/block.h"
#include "core/format/finder.h"

namespace kv {

__extension__ typedef unsigned __int128 Uint128;

// What a reader knows of a block after one consistent read.
struct Snapshot {
  uint32_t record = 0;
  Control control{0};
  Extent extent{0, 0};
  Shape shape{};
  uint32_t expiry_s = 0;
};

// A block that a search came upon: nothing is known of it but what its record said once.
struct Sighting {
  Key key;
  uint32_t record;
  uint32_t tokens;
  bool on_disk;  // and nowhere else
};

enum class Find { Hit, Miss, Torn };

// The mapped table: header, records and their upkeep, buckets. Views over memory that somebody else owns.
class Index {
 public:
  Index() = default;
  explicit Index(std::byte* table);  // a table segment whose header has been validated

  TableHeader& header() const { return *header_; }
  Record& record(uint32_t number) const { return records_[number]; }  // number < max_blocks()
  Upkeep& upkeep(uint32_t number) const { return upkeep_[number]; }   // of the same record
  uint32_t max_blocks() const { return max_blocks_; }

  // Reader side.
  Find find(const Key& key, Snapshot& out) const;
  // The same of each key, the cache misses of many at a time. Blocks that were created together mostly have records in a row:
  // behind some found a step apart the next key is sought another step on, and where it is there no bucket is read.
  void find_each(std::span<const Key> keys, std::span<Find> found, std::span<Snapshot> where) const;
  // The cache line that find() reads first.
  void prefetch_bucket(const Key& key) const { __builtin_prefetch(&buckets_[home(key)]); }
  // The record that probably holds the key, by the first bucket it may be in; kAbsent if none there does.
  uint32_t prefetch_record(const Key& key) const;
  Find find(const Key& key, uint32_t likely, Snapshot& out) const;  // the same, looking first at the record that was said
  void prefetch_contents(uint32_t record) const;                    // the cache lines that insert_contents() will touch
  void prefetch_erase(uint32_t record) const;                       // and erase()
  void prefetch_whole(uint32_t record) const {                      // the record and its upkeep
    __builtin_prefetch(&records_[record]);
    __builtin_prefetch(&upkeep_[record]);
  }
  const Finder& finder() const { return finder_; }
  // Sealed blocks with this fingerprint, or (by_parent) with this low word of their parent's key; at most out.size(). With
  // on_disk also those that lie only there, of which the table still knows these words.
  size_t sightings(uint64_t word, std::span<Sighting> out, bool on_disk = false) const;
  // Where a block in pieces lies that is pinned, or the caller's own: nothing if they are not pages below `limit` that together
  // are as long as it.
  std::vector<Extent> pieces(Extent block, uint64_t limit) const;
  // Of a record: state, generation and flags, read once.
  Control control(uint32_t number) const { return {records_[number].control.load(std::memory_order_acquire)}; }

  // Writer side: no other thread may be inside these.
  uint32_t find_exclusive(const Key& key) const;     // record, or kAbsent
  bool insert_key(const Key& key, uint32_t record);  // false: no bucket within reach has room
  void insert_contents(uint32_t record);             // into the finder. Once, and before it is sealed
  // Both of these.
  bool insert(const Key& key, uint32_t record) { return insert_key(key, record) && (insert_contents(record), true); }
  void erase(const Key& key, uint32_t record);               // from the buckets and the finder
  void replace(const Key& key, uint32_t from, uint32_t to);  // one store: readers see one or the other
  void clear();                                              // every key

  static constexpr uint32_t kAbsent = ~0u;
  static constexpr uint32_t kMaxProbe = 64;  // buckets
  // How many buckets a table of so many blocks has: 4.5 blocks each when it is full.
  static uint32_t buckets_for(uint32_t max_blocks) { return static_cast<uint32_t>(uint64_t{max_blocks} * 2 / 9) + 2; }

 private:
  uint32_t home(const Key& key) const { return static_cast<uint32_t>(static_cast<Uint128>(key.words[0]) * bucket_count_ >> 64); }
  static uint64_t slot_word(const Key& key, uint32_t record) { return key.words[1] << 32 | (record + 1); }
  Bucket& bucket(uint32_t home, uint32_t step) const {
    const uint32_t at = home + step;
    return buckets_[at < bucket_count_ ? at : at - bucket_count_];
  }
  std::array<uint64_t, 2> contents(uint32_t record) const;  // what the finder knows a block by
  void erase_contents(uint32_t record);
  bool read_record(uint32_t number, const Key& key, Snapshot& out, bool& torn) const;
  bool holds(uint32_t likely, const Key& key, Snapshot& out) const;  // sealed, and with this key
  Find probe(const Key& key, Snapshot& out) const;
  size_t find_by_buckets(std::span<const Key> keys, size_t from, bool to_row, Find* found, Snapshot* where) const;
  size_t find_in_row(std::span<const Key> keys, size_t from, Find* found, Snapshot* where) const;

  TableHeader* header_ = nullptr;
  Record* records_ = nullptr;
  Upkeep* upkeep_ = nullptr;
  Bucket* buckets_ = nullptr;
  Finder finder_;
  uint32_t bucket_count_ = 0;
  uint32_t reach_ = 0;  // buckets of the longest probe: a small table has fewer than kMaxProbe
  uint32_t max_blocks_ = 0;
};

// The writer's bracket around a change of a record's payload: odd, release fence, data, even with release.
class Writing {
 public:
  explicit Writing(std::atomic<uint32_t>& sequence) : sequence_(sequence), before_(sequence.load(std::memory_order_relaxed)) {
    sequence_.store(before_ | 1, std::memory_order_relaxed);
    fence_release();
  }
  ~Writing() { sequence_.store((before_ | 1) + 1, std::memory_order_release); }
  Writing(const Writing&) = delete;

 private:
  std::atomic<uint32_t>& sequence_;
  const uint32_t before_;
};

}  // namespace kv
