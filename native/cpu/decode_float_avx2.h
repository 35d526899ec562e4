// Tiles of every codec but fp32 under a few query rows, in fp32 and eight floats at once: decoding. What a path has for integers
// or pairs comes first.
//
// Four rows at a time, and nothing laid out anew in memory: a key or value becomes floats in registers once and is multiplied
// with four rows there, where cpu/prefill_float_avx2.h, which takes all other shapes, writes a tile of floats and transposes it.
// K's scales go into the queries, V's into the weights; zero points are one number a row.
//
// Owns a tile's scores and sums. Invariant: reads no byte behind a key or value; rows beyond the last of four are zeros.
#pragma once

#include "cpu/decode_softmax.h"

namespace kvk {
namespace {

// Elements channel..channel + 7 of a key or value.
template <uint32_t kCodec>
inline __m256 eight_of(const uint8_t* row, uint32_t channel) {
  if constexpr (kCodec == KVK_F16) return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 2 * channel)));
  if constexpr (kCodec == KVK_BF16) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 2 * channel));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  if constexpr (kCodec == KVK_INT8) {
    const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + channel));
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(codes));
  }
  int32_t word;  // int4
  std::memcpy(&word, row + channel / 2, 4);
  const __m256i places = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
  return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(word), places), _mm256_set1_epi32(15)));
}

constexpr uint32_t bits_of(uint32_t codec) { return codec == KVK_INT8 ? 8 : codec == KVK_INT4 ? 4 : 16; }

// ---------------------------------------------------------------- scores

// The queries as [four rows][eight channels][row][8] floats, with a group's scales of K in them where there are any; s.shift is
// what its zero points give.
template <uint32_t kCodec>
inline void fold_four(const Tile& tile, uint32_t group, uint32_t rows, uint32_t head_dim, uint32_t width, const float* q,
                      Scratch& s) {
  const int64_t start = tile.kv_head * tile.segment->k_scale_head_stride + int64_t{2} * group * head_dim;
  const auto* scales = quantised(kCodec) ? at(tile.segment->k_scale, start) : nullptr;
  const auto* zeros = quantised(kCodec) ? at(tile.segment->k_zero, start) : nullptr;
  const auto eight = [](const uint16_t* x) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))); };
  auto* out = reinterpret_cast<float*>(s.query);
  for (uint32_t r = 0; r < round_up(rows, kFew); ++r) {
    float* to = out + r / kFew * kFew * head_dim + r % kFew * 8;
    __m256 sum = _mm256_setzero_ps();
    for (uint32_t i = 0; i < head_dim; i += 8, to += 8 * kFew) {
      __m256 x = r < rows ? _mm256_loadu_ps(q + r * width + i) : _mm256_setzero_ps();
      if constexpr (quantised(kCodec)) {
        sum = _mm256_fmadd_ps(x, eight(zeros + i), sum);
        x = _mm256_mul_ps(x, eight(scales + i));
      }
      _mm256_store_ps(to, x);
    }
    s.shift[r] = Floats8::sum(sum);
  }
}

// Two keys and four rows: [key][row].
template <uint32_t kCodec>
inline __m256 score_two(const uint8_t* left, const uint8_t* right, const float* q, uint32_t head_dim) {
  __m256 sum[2][kFew];
#pragma GCC unroll 4
  for (uint32_t r = 0; r < kFew; ++r) sum[0][r] = sum[1][r] = _mm256_setzero_ps();
  for (uint32_t i = 0; i < head_dim; i += 8, q += 8 * kFew) {
    const __m256 a = eight_of<kCodec>(left, i), b = eight_of<kCodec>(right, i);
#pragma GCC unroll 4
    for (uint32_t r = 0; r < kFew; ++r) {
      const __m256 factor = _mm256_load_ps(q + 8 * r);
      sum[0][r] = _mm256_fmadd_ps(a, factor, sum[0][r]);
      sum[1][r] = _mm256_fmadd_ps(b, factor, sum[1][r]);
    }
  }
  const __m256 first = float_halves(sum[0]), second = float_halves(sum[1]);
  return _mm256_add_ps(_mm256_permute2f128_ps(first, second, 0x20), _mm256_permute2f128_ps(first, second, 0x31));
}

