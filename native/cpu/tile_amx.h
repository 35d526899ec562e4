// Tiles of bf16, int8 and int4 keys and values under many rows of queries, multiplied in AMX's tile registers. Included by
// amx.cc alone.
//
// Owns the loops over tile registers; operands are packed as for vpdpbf16ps and vpdpbusd (cpu/tile_bf16.h, cpu/tile_vnni.h),
// whose form is also that of a right-hand tile: four bytes of a column beside each other. Never reads a packed row that nobody
// wrote as bf16: 0 times what lies there might be NaN; rows of queries beyond the last one may hold anything, each is its own.
// Invariant: integer sums are those of vpdpbusd, so results for codes are the same bytes.
#pragma once

#include "cpu/tile_bf16.h"
#include "cpu/tile_vnni.h"
#include "cpu/tiles.h"

namespace kvk {
namespace {

// Bytes of a row's operand that one multiplication takes: a divisor of `bytes`, so that none has a rest.
inline uint32_t depth_step(uint32_t bytes) { return bytes % 64 == 0 ? 64 : bytes % 32 == 0 ? 32 : 16; }

// ---------------------------------------------------------------- bf16

// What one block of kMTiles x kWide sums multiplies. Strides are in bytes.
struct Operands {
  const uint8_t* left;
  const uint8_t* right;
  int64_t left_stride, right_stride;
  uint32_t step, steps;  // bytes of a left row at once, and how many of these
};

template <uint32_t kMTiles, uint32_t kWide, bool kAdd>
inline void multiply_bf16_block(const Operands& from, float* out, uint32_t out_stride, Ahead& ahead) {
  const int64_t stride = int64_t{4} * out_stride;
  if constexpr (kAdd) {
    Tiles::load<0>(out, stride);
    if constexpr (kWide == 2) Tiles::load<1>(out + 16, stride);
    if constexpr (kMTiles == 2) Tiles::load<2>(out + 16 * out_stride, stride);
    if constexpr (kMTiles == 2 && kWide == 2) Tiles::load<3>(out + 16 * out_stride + 16, stride);
  } else {
    Tiles::zero<0>(), Tiles::zero<1>(), Tiles::zero<2>(), Tiles::zero<3>();
  }
  const uint8_t *left = from.left, *right = from.right;
  for (uint32_t i = 0; i < from.steps; ++i, left += from.step, right += from.step / 4 * from.right_stride) {
    ahead.multiplying();
    Tiles::load<4>(left, from.left_stride);
    Tiles::load<6>(right, from.right_stride);
    Tiles::dot_bf16<0, 4, 6>();
    if constexpr (kWide == 2) Tiles::load<7>(right + 64, from.right_stride), Tiles::dot_bf16<1, 4, 7>();
    if constexpr (kMTiles == 2) Tiles::load<5>(left + 16 * from.left_stride, from.left_stride), Tiles::dot_bf16<2, 5, 6>();
    if constexpr (kMTiles == 2 && kWide == 2) Tiles::dot_bf16<3, 5, 7>();
  }
  Tiles::store<0>(out, stride);
  if constexpr (kWide == 2) Tiles::store<1>(out + 16, stride);
  if constexpr (kMTiles == 2) Tiles::store<2>(out + 16 * out_stride, stride);
  if constexpr (kMTiles == 2 && kWide == 2) Tiles::store<3>(out + 16 * out_stride + 16, stride);
}

template <uint32_t kMTiles, bool kAdd>
inline void multiply_bf16_rows(Operands from, float* out, uint32_t out_stride, uint32_t columns, Ahead& ahead) {
  uint32_t j = 0;
  for (; j + 32 <= columns; j += 32, from.right += 128) multiply_bf16_block<kMTiles, 2, kAdd>(from, out + j, out_stride, ahead);
  if (j < columns) multiply_bf16_block<kMTiles, 1, kAdd>(from, out + j, out_stride, ahead);
}

// out[r][j] (+)= sum over k of a[r][k] * b[k][j], for rows and columns in sixteens: rows beyond the last are written too.
template <bool kAdd>
inline void multiply_bf16(Operands from, uint32_t rows, float* out, uint32_t out_stride, uint32_t columns, Ahead& ahead) {
  Registers::shape(from.step);
  for (uint32_t r = 0; r < rows; r += 32, from.left += 32 * from.left_stride, out += 32 * out_stride) {
    if (rows - r > 16)
      multiply_bf16_rows<2, kAdd>(from, out, out_stride, columns, ahead);
    else
      multiply_bf16_rows<1, kAdd>(from, out, out_stride, columns, ahead);
  }
}

inline uint32_t block_steps(uint32_t rows, uint32_t high, uint32_t columns, uint32_t steps) {
  return (rows + high - 1) / high * ((columns + 31) / 32) * steps;
}

inline void scores_bf16_amx(const Tile& tile, uint32_t rows, uint32_t head_dim, uint32_t width, const float* q, Held& held,
                            Scratch& s) {
  if (held.whose != q) {
    held.group = pack_queries_bf16(q, rows, width, s.query);
    held.whose = q;
  }
  const uint32_t columns = round_up(tile.count, 16), step = depth_step(2 * width), steps = 2 * width / step;
  auto* keys = reinterpret_cast<uint32_t*>(s.keys);
  const uint8_t* row[kTile];
  rows_from(tile, false, 0, columns, nullptr, row);
  Ahead ahead = ahead_of(tile, false, 2 * head_dim, columns / 16, block_steps(rows, 32, columns, steps));
  for (uint32_t t = 0; t < columns; t += 16) {
    ahead.packing();
    transpose(row + t, 2 * head_dim, keys + t, kTile);
  }
  for (uint32_t k = (head_dim + 1) / 2; k < width / 2; ++k) std::memset(keys + k * kTile, 0, 4 * kTile);
  Operands from{s.query, s.keys, int64_t{4} * width, 4 * kTile, step, steps};
  multiply_bf16<false>(from, rows, s.scores, kTile, columns, ahead);
  if (held.group == 0) return;
  ahead = {};
  from.left += 2 * width;
  multiply_bf16<true>(from, rows, s.scores, kTile, columns, ahead);
}

inline void values_bf16_amx(const Tile& tile, uint32_t rows, uint32_t head_dim, uint32_t width, Scratch& s) {
  const uint32_t vectors = (tile.count + 15) / 16, steps = (tile.count + 31) / 32;
  for (uint32_t r = 0; r < rows; ++r)
    for (uint32_t i = 0; i < 2 * steps; ++i) {
      const __m256i weights = i < vectors ? narrow(_mm512_loadu_ps(s.scores + r * kTile + 16 * i)) : _mm256_setzero_si256();
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(s.weight + (r * kTile + 16 * i) * 2), weights);
    }
  const uint32_t depth = (tile.count + 1) / 2;
  Ahead ahead = ahead_of(tile, true, 2 * head_dim, depth, block_steps(rows, 32, width, steps));
  auto* values = reinterpret_cast<uint32_t*>(s.values);
  pack_values_bf16(tile, head_dim, width, ahead, values);
  std::memset(values + depth * width, 0, size_t{4} * width * (16 * steps - depth));
  multiply_bf16<true>({s.weight, s.values, 2 * kTile, int64_t{4} * width, 64, steps}, rows, s.sum, width, width, ahead);
}

// ---------------------------------------------------------------- int8 and int4

// One block of 16 rows of both bytes by kWide sixteens of columns, of which `rows` are looked at.
template <uint32_t kWide, bool kAdd>
inline void multiply_codes_block(const Operands& from, uint32_t part, uint32_t rows, const float* step, const float* shift,
                                 float* out, uint32_t out_stride, Ahead& ahead) {
  Tiles::zero<0>(), Tiles::zero<1>(), Tiles::zero<2>(), Tiles::zero<3>();
  const uint8_t *left = from.left, *right = from.right;
  for (uint32_t i = 0; i < from.steps; ++i, left += from.step, right += from.step / 4 * from.right_stride) {
    ahead.multiplying();
    Tiles::load<4>(left, from.left_stride);
    Tiles::load<5>(left + part, from.left_stride);
    Tiles::load<6>(right, from.right_stride);
    Tiles::dot_signed_unsigned<0, 4, 6>();
    Tiles::dot_signed_unsigned<1, 5, 6>();
    if constexpr (kWide == 2) {
      Tiles::load<7>(right + 64, from.right_stride);
      Tiles::dot_signed_unsigned<2, 4, 7>();
      Tiles::dot_signed_unsigned<3, 5, 7>();
    }
  }
  alignas(64) int32_t sums[2 * kWide][16][16];
  Tiles::store<0>(sums[0], 64), Tiles::store<1>(sums[1], 64);
  if constexpr (kWide == 2) Tiles::store<2>(sums[2], 64), Tiles::store<3>(sums[3], 64);
  for (uint32_t r = 0; r < rows; ++r, out += out_stride)
#pragma GCC unroll 2
    for (uint32_t j = 0; j < kWide; ++j) {
      const __m512 high = _mm512_cvtepi32_ps(_mm512_load_si512(sums[2 * j][r]));
      const __m512 whole =
          _mm512_fmadd_ps(high, _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(_mm512_load_si512(sums[2 * j + 1][r])));
      const __m512 base =
          kAdd ? _mm512_add_ps(_mm512_loadu_ps(out + 16 * j), _mm512_set1_ps(shift[r])) : _mm512_set1_ps(shift[r]);
      _mm512_storeu_ps(out + 16 * j, _mm512_fmadd_ps(whole, _mm512_set1_ps(step[r]), base));
    }
}

// multiply_codes() of cpu/tile_vnni.h. A row is two parts of `part` bytes; right-hand rows beyond what was packed are multiplied
// by zeros.
template <bool kAdd>
inline void multiply_codes_amx(const uint8_t* a, uint32_t part, uint32_t rows, const void* b, uint32_t b_stride,
                               const float* step, const float* shift, float* out, uint32_t out_stride, uint32_t columns,
                               Ahead& ahead) {
  const uint32_t bytes = depth_step(part);
  Registers::shape(bytes);
  for (uint32_t r = 0; r < rows; r += 16) {
    Operands from{a + uint64_t{2} * r * part,
                  static_cast<const uint8_t*>(b),
                  int64_t{2} * part,
                  int64_t{4} * b_stride,
                  bytes,
                  part / bytes};
    const uint32_t high = rows - r < 16 ? rows - r : 16;
    float* to = out + r * out_stride;
    uint32_t j = 0;
    for (; j + 32 <= columns; j += 32, from.right += 128)
      multiply_codes_block<2, kAdd>(from, part, high, step + r, shift + r, to + j, out_stride, ahead);
    if (j < columns) multiply_codes_block<1, kAdd>(from, part, high, step + r, shift + r, to + j, out_stride, ahead);
  }
}

inline void scores_codes_amx(const Tile& tile, uint32_t rows, uint32_t head_dim, uint32_t width, const float* q, Held& held,
                             Scratch& s) {
  const uint32_t steps = block_steps(rows, 16, tile.count, width / depth_step(width));
  Ahead ahead = ahead_of(tile, false, row_bytes(tile, head_dim), (tile.count + 15) / 16, steps);
  scores_codes(tile, rows, head_dim, width, q, held, ahead, s, [&](const uint32_t* keys, float* out, uint32_t columns) {
    multiply_codes_amx<false>(s.query, width, rows, keys, kTile, s.step, s.shift, out, kTile, columns, ahead);
  });
}

inline void values_codes_amx(const Tile& tile, uint32_t rows, uint32_t head_dim, uint32_t width, Scratch& s) {
  alignas(64) float step[kRows], shift[kRows];
  fold_weights(tile, rows, step, shift, s);
  if (const uint32_t written = round_up(tile.count, 16); written < kTile)
    for (uint32_t r = 0; r < 2 * rows; ++r) std::memset(s.weight + r * kTile + written, 0, kTile - written);
  Ahead ahead = ahead_of(tile, true, row_bytes(tile, head_dim), (tile.count + 3) / 4, block_steps(rows, 16, width, 1));
  const uint32_t* values = pack_values_vnni(tile, head_dim, width, ahead, s);
  multiply_codes_amx<true>(s.weight, kTile, rows, values, width, step, shift, s.sum, width, width, ahead);
}

}  // namespace
}  // namespace kvk
