// Tiles of bf16 keys and values, multiplied in pairs of elements (vdpbf16ps). Included by avx512_vnni.cc and what
// builds on it.
//
// Owns the packing of bf16 operands. Invariant: queries are exact, in two bf16 parts where one does not hold them; weights are
// rounded to bf16, as everywhere in the field.
#pragma once

#include "cpu/attend_rows.h"

namespace kvk {
namespace {

inline __m512bh as_pairs(__m512i x) { return __builtin_bit_cast(__m512bh, x); }

// out[r][j] (+)= sum over k of the two products of a[r][k] with b[k][j]; all of them pairs of bf16.
template <uint32_t kMTiles, uint32_t kWide, bool kAdd>
inline void multiply_pairs_panel(const int32_t* a, uint32_t a_stride, const uint32_t* b, uint32_t b_stride, uint32_t depth,
                                 float* out, uint32_t out_stride, Ahead& ahead) {
  __m512 sum[kMTiles][kWide];
#pragma GCC unroll 8
  for (uint32_t r = 0; r < kMTiles; ++r)
#pragma GCC unroll 4
    for (uint32_t j = 0; j < kWide; ++j) sum[r][j] = kAdd ? _mm512_loadu_ps(out + r * out_stride + j * 16) : _mm512_setzero_ps();
  for (uint32_t k = 0; k < depth; ++k, b += b_stride) {
    ahead.multiplying();
    __m512bh column[kWide];
#pragma GCC unroll 4
    for (uint32_t j = 0; j < kWide; ++j) column[j] = as_pairs(_mm512_load_si512(b + j * 16));
#pragma GCC unroll 8
    for (uint32_t r = 0; r < kMTiles; ++r) {
      const __m512bh factor = as_pairs(_mm512_set1_epi32(a[r * a_stride + k]));
#pragma GCC unroll 4
      for (uint32_t j = 0; j < kWide; ++j) sum[r][j] = _mm512_dpbf16_ps(sum[r][j], factor, column[j]);
    }
  }
#pragma GCC unroll 8
  for (uint32_t r = 0; r < kMTiles; ++r)
#pragma GCC unroll 4
    for (uint32_t j = 0; j < kWide; ++j) _mm512_storeu_ps(out + r * out_stride + j * 16, sum[r][j]);
}

template <uint32_t kMTiles, bool kAdd>
inline void multiply_pairs_rows(const int32_t* a, uint32_t a_stride, const uint32_t* b, uint32_t b_stride, uint32_t depth,
                                float* out, uint32_t out_stride, uint32_t columns, Ahead& ahead) {
  uint32_t j = 0;
  for (; j + 64 <= columns; j += 64)
    multiply_pairs_panel<kMTiles, 4, kAdd>(a, a_stride, b + j, b_stride, depth, out + j, out_stride, ahead);
  for (; j < columns; j += 16)
    multiply_pairs_panel<kMTiles, 1, kAdd>(a, a_stride, b + j, b_stride, depth, out + j, out_stride, ahead);
}

template <bool kAdd>
inline void multiply_pairs(const void* a, uint32_t a_stride, uint32_t rows, const void* b, uint32_t b_stride, uint32_t depth,
                           float* out, uint32_t out_stride, uint32_t columns, Ahead& ahead) {
  const auto* left = static_cast<const int32_t*>(a);
  const auto* right = static_cast<const uint32_t*>(b);
  uint32_t r = 0;
  for (; r + 6 <= rows; r += 6)
    multiply_pairs_rows<6, kAdd>(left + r * a_stride, a_stride, right, b_stride, depth, out + r * out_stride, out_stride, columns,
                                 ahead);
  left += r * a_stride, out += r * out_stride;
  switch (rows - r) {
    case 5: return multiply_pairs_rows<5, kAdd>(left, a_stride, right, b_stride, depth, out, out_stride, columns, ahead);
    case 4: return multiply_pairs_rows<4, kAdd>(left, a_stride, right, b_stride, depth, out, out_stride, columns, ahead);
    case 3: return multiply_pairs_rows<3, kAdd>(left, a_stride, right, b_stride, depth, out, out_stride, columns, ahead);
    case 2: return multiply_pairs_rows<2, kAdd>(left, a_stride, right, b_stride, depth, out, out_stride, columns, ahead);
    case 1: return multiply_pairs_rows<1, kAdd>(left, a_stride, right, b_stride, depth, out, out_stride, columns, ahead);
    default: return;
  }
}

inline __m256i narrow(__m512 x) { return __builtin_bit_cast(__m256i, _mm512_cvtneps_pbh(x)); }
inline __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

// The queries as bf16, [rows][2][width]: the number rounded, and what the rounding left. True if anything was left.
inline bool pack_queries_bf16(const float* q, uint32_t rows, uint32_t width, uint8_t* out) {
  __mmask16 left = 0;
  for (uint32_t r = 0; r < rows; ++r)
    for (uint32_t i = 0; i < width; i += 16) {
      const __m512 x = _mm512_loadu_ps(q + r * width + i);
      const __m256i high = narrow(x);
      const __m512 rest = _mm512_sub_ps(x, widen(high));
      left |= _mm512_cmp_ps_mask(rest, _mm512_setzero_ps(), _CMP_NEQ_OQ);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + (2 * r * width + i) * 2), high);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + ((2 * r + 1) * width + i) * 2), narrow(rest));
    }
  return left != 0;
}

