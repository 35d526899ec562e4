// Tiles of int8 and int4 under a few query rows: decoding. Included by the paths that have VNNI.
//
// Four rows at a time, and nothing laid out anew in memory: keys and values are multiplied as they come, as 16-bit integers
// (vpdpwssd), so that a row has one sum where cpu/tile_vnni.h, which takes all other shapes, has two. K's scales go into the
// queries, V's into the weights, each with one step per row; zero points and the middle of the code range are one number a row.
//
// Owns a tile's scores, weights and sums. Invariant: rows beyond the last of four are computed from zeros and looked at by
// nobody.
#pragma once

#include "cpu/decode_queries_vnni.h"

namespace kvk {
namespace {

// Eight keys or values of a tile.
struct Eight {
  const uint8_t *low, *high;  // the first and the fifth
  int64_t stride;
  const uint8_t* row(uint32_t i) const { return (i < 4 ? low : high) + i % 4 * stride; }
};

// Those from `token` on, of which `bytes` are read; where there are fewer, copies in `spare` with zeros behind them.
inline Eight eight_rows(const uint8_t* first, int64_t stride, uint32_t token, uint32_t count, uint32_t bytes, uint8_t* spare) {
  const uint8_t* at_token = first + token * stride;
  if (token + 8 <= count) return {at_token, at_token + 4 * stride, stride};
  std::memset(spare, 0, 8 * bytes);
  for (uint32_t i = 0; token + i < count; ++i) std::memcpy(spare + i * bytes, at_token + i * stride, bytes);
  return {spare, spare + 4 * bytes, bytes};
}

// ---------------------------------------------------------------- scores

inline __m512i beside(const uint8_t* low, const uint8_t* high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(low))),
                            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(high)), 1);
}

// x0, x1: sixteen bytes of four keys each; q: the queries' words for them, [plane][row].
template <uint32_t kCodec, uint32_t kPlane>
inline void multiply_plane(__m512i x0, __m512i x1, const __m512i* q, __m512i (*sum)[kFew]) {
  const __m512i first = Planes<kCodec>::template of<kPlane>(x0), second = Planes<kCodec>::template of<kPlane>(x1);
#pragma GCC unroll 4
  for (uint32_t r = 0; r < kFew; ++r) {
    const __m512i factor = _mm512_load_si512(q + kPlane * kFew + r);
    multiply_add(sum[0][r], first, factor);
    multiply_add(sum[1][r], second, factor);
  }
  if constexpr (kPlane + 1 < Planes<kCodec>::kCount) multiply_plane<kCodec, kPlane + 1>(x0, x1, q, sum);
}

// Scores of eight keys and four rows, two registers.
template <uint32_t kCodec>
inline void score_eight(const Eight& from, uint32_t bytes, const __m512i* q, __m512 step, __m512 shift, float* out,
                        Stream& stream, uint32_t lines) {
  constexpr uint32_t kSixteen = Planes<kCodec>::kCount * kFew;  // registers for sixteen bytes
  __m512i sum[2][kFew];
#pragma GCC unroll 4
  for (uint32_t r = 0; r < kFew; ++r) sum[0][r] = sum[1][r] = _mm512_setzero_si512();
  Eight keys = from;
  for (uint32_t start = 0; start < bytes; start += 32, q += 2 * kSixteen, keys.low += 32, keys.high += 32) {
    stream.ask(lines);
    __m512i x[2][2];
#pragma GCC unroll 2
    for (uint32_t g = 0; g < 2; ++g) {
      const __m512i a = beside(keys.row(4 * g), keys.row(4 * g + 1));
      const __m512i b = beside(keys.row(4 * g + 2), keys.row(4 * g + 3));
      x[g][0] = _mm512_shuffle_i32x4(a, b, 0x88), x[g][1] = _mm512_shuffle_i32x4(a, b, 0xdd);
    }
    multiply_plane<kCodec, 0>(x[0][0], x[1][0], q, sum);
    multiply_plane<kCodec, 0>(x[0][1], x[1][1], q + kSixteen, sum);
  }
#pragma GCC unroll 2
  for (uint32_t g = 0; g < 2; ++g) {
    const __m512i whole = sum_quarters(sum[g][0], sum[g][1], sum[g][2], sum[g][3]);
    _mm512_store_ps(out + 16 * g, _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), step, shift));
  }
}

