// Tiles of int8 and int4 under a few query rows, as 16-bit integers by AVX2 alone (vpmaddwd): decoding where there is no VNNI.
//
// As cpu/decode_int_vnni.h with registers of half the width: queries with K's scales in them and weights with V's scales in them
// become 16-bit integers with one step per row, keys and values are multiplied as they come, told apart by shifts. Where the
// shape does not fit, cpu/decode_float_avx2.h takes the tile.
//
// Owns a tile's scores and sums. Invariant: no sum of products overflows for head_dim <= kFewHeadDim and kFewTile tokens; reads
// no byte behind a key or value.
#pragma once

#include "cpu/decode_softmax.h"

namespace kvk {
namespace {

template <uint32_t kCodec>
struct Words {
  static constexpr uint32_t kBits = kCodec == KVK_INT8 ? 8 : 4;
  static constexpr uint32_t kCount = 16 / kBits;  // codes of a word

  // Code `kPlane` of each word.
  template <uint32_t kPlane>
  static __m256i plane(__m256i x) {
    const __m256i low = _mm256_set1_epi16((1 << kBits) - 1);
    if constexpr (kPlane == 0) return _mm256_and_si256(x, low);
    if constexpr (kPlane == kCount - 1) return _mm256_srli_epi16(x, 16 - kBits);
    return _mm256_and_si256(_mm256_srli_epi16(x, kPlane * kBits), low);
  }
};

inline __m256i load_codes_32(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }

// sum += the two products of each lane's words. The sum is not left to g++ 12, which puts off such sums and then has no register
// for what it added up so far.
inline void multiply_add(__m256i& sum, __m256i a, __m256i b) {
  const __m256i product = _mm256_madd_epi16(a, b);
  asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(product));
}

// Four keys or values of a tile.
struct Four {
  const uint8_t* first;
  int64_t stride;
  const uint8_t* row(uint32_t i) const { return first + i * stride; }
};

// Those from token `t` on, of which `bytes` are read; where there are fewer, copies in `spare` with zeros behind them.
inline Four four_rows(const uint8_t* from, int64_t stride, uint32_t t, uint32_t count, uint32_t bytes, uint8_t* spare) {
  if (t + 4 <= count) return {from, stride};
  std::memset(spare, 0, 4 * bytes);
  for (uint32_t i = 0; t + i < count; ++i) std::memcpy(spare + i * bytes, from + i * stride, bytes);
  return {spare, bytes};
}

// Of four registers, one a row: the sums of each half's lanes, [half][row].
inline __m256i sum_halves(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i ab = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
  const __m256i cd = _mm256_add_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
  return _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
}

// Steps to one, where the largest number is kFewLargest steps.
inline __m128 steps_to_one(__m128 largest) {
  return _mm_and_ps(_mm_div_ps(_mm_set1_ps(kFewLargest), largest), _mm_cmpneq_ps(largest, _mm_setzero_ps()));
}

// ---------------------------------------------------------------- queries

// Sixteen floats as words in their order.
inline __m256i words_of(const float* x, __m256 per_step) {
  const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_load_ps(x), per_step));
  const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_load_ps(x + 8), per_step));
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
}

// The even words in the low half, the odd ones in the high half.
inline __m256i even_odd(__m256i x) {
  const __m256i even = _mm256_and_si256(x, _mm256_set1_epi32(0xffff)), odd = _mm256_srli_epi32(x, 16);
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(even, odd), 0xd8);
}

// Queries of what sixteen bytes of a key hold, [plane], each twice beside itself for two keys; `to` has kFew registers a plane.
// Returns the sums of pairs of words.
template <uint32_t kCodec>
inline __m256i fold_sixteen_bytes(const float* x, __m256 per_step, __m256i* to) {
  const auto twice_beside = [](__m256i both, __m256i* low, __m256i* high) {
    _mm256_store_si256(low, _mm256_permute2x128_si256(both, both, 0x00));
    _mm256_store_si256(high, _mm256_permute2x128_si256(both, both, 0x11));
  };
  const __m256i ones = _mm256_set1_epi16(1), words = words_of(x, per_step);
  if constexpr (kCodec == KVK_INT8) {
    twice_beside(even_odd(words), to, to + kFew);
    return _mm256_madd_epi16(words, ones);
  }
  const __m256i more = words_of(x + 16, per_step), a = even_odd(words), b = even_odd(more);
  twice_beside(even_odd(_mm256_permute2x128_si256(a, b, 0x20)), to, to + 2 * kFew);
  twice_beside(even_odd(_mm256_permute2x128_si256(a, b, 0x31)), to + kFew, to + 3 * kFew);
  return _mm256_add_epi32(_mm256_madd_epi16(words, ones), _mm256_madd_epi16(more, ones));
}