inline void scores_bf16(const Tile& tile, uint32_t rows, uint32_t head_dim, uint32_t width, const float* q, Held& held,
                        Scratch& s) {
  if (held.whose != q) {  // `group`: whether there is a second part
    held.group = pack_queries_bf16(q, rows, width, s.query);
    held.whose = q;
  }
  const uint32_t columns = round_up(tile.count, 16), depth = (head_dim + 1) / 2;
  auto* keys = reinterpret_cast<uint32_t*>(s.keys);
  const uint8_t* row[kTile];
  rows_from(tile, false, 0, columns, nullptr, row);
  Ahead ahead = ahead_of(tile, false, 2 * head_dim, columns / 16, steps_of(rows, depth, columns, 6, 64));
  for (uint32_t t = 0; t < columns; t += 16) {
    ahead.packing();
    transpose(row + t, 2 * head_dim, keys + t, kTile);
  }
  multiply_pairs<false>(s.query, width, rows, keys, kTile, depth, s.scores, kTile, columns, ahead);
  if (held.group == 0) return;
  ahead = {};
  multiply_pairs<true>(s.query + 2 * width, width, rows, keys, kTile, depth, s.scores, kTile, columns, ahead);
}

// Two tokens' values beside each other, [count / 2][width] pairs. The words are first put where unpacking, which works inside
// quarters of a register, leaves the channels in order.
inline void pack_values_bf16(const Tile& tile, uint32_t head_dim, uint32_t width, Ahead& ahead, uint32_t* out) {
  const __m512i places = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  alignas(64) static constexpr uint8_t kNothing[2 * KVK_MAX_HEAD_DIM] = {};
  for (uint32_t t = 0; t < tile.count; t += 2, out += width) {
    const uint8_t* row[2];
    rows_from(tile, true, t, 2, kNothing, row);
    ahead.packing();
    for (uint32_t i = 0; i < head_dim; i += 32) {
      const uint32_t left = head_dim - i;
      const __mmask32 read = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
      const __m512i a = _mm512_permutexvar_epi64(places, _mm512_maskz_loadu_epi16(read, row[0] + 2 * i));
      const __m512i b = _mm512_permutexvar_epi64(places, _mm512_maskz_loadu_epi16(read, row[1] + 2 * i));
      _mm512_store_si512(out + i, _mm512_unpacklo_epi16(a, b));
      if (left > 16) _mm512_store_si512(out + i + 16, _mm512_unpackhi_epi16(a, b));
    }
  }
}

inline void values_bf16(const Tile& tile, uint32_t rows, uint32_t head_dim, uint32_t width, Scratch& s) {
  const uint32_t columns = round_up(tile.count, 16);
  for (uint32_t r = 0; r < rows; ++r)
    for (uint32_t i = 0; i < columns; i += 16)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(s.weight + (r * kTile + i) * 2),
                          narrow(_mm512_loadu_ps(s.scores + r * kTile + i)));
  const uint32_t depth = (tile.count + 1) / 2;
  Ahead ahead = ahead_of(tile, true, 2 * head_dim, depth, steps_of(rows, depth, width, 6, 64));
  pack_values_bf16(tile, head_dim, width, ahead, reinterpret_cast<uint32_t*>(s.values));
  multiply_pairs<true>(s.weight, kTile / 2, rows, s.values, width, depth, s.sum, width, width, ahead);
}

}  // namespace
}  // namespace kvk
