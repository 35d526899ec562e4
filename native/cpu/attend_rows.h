// One task of attention, for paths with vectors: tiles of keys, the softmax kept up from tile to tile.
//
// Owns the walk over segments and the softmax that all such paths share. `Isa` is what differs between them: which codecs it
// multiplies in a form of its own (cpu/tile_vnni.h, cpu/tile_bf16.h); all others become fp32 (cpu/prefill_float_avx2.h).
// Invariant: local to the including file (cpu/numbers.h says why).
#pragma once

#include "cpu/attend.h"
#include "cpu/attend_result.h"
#include "cpu/prefill_float_avx2.h"

namespace kvk {
namespace {

// ---------------------------------------------------------------- softmax

constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

// Keys of the tile that the query at `position` sees: start..stop of it.
struct Seen {
  int start, stop;
};

inline Seen seen(const kvk_attention& a, int64_t position, int64_t first_key, uint32_t count) {
  int64_t start = 0, stop = count;
  if (a.causal != 0 && position - first_key + 1 < stop) stop = position - first_key + 1;
  if (a.window != 0 && position - first_key - a.window + 1 > 0) start = position - first_key - a.window + 1;
  if (stop < 0) stop = 0;
  return {static_cast<int>(start < stop ? start : stop), static_cast<int>(stop)};
}

// Scores in base 2, capped if asked for.
inline V::T in_base_2(V::T score, float scale, float softcap) {
  if (softcap == 0) return V::mul(score, V::all(scale * kLog2E));
  // cap * tanh(x / cap) = cap * (1 - 2 / (1 + e^(2x / cap)))
  V::T power = V::mul(score, V::all(scale * -2 * kLog2E / softcap));
  power = V::sub(V::zero(), V::max(V::all(-120.0f), power));  // at most 120; a NaN as second operand stays one
  const V::T share = V::div(V::all(2.0f), V::add(V::all(1.0f), exp2(power)));
  return V::mul(V::all(softcap * kLog2E), V::sub(V::all(1.0f), share));
}

// Scores of a row become weights; the row's sums are brought to the new largest score. `count` is padded with unseen keys.
// `kWhole`: a full tile, all of it seen; the same arithmetic without a question a register.
template <bool kWhole>
inline void softmax_of(const kvk_attention& a, Seen keys, uint32_t count, uint32_t width, uint32_t r, Scratch& s) {
  float* row = s.scores + r * kTile;
  const V::T never = V::all(-__builtin_inff());
  const uint32_t vectors = kWhole ? kTile / V::kLanes : (count + V::kLanes - 1) / V::kLanes;
  V::T score[kTile / V::kLanes], largest = never;
  for (uint32_t i = 0; i < vectors; ++i) {
    const int base = static_cast<int>(i * V::kLanes);
    score[i] = in_base_2(V::load(row + base), a.scale, a.softcap);
    if (!kWhole && (keys.start > base || keys.stop < base + static_cast<int>(V::kLanes)))
      score[i] = V::between(keys.start - base, keys.stop - base, score[i], never);
    largest = V::max(score[i], largest);  // a NaN that came before gives way: found again in the weights
  }
  const float before = s.row_max[r], now = V::largest(largest) > before ? V::largest(largest) : before;
  if (now == -__builtin_inff()) {  // nothing seen yet, or nothing but NaN
    for (uint32_t i = 0; i < vectors; ++i)
      if (const float sum = V::sum(score[i]); sum != sum) s.row_sum[r] = sum;
    for (uint32_t i = 0; i < vectors; ++i) V::store(row + i * V::kLanes, V::zero());
    return;
  }
  if (now > before) {
    const float rescale = before == -__builtin_inff() ? 0.0f : __builtin_exp2f(before - now);
    s.row_max[r] = now;
    s.row_sum[r] *= rescale;
    float* sum = s.sum + r * width;
    for (uint32_t i = 0; i < width; i += V::kLanes) V::store(sum + i, V::mul(V::load(sum + i), V::all(rescale)));
  }
  V::T total = V::zero();
  for (uint32_t i = 0; i < vectors; ++i) {
    const int base = static_cast<int>(i * V::kLanes);
    V::T weight = exp2(V::sub(score[i], V::all(now)));
    if (!kWhole && (keys.start > base || keys.stop < base + static_cast<int>(V::kLanes)))
      weight = V::between(keys.start - base, keys.stop - base, weight, V::zero());
    V::store(row + base, weight);
    total = V::add(total, weight);
  }
  s.row_sum[r] += V::sum(total);
}

inline void softmax_row(const kvk_attention& a, Seen keys, uint32_t count, uint32_t width, uint32_t r, Scratch& s) {
  if (keys.start == 0 && keys.stop == static_cast<int>(kTile))
    softmax_of<true>(a, keys, count, width, r, s);
  else
    softmax_of<false>(a, keys, count, width, r, s);
}

// ---------------------------------------------------------------- the task

// Which queries s.query holds, in the form of which path: until another segment or group wants others.
struct Held {
  const void* whose = nullptr;
  uint32_t group = 0;
  const float* laid_out = nullptr;  // what few rows have beside it, and for which codec
  uint32_t codec = 0;
};

inline int64_t position_of(const kvk_attention& a, const Task& task, uint32_t r) {
  return a.q_position[uint64_t{task.batch} * a.query_tokens + r / (a.query_heads / a.kv_heads)];
}

// The queries as this segment's keys see them: turned back by what the keys were not turned forward.
inline const float* queries_for(const kvk_attention& a, const kvk_segment& segment, uint32_t rows, uint32_t width,
                                const float** turned_by, Scratch& s) {
  if (segment.turn == nullptr) return s.q;
  if (*turned_by != segment.turn) {
    for (uint32_t r = 0; r < rows; ++r)
      turn_row(s.q + r * width, segment.turn, true, a.rope, a.rotary_dim, width, s.turned + r * width);
    *turned_by = segment.turn;
  }
  return s.turned;
}

// Tokens of a tile, at most `most`, that starts at token `start` of its block and may go on to `stop`.
inline uint32_t tile_tokens(const kvk_segment& segment, uint64_t start, uint64_t stop, uint32_t most) {
  const uint64_t left = stop - start;
  if (!quantised(segment.codec)) return static_cast<uint32_t>(left < most ? left : most);
  const uint64_t step = start % 32 != 0 ? 32 : most;  // groups of 32 tokens then start at multiples of 32 in the tile
  const uint64_t whole = step - start % step;
  return static_cast<uint32_t>(left < whole ? left : whole);
}

// Rows first..stop of a task: all between the first and the last that see something of a tile. Before and behind them are rows
// that stand too early or, with a window, too late: where the rows are some of a prompt's, whole blocks of them.
struct Sighted {
  uint32_t first, stop;
};

inline Sighted sighted(const kvk_attention& a, const Task& task, int64_t first_key, uint32_t count) {
  Sighted rows{0, task.row_stop - task.row_start};
  const auto blind = [&](uint32_t r) {
    const Seen keys = seen(a, position_of(a, task, task.row_start + r), first_key, count);
    return keys.start == keys.stop;
  };
  while (rows.first < rows.stop && blind(rows.first)) ++rows.first;
  while (rows.first < rows.stop && blind(rows.stop - 1)) --rows.stop;
  return rows;
}

inline Scratch from_row(Scratch s, uint32_t row, uint32_t width) {
  s.scores += row * kTile, s.sum += row * width;
  return s;
}

template <class Isa>
void attend_segment(const kvk_attention& a, const Task& task, const kvk_segment& segment, uint64_t from, uint64_t to,
                    const kvk_segment* next, const float* q, Held& held, Scratch& s) {
  const uint32_t rows = task.row_stop - task.row_start, width = padded(a.head_dim);
  const uint64_t stop = segment.first + to;
  const uint32_t most = Isa::most_tokens(segment, rows, a.head_dim);
  for (uint64_t start = segment.first + from; start < stop;) {
    Tile tile{&segment, task.kv_head, static_cast<uint32_t>(start), tile_tokens(segment, start, stop, most), &segment, 0};
    tile.next_start = tile.start + tile.count;
    if (tile.next_start == stop) tile.next_segment = next, tile.next_start = next == nullptr ? 0 : next->first;
    const int64_t first_key = segment.new_position + static_cast<int64_t>(start - segment.first);
    start += tile.count;
    if (Isa::few(a, task, tile, rows, q, held, s)) continue;
    const Sighted rows_seen = sighted(a, task, first_key, tile.count);
    if (rows_seen.first == rows_seen.stop) continue;
    Scratch part = from_row(s, rows_seen.first, width);
    if (!Isa::scores(tile, rows, a.head_dim, width, q, held, s))
      scores_f32(tile, rows_seen.stop - rows_seen.first, a.head_dim, width, q + rows_seen.first * width, part);
    for (uint32_t r = 0; r < rows; ++r)
      softmax_row(a, seen(a, position_of(a, task, task.row_start + r), first_key, tile.count), tile.count, width, r, s);
    if (!Isa::values(tile, rows, a.head_dim, width, s))
      values_f32(tile, rows_seen.stop - rows_seen.first, a.head_dim, width, part);
  }
}

template <class Isa>
void attend_rows(const kvk_attention& a, const Task& task, Scratch s) {
  const uint32_t rows = task.row_stop - task.row_start, width = padded(a.head_dim), group = a.query_heads / a.kv_heads;
  int64_t first_position = 0, last_position = 0;
  for (uint32_t r = 0; r < rows; ++r) {
    const uint32_t row = task.row_start + r;
    load_row(a.dtype,
             at(a.q, task.batch * a.q_batch_stride + (task.kv_head * group + row % group) * a.q_head_stride +
                         row / group * a.q_token_stride),
             a.head_dim, s.q + r * width);
    for (uint32_t i = a.head_dim; i < width; ++i) s.q[r * width + i] = 0;
    for (uint32_t i = 0; i < width; ++i) s.sum[r * width + i] = 0;
    s.row_max[r] = -__builtin_inff(), s.row_sum[r] = 0;
    const int64_t position = position_of(a, task, row);
    first_position = r == 0 || position < first_position ? position : first_position;
    last_position = r == 0 || position > last_position ? position : last_position;
  }
  for (uint32_t r = rows; r < round_up(rows, 4); ++r) {  // some paths take four rows at once
    for (uint32_t i = 0; i < width; ++i) s.sum[r * width + i] = 0;
    s.row_max[r] = -__builtin_inff(), s.row_sum[r] = 0;
  }
  const kvk_sequence& sequence = a.sequences[task.batch];
  const float* turned_by = nullptr;
  Held held;
  uint64_t key = 0;
  for (uint64_t i = 0; i <= sequence.count && key < task.key_stop; ++i) {
    const kvk_segment& segment = i < sequence.count ? sequence.segments[i] : sequence.tail;
    const uint64_t first = key;
    key += segment.tokens;
    if (key <= task.key_start) continue;
    int64_t from = task.key_start > first ? static_cast<int64_t>(task.key_start - first) : 0;
    int64_t to = static_cast<int64_t>((key < task.key_stop ? key : task.key_stop) - first);
    if (a.causal != 0 && to > last_position - segment.new_position + 1) to = last_position - segment.new_position + 1;
    if (a.window != 0 && from < first_position - segment.new_position - a.window + 1)
      from = first_position - segment.new_position - a.window + 1;
    if (from >= to) continue;
    const float* before = turned_by;
    const float* q = queries_for(a, segment, rows, width, &turned_by, s);
    if (turned_by != before) held = {};
    const kvk_segment* next = i + 1 < sequence.count ? &segment + 1 : nullptr;
    attend_segment<Isa>(a, task, segment, static_cast<uint64_t>(from), static_cast<uint64_t>(to), next, q, held, s);
  }
  for (uint32_t r = 0; r < rows; ++r) {
    const float* sum = s.sum + r * width;
    if (task.partial == nullptr) {
      finish_row(a, task.batch, task.kv_head, task.row_start + r, sum, s.row_max[r], s.row_sum[r], s.turned);
      continue;
    }
    float* to = task.partial + r * (width + 2);
    std::memcpy(to, sum, width * sizeof(float));
    to[width] = s.row_max[r], to[width + 1] = s.row_sum[r];
  }
}

}  // namespace
}  // namespace kvk