// The queries with one group's scales of K in them, [four rows][sixteen bytes of a key][plane][row]; s.step and s.shift.
template <uint32_t kCodec>
inline void fold_words(const Tile& tile, uint32_t group, uint32_t rows, uint32_t head_dim, const float* q, Scratch& s) {
  constexpr uint32_t kChannels = 128 / Words<kCodec>::kBits;  // of sixteen bytes
  const int64_t start = tile.kv_head * tile.segment->k_scale_head_stride + int64_t{2} * group * head_dim;
  const uint16_t *scales = at(tile.segment->k_scale, start), *zeros = at(tile.segment->k_zero, start);
  const auto eight = [](const uint16_t* x) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))); };
  const auto sums = [](const __m256* x) { return sum_of_keys(float_halves(x)); };
  auto* scaled = reinterpret_cast<float*>(s.keys);  // [row][head_dim]
  auto* out = reinterpret_cast<__m256i*>(s.query);
  for (uint32_t r = 0; r < rows; r += kFew) {
    __m256 most[kFew], all[kFew], sum[kFew];
#pragma GCC unroll 4
    for (uint32_t i = 0; i < kFew; ++i) most[i] = all[i] = sum[i] = _mm256_setzero_ps();
    for (uint32_t j = 0; j < head_dim; j += 8) {
      const __m256 scale = eight(scales + j), zero = eight(zeros + j);
#pragma GCC unroll 4
      for (uint32_t i = 0; i < kFew; ++i) {
        const __m256 x = r + i < rows ? _mm256_loadu_ps(q + (r + i) * head_dim + j) : _mm256_setzero_ps();
        const __m256 folded = _mm256_mul_ps(x, scale);
        most[i] = _mm256_max_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), folded), most[i]);
        all[i] = _mm256_add_ps(all[i], folded);
        sum[i] = _mm256_fmadd_ps(x, zero, sum[i]);
        _mm256_store_ps(scaled + i * head_dim + j, folded);
      }
    }
    alignas(16) float largest[kFew], per_step[kFew];
    for (uint32_t i = 0; i < kFew; ++i) largest[i] = Floats8::largest(most[i]);
    _mm_store_ps(per_step, steps_to_one(_mm_load_ps(largest)));
    __m256i whole[kFew];
    for (uint32_t i = 0; i < kFew; ++i) {
      whole[i] = _mm256_setzero_si256();
      __m256i* to = out + i;
      for (uint32_t j = 0; j < head_dim; j += kChannels, to += Words<kCodec>::kCount * kFew)
        whole[i] =
            _mm256_add_epi32(whole[i], fold_sixteen_bytes<kCodec>(scaled + i * head_dim + j, _mm256_set1_ps(per_step[i]), to));
    }
    out += head_dim / kChannels * Words<kCodec>::kCount * kFew;
    const __m128 step = _mm_mul_ps(_mm_load_ps(largest), _mm_set1_ps(1 / kFewLargest));
    const __m256i halves = sum_halves(whole[0], whole[1], whole[2], whole[3]);
    const __m128i words = _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    const __m128 lost = _mm_fnmadd_ps(_mm_cvtepi32_ps(words), step, sums(all));  // by rounding
    _mm_storeu_ps(s.step + r, step);
    _mm_storeu_ps(s.shift + r, _mm_fmadd_ps(lost, _mm_set1_ps(middle(kCodec)), sums(sum)));
  }
}

// ---------------------------------------------------------------- scores

inline __m256i beside(const uint8_t* low, const uint8_t* high) {  // sixteen bytes each
  const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low));
  return _mm256_inserti128_si256(_mm256_castsi128_si256(a), _mm_loadu_si128(reinterpret_cast<const __m128i*>(high)), 1);
}

