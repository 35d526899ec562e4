#include "core/format/finder.h"

#include <bit>
#include <cstring>

namespace kv {
namespace {

constexpr uint32_t kRecordMask = (1u << 24) - 1;
constexpr size_t kCopies = 4;  // of 32 entries with tags of eight bits: by chance in one pair of thousands

// Murmur3's finaliser: parents are low words of digests, but fingerprints are sums whose high bits count for little.
constexpr uint64_t mix(uint64_t x) {
  x = (x ^ x >> 33) * 0xff51afd7ed558ccdull;
  x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53ull;
  return x ^ x >> 33;
}

constexpr uint32_t scaled(uint32_t hash, uint32_t count) { return static_cast<uint32_t>(uint64_t{hash} * count >> 32); }

constexpr uint32_t slot_of(uint32_t tag, uint32_t record) { return tag << 24 | (record + 1); }

// The writer's own look at a bucket: nobody else writes, so it needs no atomic loads, and the compiler compares all slots at
// once.
struct Slots {
  uint32_t value[kFinderSlots];
  explicit Slots(const FinderBucket& bucket) { std::memcpy(value, static_cast<const void*>(bucket.slot), sizeof value); }
};

uint32_t equal_slots(const FinderBucket& bucket, uint32_t wanted) {
  const Slots now(bucket);
  uint32_t count = 0;
  for (const uint32_t value : now.value) count += value == wanted;
  return count;
}

std::atomic<uint32_t>* slot_with(FinderBucket& bucket, uint32_t wanted) {
  const Slots now(bucket);
  uint32_t found = 0;
  for (uint32_t i = 0; i < kFinderSlots; ++i) found |= static_cast<uint32_t>(now.value[i] == wanted) << i;
  return found ? &bucket.slot[std::countr_zero(found)] : nullptr;
}

// One of the entries with this tag, if so many have it that they are copies of one text: any of them with the same chance, so
// that those of long ago go sooner or later.
std::atomic<uint32_t>* copy_in(FinderBucket& first, FinderBucket& second, uint32_t tag, uint32_t record) {
  std::atomic<uint32_t>* copies[2 * kFinderSlots];
  size_t count = 0;
  for (FinderBucket* bucket : {&first, &second})
    for (auto& slot : bucket->slot)
      if (slot.load(std::memory_order_relaxed) >> 24 == tag) copies[count++] = &slot;
  return count >= kCopies ? copies[mix(record) % count] : nullptr;
}

}  // namespace

// The tag has bits of its own: those that chose a bucket say nothing within it.
Finder::Place Finder::place(uint64_t word) const {
  const uint64_t hash = mix(word);
  return {scaled(static_cast<uint32_t>(hash >> 32), count_), scaled(static_cast<uint32_t>(hash), count_),
          static_cast<uint32_t>(mix(hash) >> 56)};
}

void Finder::prefetch(uint64_t word) const {
  if (count_ == 0) return;
  const Place at = place(word);
  __builtin_prefetch(&buckets_[at.first]);
  __builtin_prefetch(&buckets_[at.second]);
}

size_t Finder::find(uint64_t word, std::span<uint32_t> out) const {
  if (count_ == 0 || word == 0) return 0;
  const Place at = place(word);
  size_t found = 0;
  for (uint32_t side = 0; side < (at.first == at.second ? 1 : 2); ++side)
    for (const auto& slot : buckets_[side == 0 ? at.first : at.second].slot) {
      const uint32_t value = slot.load(std::memory_order_relaxed);
      if (value >> 24 != at.tag || (value & kRecordMask) == 0) continue;
      if (found == out.size()) return found;
      out[found++] = (value & kRecordMask) - 1;
    }
  return found;
}

bool Finder::insert(uint64_t word, uint32_t record) {
  if (count_ == 0 || word == 0 || record >= kRecordMask) return false;
  const Place at = place(word);
  FinderBucket& first = buckets_[at.first];
  FinderBucket& second = buckets_[at.second];
  FinderBucket& emptier = equal_slots(second, 0) > equal_slots(first, 0) ? second : first;
  std::atomic<uint32_t>* chosen = slot_with(emptier, 0);
  if (!chosen) chosen = copy_in(first, second, at.tag, record);
  if (!chosen) return false;
  chosen->store(slot_of(at.tag, record), std::memory_order_relaxed);
  return true;
}

void Finder::erase(uint64_t word, uint32_t record) {
  if (count_ == 0 || word == 0) return;
  const Place at = place(word);
  const uint32_t wanted = slot_of(at.tag, record);
  std::atomic<uint32_t>* found = slot_with(buckets_[at.first], wanted);
  if (!found) found = slot_with(buckets_[at.second], wanted);
  if (found) found->store(0, std::memory_order_relaxed);
}

void Finder::clear() {
  for (uint32_t i = 0; i < count_; ++i)
    for (auto& slot : buckets_[i].slot) slot.store(0, std::memory_order_relaxed);
}

}  // namespace kv
