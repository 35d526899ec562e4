// A warp's way over the segments of a sequence, one tile of keys after the other, in device memory.
//
// Owns which keys a split has and where they lie. Two descriptions are held in shared memory, of the segment that is computed
// and of the one that is loaded; the next one is on its way into registers. Invariant: a tile lies in one segment; one of
// codes does not pass a multiple of its width, and so not the end of a group of tokens that share K's scales if it divides that.
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

// The keys of a sequence, counted through the segments, then the tail: all of them, those of the run of segments that this lane
// looks at, and those before it.
struct Counted {
  uint64_t all, before, of_run;
};

KVK_DEVICE_FN Counted count_keys(const kvk_sequence& sequence) {
  const uint32_t lane = lane_index();
  const uint64_t run = (sequence.count + 31) / 32, first = lane * run;
  const uint64_t last = first + run < sequence.count ? first + run : sequence.count;
  Counted counted{sequence.tail.tokens, 0, 0};
#pragma unroll 8
  for (uint64_t i = first; i < last; ++i) counted.of_run += sequence.segments[i].tokens;
  counted.before = counted.of_run;
  for (uint32_t by = 1; by < 32; by *= 2) {
    const uint64_t other = shuffle_up(counted.before, by);
    if (lane >= by) counted.before += other;
  }
  counted.all += shuffle(counted.before, 31);
  counted.before -= counted.of_run;
  return counted;
}

// An iterator's place in shared memory, one for each warp: what is needed from segment to segment only.
struct alignas(16) TileIteratorState {
  kvk_segment held[2];
  const kvk_segment* segments;
  const kvk_segment* tail;
  uint64_t count, start, stop;
  int64_t least, most;
  struct Now {
    uint64_t index, key;  // of the segment that comes next
  } now;
};

class TileIterator {
 public:
  // Over keys start..stop, for `rows` that look from position(row).
  template <class Position>
  KVK_DEVICE_FN TileIterator(const kvk_attention& a, const kvk_sequence& sequence, const Counted& counted,
                             TileIteratorState& state, uint64_t start, uint64_t stop, uint32_t rows, Position position)
      : a_(a), state_(state) {
    const TileIteratorState::Now now = find(sequence, counted, start);
    if (lane_index() == 0) {
      int64_t least = position(0), most = least;
      for (uint32_t row = 1; row < rows; ++row) {
        const int64_t at = position(row);
        least = at < least ? at : least, most = at > most ? at : most;
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

  // The next tile, of at most wide(kind, segment) tokens, a power of two; of codes up to a multiple of that. The tile before it
  // may still be in use, the one before that not.
  template <class Wide>
  KVK_DEVICE_FN Tile next(Wide wide) {
    while (token_ >= token_stop_) {
      TileIteratorState::Now now = state_.now;
      if (now.index > state_.count || now.key >= state_.stop) return {0, 0, 0, kHalf, 0};
      slot_ ^= token_stop_ != 0;  // one that was passed over gives up its place
      const kvk_segment& s = state_.held[slot_];
      settle(state_.held[slot_]);
      fetch(++now.index);
      clip(s, now.key);
      kind_ = kind_of(a_, s.codec), origin_ = s.new_position - static_cast<int64_t>(s.first);
      now.key += s.tokens;
      if (lane_index() == 0) state_.now = now;
      sync_warp();
    }
    const uint32_t width = wide(kind_, state_.held[slot_]);
    const uint32_t most = is_quantised(kind_) ? width - (token_ & (width - 1)) : width;
    const uint32_t left = token_stop_ - token_, count = left < most ? left : most, token = token_;
    token_ += count;
    return {slot_, token, count, kind_, origin_ + token};
  }

 private:
  // The first segment that reaches into the split: one lane's run has it.
  static KVK_DEVICE_FN TileIteratorState::Now find(const kvk_sequence& sequence, const Counted& counted, uint64_t start) {
    const uint32_t lane = lane_index(), has = ballot(counted.before + counted.of_run > start);
    uint64_t index = (sequence.count + 31) / 32 * lane, before = counted.before;
    if (has != 0 && lane == first_bit(has))
      for (uint32_t tokens; before + (tokens = sequence.segments[index].tokens) <= start; ++index) before += tokens;
    const uint32_t from = has == 0 ? 31 : first_bit(has);
    if (has == 0) before += counted.of_run, index = sequence.count;
    return {shuffle(index, from), shuffle(before, from)};
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
  // The tokens of the segment that belong to the split and that some row may see; `key` is its first.
  KVK_DEVICE_FN void clip(const kvk_segment& s, uint64_t key) {
    const uint64_t end = key + s.tokens, start = state_.start, stop = state_.stop;
    int64_t from = start > key ? static_cast<int64_t>(start - key) : 0;
    int64_t to = static_cast<int64_t>((end < stop ? end : stop) - key);
    if (a_.causal != 0 && to > state_.most - s.new_position + 1) to = state_.most - s.new_position + 1;
    if (a_.window != 0 && from < state_.least - s.new_position - a_.window + 1)
      from = state_.least - s.new_position - a_.window + 1;
    token_ = from < to ? s.first + static_cast<uint32_t>(from) : 0;
    token_stop_ = from < to ? s.first + static_cast<uint32_t>(to) : 0;
  }

  static constexpr uint32_t kWords = sizeof(kvk_segment) / 4;
  static_assert(sizeof(kvk_segment) % 4 == 0 && kWords > 32 && kWords <= 64);

  const kvk_attention& a_;
  TileIteratorState& state_;
  uint32_t ahead_[2] = {0, 0};
  uint32_t token_ = 0, token_stop_ = 0, slot_ = 0;
  Kind kind_ = kHalf;
  int64_t origin_ = 0;  // where token 0 of the segment's block would stand
};

}  // namespace kvk