// Scores of all rows: [four rows][key][row].
template <uint32_t kCodec>
inline void scores_few(const kvk_attention& a, const Tile& tile, uint32_t rows, const float* q, Held& held, Stream& stream,
                       Scratch& s) {
  const kvk_segment& segment = *tile.segment;
  const uint32_t head_dim = a.head_dim, bytes = head_dim * Planes<kCodec>::kBits / 8;
  const uint32_t block = 4 * lines_of<kCodec>(head_dim) * Planes<kCodec>::kCount * kFew;
  float* laid = s.q + kFewRows * head_dim;
  if (held.laid_out != q || held.codec != kCodec) {
    lay_out<kCodec>(q, rows, head_dim, laid);
    held = {nullptr, 0, q, kCodec};
  }
  const uint32_t lines = stream.of_step(7, (tile.count + 7) / 8 * (bytes / 32) * ((rows + kFew - 1) / kFew));
  for (uint32_t done = 0; done < tile.count;) {
    const uint32_t group = (tile.start + done) / segment.k_group;
    const uint32_t end = (group + 1) * segment.k_group - tile.start, stop = end < tile.count ? end : tile.count;
    if (held.whose != &segment || held.group != group) {
      fold_few<kCodec>(tile, group, rows, head_dim, laid, stream, s);
      held.whose = &segment, held.group = group;
    }
    const auto* queries = reinterpret_cast<const __m512i*>(s.query);
    for (uint32_t r = 0; r < rows; r += kFew, queries += block) {
      const __m512 unit = _mm512_set1_ps(a.softcap == 0 ? a.scale * kLog2E : 1.0f);  // in base 2 where nothing caps them
      const __m512 step = _mm512_mul_ps(by_row(s.step + r), unit), shift = _mm512_mul_ps(by_row(s.shift + r), unit);
      for (uint32_t t = done; t < stop; t += 8) {
        const Eight keys = eight_rows(key_row(tile, 0), segment.k_token_stride, t, tile.count, bytes, s.keys);
        score_eight<kCodec>(keys, bytes, queries, step, shift, s.scores + r * kFewTile + t * kFew, stream, lines);
      }
    }
    done = stop;
  }
}

// ---------------------------------------------------------------- softmax

// Which keys of a tile rows r..r + 3 see.
struct SeenByFew {
  bool all;
  __m512i start, stop;  // lane 4 * key + row

  __mmask16 of(uint32_t four) const {
    const __m512i key = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const __m512i at_key = _mm512_add_epi32(key, _mm512_set1_epi32(static_cast<int>(4 * four)));
    return _mm512_cmpge_epi32_mask(at_key, start) & _mm512_cmplt_epi32_mask(at_key, stop);
  }
};

inline SeenByFew seen_by_few(const kvk_attention& a, const Task& task, const Tile& tile, uint32_t rows, uint32_t r) {
  const int64_t first_key = tile.segment->new_position + (int64_t{tile.start} - tile.segment->first);
  alignas(16) int start[kFew], stop[kFew];
  bool all = tile.count % 8 == 0;
  for (uint32_t i = 0; i < kFew; ++i) {
    const uint32_t row = task.row_start + (r + i < rows ? r + i : rows - 1);
    const Seen keys = seen(a, position_of(a, task, row), first_key, tile.count);
    start[i] = keys.start, stop[i] = keys.stop;
    all = all && keys.start == 0 && keys.stop == static_cast<int>(tile.count);
  }
  const auto spread = [](const int* x) { return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(x))); };
  return {all, spread(start), spread(stop)};
}

// Brings sums and totals of rows r..r + 3 to their new largest scores; returns the totals.
inline __m512 bring_to(__m512 now, uint32_t width, uint32_t r, Scratch& s) {
  const __m512 before = by_row(s.row_max + r), total = by_row(s.row_sum + r);
  const __mmask16 more = _mm512_cmp_ps_mask(now, before, _CMP_GT_OQ);
  if (more == 0) return total;
  alignas(16) float rescale[kFew];  // where nothing was seen before, the sums are 0, or NaN
  const __m512 less = _mm512_mask_mov_ps(_mm512_set1_ps(1), more, exp2(_mm512_sub_ps(before, now)));
  store_by_row(less, rescale);
  store_by_row(now, s.row_max + r);
  for (uint32_t i = 0; i < kFew; ++i)
    for (uint32_t j = 0; j < width; j += 16) {
      float* sum = s.sum + (r + i) * width + j;
      _mm512_storeu_ps(sum, _mm512_mul_ps(_mm512_loadu_ps(sum), _mm512_set1_ps(rescale[i])));
    }
  return _mm512_mul_ps(total, less);
}

