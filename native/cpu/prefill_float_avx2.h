// Tiles under many query rows as fp32: what every path has for what it multiplies in no form of its own.
//
// Owns the scores and sums of a tile, from elements of any codec. Invariant: the order of a sum is that of its elements, however
// many rows and columns are taken at once.
#pragma once

#include "cpu/codec_rows.h"
#include "cpu/tile_rows.h"
#include "cpu/vector.h"

namespace kvk {
namespace {

using V = Vector;

constexpr uint32_t kPanelRows = V::kLanes == 16 ? 4 : 6, kPanelColumns = V::kLanes == 16 ? 64 : 16;  // what the registers hold

// out[r][j] (+)= sum over k of a[r][k] * b[k][j], for `kWide` vectors of j.
template <uint32_t kMTiles, uint32_t kWide, bool kAdd>
inline void multiply_panel(const float* a, uint32_t a_stride, const float* b, int64_t b_stride, uint32_t depth, float* out,
                           uint32_t out_stride) {
  V::T sum[kMTiles][kWide];
  const float* row[kMTiles];
#pragma GCC unroll 8
  for (uint32_t r = 0; r < kMTiles; ++r) {
    row[r] = a + r * a_stride;
#pragma GCC unroll 4
    for (uint32_t j = 0; j < kWide; ++j) sum[r][j] = kAdd ? V::load(out + r * out_stride + j * V::kLanes) : V::zero();
  }
#pragma GCC unroll 4
  for (size_t k = 0; k < depth; ++k, b += b_stride) {
    V::T column[kWide];
#pragma GCC unroll 4
    for (uint32_t j = 0; j < kWide; ++j) column[j] = V::load(b + j * V::kLanes);
#pragma GCC unroll 8
    for (uint32_t r = 0; r < kMTiles; ++r) {
      const V::T factor = V::all(row[r][k]);
#pragma GCC unroll 4
      for (uint32_t j = 0; j < kWide; ++j) sum[r][j] = V::fma(factor, column[j], sum[r][j]);
    }
  }
#pragma GCC unroll 8
  for (uint32_t r = 0; r < kMTiles; ++r)
#pragma GCC unroll 4
    for (uint32_t j = 0; j < kWide; ++j) V::store(out + r * out_stride + j * V::kLanes, sum[r][j]);
}

// A panel of columns for all rows; what kPanelRows leaves over goes together as well: one row alone waits for its own sums.
template <uint32_t kWide, bool kAdd>
inline void multiply_columns(const float* a, uint32_t a_stride, uint32_t rows, const float* b, int64_t b_stride, uint32_t depth,
                             float* out, uint32_t out_stride, Ahead& ahead) {
  const auto panel = [&]<uint32_t kMTiles>(uint32_t r) {
    ahead.multiplying();
    multiply_panel<kMTiles, kWide, kAdd>(a + r * a_stride, a_stride, b, b_stride, depth, out + r * out_stride, out_stride);
  };
  uint32_t r = 0;
  for (; r + kPanelRows <= rows; r += kPanelRows) panel.template operator()<kPanelRows>(r);
  if (r + 4 <= rows) panel.template operator()<4>(r), r += 4;
  if (r + 2 <= rows) panel.template operator()<2>(r), r += 2;
  if (r < rows) panel.template operator()<1>(r);
}

// The right operand of a product: floats from one row to the next, and from one panel of kPanelColumns columns to the next.
struct Right {
  const float* at;
  int64_t row, panel;
};

// Row by row in registers of 16 floats; in those of eight a panel lies in one piece, since rows that are 256 bytes or more apart
// share so few sets of the first cache that they push each other out.
inline Right laid_out(const float* at, uint32_t depth, uint32_t columns) {
  if (V::kLanes == 16) return {at, columns, kPanelColumns};
  return {at, kPanelColumns, int64_t{depth} * kPanelColumns};
}

// All rows with some columns before the next: a tile of 64 times 128 floats fills the first cache, some columns of it do not.
template <bool kAdd>
inline void multiply(const float* a, uint32_t a_stride, uint32_t rows, Right b, uint32_t depth, float* out, uint32_t out_stride,
                     uint32_t columns, Ahead& ahead) {
  uint32_t j = 0;
  for (; j + kPanelColumns <= columns; j += kPanelColumns, b.at += b.panel)
    multiply_columns<kPanelColumns / V::kLanes, kAdd>(a, a_stride, rows, b.at, b.row, depth, out + j, out_stride, ahead);
  for (; j < columns; j += V::kLanes, b.at += V::kLanes)
    multiply_columns<1, kAdd>(a, a_stride, rows, b.at, b.row, depth, out + j, out_stride, ahead);
}

// Keys of a tile as floats, [count][width], the last ones of a row 0.
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

inline void load_value(const Tile& tile, uint32_t token, uint32_t head_dim, uint32_t width, float* out) {
  const kvk_segment& s = *tile.segment;
  for (uint32_t i = head_dim; i < width; ++i) out[i] = 0;
  if (!quantised(s.codec)) {
    load_row(s.codec, value_row(tile, token), head_dim, out);
    return;
  }
  const float scale = from_half(at(s.v_scale, tile.kv_head * s.v_scale_head_stride)[tile.start + token]);
  const float zero = from_half(at(s.v_zero, tile.kv_head * s.v_scale_head_stride)[tile.start + token]);
  load_codes(s.codec, value_row(tile, token), head_dim, out);
  for (uint32_t i = 0; i < head_dim; ++i) out[i] = out[i] * scale + zero;
}

// Values of a tile as floats, the columns behind head_dim 0.
inline Right load_values(const Tile& tile, uint32_t head_dim, uint32_t width, float* out) {
  const Right values = laid_out(out, tile.count, width);
  alignas(64) float row[KVK_MAX_HEAD_DIM];
  for (uint32_t t = 0; t < tile.count; ++t, out += values.row) {
    load_value(tile, t, head_dim, width, row);
    if (values.row == width)
      std::memcpy(out, row, width * sizeof(float));
    else
      for (uint32_t i = 0; i < width; i += kPanelColumns)
        std::memcpy(out + i / kPanelColumns * values.panel, row + i, kPanelColumns * sizeof(float));
  }
  return values;
}

inline uint32_t panel_steps(uint32_t rows, uint32_t columns) { return steps_of(rows, 1, columns, kPanelRows, kPanelColumns); }

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
  const Right keys = laid_out(reinterpret_cast<float*>(s.keys), width, kTile);
  Ahead ahead = ahead_of(tile, false, row_bytes(tile, head_dim), padded_count / V::kLanes, panel_steps(rows, padded_count));
  for (uint32_t t = 0; t < padded_count; t += V::kLanes) {
    ahead.packing();
    transpose(row + t, 4 * width, reinterpret_cast<uint32_t*>(s.keys) + t / kPanelColumns * keys.panel + t % kPanelColumns,
              static_cast<uint32_t>(keys.row));
  }
  multiply<false>(q, width, rows, keys, width, s.scores, kTile, padded_count, ahead);
}

inline void values_f32(const Tile& tile, uint32_t rows, uint32_t head_dim, uint32_t width, Scratch& s) {
  const kvk_segment& segment = *tile.segment;
  const bool direct = segment.codec == KVK_F32 && width == head_dim && segment.v_token_stride % 4 == 0;
  const Right values = direct
                           ? Right{reinterpret_cast<const float*>(value_row(tile, 0)), segment.v_token_stride / 4, kPanelColumns}
                           : load_values(tile, head_dim, width, reinterpret_cast<float*>(s.values));
  Ahead ahead = ahead_of(tile, true, row_bytes(tile, head_dim), 0, panel_steps(rows, width));
  multiply<true>(s.scores, kTile, rows, values, tile.count, s.sum, width, width, ahead);
}

}  // namespace
}  // namespace kvk
