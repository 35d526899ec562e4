// Tiles of int8 and int4 under many query rows, as 16-bit integers by AVX2 alone (vpmaddwd): prefill and append where there is no
// VNNI. Twice as many products an instruction as fp32 has, and codes need no scale before they are multiplied.
//
// As cpu/tile_vnni.h: K's scales go into the queries, V's into the weights, each row of which becomes 16-bit integers with one
// step; zero points and the middle of the code range are one number a row. Codes are laid out once a tile, as words in pairs
// along the sum. Shapes that do not fit (fits_words) become fp32 in cpu/prefill_float_avx2.h.
//
// Owns a tile's scores and sums. Invariant: no sum of products overflows for head_dim <= kFewHeadDim and kTile tokens: 256
// products of 32767 with 255 fit 31 bits. Reads no byte behind a key or value.
#pragma once

#include "cpu/decode_int_avx2.h"

namespace kvk {
namespace {

// out[r][j] (+)= shift[r] + step[r] * sum over k of the two products of a[r][k] with b[k][j]; pairs of words.
template <uint32_t kMTiles, uint32_t kWide, bool kAdd>
inline void multiply_words_panel(const int32_t* a, uint32_t a_stride, const uint32_t* b, uint32_t b_stride, uint32_t depth,
                                 const float* step, const float* shift, float* out, uint32_t out_stride) {
  __m256i sum[kMTiles][kWide];
  const int32_t* row[kMTiles];
#pragma GCC unroll 8
  for (uint32_t r = 0; r < kMTiles; ++r) {
    row[r] = a + r * a_stride;
#pragma GCC unroll 2
    for (uint32_t j = 0; j < kWide; ++j) sum[r][j] = _mm256_setzero_si256();
  }
  for (size_t k = 0; k < depth; ++k, b += b_stride) {
    __m256i column[kWide];
#pragma GCC unroll 2
    for (uint32_t j = 0; j < kWide; ++j) column[j] = _mm256_load_si256(reinterpret_cast<const __m256i*>(b + 8 * j));
#pragma GCC unroll 8
    for (uint32_t r = 0; r < kMTiles; ++r) {
      const __m256i factor = _mm256_set1_epi32(row[r][k]);
#pragma GCC unroll 2
      for (uint32_t j = 0; j < kWide; ++j) multiply_add(sum[r][j], column[j], factor);
    }
  }
#pragma GCC unroll 8
  for (uint32_t r = 0; r < kMTiles; ++r)
#pragma GCC unroll 2
    for (uint32_t j = 0; j < kWide; ++j) {
      float* to = out + r * out_stride + 8 * j;
      const __m256 base = kAdd ? _mm256_add_ps(_mm256_loadu_ps(to), _mm256_set1_ps(shift[r])) : _mm256_set1_ps(shift[r]);
      _mm256_storeu_ps(to, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][j]), _mm256_set1_ps(step[r]), base));
    }
}

template <uint32_t kMTiles, uint32_t kWide, bool kAdd>
inline uint32_t multiply_words_rows(uint32_t r, uint32_t rows, const int32_t* a, uint32_t a_stride, const uint32_t* b,
                                    uint32_t b_stride, uint32_t depth, const float* step, const float* shift, float* out,
                                    uint32_t out_stride) {
  for (; r + kMTiles <= rows; r += kMTiles)
    multiply_words_panel<kMTiles, kWide, kAdd>(a + r * a_stride, a_stride, b, b_stride, depth, step + r, shift + r,
                                               out + r * out_stride, out_stride);
  return r;
}

// All rows with some columns before the next columns: those stay in the first cache.
template <bool kAdd>
inline void multiply_words(const void* a, uint32_t a_stride, uint32_t rows, const void* b, uint32_t b_stride, uint32_t depth,
                           const float* step, const float* shift, float* out, uint32_t out_stride, uint32_t columns) {
  const auto* left = static_cast<const int32_t*>(a);
  const auto* right = static_cast<const uint32_t*>(b);
  const auto all_rows = [&]<uint32_t kWide>(uint32_t j) {
    uint32_t r = multiply_words_rows<6, kWide, kAdd>(0, rows, left, a_stride, right + j, b_stride, depth, step, shift, out + j,
                                                     out_stride);
    r = multiply_words_rows<4, kWide, kAdd>(r, rows, left, a_stride, right + j, b_stride, depth, step, shift, out + j,
                                            out_stride);
    multiply_words_rows<1, kWide, kAdd>(r, rows, left, a_stride, right + j, b_stride, depth, step, shift, out + j, out_stride);
  };
  uint32_t j = 0;
  for (; j + 16 <= columns; j += 16) all_rows.template operator()<2>(j);
  if (j < columns) all_rows.template operator()<1>(j);
}