template <uint32_t kCodec>
inline void scores_four(const kvk_attention& a, const Tile& tile, uint32_t rows, uint32_t width, const float* q, Held& held,
                        Stream& stream, Scratch& s) {
  const kvk_segment& segment = *tile.segment;
  const uint32_t head_dim = a.head_dim, lines = stream.of_step(8, (tile.count + 1) / 2);
  for (uint32_t done = 0; done < tile.count;) {
    const uint32_t group = quantised(kCodec) ? (tile.start + done) / segment.k_group : 0;
    const uint32_t end = quantised(kCodec) ? (group + 1) * segment.k_group - tile.start : tile.count;
    const uint32_t stop = end < tile.count ? end : tile.count;
    // No path's other form of a few rows' queries goes by these names: cpu/tile_bf16.h has q.
    const void* whose = quantised(kCodec) ? static_cast<const void*>(&segment) : q + 1;
    if (held.whose != whose || held.group != group) {
      fold_four<kCodec>(tile, group, rows, head_dim, width, q, s);
      held.whose = whose, held.group = group;
    }
    const __m256 unit = _mm256_set1_ps(a.softcap == 0 ? a.scale * kLog2E : 1.0f);  // in base 2 where nothing caps them
    for (uint32_t r = 0; r < rows; r += kFew) {
      const float* queries = reinterpret_cast<const float*>(s.query) + r * head_dim;
      const __m256 shift = twice(_mm_loadu_ps(s.shift + r));
      for (uint32_t t = done; t < stop; t += 2) {
        if (r == 0) stream.ask(lines);
        const __m256 score =
            score_two<kCodec>(key_row(tile, t), key_row(tile, t + 1 < tile.count ? t + 1 : t), queries, head_dim);
        _mm256_store_ps(s.scores + r * kFewTile + t * kFew, _mm256_mul_ps(_mm256_add_ps(score, shift), unit));
      }
    }
    done = stop;
  }
}

// ---------------------------------------------------------------- values

// Sums of `kWide` eights of channels from `channel` on.
template <uint32_t kCodec, uint32_t kWide>
inline void values_of(const Tile& tile, uint32_t channel, const float* weights, const float* shift, uint32_t width, float* to,
                      Stream& stream, uint32_t lines) {
  __m256 sum[kFew][kWide];
#pragma GCC unroll 4
  for (uint32_t r = 0; r < kFew; ++r)
#pragma GCC unroll 2
    for (uint32_t j = 0; j < kWide; ++j)
      sum[r][j] = _mm256_add_ps(_mm256_loadu_ps(to + r * width + 8 * j), _mm256_set1_ps(shift[r]));
  const uint8_t* row = value_row(tile, 0);
  for (uint32_t t = 0; t < tile.count; ++t, row += tile.segment->v_token_stride, weights += kFew) {
    if (t % 4 == 0) stream.ask(lines);
    __m256 value[kWide];
#pragma GCC unroll 2
    for (uint32_t j = 0; j < kWide; ++j) value[j] = eight_of<kCodec>(row, channel + 8 * j);
#pragma GCC unroll 4
    for (uint32_t r = 0; r < kFew; ++r) {
      const __m256 weight = _mm256_broadcast_ss(weights + r);
#pragma GCC unroll 2
      for (uint32_t j = 0; j < kWide; ++j) sum[r][j] = _mm256_fmadd_ps(weight, value[j], sum[r][j]);
    }
  }
#pragma GCC unroll 4
  for (uint32_t r = 0; r < kFew; ++r)
#pragma GCC unroll 2
    for (uint32_t j = 0; j < kWide; ++j) _mm256_storeu_ps(to + r * width + 8 * j, sum[r][j]);
}

template <uint32_t kCodec>
inline void values_four(const Tile& tile, uint32_t r, uint32_t head_dim, uint32_t width, const float* shift, Stream& stream,
                        Scratch& s) {
  const float* weights = s.scores + r * kFewTile;
  const uint32_t lines = r == 0 ? stream.of_step(7, (tile.count + 3) / 4 * ((head_dim + 15) / 16)) : 0;
  uint32_t i = 0;
  for (; i + 16 <= head_dim; i += 16) values_of<kCodec, 2>(tile, i, weights, shift, width, s.sum + r * width + i, stream, lines);
  if (i < head_dim) values_of<kCodec, 1>(tile, i, weights, shift, width, s.sum + r * width + i, stream, lines);
}

// ---------------------------------------------------------------- the tile

// Elements of 16 bits have no scales to fold, so their tiles may be short enough to stay in the first cache.
constexpr uint32_t most_of_four(uint32_t codec) { return quantised(codec) ? kFewTile : kTile; }

template <uint32_t kCodec>
inline void attend_four(const kvk_attention& a, const Task& task, const Tile& tile, uint32_t rows, const float* q, Held& held,
                        Scratch& s) {
  constexpr bool kQuantised = quantised(kCodec);
  const uint32_t width = padded(a.head_dim);
  Stream stream(tile, a.head_dim, a.head_dim * bits_of(kCodec) / 8, most_of_four(kCodec));
  scores_four<kCodec>(a, tile, rows, width, q, held, stream, s);
  for (uint32_t r = 0; r < rows; r += kFew) {
    alignas(16) float shift[kFew];
    const SeenByFour keys = seen_by_four(a, task, tile, rows, r);
    (keys.all ? softmax_four<kQuantised, true> : softmax_four<kQuantised, false>)(a, tile, keys, width, r,
                                                                                  s.scores + r * kFewTile, shift, stream, s);
    values_four<kCodec>(tile, r, a.head_dim, width, shift, stream, s);
  }
}

}  // namespace
}  // namespace kvk
