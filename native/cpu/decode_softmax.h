// Scores of four query rows become weights, for decoding with eight floats at once (cpu/decode_float_avx2.h).
//
// Owns the largest score, the sum and the rescaling of four rows. What is had of four rows lies [key][row], two keys a register.
// Never reads keys or values. Invariant: rows beyond the last of four are computed from zeros and looked at by nobody.
#pragma once

#include "cpu/decode_prefetch.h"

namespace kvk {
namespace {

inline __m256 twice(__m128 four) { return _mm256_set_m128(four, four); }
inline __m128 most_of_keys(__m256 x) { return _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)); }
inline __m128 sum_of_keys(__m256 x) { return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)); }

// Of four registers, one a row: the sums of each half's lanes, [half][row].
inline __m256 float_halves(const __m256* x) {
  const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(x[0], x[1]), _mm256_unpackhi_ps(x[0], x[1]));
  const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(x[2], x[3]), _mm256_unpackhi_ps(x[2], x[3]));
  return _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
}

// Which keys of a tile rows r..r + 3 see.
struct SeenByFour {
  bool all;
  __m256i start, stop;

  __m256 of(uint32_t key) const {  // of two keys
    const __m256i at_key = _mm256_add_epi32(_mm256_set_epi32(1, 1, 1, 1, 0, 0, 0, 0), _mm256_set1_epi32(static_cast<int>(key)));
    return _mm256_castsi256_ps(_mm256_andnot_si256(_mm256_cmpgt_epi32(start, at_key), _mm256_cmpgt_epi32(stop, at_key)));
  }
};

inline SeenByFour seen_by_four(const kvk_attention& a, const Task& task, const Tile& tile, uint32_t rows, uint32_t r) {
  const int64_t first_key = tile.segment->new_position + (int64_t{tile.start} - tile.segment->first);
  alignas(16) int start[kFew], stop[kFew];
  bool all = tile.count % 4 == 0;
  for (uint32_t i = 0; i < kFew; ++i) {
    const uint32_t row = task.row_start + (r + i < rows ? r + i : rows - 1);
    const Seen keys = seen(a, position_of(a, task, row), first_key, tile.count);
    start[i] = keys.start, stop[i] = keys.stop;
    all = all && keys.start == 0 && keys.stop == static_cast<int>(tile.count);
  }
  const auto spread = [](const int* x) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(x)));
  };
  return {all, spread(start), spread(stop)};
}

// Brings sums and totals of rows r..r + 3 to their new largest scores; returns the totals.
inline __m128 bring_four_to(__m128 now, uint32_t width, uint32_t r, Scratch& s) {
  const __m128 before = _mm_loadu_ps(s.row_max + r), total = _mm_loadu_ps(s.row_sum + r), more = _mm_cmpgt_ps(now, before);
  if (_mm_movemask_ps(more) == 0) return total;
  alignas(16) float rescale[kFew];  // where nothing was seen before, the sums are 0, or NaN
  const __m128 power = _mm256_castps256_ps128(exp2<Floats8>(twice(_mm_sub_ps(before, now))));
  const __m128 less = _mm_blendv_ps(_mm_set1_ps(1), power, more);
  _mm_store_ps(rescale, less);
  _mm_storeu_ps(s.row_max + r, now);
  for (uint32_t i = 0; i < kFew; ++i)
    for (uint32_t j = 0; j < width; j += 8) {
      float* sum = s.sum + (r + i) * width + j;
      _mm256_storeu_ps(sum, _mm256_mul_ps(_mm256_loadu_ps(sum), _mm256_set1_ps(rescale[i])));
    }
  return _mm_mul_ps(total, less);
}