// x[0..n) as 16-bit integers with one step, in their order; n is a multiple of 16. `bias` is what the caller adds to every
// product anyway; `shift` becomes that and what rounding loses against codes around the middle.
template <uint32_t kCodec>
inline void words_of_row(const float* x, uint32_t n, float bias, int16_t* out, float* step, float* shift) {
  __m256 most = _mm256_setzero_ps(), all = most;
  for (uint32_t i = 0; i < n; i += 8) {
    const __m256 eight = _mm256_load_ps(x + i);
    most = _mm256_max_ps(most, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), eight));
    all = _mm256_add_ps(all, eight);
  }
  const float largest = Floats8::largest(most);
  const __m256 per_step = _mm256_set1_ps(largest == 0 ? 0 : kFewLargest / largest);
  __m256i whole = _mm256_setzero_si256();
  for (uint32_t i = 0; i < n; i += 16) {
    const __m256i words = words_of(x + i, per_step);
    whole = _mm256_add_epi32(whole, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), words);
  }
  *step = largest / kFewLargest;
  const __m256 lost = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(whole), _mm256_set1_ps(*step), all);
  *shift = bias + middle(kCodec) * Floats8::sum(lost);
}

// ---------------------------------------------------------------- scores

// Words of a row's queries beside each other as the codes are that they meet: a key's four bytes hold channels 0 and 2, 1 and 3
// (int8), or 0 and 4, 1 and 5, 2 and 6, 3 and 7 (int4) in the same place of their two words.
template <uint32_t kCodec>
inline void pair_channels(uint32_t head_dim, int16_t* words) {
  const __m256i places = kCodec == KVK_INT8 ? _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, 0, 1, 4, 5,
                                                               2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15)
                                            : _mm256_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15, 0, 1, 8, 9,
                                                               2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
  for (uint32_t i = 0; i < head_dim; i += 16) {
    auto* at = reinterpret_cast<__m256i*>(words + i);
    _mm256_storeu_si256(at, _mm256_shuffle_epi8(_mm256_loadu_si256(at), places));
  }
}

// The queries with one group's scales of K in them: s.query, [row][head_dim] words; s.step, s.shift.
template <uint32_t kCodec>
inline void fold_rows(const Tile& tile, uint32_t group, uint32_t rows, uint32_t head_dim, const float* q, Scratch& s) {
  const int64_t start = tile.kv_head * tile.segment->k_scale_head_stride + int64_t{2} * group * head_dim;
  alignas(32) float scales[kFewHeadDim], zeros[kFewHeadDim], folded[kFewHeadDim];
  load_row(KVK_F16, at(tile.segment->k_scale, start), head_dim, scales);
  load_row(KVK_F16, at(tile.segment->k_zero, start), head_dim, zeros);
  for (uint32_t r = 0; r < rows; ++r, q += head_dim) {
    __m256 bias = _mm256_setzero_ps();
    for (uint32_t i = 0; i < head_dim; i += 8) {
      const __m256 x = _mm256_loadu_ps(q + i);
      _mm256_store_ps(folded + i, _mm256_mul_ps(x, _mm256_load_ps(scales + i)));
      bias = _mm256_fmadd_ps(x, _mm256_load_ps(zeros + i), bias);
    }
    auto* words = reinterpret_cast<int16_t*>(s.query) + r * head_dim;
    words_of_row<kCodec>(folded, head_dim, Floats8::sum(bias), words, s.step + r, s.shift + r);
    pair_channels<kCodec>(head_dim, words);
  }
}

// A column of four bytes of eight keys becomes as many columns of words as it has codes for each.
template <uint32_t kCodec>
inline void spread_to_words(uint32_t columns, uint32_t* keys) {
  using W = Words<kCodec>;
  const __m256i low = _mm256_set1_epi16((1 << W::kBits) - 1);
  for (uint32_t c = columns; c-- > 0;) {  // from the back: a column's place is not before itself
    const __m256i x = _mm256_load_si256(reinterpret_cast<const __m256i*>(keys + c * kTile));
#pragma GCC unroll 4
    for (uint32_t plane = 0; plane < W::kCount; ++plane)
      _mm256_store_si256(reinterpret_cast<__m256i*>(keys + (W::kCount * c + plane) * kTile),
                         _mm256_and_si256(_mm256_srli_epi16(x, plane * W::kBits), low));
  }
}

