// Tiles of int8 and int4 keys and values, multiplied as integers (vpdpbusd). Included by avx512_vnni.cc and what
// builds on it.
//
// Owns the folding: K's scales go into the queries, V's into the weights, and both become 16-bit integers with one step per
// row, held as two bytes that are multiplied one after the other. Zero points and the middle of the code range are added as
// one number per row, so that the rounding of the integers meets centred codes only. Invariant: no product or sum of
// integers overflows for head_dim <= 512.
#pragma once

#include "cpu/attend_rows.h"

namespace kvk {
namespace {

constexpr float kLargest = 127 * 256;  // of the integers; their high byte is then within -127..127

inline __m512 halves(const uint16_t* from, __mmask16 read) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(read, from)); }

inline __mmask16 first_lanes(uint32_t count) { return count >= 16 ? 0xffff : static_cast<__mmask16>((1u << count) - 1); }

// out[r][j] (+)= step[r] * sum over k of a[r][k] * b[k][j] + shift[r], where a is two bytes times 256 and 1.
template <uint32_t kMTiles, uint32_t kWide, bool kAdd>
inline void multiply_codes_panel(const uint8_t* a, uint32_t a_stride, const uint32_t* b, uint32_t b_stride, uint32_t depth,
                                 const float* step, const float* shift, float* out, uint32_t out_stride, Ahead& ahead) {
  __m512i high[kMTiles][kWide], low[kMTiles][kWide];
#pragma GCC unroll 4
  for (uint32_t r = 0; r < kMTiles; ++r)
#pragma GCC unroll 4
    for (uint32_t j = 0; j < kWide; ++j) high[r][j] = low[r][j] = _mm512_setzero_si512();
  const auto* bytes = reinterpret_cast<const int32_t*>(a);
  for (uint32_t k = 0; k < depth; ++k, b += b_stride) {
    ahead.multiplying();
    __m512i column[kWide];
#pragma GCC unroll 4
    for (uint32_t j = 0; j < kWide; ++j) column[j] = _mm512_load_si512(b + j * 16);
#pragma GCC unroll 4
    for (uint32_t r = 0; r < kMTiles; ++r) {
      const __m512i upper = _mm512_set1_epi32(bytes[2 * r * (a_stride / 4) + k]);
      const __m512i lower = _mm512_set1_epi32(bytes[(2 * r + 1) * (a_stride / 4) + k]);
#pragma GCC unroll 4
      for (uint32_t j = 0; j < kWide; ++j) {
        high[r][j] = _mm512_dpbusd_epi32(high[r][j], column[j], upper);
        low[r][j] = _mm512_dpbusd_epi32(low[r][j], column[j], lower);
      }
    }
  }
#pragma GCC unroll 4
  for (uint32_t r = 0; r < kMTiles; ++r)
#pragma GCC unroll 4
    for (uint32_t j = 0; j < kWide; ++j) {
      const __m512 whole = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high[r][j]), _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(low[r][j]));
      float* to = out + r * out_stride + j * 16;
      const __m512 base = kAdd ? _mm512_add_ps(_mm512_loadu_ps(to), _mm512_set1_ps(shift[r])) : _mm512_set1_ps(shift[r]);
      _mm512_storeu_ps(to, _mm512_fmadd_ps(whole, _mm512_set1_ps(step[r]), base));
    }
}

template <uint32_t kMTiles, bool kAdd>
inline void multiply_codes_rows(const uint8_t* a, uint32_t a_stride, const uint32_t* b, uint32_t b_stride, uint32_t depth,
                                const float* step, const float* shift, float* out, uint32_t out_stride, uint32_t columns,
                                Ahead& ahead) {
  constexpr uint32_t kWide = kMTiles <= 2 ? 4 : 2;  // what the registers hold
  uint32_t j = 0;
  for (; j + 16 * kWide <= columns; j += 16 * kWide)
    multiply_codes_panel<kMTiles, kWide, kAdd>(a, a_stride, b + j, b_stride, depth, step, shift, out + j, out_stride, ahead);
  if (kWide == 4 && j + 32 <= columns) {
    multiply_codes_panel<kMTiles, 2, kAdd>(a, a_stride, b + j, b_stride, depth, step, shift, out + j, out_stride, ahead);
    j += 32;
  }
  for (; j < columns; j += 16)
    multiply_codes_panel<kMTiles, 1, kAdd>(a, a_stride, b + j, b_stride, depth, step, shift, out + j, out_stride, ahead);
}

inline uint32_t rows_at_once(uint32_t left) { return left == 3 ? 3 : left == 1 ? 1 : 2; }