// 2^x for x <= 0, to 3e-6 of itself, less than weights are rounded by; what is below -126 counts as -126. A NaN stays one.
inline __m512 weight_of(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-126.0f), x);
  const __m512 part = _mm512_reduce_ps(x, 0x09);  // behind the whole number below
  __m512 p = _mm512_set1_ps(0.013534168f);
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(0.05201146f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(0.24144275f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(0.69300383f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(1.0000026f));
  return _mm512_scalef_ps(p, x);
}

// The largest of the scores, which are capped and hidden first where that is asked for.
template <bool kAll>
inline __m512 largest_few(const kvk_attention& a, const SeenByFew& keys, uint32_t fours, float* scores) {
  const __m512 never = _mm512_set1_ps(-__builtin_inff());
  if (a.softcap != 0)
    for (uint32_t i = 0; i < fours; ++i)
      _mm512_store_ps(scores + 16 * i, in_base_2(_mm512_load_ps(scores + 16 * i), a.scale, a.softcap));
  if constexpr (!kAll)
    for (uint32_t i = 0; i < fours; ++i)
      _mm512_store_ps(scores + 16 * i, _mm512_mask_blend_ps(keys.of(i), never, _mm512_load_ps(scores + 16 * i)));
  __m512 largest = never, largest2 = never;  // a NaN that came before gives way: found again in the weights
  for (uint32_t i = 0; i < fours; i += 2) {
    largest = _mm512_max_ps(_mm512_load_ps(scores + 16 * i), largest);
    largest2 = _mm512_max_ps(_mm512_load_ps(scores + 16 * i + 16), largest2);
  }
  return row_most(_mm512_max_ps(largest, largest2));
}

// Scores of rows r..r + 3 become weights with V's scales in them, as 16-bit integers, [eight keys][key][row] of two: keys t
// and t + 4. `step` and `shift` are for what the products give.
template <bool kAll>
inline void softmax_few(const kvk_attention& a, const Tile& tile, const SeenByFew& keys, uint32_t r, float* step, float* shift,
                        Stream& stream, Scratch& s) {
  const kvk_segment& segment = *tile.segment;
  const uint32_t fours = round_up(tile.count, 8) / 4;
  const __m512 never = _mm512_set1_ps(-__builtin_inff());
  float* scores = s.scores + r * kFewTile;
  const __m512 now = _mm512_max_ps(largest_few<kAll>(a, keys, fours, scores), by_row(s.row_max + r));
  const __m512 total = bring_to(now, a.head_dim, r, s);
  const __m512 least = _mm512_mask_mov_ps(now, _mm512_cmp_ps_mask(now, never, _CMP_EQ_OQ), _mm512_setzero_ps());
  const uint16_t* scales = at(segment.v_scale, tile.kv_head * segment.v_scale_head_stride) + tile.start;
  const uint16_t* zeros = at(segment.v_zero, tile.kv_head * segment.v_scale_head_stride) + tile.start;
  __m512 most = _mm512_setzero_ps(), bias = most, added = most, all = most, scale = most, zero = most;
  alignas(64) static constexpr int kQuarters[4][16] = {{0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3},
                                                       {4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7},
                                                       {8, 8, 8, 8, 9, 9, 9, 9, 10, 10, 10, 10, 11, 11, 11, 11},
                                                       {12, 12, 12, 12, 13, 13, 13, 13, 14, 14, 14, 14, 15, 15, 15, 15}};
  const uint32_t lines = stream.of_step(2, fours);
  for (uint32_t i = 0; i < fours; ++i) {
    if (r == 0) stream.ask(lines);
    if (i % 4 == 0) {
      const __mmask16 read = first_lanes(tile.count - 4 * i);
      scale = halves(scales + 4 * i, read), zero = halves(zeros + 4 * i, read);
    }
    const __m512i lanes = _mm512_load_si512(kQuarters[i % 4]);
    __m512 weight = weight_of(_mm512_sub_ps(_mm512_load_ps(scores + 16 * i), least));
    if constexpr (!kAll) weight = _mm512_maskz_mov_ps(keys.of(i), weight);
    added = _mm512_add_ps(added, weight);
    bias = _mm512_fmadd_ps(weight, _mm512_permutexvar_ps(lanes, zero), bias);
    const __m512 folded = _mm512_mul_ps(weight, _mm512_permutexvar_ps(lanes, scale));
    most = _mm512_max_ps(folded, most);
    all = _mm512_add_ps(all, folded);
    _mm512_store_ps(scores + 16 * i, folded);
  }
  store_by_row(_mm512_add_ps(total, row_sum(added)), s.row_sum + r);
  most = row_most(most);
  const __m512 per_row = _mm512_mul_ps(most, _mm512_set1_ps(1 / kFewLargest)), per_step = steps_in(most);
  __m512i whole = _mm512_setzero_si512();
  auto* out = reinterpret_cast<__m512i*>(s.weight + 2 * r * kFewTile);
  for (uint32_t i = 0; i < fours; i += 2) {
    const __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(scores + 16 * i), per_step));
    const __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(scores + 16 * i + 16), per_step));
    const __m512i words = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
    multiply_add(whole, words, _mm512_set1_epi16(1));
    _mm512_store_si512(out + i / 2, words);
  }
  const __m512 lost = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(whole), per_row, all);  // by rounding
  store_by_row(per_row, step);
  store_by_row(row_sum(_mm512_fmadd_ps(lost, _mm512_set1_ps(middle(segment.codec)), bias)), shift);
}

