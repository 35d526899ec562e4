// One task of attention, for paths with vectors: tiles of keys, the softmax kept up from tile to tile, fp32 products.
//
// Owns the walk over segments and the arithmetic that all such paths share. `Isa` is what differs between them: which codecs it
// multiplies in a form of its own (cpu/tile_vnni.h, cpu/tile_bf16.h); all others become fp32 here. Invariant: local to the
// including file (cpu/numbers.h says why).
#pragma once

#include "cpu/attend.h"
#include "cpu/attend_result.h"
#include "cpu/codec_rows.h"
#include "cpu/numbers.h"
#include "cpu/vector.h"

namespace kvk {
namespace {

using V = Vector;

// The part of one segment that a tile looks at: tokens start..start + count of the segment's block.
struct Tile {
  const kvk_segment* segment;
  uint32_t kv_head, start, count;
  const kvk_segment* next_segment;  // of the tile that comes after this one, or null
  uint32_t next_start;
};

inline const uint8_t* key_row(const Tile& tile, uint32_t token) {
  const kvk_segment& s = *tile.segment;
  return static_cast<const uint8_t*>(at(s.k, tile.kv_head * s.k_head_stride + (tile.start + token) * s.k_token_stride));
}

inline const uint8_t* value_row(const Tile& tile, uint32_t token) {
  const kvk_segment& s = *tile.segment;
  return static_cast<const uint8_t*>(at(s.v, tile.kv_head * s.v_head_stride + (tile.start + token) * s.v_token_stride));
}

// Asks for the bytes of the tile that comes next while this one is packed and multiplied: a few cache lines at every step, so
// that memory and arithmetic are busy at the same time. The processor's own prefetching does not see through the reordering
// of rows.
struct Ahead {
  const char* next;
  uint32_t of_pack, of_product;  // lines at every step

