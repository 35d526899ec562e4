// A set of records, one bit each: what a scan of all pins is compared with. Of 100,000 records it lies in the nearest cache.
#pragma once

#include <cstdint>
#include <vector>

namespace kv {

class RecordSet {
 public:
  void resize(uint32_t records) { words_.assign(uint64_t{records} / 64 + 1, 0); }
  void add(uint32_t record) { words_[record / 64] |= uint64_t{1} << record % 64; }
  void remove(uint32_t record) { words_[record / 64] &= ~(uint64_t{1} << record % 64); }
  bool contains(uint32_t record) const { return words_[record / 64] >> record % 64 & 1; }
  // The bits themselves, for a loop that reads atomics: it would read the vector's own pointer again for each.
  const uint64_t* bits() const { return words_.data(); }
  static bool has(const uint64_t* bits, uint32_t record) { return bits[record / 64] >> record % 64 & 1; }
  void clear() { words_.assign(words_.size(), 0); }

 private:
  std::vector<uint64_t> words_;
};

}  // namespace kv