inline uint32_t code_steps(uint32_t rows, uint32_t depth, uint32_t columns) {
  return (rows + 1) / 2 * ((columns + 63) / 64) * depth;
}

template <bool kAdd>
inline void multiply_codes(const uint8_t* a, uint32_t a_stride, uint32_t rows, const uint32_t* b, uint32_t b_stride,
                           uint32_t depth, const float* step, const float* shift, float* out, uint32_t out_stride,
                           uint32_t columns, Ahead& ahead) {
  for (uint32_t r = 0; r < rows;) {
    const uint32_t high = rows_at_once(rows - r);
    if (high == 3)
      multiply_codes_rows<3, kAdd>(a, a_stride, b, b_stride, depth, step, shift, out, out_stride, columns, ahead);
    else if (high == 2)
      multiply_codes_rows<2, kAdd>(a, a_stride, b, b_stride, depth, step, shift, out, out_stride, columns, ahead);
    else
      multiply_codes_rows<1, kAdd>(a, a_stride, b, b_stride, depth, step, shift, out, out_stride, columns, ahead);
    r += high, a += 2 * high * a_stride, step += high, shift += high, out += high * out_stride;
  }
}

// x[0..vectors) as 16-bit integers with one step, each in two bytes [high][stride], [low][stride]. `bias` is what the caller
// adds to every product anyway; it is returned, summed, with what the integers lose against codes around `centre`.
inline void split_row(const __m512* x, uint32_t vectors, bool interleave, float centre, __m512 bias, uint8_t* out,
                      uint32_t stride, float* step, float* shift) {
  __m512 largest = _mm512_setzero_ps(), sum = _mm512_setzero_ps();
  for (uint32_t i = 0; i < vectors; ++i) {
    largest = _mm512_max_ps(largest, _mm512_abs_ps(x[i]));
    sum = _mm512_add_ps(sum, x[i]);
  }
  const float most = _mm512_reduce_max_ps(largest);
  const __m512 per_step = _mm512_set1_ps(most == 0 ? 0 : kLargest / most);
  const __m512i by_eights = _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  __m512i whole_sum = _mm512_setzero_si512();
  for (uint32_t i = 0; i < vectors; ++i) {
    __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(x[i], per_step));
    whole_sum = _mm512_add_epi32(whole_sum, whole);
    if (interleave) whole = _mm512_permutexvar_epi32(by_eights, whole);
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
    // The low byte is that of the whole: what the high one was rounded by is a multiple of 256.
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16 * i), _mm512_cvtepi32_epi8(high));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + stride + 16 * i), _mm512_cvtepi32_epi8(whole));
  }
  *step = most / kLargest;
  const __m512 lost = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(whole_sum), _mm512_set1_ps(*step), sum);
  *shift = _mm512_reduce_add_ps(_mm512_fmadd_ps(lost, _mm512_set1_ps(centre), bias));
}

// Asks for the scales of the tile that comes next; its codes are asked for while this one is multiplied.
inline void ask_for_scales(const Tile& tile, uint32_t head_dim) {
  const kvk_segment* s = tile.next_segment;
  if (s == nullptr || !quantised(s->codec) || tile.next_start >= s->first + s->tokens) return;
  const auto ask = [](const uint16_t* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(from) + i, _MM_HINT_T0);
  };
  const int64_t k = tile.kv_head * s->k_scale_head_stride, v = tile.kv_head * s->v_scale_head_stride;
  if (tile.next_start % s->k_group == 0) {
    const uint64_t start = uint64_t{tile.next_start / s->k_group} * head_dim;
    const int64_t bytes = int64_t{2} * head_dim * (s->k_group < kTile ? kTile / s->k_group : 1);
    ask(at(s->k_scale, k) + start, bytes), ask(at(s->k_zero, k) + start, bytes);
  }
  ask(at(s->v_scale, v) + tile.next_start, 2 * kTile), ask(at(s->v_zero, v) + tile.next_start, 2 * kTile);
}