  void packing() { ask(of_pack); }
  void multiplying() { ask(of_product); }
  void ask(uint32_t lines) {
    for (uint32_t i = 0; i < lines; ++i, next += 64) _mm_prefetch(next, _MM_HINT_T1);
  }
};

// Steps of a product of rows x depth with depth x columns that takes `high` rows and `wide` columns at once.
inline uint32_t steps_of(uint32_t rows, uint32_t depth, uint32_t columns, uint32_t high, uint32_t wide) {
  return (rows + high - 1) / high * ((columns + wide - 1) / wide) * depth;
}

// The keys, or the values, of the next tile, whose rows have `bytes`: a third while packing, the rest while multiplying.
inline Ahead ahead_of(const Tile& tile, bool values, uint32_t bytes, uint32_t packs, uint32_t steps) {
  const kvk_segment* s = tile.next_segment;
  const int64_t token_stride = s == nullptr ? 0 : values ? s->v_token_stride : s->k_token_stride;
  if (s == nullptr || tile.next_start >= s->first + s->tokens || token_stride < bytes || token_stride >= 2 * int64_t{bytes})
    return {nullptr, 0, 0};
  const uint32_t left = s->first + s->tokens - tile.next_start;
  const int64_t head_stride = values ? s->v_head_stride : s->k_head_stride;
  const uint32_t lines = static_cast<uint32_t>((left < kTile ? left : kTile) * token_stride / 64);
  const uint32_t of_pack = (lines / 3 + packs - 1) / packs, rest = lines > of_pack * packs ? lines - of_pack * packs : 0;
  return {static_cast<const char*>(at(values ? s->v : s->k, tile.kv_head * head_stride + tile.next_start * token_stride)),
          of_pack, (rest + steps - 1) / steps};
}

// `count` rows of keys or values from `token` of the tile on; behind the tile's last one `beyond`, or that last one again.
inline void rows_from(const Tile& tile, bool values, uint32_t token, uint32_t count, const uint8_t* beyond, const uint8_t** row) {
  const int64_t stride = values ? tile.segment->v_token_stride : tile.segment->k_token_stride;
  const uint8_t* at_row = values ? value_row(tile, token) : key_row(tile, token);
  const uint32_t there = tile.count - token < count ? tile.count - token : count;
  for (uint32_t i = 0; i < there; ++i, at_row += stride) row[i] = at_row;
  for (uint32_t i = there; i < count; ++i) row[i] = beyond != nullptr ? beyond : row[there - 1];
}

constexpr bool quantised(uint32_t codec) { return codec == KVK_INT8 || codec == KVK_INT4; }
constexpr float middle(uint32_t codec) { return codec == KVK_INT8 ? 128.0f : 8.0f; }

// ---------------------------------------------------------------- products in fp32

constexpr uint32_t kPanelRows = V::kLanes == 16 ? 4 : 6;  // with a panel's columns: what the registers hold

// out[r][j] (+)= sum over k of a[r][k] * b[k][j], for `kWide` vectors of j.
template <uint32_t kHigh, uint32_t kWide, bool kAdd>
inline void multiply_panel(const float* a, uint32_t a_stride, const float* b, int64_t b_stride, uint32_t depth, float* out,
                           uint32_t out_stride) {
  V::T sum[kHigh][kWide];
  const float* row[kHigh];
#pragma GCC unroll 8
  for (uint32_t r = 0; r < kHigh; ++r) {
    row[r] = a + r * a_stride;
#pragma GCC unroll 4
    for (uint32_t j = 0; j < kWide; ++j) sum[r][j] = kAdd ? V::load(out + r * out_stride + j * V::kLanes) : V::zero();
  }
  for (size_t k = 0; k < depth; ++k, b += b_stride) {
    V::T column[kWide];
#pragma GCC unroll 4
    for (uint32_t j = 0; j < kWide; ++j) column[j] = V::load(b + j * V::kLanes);
#pragma GCC unroll 8
    for (uint32_t r = 0; r < kHigh; ++r) {
      const V::T factor = V::all(row[r][k]);
#pragma GCC unroll 4
      for (uint32_t j = 0; j < kWide; ++j) sum[r][j] = V::fma(factor, column[j], sum[r][j]);
    }
  }
#pragma GCC unroll 8
  for (uint32_t r = 0; r < kHigh; ++r)
#pragma GCC unroll 4
    for (uint32_t j = 0; j < kWide; ++j) V::store(out + r * out_stride + j * V::kLanes, sum[r][j]);
}

template <uint32_t kWide, bool kAdd>
inline void multiply_columns(const float* a, uint32_t a_stride, uint32_t rows, const float* b, int64_t b_stride, uint32_t depth,
                             float* out, uint32_t out_stride) {
  uint32_t r = 0;
  for (; r + kPanelRows <= rows; r += kPanelRows)
    multiply_panel<kPanelRows, kWide, kAdd>(a + r * a_stride, a_stride, b, b_stride, depth, out + r * out_stride, out_stride);
  for (; r < rows; ++r)
    multiply_panel<1, kWide, kAdd>(a + r * a_stride, a_stride, b, b_stride, depth, out + r * out_stride, out_stride);
}

// All rows with some columns before the next: a tile of 64 times 128 floats fills the first cache, some columns of it do not.
template <bool kAdd>
inline void multiply(const float* a, uint32_t a_stride, uint32_t rows, const float* b, int64_t b_stride, uint32_t depth,
                     float* out, uint32_t out_stride, uint32_t columns) {
  constexpr uint32_t kWide = V::kLanes == 16 ? 4 : 2;  // what the registers hold
  uint32_t j = 0;
  for (; j + kWide * V::kLanes <= columns; j += kWide * V::kLanes)
    multiply_columns<kWide, kAdd>(a, a_stride, rows, b + j, b_stride, depth, out + j, out_stride);
  for (; j < columns; j += V::kLanes) multiply_columns<1, kAdd>(a, a_stride, rows, b + j, b_stride, depth, out + j, out_stride);
}

// Keys or values of a tile as floats, [count][width], the last ones of a row 0.
inline void load_keys(const Tile& tile, uint32_t head_dim, uint32_t width, float* out) {
  const kvk_segment& s = *tile.segment;
  float scale[KVK_MAX_HEAD_DIM], zero[KVK_MAX_HEAD_DIM];
  uint32_t group = ~0u;
  for (uint32_t t = 0; t < tile.count; ++t, out += width) {
    for (uint32_t i = head_dim; i < width; ++i) out[i] = 0;
    if (!quantised(s.codec)) {
      load_row(s.codec, key_row(tile, t), head_dim, out);
      continue;
    }
    if (group != (tile.start + t) / s.k_group) {
      group = (tile.start + t) / s.k_group;
      load_row(KVK_F16, at(s.k_scale, tile.kv_head * s.k_scale_head_stride) + uint64_t{group} * head_dim, head_dim, scale);
      load_row(KVK_F16, at(s.k_zero, tile.kv_head * s.k_scale_head_stride) + uint64_t{group} * head_dim, head_dim, zero);
    }
    load_codes(s.codec, key_row(tile, t), head_dim, out);
    for (uint32_t i = 0; i < head_dim; ++i) out[i] = out[i] * scale[i] + zero[i];
  }
}

inline void load_values(const Tile& tile, uint32_t head_dim, uint32_t width, float* out) {
  const kvk_segment& s = *tile.segment;
  for (uint32_t t = 0; t < tile.count; ++t, out += width) {
    for (uint32_t i = head_dim; i < width; ++i) out[i] = 0;
    if (!quantised(s.codec)) {
      load_row(s.codec, value_row(tile, t), head_dim, out);
      continue;
    }
    const float scale = from_half(at(s.v_scale, tile.kv_head * s.v_scale_head_stride)[tile.start + t]);
    const float zero = from_half(at(s.v_zero, tile.kv_head * s.v_scale_head_stride)[tile.start + t]);
    load_codes(s.codec, value_row(tile, t), head_dim, out);
    for (uint32_t i = 0; i < head_dim; ++i) out[i] = out[i] * scale + zero;
  }
}

inline void scores_f32(const Tile& tile, uint32_t rows, uint32_t head_dim, uint32_t width, const float* q, Scratch& s) {
  const uint8_t* row[kTile];
  auto* floats = reinterpret_cast<float*>(s.values);  // free until the values are wanted
  const bool direct = tile.segment->codec == KVK_F32 && width == head_dim;
  if (!direct) load_keys(tile, head_dim, width, floats);
  const uint32_t padded_count = round_up(tile.count, V::kLanes);
  for (uint32_t t = 0; t < padded_count; ++t) {  // behind the last key its copies: their scores are not looked at
    const uint32_t from = t < tile.count ? t : tile.count - 1;
    row[t] = direct ? key_row(tile, from) : reinterpret_cast<const uint8_t*>(floats + from * width);
  }
  auto* keys = reinterpret_cast<uint32_t*>(s.keys);
  for (uint32_t t = 0; t < padded_count; t += V::kLanes) transpose(row + t, 4 * width, keys + t, kTile);
  multiply<false>(q, width, rows, reinterpret_cast<const float*>(keys), kTile, width, s.scores, kTile, padded_count);
}

inline void values_f32(const Tile& tile, uint32_t rows, uint32_t head_dim, uint32_t width, Scratch& s) {
  if (tile.segment->codec == KVK_F32 && width == head_dim && tile.segment->v_token_stride % 4 == 0) {
    multiply<true>(s.scores, kTile, rows, reinterpret_cast<const float*>(value_row(tile, 0)), tile.segment->v_token_stride / 4,
                   tile.count, s.sum, width, width);
    return;
  }
  auto* floats = reinterpret_cast<float*>(s.values);
  load_values(tile, head_dim, width, floats);
  multiply<true>(s.scores, kTile, rows, floats, width, tile.count, s.sum, width, width);
}

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
  const float before = s.most[r], now = V::largest(largest) > before ? V::largest(largest) : before;
  if (now == -__builtin_inff()) {  // nothing seen yet, or nothing but NaN
    for (uint32_t i = 0; i < vectors; ++i)
      if (const float sum = V::sum(score[i]); sum != sum) s.total[r] = sum;
    for (uint32_t i = 0; i < vectors; ++i) V::store(row + i * V::kLanes, V::zero());
    return;
  }
  if (now > before) {
    const float down = before == -__builtin_inff() ? 0.0f : __builtin_exp2f(before - now);
    s.most[r] = now;
    s.total[r] *= down;
    float* sum = s.sum + r * width;
    for (uint32_t i = 0; i < width; i += V::kLanes) V::store(sum + i, V::mul(V::load(sum + i), V::all(down)));
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
  s.total[r] += V::sum(total);
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

// What a path has that knows no other form for a few rows.
struct AllRowsAlike {
  static uint32_t most_tokens(const kvk_segment&, uint32_t, uint32_t) { return kTile; }
  static bool few(const kvk_attention&, const Task&, const Tile&, uint32_t, const float*, Held&, Scratch&) { return false; }
};

// Tokens of a tile, at most `most`, that starts at token `start` of its block and may go on to `stop`.
inline uint32_t tile_tokens(const kvk_segment& segment, uint64_t start, uint64_t stop, uint32_t most) {
  const uint64_t left = stop - start;
  if (!quantised(segment.codec)) return static_cast<uint32_t>(left < most ? left : most);
  const uint64_t step = start % 32 != 0 ? 32 : most;  // groups of 32 tokens then start at multiples of 32 in the tile
  const uint64_t whole = step - start % step;
  return static_cast<uint32_t>(left < whole ? left : whole);
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
    if (!Isa::scores(tile, rows, a.head_dim, width, q, held, s)) scores_f32(tile, rows, a.head_dim, width, q, s);
    for (uint32_t r = 0; r < rows; ++r)
      softmax_row(a, seen(a, position_of(a, task, task.row_start + r), first_key, tile.count), tile.count, width, r, s);
    if (!Isa::values(tile, rows, a.head_dim, width, s)) values_f32(tile, rows, a.head_dim, width, s);
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
    s.most[r] = -__builtin_inff(), s.total[r] = 0;
    const int64_t position = position_of(a, task, row);
    first_position = r == 0 || position < first_position ? position : first_position;
    last_position = r == 0 || position > last_position ? position : last_position;
  }
  for (uint32_t r = rows; r < round_up(rows, 4); ++r) {  // some paths take four rows at once
    for (uint32_t i = 0; i < width; ++i) s.sum[r * width + i] = 0;
    s.most[r] = -__builtin_inff(), s.total[r] = 0;
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
      finish_row(a, task.batch, task.kv_head, task.row_start + r, sum, s.most[r], s.total[r], s.turned);
      continue;
    }
    float* to = task.partial + r * (width + 2);
    std::memcpy(to, sum, width * sizeof(float));
    to[width] = s.most[r], to[width + 1] = s.total[r];
  }
}

}  // namespace
}  // namespace kvk
