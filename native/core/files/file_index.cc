#include "core/files/file_index.h"

#include <bit>

namespace kv {

FileIndex::FileIndex(uint32_t max_files)
    : max_files_(max_files), mask_(std::bit_ceil(uint64_t{max_files} * 3 / 2 + 2) - 1), slots_(mask_ + 1, kEmpty) {}

// xorshift64*: Vigna 2016.
uint64_t FileIndex::next_random() {
  random_ ^= random_ >> 12;
  random_ ^= random_ << 25;
  random_ ^= random_ >> 27;
  return random_ * 0x2545f4914f6cdd1dull >> 16;
}

size_t FileIndex::slot_of(const Key& key) const {
  size_t at = home(key);
  while (slots_[at] != kEmpty && !(entries_[slots_[at] - 1].key == key)) at = (at + 1) & mask_;
  return at;
}

FileIndex::Entry* FileIndex::find(const Key& key) {
  const size_t at = slot_of(key);
  return slots_[at] == kEmpty ? nullptr : &entries_[slots_[at] - 1];
}

FileIndex::Entry* FileIndex::add(const Key& key, uint32_t pages, uint8_t directory, uint32_t used_s) {
  const size_t at = slot_of(key);
  if (slots_[at] != kEmpty) return &entries_[slots_[at] - 1];
  if (full()) return nullptr;
  Entry entry;
  entry.key = key, entry.pages = pages, entry.directory = directory, entry.used_s = used_s;
  bytes_ += entry.bytes();
  entries_.push_back(entry);
  slots_[at] = static_cast<uint32_t>(entries_.size());
  return &entries_.back();
}

void FileIndex::erase(const Key& key) {
  size_t gap = slot_of(key);
  if (slots_[gap] == kEmpty) return;
  const uint32_t place = slots_[gap] - 1;
  bytes_ -= entries_[place].bytes();
  if (place + 1 != entries_.size()) {
    slots_[slot_of(entries_.back().key)] = place + 1;
    entries_[place] = entries_.back();
    // The slot that is emptied below may be the moved entry's probe's start, never its place: keys differ.
  }
  entries_.pop_back();
  // Linear probing without tombstones: what stood behind the gap moves up (Knuth, volume 3, algorithm 6.4R).
  slots_[gap] = kEmpty;
  for (size_t at = (gap + 1) & mask_; slots_[at] != kEmpty; at = (at + 1) & mask_) {
    const size_t wanted = home(entries_[slots_[at] - 1].key);
    if (((at - wanted) & mask_) < ((at - gap) & mask_)) continue;
    slots_[gap] = slots_[at];
    slots_[at] = kEmpty;
    gap = at;
  }
}

}  // namespace kv