// The queries with one group's scales of K in them: s.query, s.step, s.shift.
inline void fold_queries(const Tile& tile, uint32_t group, uint32_t rows, uint32_t head_dim, uint32_t width, const float* q,
                         Scratch& s) {
  const kvk_segment& segment = *tile.segment;
  const uint64_t start = uint64_t{group} * head_dim;
  const uint16_t* scale = at(segment.k_scale, tile.kv_head * segment.k_scale_head_stride) + start;
  const uint16_t* zero = at(segment.k_zero, tile.kv_head * segment.k_scale_head_stride) + start;
  __m512 folded[KVK_MAX_HEAD_DIM / 16], scales[KVK_MAX_HEAD_DIM / 16], zeros[KVK_MAX_HEAD_DIM / 16];
  for (uint32_t i = 0; i < head_dim; i += 16) {
    scales[i / 16] = halves(scale + i, first_lanes(head_dim - i));
    zeros[i / 16] = halves(zero + i, first_lanes(head_dim - i));
  }
  for (uint32_t r = 0; r < rows; ++r) {
    __m512 bias = _mm512_setzero_ps();
    for (uint32_t i = 0; i < width / 16; ++i) {
      const __m512 x = _mm512_loadu_ps(q + r * width + 16 * i);
      folded[i] = _mm512_mul_ps(x, scales[i]);
      bias = _mm512_fmadd_ps(x, zeros[i], bias);
    }
    split_row(folded, width / 16, segment.codec == KVK_INT4, middle(segment.codec), bias, s.query + uint64_t{2} * r * width,
              width, s.step + r, s.shift + r);
  }
}

// Four bits to a byte each, after the transposition: a column of eight channels becomes two, the even ones and the odd ones.
inline void spread_columns(uint32_t columns, uint32_t panel, uint32_t* keys) {
  const __m512i half = _mm512_set1_epi8(15);
  for (uint32_t c = columns; c-- > 0;) {  // from the back: a column's place is not before itself
    const __m512i both = _mm512_load_si512(keys + c * kTile + panel);
    _mm512_store_si512(keys + 2 * c * kTile + panel, _mm512_and_si512(both, half));
    _mm512_store_si512(keys + (2 * c + 1) * kTile + panel, _mm512_and_si512(_mm512_srli_epi16(both, 4), half));
  }
}

// Scores: group after group, whose scales the queries have, keys are laid out in s.keys and multiplied by
// multiply(keys, scores, columns).
template <class Multiply>
inline void scores_codes(const Tile& tile, uint32_t rows, uint32_t head_dim, uint32_t width, const float* q, Held& held,
                         Ahead& ahead, Scratch& s, const Multiply& multiply) {
  const kvk_segment& segment = *tile.segment;
  auto* keys = reinterpret_cast<uint32_t*>(s.keys);
  const uint32_t bytes = row_bytes(tile, head_dim);
  ask_for_scales(tile, head_dim);
  for (uint32_t done = 0; done < tile.count;) {
    const uint32_t group = (tile.start + done) / segment.k_group, end = (group + 1) * segment.k_group - tile.start;
    const uint32_t stop = end < tile.count ? end : tile.count;
    if (held.whose != &segment || held.group != group) {
      fold_queries(tile, group, rows, head_dim, width, q, s);
      held.whose = &segment, held.group = group;
    }
    for (uint32_t t = done; t < stop; t += 16) {
      const uint8_t* row[16];
      rows_from(tile, false, t, 16, nullptr, row);
      ahead.packing();
      transpose(row, bytes, keys + t, kTile);
      if (segment.codec == KVK_INT4) spread_columns((bytes + 3) / 4, t, keys);
    }
    multiply(keys + done, s.scores + done, round_up(stop - done, 16));
    done = stop;
  }
}

inline void scores_vnni(const Tile& tile, uint32_t rows, uint32_t head_dim, uint32_t width, const float* q, Held& held,
                        Scratch& s) {
  const uint32_t bytes = row_bytes(tile, head_dim), depth = (bytes + 3) / 4 * (tile.segment->codec == KVK_INT8 ? 1 : 2);
  Ahead ahead = ahead_of(tile, false, bytes, (tile.count + 15) / 16, code_steps(rows, depth, tile.count));
  scores_codes(tile, rows, head_dim, width, q, held, ahead, s, [&](const uint32_t* keys, float* out, uint32_t columns) {
    multiply_codes<false>(s.query, width, rows, keys, kTile, depth, s.step, s.shift, out, kTile, columns, ahead);
  });
}

// 64 channels of a token as bytes, put where unpacking, which works inside quarters of a register, leaves them in order.
template <uint32_t kCodec>
inline __m512i value_codes(const uint8_t* row, uint32_t start, uint32_t left) {
  const __m512i places = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  if (kCodec == KVK_INT8) {
    if (left >= 64) return _mm512_permutexvar_epi32(places, _mm512_loadu_si512(row + start));
    return _mm512_permutexvar_epi32(places, _mm512_maskz_loadu_epi8((__mmask64{1} << left) - 1, row + start));
  }
  const __mmask32 read = left >= 64 ? ~__mmask32{0} : (__mmask32{1} << left / 2) - 1;
  const __m512i wide = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(read, row + start / 2));
  const __m512i bytes = _mm512_and_si512(_mm512_or_si512(wide, _mm512_slli_epi16(wide, 4)), _mm512_set1_epi8(15));
  return _mm512_permutexvar_epi32(places, bytes);
}