// x0, x1: sixteen bytes of two keys each; q: the queries for them, [plane][row].
template <uint32_t kCodec, uint32_t kPlane>
inline void multiply_plane(__m256i x0, __m256i x1, const __m256i* q, __m256i (*sum)[kFew]) {
  const __m256i first = Words<kCodec>::template plane<kPlane>(x0), second = Words<kCodec>::template plane<kPlane>(x1);
#pragma GCC unroll 4
  for (uint32_t r = 0; r < kFew; ++r) {
    __m256i factor = _mm256_load_si256(q + kPlane * kFew + r);
    asm("" : "+x"(factor));  // read once: two reads a cycle are what bounds this
    multiply_add(sum[0][r], first, factor);
    multiply_add(sum[1][r], second, factor);
  }
  if constexpr (kPlane + 1 < Words<kCodec>::kCount) multiply_plane<kCodec, kPlane + 1>(x0, x1, q, sum);
}

// Scores of four keys and four rows, [key][row].
template <uint32_t kCodec>
inline void score_four_keys(Four key, uint32_t bytes, const __m256i* q, __m256 step, __m256 shift, float* out, Stream& stream,
                            uint32_t lines) {
  constexpr uint32_t kSixteen = Words<kCodec>::kCount * kFew;
  __m256i sum[2][kFew];
#pragma GCC unroll 4
  for (uint32_t r = 0; r < kFew; ++r) sum[0][r] = sum[1][r] = _mm256_setzero_si256();
  for (uint32_t i = 0; i < bytes; i += 32, q += 2 * kSixteen, key.first += 32) {
    stream.ask(lines);
    multiply_plane<kCodec, 0>(beside(key.row(0), key.row(1)), beside(key.row(2), key.row(3)), q, sum);
    multiply_plane<kCodec, 0>(beside(key.row(0) + 16, key.row(1) + 16), beside(key.row(2) + 16, key.row(3) + 16), q + kSixteen,
                              sum);
  }
#pragma GCC unroll 2
  for (uint32_t g = 0; g < 2; ++g) {
    const __m256i whole = sum_halves(sum[g][0], sum[g][1], sum[g][2], sum[g][3]);
    _mm256_store_ps(out + 8 * g, _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole), step, shift));
  }
}

template <uint32_t kCodec>
inline void scores_words(const kvk_attention& a, const Tile& tile, uint32_t rows, const float* q, Held& held, Stream& stream,
                         Scratch& s) {
  const kvk_segment& segment = *tile.segment;
  const uint32_t head_dim = a.head_dim, bytes = head_dim * Words<kCodec>::kBits / 8;
  const uint32_t lines = stream.of_step(7, (tile.count + 3) / 4 * (bytes / 32));
  const uint8_t* first = key_row(tile, 0);
  for (uint32_t done = 0; done < tile.count;) {
    const uint32_t group = (tile.start + done) / segment.k_group;
    const uint32_t end = (group + 1) * segment.k_group - tile.start, stop = end < tile.count ? end : tile.count;
    if (held.whose != &segment || held.group != group) {
      fold_words<kCodec>(tile, group, rows, head_dim, q, s);
      held.whose = &segment, held.group = group;
    }
    const __m128 unit = _mm_set1_ps(a.softcap == 0 ? a.scale * kLog2E : 1.0f);  // in base 2 where nothing caps them
    for (uint32_t r = 0; r < rows; r += kFew) {
      const auto* queries = reinterpret_cast<const __m256i*>(s.query) + r * (bytes / 16) * Words<kCodec>::kCount;
      const __m256 step = twice(_mm_mul_ps(_mm_loadu_ps(s.step + r), unit));
      const __m256 shift = twice(_mm_mul_ps(_mm_loadu_ps(s.shift + r), unit));
      for (uint32_t t = done; t < stop; t += 4) {
        const Four key = four_rows(first + t * segment.k_token_stride, segment.k_token_stride, t, tile.count, bytes, s.values);
        score_four_keys<kCodec>(key, bytes, queries, step, shift, s.scores + r * kFewTile + t * kFew, stream, r == 0 ? lines : 0);
      }
    }
    done = stop;
  }
}

// ---------------------------------------------------------------- values

