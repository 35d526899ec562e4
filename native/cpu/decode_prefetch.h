// What a few rows ask of memory while they are computed (cpu/decode_int_vnni.h, cpu/decode_float_avx2.h).
//
// Owns the order and the pace of the requests for the next tile; reads nothing. Invariant: a request never faults, so one for
// memory that is not there does no harm.
#pragma once

#include "cpu/attend_rows.h"

namespace kvk {
namespace {

constexpr uint32_t kFew = 4;  // rows at a time
constexpr uint32_t kFewRows = 16, kFewHeadDim = 256;
constexpr uint32_t kFewTile = 128;    // keys looked at together
constexpr float kFewLargest = 32767;  // that a word of 16 bits holds

// Asks for what the next tile reads, line after line, a few at every step of all that is done with this one: a request too many
// at once is dropped, and memory that waits while weights are made is time lost.
class Stream {
 public:
  // `bytes` of a key or value; the next tile has `most` tokens or fewer. Codes do not ask for elements, nor elements for codes.
  Stream(const Tile& tile, uint32_t head_dim, uint32_t bytes, uint32_t most) {
    const kvk_segment* s = tile.next_segment;
    if (s == nullptr || s->codec != tile.segment->codec || tile.next_start >= s->first + s->tokens) return;
    const uint32_t left = s->first + s->tokens - tile.next_start, tokens = left < most ? left : most;
    const Tile next{s, tile.kv_head, tile.next_start, tokens, nullptr, 0};
    if (quantised(s->codec)) add_scales(next, head_dim);
    if (s->k_token_stride >= bytes && s->k_token_stride < 2 * int64_t{bytes})
      add(key_row(next, 0), tokens * static_cast<uint32_t>(s->k_token_stride));
    if (s->v_token_stride >= bytes && s->v_token_stride < 2 * int64_t{bytes})
      add(value_row(next, 0), tokens * static_cast<uint32_t>(s->v_token_stride));
    next_ = range_[0].next, stop_ = range_[0].stop;
    for (uint32_t i = 0; i < count_; ++i)  // a line of each page, so that they are looked up together
      for (const char* page = range_[i].next; page < range_[i].stop; page += 4096) _mm_prefetch(page, _MM_HINT_T1);
  }
  // Lines to ask for at each of `steps` that together take `sixteenths` of the time.
  uint32_t of_step(uint32_t sixteenths, uint32_t steps) const { return (lines_ * sixteenths / 16 + steps - 1) / steps; }
  void ask(uint32_t lines) {
    const char *now = next_, *end = now + 64 * lines;
    if (end > stop_) return ask_across(lines);
    for (; now < end; now += 64) _mm_prefetch(now, _MM_HINT_T1);
    next_ = end;
  }

 private:
  struct Range {
    const char *next, *stop;
  };
  // The last lines of a range, and the first of the one behind it.
  [[gnu::noinline]] void ask_across(uint32_t lines) {
    for (; lines > 0; --lines, next_ += 64) {
      while (next_ >= stop_) {
        if (now_ + 1 >= count_) return;
        ++now_, next_ = range_[now_].next, stop_ = range_[now_].stop;
      }
      _mm_prefetch(next_, _MM_HINT_T1);
    }
  }
  void add_scales(const Tile& next, uint32_t head_dim) {
    const kvk_segment& s = *next.segment;
    const uint32_t group = next.start / s.k_group, groups = (next.start + next.count - 1) / s.k_group - group + 1;
    const int64_t k = next.kv_head * s.k_scale_head_stride + int64_t{2} * head_dim * group;
    const int64_t v = next.kv_head * s.v_scale_head_stride + int64_t{2} * next.start;
    add(at(s.k_scale, k), 2 * head_dim * groups), add(at(s.k_zero, k), 2 * head_dim * groups);
    add(at(s.v_scale, v), 2 * next.count), add(at(s.v_zero, v), 2 * next.count);
  }
  void add(const void* from, uint32_t bytes) {
    const auto* first = static_cast<const char*>(from);
    range_[count_++] = {first, first + bytes};
    lines_ += (bytes + 63) / 64;
  }
  Range range_[6] = {};
  const char *next_ = nullptr, *stop_ = nullptr;  // of the range that is asked for now
  uint32_t count_ = 0, now_ = 0, lines_ = 0;
};

}  // namespace
}  // namespace kvk