// Four tokens' codes beside each other, [count / 4][width] of four bytes. A token behind the last counts as 0.
template <uint32_t kCodec>
inline void pack_codes(const Tile& tile, uint32_t head_dim, uint32_t width, Ahead& ahead, uint32_t* out) {
  alignas(64) static constexpr uint8_t kNothing[KVK_MAX_HEAD_DIM] = {};
  for (uint32_t t = 0; t < tile.count; t += 4, out += width) {
    const uint8_t* row[4];
    rows_from(tile, true, t, 4, kNothing, row);
    ahead.packing();
    for (uint32_t i = 0; i < head_dim; i += 64) {
      const uint32_t left = head_dim - i;
      const __m512i a = value_codes<kCodec>(row[0], i, left), b = value_codes<kCodec>(row[1], i, left);
      const __m512i c = value_codes<kCodec>(row[2], i, left), d = value_codes<kCodec>(row[3], i, left);
      const __m512i low = _mm512_unpacklo_epi8(a, b), low2 = _mm512_unpacklo_epi8(c, d);
      const __m512i high = _mm512_unpackhi_epi8(a, b), high2 = _mm512_unpackhi_epi8(c, d);
      _mm512_store_si512(out + i, _mm512_unpacklo_epi16(low, low2));
      if (left > 16) _mm512_store_si512(out + i + 16, _mm512_unpackhi_epi16(low, low2));
      if (left > 32) _mm512_store_si512(out + i + 32, _mm512_unpacklo_epi16(high, high2));
      if (left > 48) _mm512_store_si512(out + i + 48, _mm512_unpackhi_epi16(high, high2));
    }
  }
}

inline const uint32_t* pack_values_vnni(const Tile& tile, uint32_t head_dim, uint32_t width, Ahead& ahead, Scratch& s) {
  auto* out = reinterpret_cast<uint32_t*>(s.values);
  if (tile.segment->codec == KVK_INT8)
    pack_codes<KVK_INT8>(tile, head_dim, width, ahead, out);
  else
    pack_codes<KVK_INT4>(tile, head_dim, width, ahead, out);
  return out;
}

// The weights with the values' scales in them: s.weight, and a step and a shift a row.
inline void fold_weights(const Tile& tile, uint32_t rows, float* step, float* shift, Scratch& s) {
  const kvk_segment& segment = *tile.segment;
  const uint16_t* scale = at(segment.v_scale, tile.kv_head * segment.v_scale_head_stride) + tile.start;
  const uint16_t* zero = at(segment.v_zero, tile.kv_head * segment.v_scale_head_stride) + tile.start;
  __m512 folded[kTile / 16], scales[kTile / 16], zeros[kTile / 16];
  const uint32_t vectors = (tile.count + 15) / 16;
  for (uint32_t i = 0; i < vectors; ++i) {
    scales[i] = halves(scale + 16 * i, first_lanes(tile.count - 16 * i));
    zeros[i] = halves(zero + 16 * i, first_lanes(tile.count - 16 * i));
  }
  for (uint32_t r = 0; r < rows; ++r) {
    __m512 bias = _mm512_setzero_ps();
    for (uint32_t i = 0; i < vectors; ++i) {
      const __m512 weight = _mm512_loadu_ps(s.scores + r * kTile + 16 * i);
      folded[i] = _mm512_mul_ps(weight, scales[i]);
      bias = _mm512_fmadd_ps(weight, zeros[i], bias);
    }
    split_row(folded, vectors, false, middle(segment.codec), bias, s.weight + 2 * r * kTile, kTile, step + r, shift + r);
  }
}

inline void values_vnni(const Tile& tile, uint32_t rows, uint32_t head_dim, uint32_t width, Scratch& s) {
  alignas(64) float step[kRows], shift[kRows];
  fold_weights(tile, rows, step, shift, s);
  const uint32_t depth = (tile.count + 3) / 4;
  Ahead ahead = ahead_of(tile, true, row_bytes(tile, head_dim), depth, code_steps(rows, depth, width));
  const uint32_t* values = pack_values_vnni(tile, head_dim, width, ahead, s);
  multiply_codes<true>(s.weight, kTile, rows, values, width, depth, step, shift, s.sum, width, width, ahead);
}

}  // namespace
}  // namespace kvk