// ---------------------------------------------------------------- values

template <uint32_t kCodec, uint32_t kPlane, uint32_t kFirst>
inline void add_planes(__m512i x, const __m512i* factor, __m512i (*sum)[4]) {
  const __m512i code = Planes<kCodec>::template of<kPlane>(x);
#pragma GCC unroll 4
  for (uint32_t r = 0; r < kFew; ++r) multiply_add(sum[r][kFirst + kPlane], code, factor[r]);
  if constexpr (kPlane + 1 < Planes<kCodec>::kCount) add_planes<kCodec, kPlane + 1, kFirst>(x, factor, sum);
}

// Two tokens' codes of 64 channels.
template <uint32_t kCodec>
inline void add_pair(const uint8_t* first, const uint8_t* second, const int32_t* weights, __m512i (*sum)[4]) {
  __m512i factor[kFew];
#pragma GCC unroll 4
  for (uint32_t r = 0; r < kFew; ++r) factor[r] = _mm512_set1_epi32(weights[r]);
  if constexpr (kCodec == KVK_INT8) {
    const __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
    add_planes<kCodec, 0, 0>(_mm512_unpacklo_epi16(a, b), factor, sum);
    add_planes<kCodec, 0, 2>(_mm512_unpackhi_epi16(a, b), factor, sum);
  } else {
    const __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(first)));
    const __m512i b = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(second)));
    add_planes<kCodec, 0, 0>(_mm512_or_si512(a, _mm512_slli_epi32(b, 16)), factor, sum);
  }
}

// The sums of 64 channels in the order of the channels.
template <uint32_t kCodec>
inline void in_order(__m512i* x) {
  __m512i y[4];
  if constexpr (kCodec == KVK_INT8) {
    y[0] = _mm512_unpacklo_epi32(x[0], x[1]), y[1] = _mm512_unpackhi_epi32(x[0], x[1]);
    y[2] = _mm512_unpacklo_epi32(x[2], x[3]), y[3] = _mm512_unpackhi_epi32(x[2], x[3]);
  } else {
    const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
    const __m512i c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
    y[0] = _mm512_unpacklo_epi64(a, c), y[1] = _mm512_unpackhi_epi64(a, c);
    y[2] = _mm512_unpacklo_epi64(b, d), y[3] = _mm512_unpackhi_epi64(b, d);
  }
  const __m512i low = _mm512_shuffle_i32x4(y[0], y[1], 0x88), high = _mm512_shuffle_i32x4(y[0], y[1], 0xdd);
  const __m512i low2 = _mm512_shuffle_i32x4(y[2], y[3], 0x88), high2 = _mm512_shuffle_i32x4(y[2], y[3], 0xdd);
  x[0] = _mm512_shuffle_i32x4(low, low2, 0x88), x[2] = _mm512_shuffle_i32x4(low, low2, 0xdd);
  x[1] = _mm512_shuffle_i32x4(high, high2, 0x88), x[3] = _mm512_shuffle_i32x4(high, high2, 0xdd);
}

