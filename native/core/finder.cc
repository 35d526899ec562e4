#include "core/finder.h"

namespace kv {
namespace {

constexpr uint32_t kRecordMask = (1u << 24) - 1;

// Murmur3's finaliser: parents are low words of digests, but fingerprints are sums whose high bits count for little.
constexpr uint64_t mix(uint64_t x) {
  x = (x ^ x >> 33) * 0xff51afd7ed558ccdull;
  x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53ull;
  return x ^ x >> 33;
}

constexpr uint32_t scaled(uint32_t hash, uint32_t count) { return static_cast<uint32_t>(uint64_t{hash} * count >> 32); }

constexpr uint32_t slot_of(uint32_t tag, uint32_t record) { return tag << 24 | (record + 1); }

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
  std::atomic<uint32_t>* room[2] = {nullptr, nullptr};
  uint32_t empty[2] = {0, 0};
  for (uint32_t side = 0; side < 2; ++side)
    for (auto& slot : buckets_[side == 0 ? at.first : at.second].slot)
      if (slot.load(std::memory_order_relaxed) == 0) room[side] = &slot, ++empty[side];
  std::atomic<uint32_t>* chosen = room[empty[1] > empty[0]];
  if (!chosen) return false;
  chosen->store(slot_of(at.tag, record), std::memory_order_relaxed);
  return true;
}

void Finder::erase(uint64_t word, uint32_t record) {
  if (count_ == 0 || word == 0) return;
  const Place at = place(word);
  for (uint32_t side = 0; side < 2; ++side)
    for (auto& slot : buckets_[side == 0 ? at.first : at.second].slot)
      if (slot.load(std::memory_order_relaxed) == slot_of(at.tag, record)) {
        slot.store(0, std::memory_order_relaxed);
        return;
      }
}

void Finder::clear() {
  for (uint32_t i = 0; i < count_; ++i)
    for (auto& slot : buckets_[i].slot) slot.store(0, std::memory_order_relaxed);
}

}  // namespace kv
