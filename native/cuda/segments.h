// A warp's way over the segments of a sequence, one tile of keys after the other, in device memory.
//
// Owns which keys a split has and where they lie. Two descriptions are held in shared memory, of the segment that is computed
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

// The keys of a sequence, and a split of them, counted through the segments, then the tail.
KVK_DEVICE_FN uint64_t keys_of(const kvk_sequence& sequence) {
  const uint32_t lane = lane_index();
  uint64_t keys = lane == 0 ? sequence.tail.tokens : 0;
  for (uint64_t i = lane; i < sequence.count; i += 32) keys += sequence.segments[i].tokens;
  for (uint32_t mask = 16; mask != 0; mask /= 2) keys += shuffle_xor(keys, mask);
  return keys;
}

// An iterator's place in shared memory, one for each warp: it costs no registers between tiles.
struct alignas(16) TileIteratorState {
  kvk_segment held[2];
  const kvk_segment* segments;
  const kvk_segment* tail;
  uint64_t count, start, stop;
  int64_t least, most;
  struct Now {
    uint64_t index, key;  // of the segment that comes next
    uint32_t token, token_stop, slot, returned;
  } now;
};

class TileIterator {
 public:
  // Over keys start..stop, for `rows` that look from position(row).
  template <class Position>
  KVK_DEVICE_FN TileIterator(const kvk_attention& a, const kvk_sequence& sequence, TileIteratorState& state, uint64_t start,
                             uint64_t stop, uint32_t rows, Position position)
      : a_(a), state_(state) {
    TileIteratorState::Now now = find(sequence, start);
    if (lane_index() == 0) {
      int64_t least = position(0), most = least;
      for (uint32_t row = 1; row < rows; ++row) {
        const int64_t one = position(row);
        least = one < least ? one : least, most = one > most ? one : most;
      }
      state.segments = sequence.segments, state.tail = &sequence.tail, state.count = sequence.count;
      state.start = start, state.stop = stop, state.least = least, state.most = most, state.now = now;
    }
    sync_warp();
    fetch(now.index);
  }

  KVK_DEVICE_FN const kvk_segment& segment(const Tile& tile) const { return state_.held[tile.slot]; }
  KVK_DEVICE_FN int64_t least() const { return state_.least; }
  KVK_DEVICE_FN int64_t most() const { return state_.most; }

  // The next tile, of at most `wide` tokens for 16-bit elements and `quantised_wide` for codes. The tile before it may still be
  // in use, the one before that not.
  KVK_DEVICE_FN Tile next(uint32_t wide, uint32_t quantised_wide) {
    TileIteratorState::Now now = state_.now;
    while (now.token >= now.token_stop) {
      if (now.index > state_.count || now.key >= state_.stop) return {0, 0, 0, kHalf, 0};
      now.slot = now.returned ^ 1;
      settle(state_.held[now.slot]);
      fetch(++now.index);
      clip(state_.held[now.slot], now);
    }
    const kvk_segment& s = state_.held[now.slot];
    const Kind kind = kind_of(a_, s.codec);
    const uint32_t most = is_quantised(kind) ? quantised_wide - now.token % quantised_wide : wide;
    const uint32_t left = now.token_stop - now.token, count = left < most ? left : most, token = now.token;
    now.token += count;
    now.returned = now.slot;
    sync_warp();  // all have read what is written now
    if (lane_index() == 0) state_.now = now;
    sync_warp();
    return {now.slot, token, count, kind, s.new_position + static_cast<int64_t>(token - s.first)};
  }

 private:
  // The first segment that reaches into the split: each lane adds up a run of segments, one lane's run has it.
  static KVK_DEVICE_FN TileIteratorState::Now find(const kvk_sequence& sequence, uint64_t start) {
    const uint32_t lane = lane_index();
    const uint64_t run = (sequence.count + 31) / 32, first = lane * run;
    const uint64_t last = first + run < sequence.count ? first + run : sequence.count;
    uint64_t keys = 0;
    for (uint64_t i = first; i < last; ++i) keys += sequence.segments[i].tokens;
    uint64_t before = keys;
    for (uint32_t by = 1; by < 32; by *= 2) {
      const uint64_t other = shuffle_up(before, by);
      if (lane >= by) before += other;
    }
    const uint32_t has = ballot(before > start);
    before -= keys;
    uint64_t index = first;
    if (has != 0 && lane == first_bit(has))
      for (uint32_t tokens; before + (tokens = sequence.segments[index].tokens) <= start; ++index) before += tokens;
    const uint32_t from = has == 0 ? 31 : first_bit(has);
    if (has == 0) before += keys, index = sequence.count;
    return {shuffle(index, from), shuffle(before, from), 0, 0, 0, 0};
  }

  // Asks for the description of a segment (count: the tail): a word or two for each lane.
  KVK_DEVICE_FN void fetch(uint64_t index) {
    if (index > state_.count) return;
    const auto* words = reinterpret_cast<const uint32_t*>(index < state_.count ? state_.segments + index : state_.tail);
    ahead_[0] = words[lane_index()];
    if (lane_index() < kWords - 32) ahead_[1] = words[lane_index() + 32];
  }
  KVK_DEVICE_FN void settle(kvk_segment& held) {
    sync_warp();  // a description that was passed over may still be read
    auto* words = reinterpret_cast<uint32_t*>(&held);
    words[lane_index()] = ahead_[0];
    if (lane_index() < kWords - 32) words[lane_index() + 32] = ahead_[1];
    sync_warp();
  }
  // The tokens of the segment that belong to the split and that some row may see.
  KVK_DEVICE_FN void clip(const kvk_segment& s, TileIteratorState::Now& now) const {
    const uint64_t end = now.key + s.tokens, start = state_.start, stop = state_.stop;
    int64_t from = start > now.key ? static_cast<int64_t>(start - now.key) : 0;
    int64_t to = static_cast<int64_t>((end < stop ? end : stop) - now.key);
    if (a_.causal != 0 && to > state_.most - s.new_position + 1) to = state_.most - s.new_position + 1;
    if (a_.window != 0 && from < state_.least - s.new_position - a_.window + 1)
      from = state_.least - s.new_position - a_.window + 1;
    now.key = end;
    now.token = from < to ? s.first + static_cast<uint32_t>(from) : 0;
    now.token_stop = from < to ? s.first + static_cast<uint32_t>(to) : 0;
  }

  static constexpr uint32_t kWords = sizeof(kvk_segment) / 4;
  static_assert(sizeof(kvk_segment) % 4 == 0 && kWords > 32 && kWords <= 64);

  const kvk_attention& a_;
  TileIteratorState& state_;
  uint32_t ahead_[2] = {0, 0};
};

}  // namespace kvk