template <uint32_t kCodec>
inline void scores_rows(const Tile& tile, uint32_t rows, uint32_t head_dim, const float* q, Held& held, Scratch& s) {
  const kvk_segment& segment = *tile.segment;
  const uint32_t bytes = head_dim * Words<kCodec>::kBits / 8;
  auto* keys = reinterpret_cast<uint32_t*>(s.keys);
  for (uint32_t t = 0; t < tile.count; t += V::kLanes) {
    const uint8_t* row[V::kLanes];
    rows_from(tile, false, t, V::kLanes, nullptr, row);
    transpose(row, bytes, keys + t, kTile);
    for (uint32_t i = 0; i < V::kLanes; i += 8) spread_to_words<kCodec>(bytes / 4, keys + t + i);
  }
  for (uint32_t done = 0; done < tile.count;) {
    const uint32_t group = (tile.start + done) / segment.k_group, end = (group + 1) * segment.k_group - tile.start;
    const uint32_t stop = end < tile.count ? end : tile.count;
    if (held.whose != &segment || held.group != group) {
      fold_rows<kCodec>(tile, group, rows, head_dim, q, s);
      held.whose = &segment, held.group = group;
    }
    multiply_words<false>(s.query, head_dim / 2, rows, keys + done, kTile, head_dim / 2, s.step, s.shift, s.scores + done, kTile,
                          round_up(stop - done, 8));
    done = stop;
  }
}

// ---------------------------------------------------------------- values

// 32 channels of a token as bytes.
template <uint32_t kCodec>
inline __m256i channels_32(const uint8_t* row, uint32_t channel) {
  if constexpr (kCodec == KVK_INT8) return load_codes_32(row + channel);
  const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + channel / 2)));
  return _mm256_and_si256(_mm256_or_si256(wide, _mm256_slli_epi16(wide, 4)), _mm256_set1_epi8(15));
}

// Two tokens' codes beside each other, [count / 2][head_dim] pairs of words. A token behind the last counts as 0.
template <uint32_t kCodec>
inline void pair_values(const Tile& tile, uint32_t head_dim, uint32_t* out) {
  alignas(32) static constexpr uint8_t kNothing[kFewHeadDim] = {};
  for (uint32_t t = 0; t < tile.count; t += 2) {
    const uint8_t* row[2];
    rows_from(tile, true, t, 2, kNothing, row);
    for (uint32_t i = 0; i < head_dim; i += 32, out += 32) {
      const __m256i a = channels_32<kCodec>(row[0], i), b = channels_32<kCodec>(row[1], i);
      const __m256i low = _mm256_unpacklo_epi8(a, b), high = _mm256_unpackhi_epi8(a, b);  // of each half of the channels
      const auto put = [&](uint32_t place, __m128i pairs) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(out + place), _mm256_cvtepu8_epi16(pairs));
      };
      put(0, _mm256_castsi256_si128(low)), put(8, _mm256_castsi256_si128(high));
      put(16, _mm256_extracti128_si256(low, 1)), put(24, _mm256_extracti128_si256(high, 1));
    }
  }
}

template <uint32_t kCodec>
inline void values_rows(const Tile& tile, uint32_t rows, uint32_t head_dim, Scratch& s) {
  const kvk_segment& segment = *tile.segment;
  const int64_t start = tile.kv_head * segment.v_scale_head_stride + int64_t{2} * tile.start;
  alignas(32) float scales[kTile] = {}, zeros[kTile] = {}, folded[kTile] = {}, step[kRows], shift[kRows];
  load_row(KVK_F16, at(segment.v_scale, start), tile.count, scales);
  load_row(KVK_F16, at(segment.v_zero, start), tile.count, zeros);
  const uint32_t count = round_up(tile.count, 8);
  for (uint32_t r = 0; r < rows; ++r) {
    __m256 bias = _mm256_setzero_ps();
    for (uint32_t i = 0; i < count; i += 8) {
      const __m256 weight = _mm256_load_ps(s.scores + r * kTile + i);
      _mm256_store_ps(folded + i, _mm256_mul_ps(weight, _mm256_load_ps(scales + i)));
      bias = _mm256_fmadd_ps(weight, _mm256_load_ps(zeros + i), bias);
    }
    words_of_row<kCodec>(folded, round_up(count, 16), Floats8::sum(bias), reinterpret_cast<int16_t*>(s.weight) + r * kTile,
                         step + r, shift + r);
  }
  pair_values<kCodec>(tile, head_dim, reinterpret_cast<uint32_t*>(s.values));
  multiply_words<true>(s.weight, kTile / 2, rows, s.values, head_dim, (tile.count + 1) / 2, step, shift, s.sum, head_dim,
                       head_dim);
}

}  // namespace
}  // namespace kvk
