// What lies in the directories of a disk tier: a name, a length and a time of last use for each file. 60 bytes a file, bounded by
// the number of files it was made for. Never touches a file. Not thread-safe: the tier's lock guards it.
//
// Invariant: bytes() is the sum of the lengths of all entries.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "core/format/block.h"

namespace kv {

class FileIndex {
 public:
  struct Entry {
    Key key;
    uint32_t used_s = 0;    // by the clock of whoever keeps the index
    uint32_t expiry_s = 0;  // 0: never, or not known yet
    uint32_t pages = 0;     // of the file
    uint32_t tokens = 0;    // 0: not known yet
    uint8_t directory = 0;
    bool doomed = false;  // its file is about to be removed: nobody finds it any more
    bool listed = false;  // among the files to be removed next, or again
    uint64_t bytes() const { return pages * kPageBytes; }
  };
  static_assert(sizeof(Entry) <= 56);

  explicit FileIndex(uint32_t max_files);

  Entry* find(const Key& key);
  // The entry, new or as it was. Null if there are max_files already.
  Entry* add(const Key& key, uint32_t pages, uint8_t directory, uint32_t used_s);
  void erase(const Key& key);

  // Of sixteen entries taken at random the one used longest ago (the approximation Redis evicts by): no list to keep in order,
  // and none to restore at start. `usable` says which count. Null if none did.
  template <class Usable>
  const Entry* old_one(Usable&& usable) {
    const Entry* oldest = nullptr;
    const size_t tries = entries_.size() < kSample ? entries_.size() : 4 * kSample;
    for (size_t i = 0, seen = 0; i < tries && seen < kSample; ++i) {
      const Entry& entry = entries_.size() < kSample ? entries_[i] : entries_[next_random() % entries_.size()];
      if (!usable(entry)) continue;
      ++seen;
      if (!oldest || entry.used_s < oldest->used_s) oldest = &entry;
    }
    return oldest;
  }

  template <class F>
  void each(F&& f) {
    for (Entry& entry : entries_) f(entry);
  }
  size_t size() const { return entries_.size(); }
  uint64_t bytes() const { return bytes_; }
  bool full() const { return entries_.size() >= max_files_; }

 private:
  static constexpr size_t kSample = 16;
  static constexpr uint32_t kEmpty = 0;
  size_t home(const Key& key) const { return KeyHash{}(key)&mask_; }
  size_t slot_of(const Key& key) const;  // where it is, or the empty slot where it would be
  uint64_t next_random();

  const uint32_t max_files_;
  size_t mask_;
  std::vector<uint32_t> slots_;  // 1 + place in entries_; linear probing, at most two thirds full
  std::deque<Entry> entries_;    // dense; the last one fills a gap
  uint64_t bytes_ = 0;
  uint64_t random_ = 0x9e3779b97f4a7c15ull;
};

}  // namespace kv
