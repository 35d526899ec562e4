// What the store keeps for the disk tier: which blocks wait to be written, which lie only on disk, which files must go. Plain
// state; the store's lock guards it. store_disk.cc says how it changes.
#pragma once

#include <iterator>
#include <set>
#include <unordered_map>
#include <utility>

#include "core/format/keys.h"
#include "core/format/store_types.h"
#include "core/store/eviction.h"

namespace kv {

// Blocks that wait to be written, by their scores.
class WriteQueue {
 public:
  bool empty() const { return blocks_.empty(); }
  size_t size() const { return blocks_.size(); }
  bool contains(double score, uint32_t record) const { return blocks_.contains({score, record}); }
  void add(double score, uint32_t record) { blocks_.emplace(score, record); }
  bool remove(double score, uint32_t record) { return blocks_.erase({score, record}) != 0; }
  uint32_t most() const { return std::prev(blocks_.end())->second; }
  uint32_t pop_most() { return pop(std::prev(blocks_.end())); }
  uint32_t pop_least() { return pop(blocks_.begin()); }
  // All scores have changed: what they are now.
  template <class Score>
  void score_again(Score&& score) {
    Blocks blocks;
    for (const auto& [before, record] : blocks_) blocks.emplace(score(record), record);
    blocks_ = std::move(blocks);
  }

 private:
  using Blocks = std::set<std::pair<double, uint32_t>>;
  uint32_t pop(Blocks::iterator block) {
    const uint32_t record = block->second;
    blocks_.erase(block);
    return record;
  }
  Blocks blocks_;
};

struct DiskState {
  DiskState(RecordPlaces places, uint32_t records) : blocks(places, records), tombstones(places, records) {}

  WriteQueue writes;
  EvictionPolicy<RecordPlaces> blocks;               // the DISK records, in one queue: the least valuable goes first
  std::unordered_map<Key, uint32_t, KeyHash> going;  // files that must go, and the DISK record that remembers each, if one does
  EvictionPolicy<RecordPlaces> tombstones;           // of those, the ones with a record: the oldest is given up first
  Deleted deleted;                                   // files the tier has not yet been told to remove
  int wake = -1;                                     // an eventfd; none without a tier
  bool tells() const { return !deleted.keys.empty() || deleted.all; }
  size_t spare_records() const { return blocks.size() + tombstones.size(); }
};

}  // namespace kv