// `scores`, in base 2 unless they are capped, become weights: with V's scales in them where it is quantised, and `shift` is then
// what its zero points add to every channel of a row. `count` is padded to a multiple of four with keys that nobody sees.
template <bool kQuantised, bool kAll>
inline void softmax_four(const kvk_attention& a, const Tile& tile, const SeenByFour& keys, uint32_t width, uint32_t r,
                         float* scores, float* shift, Stream& stream, Scratch& s) {
  const kvk_segment& segment = *tile.segment;
  const uint32_t count = round_up(tile.count, 4);
  const __m256 never = _mm256_set1_ps(-__builtin_inff());
  if (a.softcap != 0)
    for (uint32_t i = 0; i < kFew * count; i += V::kLanes)
      V::store(scores + i, in_base_2(V::load(scores + i), a.scale, a.softcap));
  __m256 largest = never, largest2 = never;  // a NaN that came before gives way: found again in the weights
  for (uint32_t t = 0; t < count; t += 4) {
    __m256 low = _mm256_load_ps(scores + 4 * t), high = _mm256_load_ps(scores + 4 * t + 8);
    if constexpr (!kAll) {
      low = _mm256_blendv_ps(never, low, keys.of(t)), high = _mm256_blendv_ps(never, high, keys.of(t + 2));
      _mm256_store_ps(scores + 4 * t, low), _mm256_store_ps(scores + 4 * t + 8, high);
    }
    largest = _mm256_max_ps(low, largest), largest2 = _mm256_max_ps(high, largest2);
  }
  const __m128 now = _mm_max_ps(most_of_keys(_mm256_max_ps(largest, largest2)), _mm_loadu_ps(s.row_max + r));
  const __m128 total = bring_four_to(now, width, r, s);
  const __m256 least = twice(_mm_and_ps(now, _mm_cmpneq_ps(now, _mm256_castps256_ps128(never))));  // 0 where nothing is seen
  const uint16_t *scales = nullptr, *zeros = nullptr;
  if constexpr (kQuantised) {
    scales = at(segment.v_scale, tile.kv_head * segment.v_scale_head_stride) + tile.start;
    zeros = at(segment.v_zero, tile.kv_head * segment.v_scale_head_stride) + tile.start;
  }
  const uint32_t lines = stream.of_step(2, count / 4);
  __m256 added = _mm256_setzero_ps(), bias = added;
  for (uint32_t t = 0; t < count; t += 4) {
    if (r == 0) stream.ask(lines);
    alignas(16) float scale[4], zero[4];
    if constexpr (kQuantised) {
      uint16_t edge[8] = {};  // behind the last key nothing is read
      const bool whole = t + 4 <= tile.count;
      if (!whole) std::memcpy(edge, scales + t, 2 * (tile.count - t)), std::memcpy(edge + 4, zeros + t, 2 * (tile.count - t));
      const auto four = [](const uint16_t* x) { return _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x))); };
      _mm_store_ps(scale, four(whole ? scales + t : edge)), _mm_store_ps(zero, four(whole ? zeros + t : edge + 4));
    }
#pragma GCC unroll 2
    for (uint32_t i = 0; i < 4; i += 2) {
      float* at_key = scores + 4 * (t + i);
      __m256 weight = exp2<Floats8>(_mm256_sub_ps(_mm256_load_ps(at_key), least));
      if constexpr (!kAll) weight = _mm256_and_ps(weight, keys.of(t + i));
      added = _mm256_add_ps(added, weight);
      if constexpr (kQuantised) {
        const auto spread = [](const float* x) { return _mm256_set_m128(_mm_set1_ps(x[1]), _mm_set1_ps(x[0])); };
        bias = _mm256_fmadd_ps(weight, spread(zero + i), bias);
        weight = _mm256_mul_ps(weight, spread(scale + i));
      }
      _mm256_store_ps(at_key, weight);
    }
  }
  _mm_storeu_ps(s.row_sum + r, _mm_add_ps(total, sum_of_keys(added)));
  _mm_store_ps(shift, sum_of_keys(bias));
}

}  // namespace
}  // namespace kvk