template <uint32_t kCodec>
inline void values_few(const Tile& tile, uint32_t r, uint32_t head_dim, const float* step, const float* shift, Stream& stream,
                       Scratch& s) {
  constexpr uint32_t kBytes = 64 * Planes<kCodec>::kBits / 8;
  const uint32_t lines = r == 0 ? stream.of_step(7, (tile.count + 7) / 8 * (head_dim / 64) * 4) : 0;
  for (uint32_t i = 0; i < head_dim / 64; ++i) {
    __m512i sum[kFew][4];
#pragma GCC unroll 4
    for (uint32_t row = 0; row < kFew; ++row)
#pragma GCC unroll 4
      for (uint32_t j = 0; j < 4; ++j) sum[row][j] = _mm512_setzero_si512();
    const auto* weights = reinterpret_cast<const int32_t*>(s.weight + 2 * r * kFewTile);
    const uint8_t* first = value_row(tile, 0) + kBytes * i;
    for (uint32_t t = 0; t < tile.count; t += 8, weights += 16) {
      const Eight values = eight_rows(first, tile.segment->v_token_stride, t, tile.count, kBytes, s.values);
#pragma GCC unroll 4
      for (uint32_t j = 0; j < 4; ++j) {
        stream.ask(lines);
        add_pair<kCodec>(values.row(j), values.row(4 + j), weights + 4 * j, sum);
      }
    }
#pragma GCC unroll 4
    for (uint32_t row = 0; row < kFew; ++row) {
      in_order<kCodec>(sum[row]);
      float* to = s.sum + (r + row) * head_dim + 64 * i;
#pragma GCC unroll 4
      for (uint32_t j = 0; j < 4; ++j) {
        const __m512 base = _mm512_add_ps(_mm512_loadu_ps(to + 16 * j), _mm512_set1_ps(shift[row]));
        _mm512_storeu_ps(to + 16 * j, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[row][j]), _mm512_set1_ps(step[row]), base));
      }
    }
  }
}

// ---------------------------------------------------------------- the tile

template <uint32_t kCodec>
inline void attend_few(const kvk_attention& a, const Task& task, const Tile& tile, uint32_t rows, const float* q, Held& held,
                       Scratch& s) {
  Stream stream(tile, a.head_dim, a.head_dim * Planes<kCodec>::kBits / 8, kFewTile);
  scores_few<kCodec>(a, tile, rows, q, held, stream, s);
  for (uint32_t r = 0; r < rows; r += kFew) {
    alignas(16) float step[kFew], shift[kFew];
    const SeenByFew keys = seen_by_few(a, task, tile, rows, r);
    (keys.all ? softmax_few<true> : softmax_few<false>)(a, tile, keys, r, step, shift, stream, s);
    values_few<kCodec>(tile, r, a.head_dim, step, shift, stream, s);
  }
}

// A path that takes int8 and int4 this way, up to `kMost` rows. Of four rows all are computed, so one or two are not worth it.
template <uint32_t kMost>
struct FewRows {
  static_assert(kMost <= kFewRows);
  static bool fits(const kvk_segment& segment, uint32_t rows, uint32_t head_dim) {
    return quantised(segment.codec) && rows <= kMost && (rows % kFew == 0 || rows % kFew == 3) && head_dim % 64 == 0 &&
           head_dim <= kFewHeadDim;
  }
  static uint32_t most_tokens(const kvk_segment& segment, uint32_t rows, uint32_t head_dim) {
    return fits(segment, rows, head_dim) ? kFewTile : kTile;
  }
  static bool few(const kvk_attention& a, const Task& task, const Tile& tile, uint32_t rows, const float* q, Held& held,
                  Scratch& s) {
    if (!fits(*tile.segment, rows, a.head_dim)) return false;
    if (tile.segment->codec == KVK_INT8)
      attend_few<KVK_INT8>(a, task, tile, rows, q, held, s);
    else
      attend_few<KVK_INT4>(a, task, tile, rows, q, held, s);
    return true;
  }
};

}  // namespace
}  // namespace kvk
