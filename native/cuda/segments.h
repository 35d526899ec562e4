// A warp's walk over the segments of a sequence, one tile of keys after the other, in device memory.
//
// Owns which keys a stretch has and where they lie. Two descriptions are held in shared memory, of the segment that is computed
// and of the one that is loaded; the next one is on its way into registers. Invariant: a tile lies in one segment; one of 32
// codes at most also in one group of tokens that share K's scales, since it begins at a multiple of 32 or ends there.
#pragma once

#include "cuda/attention.h"

namespace kvk {

// How operands are multiplied; from the segment's codec. kBf16 and kHalf are 16-bit elements.
enum Kind : uint32_t { kBf16, kHalf, kInt8, kInt4 };

KVK_DEVICE_FN Kind kind_of(const kvk_attention& a, uint32_t codec) {
  if (codec == KVK_INT8) return kInt8;
  if (codec == KVK_INT4) return kInt4;
  return kHasBf16 && (codec == KVK_BF16 || (codec == KVK_F32 && a.dtype == KVK_BF16)) ? kBf16 : kHalf;
}
constexpr KVK_DEVICE_FN bool is_quantised(Kind kind) { return kind == kInt8 || kind == kInt4; }
constexpr KVK_DEVICE_FN uint32_t bits_of_kind(Kind kind) { return kind == kInt8 ? 8 : kind == kInt4 ? 4 : 16; }

// Tokens start..start + count of segment held[slot]'s block; count = 0: there are no more.
struct Tile {
  uint32_t slot, start, count;
  Kind kind;
  int64_t first_key;  // position of the first
};

// The keys of a sequence, and a stretch of them, counted through the segments, then the tail.
KVK_DEVICE_FN uint64_t keys_of(const kvk_sequence& sequence) {
  const uint32_t lane = lane_index();
  uint64_t keys = lane == 0 ? sequence.tail.tokens : 0;
  for (uint64_t i = lane; i < sequence.count; i += 32) keys += sequence.segments[i].tokens;
  for (uint32_t mask = 16; mask != 0; mask /= 2) keys += shuffle_xor(keys, mask);
  return keys;
}

class Walk {
 public:
  // The rows that look are at least..most; `held` is the warp's own shared memory, two segments.
  KVK_DEVICE_FN Walk(const kvk_attention& a, const kvk_sequence& sequence, kvk_segment* held, uint64_t start, uint64_t stop,
                     int64_t least, int64_t most)
      : a_(a), sequence_(sequence), held_(held), start_(start), stop_(stop), least_(least), most_(most) {
    find();
    fetch();
  }

  // The next tile, of at most `wide` tokens for 16-bit elements and `quantised_wide` for codes. The tile before it may still be
  // in use, the one before that not.
  KVK_DEVICE_FN Tile next(uint32_t wide, uint32_t quantised_wide) {
    while (token_ >= token_stop_) {
      if (index_ > sequence_.count || key_ >= stop_) return {0, 0, 0, kHalf, 0};
      slot_ = returned_ ^ 1;
      settle();
      fetch();
      clip();
    }
    const kvk_segment& s = held_[slot_];
    const Kind kind = kind_of(a_, s.codec);
    const uint32_t most = is_quantised(kind) ? quantised_wide - token_ % quantised_wide : wide;
    const uint32_t left = token_stop_ - token_, count = left < most ? left : most, token = token_;
    token_ += count;
    returned_ = slot_;
    return {slot_, token, count, kind, s.new_position + static_cast<int64_t>(token - s.first)};
  }

 private:
  // The first segment that reaches into the stretch: each lane adds up a run of segments, one lane's run has it.
  KVK_DEVICE_FN void find() {
    const uint32_t lane = lane_index();
    const uint64_t run = (sequence_.count + 31) / 32, first = lane * run;
    const uint64_t last = first + run < sequence_.count ? first + run : sequence_.count;
    uint64_t keys = 0;
    for (uint64_t i = first; i < last; ++i) keys += sequence_.segments[i].tokens;
    uint64_t before = keys;
    for (uint32_t by = 1; by < 32; by *= 2) {
      const uint64_t other = shuffle_up(before, by);
      if (lane >= by) before += other;
    }
    const uint32_t has = ballot(before > start_);
    before -= keys;
    uint64_t index = first;
    if (has != 0 && lane == first_bit(has))
      for (uint32_t tokens; before + (tokens = sequence_.segments[index].tokens) <= start_; ++index) before += tokens;
    const uint32_t from = has == 0 ? 31 : first_bit(has);
    if (has == 0) before += keys, index = sequence_.count;
    index_ = shuffle(index, from);
    key_ = shuffle(before, from);
  }

  // Asks for the description of segment index_ (count: the tail): a word or two for each lane.
  KVK_DEVICE_FN void fetch() {
    if (index_ > sequence_.count) return;
    const auto* words =
        reinterpret_cast<const uint32_t*>(index_ < sequence_.count ? sequence_.segments + index_ : &sequence_.tail);
    ahead_[0] = words[lane_index()];
    if (lane_index() < kWords - 32) ahead_[1] = words[lane_index() + 32];
  }
  KVK_DEVICE_FN void settle() {
    sync_warp();  // a description that was passed over may still be read
    auto* words = reinterpret_cast<uint32_t*>(held_ + slot_);
    words[lane_index()] = ahead_[0];
    if (lane_index() < kWords - 32) words[lane_index() + 32] = ahead_[1];
    sync_warp();
    ++index_;
  }
  // The tokens of the segment that belong to the stretch and that some row may see.
  KVK_DEVICE_FN void clip() {
    const kvk_segment& s = held_[slot_];
    const uint64_t end = key_ + s.tokens;
    int64_t from = start_ > key_ ? static_cast<int64_t>(start_ - key_) : 0;
    int64_t to = static_cast<int64_t>((end < stop_ ? end : stop_) - key_);
    if (a_.causal != 0 && to > most_ - s.new_position + 1) to = most_ - s.new_position + 1;
    if (a_.window != 0 && from < least_ - s.new_position - a_.window + 1) from = least_ - s.new_position - a_.window + 1;
    key_ = end;
    if (from > to) from = to;
    token_ = from < to ? s.first + static_cast<uint32_t>(from) : 0;
    token_stop_ = from < to ? s.first + static_cast<uint32_t>(to) : 0;
  }

  static constexpr uint32_t kWords = sizeof(kvk_segment) / 4;
  static_assert(sizeof(kvk_segment) % 4 == 0 && kWords > 32 && kWords <= 64);

  const kvk_attention& a_;
  const kvk_sequence& sequence_;
  kvk_segment* held_;
  uint64_t start_, stop_;
  int64_t least_, most_;
  uint64_t index_ = 0, key_ = 0;  // of the segment that comes next
  uint32_t token_ = 0, token_stop_ = 0, slot_ = 0, returned_ = 0;
  uint32_t ahead_[2] = {0, 0};
};

}  // namespace kvk