// Weights of a row of four become words, [four keys][key 0 or 1][row] of two: keys t and t + 2, t + 1 and t + 3. `shift` gets
// what the words lost, `step` is theirs.
template <uint32_t kCodec>
inline void weights_words(uint32_t count, uint32_t r, float* step, float* shift, Scratch& s) {
  const float* weights = s.scores + r * kFewTile;
  __m256 most = _mm256_setzero_ps(), all = most;
  for (uint32_t i = 0; i < kFew * count; i += 8) {
    const __m256 weight = _mm256_load_ps(weights + i);
    most = _mm256_max_ps(weight, most), all = _mm256_add_ps(all, weight);
  }
  const __m128 largest = most_of_keys(most), per_key = _mm_mul_ps(largest, _mm_set1_ps(1 / kFewLargest));
  const __m256 per_step = twice(steps_to_one(largest));
  __m256i whole = _mm256_setzero_si256();
  auto* out = reinterpret_cast<__m256i*>(s.weight + 2 * r * kFewTile);
  for (uint32_t i = 0; i < kFew * count; i += 16, ++out) {
    const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_load_ps(weights + i), per_step));
    const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_load_ps(weights + i + 8), per_step));
    const __m256i words = _mm256_or_si256(low, _mm256_slli_epi32(high, 16));
    whole = _mm256_add_epi32(whole, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
    _mm256_store_si256(out, words);
  }
  const __m128i words = _mm_add_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  const __m128 lost = _mm_fnmadd_ps(_mm_cvtepi32_ps(words), per_key, sum_of_keys(all));  // by rounding
  _mm_store_ps(step, per_key);
  _mm_store_ps(shift, _mm_fmadd_ps(lost, _mm_set1_ps(middle(kCodec)), _mm_load_ps(shift)));
}

// A line of 32 bytes goes in slices of sixteen channels, whose sums for four rows the registers hold: two planes of the words
// in the low or in the high half of each sixteen bytes.
template <uint32_t kCodec, uint32_t kSlice>
inline void add_four_values(Four value, const int32_t* weights, __m256i (*sum)[2]) {
  using W = Words<kCodec>;
  constexpr bool kMTiles = kSlice >= W::kCount / 2;
  constexpr uint32_t kPlane = 2 * kSlice % W::kCount;
#pragma GCC unroll 2
  for (uint32_t i = 0; i < 2; ++i) {
    const __m256i a = load_codes_32(value.row(i)), b = load_codes_32(value.row(i + 2));
    const __m256i both = kMTiles ? _mm256_unpackhi_epi16(a, b) : _mm256_unpacklo_epi16(a, b);
    const __m256i first = W::template plane<kPlane>(both), second = W::template plane<kPlane + 1>(both);
#pragma GCC unroll 4
    for (uint32_t r = 0; r < kFew; ++r) {
      const __m256i weight = _mm256_set1_epi32(weights[4 * i + r]);
      multiply_add(sum[r][0], first, weight);
      multiply_add(sum[r][1], second, weight);
    }
  }
}

template <uint32_t kCodec, uint32_t kSlice>
inline void sum_slice(const Tile& tile, const uint8_t* first, const int32_t* weights, uint8_t* spare, __m256i (*out)[2],
                      Stream& stream, uint32_t lines) {
  __m256i sum[kFew][2];
#pragma GCC unroll 4
  for (uint32_t r = 0; r < kFew; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
  const int64_t stride = tile.segment->v_token_stride;
  uint32_t t = 0;
  for (; t + 8 <= tile.count; t += 8, weights += 16, first += 8 * stride) {
    stream.ask(lines);
    add_four_values<kCodec, kSlice>({first, stride}, weights, sum);
    add_four_values<kCodec, kSlice>({first + 4 * stride, stride}, weights + 8, sum);
  }
  for (; t < tile.count; t += 4, weights += 8, first += 4 * stride)
    add_four_values<kCodec, kSlice>(four_rows(first, stride, t, tile.count, 32, spare), weights, sum);
#pragma GCC unroll 4
  for (uint32_t r = 0; r < kFew; ++r) out[r][0] = sum[r][0], out[r][1] = sum[r][1];
}

// A row's sums of a line's slices, [slice][plane], in the order of the channels.
template <uint32_t kCodec>
inline void channels_in_order(const __m256i (*slice)[kFew][2], uint32_t r, __m256i* out) {
#pragma GCC unroll 2
  for (uint32_t half = 0; half < 2; ++half) {
    __m256i x[4];
    if constexpr (kCodec == KVK_INT8) {
      x[0] = _mm256_unpacklo_epi32(slice[half][r][0], slice[half][r][1]);
      x[1] = _mm256_unpackhi_epi32(slice[half][r][0], slice[half][r][1]);
      out[half] = _mm256_permute2x128_si256(x[0], x[1], 0x20);
      out[2 + half] = _mm256_permute2x128_si256(x[0], x[1], 0x31);
    } else {
      const __m256i *left = slice[2 * half][r], *right = slice[2 * half + 1][r];
      const __m256i a = _mm256_unpacklo_epi32(left[0], left[1]), b = _mm256_unpacklo_epi32(right[0], right[1]);
      const __m256i c = _mm256_unpackhi_epi32(left[0], left[1]), d = _mm256_unpackhi_epi32(right[0], right[1]);
      x[0] = _mm256_unpacklo_epi64(a, b), x[1] = _mm256_unpackhi_epi64(a, b);
      x[2] = _mm256_unpacklo_epi64(c, d), x[3] = _mm256_unpackhi_epi64(c, d);
      out[2 * half] = _mm256_permute2x128_si256(x[0], x[1], 0x20);
      out[2 * half + 1] = _mm256_permute2x128_si256(x[2], x[3], 0x20);
      out[4 + 2 * half] = _mm256_permute2x128_si256(x[0], x[1], 0x31);
      out[5 + 2 * half] = _mm256_permute2x128_si256(x[2], x[3], 0x31);
    }
  }
}

template <uint32_t kCodec>
inline void values_words(const Tile& tile, uint32_t r, uint32_t head_dim, const float* step, const float* shift, Stream& stream,
                         Scratch& s) {
  constexpr uint32_t kCount = Words<kCodec>::kCount, kChannels = 16 * kCount;  // of a line
  const uint32_t lines = r == 0 ? stream.of_step(7, (tile.count + 7) / 8 * (head_dim / 16)) : 0;
  const auto* weights = reinterpret_cast<const int32_t*>(s.weight + 2 * r * kFewTile);
  const uint8_t* first = value_row(tile, 0);
  for (uint32_t i = 0; i < head_dim; i += kChannels, first += 32) {
    __m256i slice[kCount][kFew][2];
    sum_slice<kCodec, 0>(tile, first, weights, s.values, slice[0], stream, lines);
    sum_slice<kCodec, 1>(tile, first, weights, s.values, slice[1], stream, lines);
    if constexpr (kCount == 4) {
      sum_slice<kCodec, 2>(tile, first, weights, s.values, slice[2], stream, lines);
      sum_slice<kCodec, 3>(tile, first, weights, s.values, slice[3], stream, lines);
    }
    for (uint32_t row = 0; row < kFew; ++row) {
      __m256i sum[kChannels / 8];
      channels_in_order<kCodec>(slice, row, sum);
      float* to = s.sum + (r + row) * head_dim + i;
      for (uint32_t j = 0; j < kChannels / 8; ++j) {
        const __m256 base = _mm256_add_ps(_mm256_loadu_ps(to + 8 * j), _mm256_set1_ps(shift[row]));
        _mm256_storeu_ps(to + 8 * j, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[j]), _mm256_set1_ps(step[row]), base));
      }
    }
  }
}

// ---------------------------------------------------------------- the tile

// Whole lines of 32 bytes, and a multiple of sixteen channels.
constexpr bool fits_words(uint32_t codec, uint32_t head_dim) {
  return quantised(codec) && head_dim % (codec == KVK_INT8 ? 32 : 64) == 0 && head_dim <= kFewHeadDim;
}

template <uint32_t kCodec>
inline void attend_words(const kvk_attention& a, const Task& task, const Tile& tile, uint32_t rows, const float* q, Held& held,
                         Scratch& s) {
  Stream stream(tile, a.head_dim, a.head_dim * Words<kCodec>::kBits / 8, kFewTile);
  scores_words<kCodec>(a, tile, rows, q, held, stream, s);
  for (uint32_t r = 0; r < rows; r += kFew) {
    alignas(16) float step[kFew], shift[kFew];
    const SeenByFour keys = seen_by_four(a, task, tile, rows, r);
    (keys.all ? softmax_four<true, true> : softmax_four<true, false>)(a, tile, keys, a.head_dim, r, s.scores + r * kFewTile,
                                                                      shift, stream, s);
    weights_words<kCodec>(round_up(tile.count, 4), r, step, shift, s);
    values_words<kCodec>(tile, r, a.head_dim, step, shift, stream, s);
  }
}

}  // namespace
}  // namespace kvk
