// Tiles of fp16 values under weights, multiplied as fp16 where they lie (vfmaddph). Included by avx512_fp16.cc and amx.cc.
//
// Owns the product with the values; nothing is packed or widened before it. Eight tokens are summed in fp16, then added to
// sums in fp32: each rounding is 2^-12 of a sum of few, as that of the weights themselves. Weights are taken 16 times, so that
// the smallest that counts is 2^-29; a sum that overflows, which values beyond 511 may, is found and computed in fp32 again.
// Products with the keys stay in fp32 (scores_f32 converts by vcvtph2ps): an fp16 sum of a score of 30 is off by 0.01, and so
// would be the weight. Invariant: nothing beyond head_dim elements of a value is read.
#pragma once

#include "cpu/attend_rows.h"
#include "cpu/halves.h"

namespace kvk {
namespace {

constexpr uint32_t kRun = 8;      // tokens whose sum is fp16
constexpr float kRaised = 16.0f;  // of weights

inline __mmask32 first_halves(uint32_t count) { return count >= 32 ? ~__mmask32{0} : (__mmask32{1} << count) - 1; }

inline __m512 widened(__m512i x, bool upper) {
  return _mm512_cvtph_ps(upper ? _mm512_extracti64x4_epi64(x, 1) : _mm512_castsi512_si256(x));
}

// out[r][j] += sum over t of weight[r][t] * value[t][j] for kWide * 32 elements from `start`, of which `left` are there. False,
// and nothing written, if a sum is not finite.
template <uint32_t kMTiles, uint32_t kWide>
inline bool multiply_halves_panel(const Tile& tile, const uint16_t* weight, uint32_t start, uint32_t left, float* out,
                                  uint32_t out_stride) {
  __m512 sum[kMTiles][2 * kWide];
#pragma GCC unroll 4
  for (uint32_t r = 0; r < kMTiles; ++r)
#pragma GCC unroll 4
    for (uint32_t j = 0; j < 2 * kWide; ++j) sum[r][j] = _mm512_setzero_ps();
  const int64_t stride = tile.segment->v_token_stride;
  const uint8_t* row = value_row(tile, 0) + 2 * start;
  for (uint32_t t = 0; t < tile.count;) {
    const uint32_t stop = t + kRun < tile.count ? t + kRun : tile.count;
    Halves::T part[kMTiles][kWide];
#pragma GCC unroll 4
    for (uint32_t r = 0; r < kMTiles; ++r)
#pragma GCC unroll 2
      for (uint32_t j = 0; j < kWide; ++j) part[r][j] = Halves::zero();
    for (; t < stop; ++t, row += stride) {
      Halves::T value[kWide];
#pragma GCC unroll 2
      for (uint32_t j = 0; j < kWide; ++j)
        value[j] = Halves::of(_mm512_maskz_loadu_epi16(first_halves(left > 32 * j ? left - 32 * j : 0), row + 64 * j));
#pragma GCC unroll 4
      for (uint32_t r = 0; r < kMTiles; ++r) {
        const Halves::T factor = Halves::all(weight[r * kTile + t]);
#pragma GCC unroll 2
        for (uint32_t j = 0; j < kWide; ++j) part[r][j] = Halves::fma(factor, value[j], part[r][j]);
      }
    }
#pragma GCC unroll 4
    for (uint32_t r = 0; r < kMTiles; ++r)
#pragma GCC unroll 4
      for (uint32_t j = 0; j < 2 * kWide; ++j)
        sum[r][j] = _mm512_add_ps(sum[r][j], widened(Halves::bits(part[r][j / 2]), j % 2 != 0));
  }
  __mmask16 lost = 0;  // infinite or NaN
#pragma GCC unroll 4
  for (uint32_t r = 0; r < kMTiles; ++r)
#pragma GCC unroll 4
    for (uint32_t j = 0; j < 2 * kWide; ++j) lost |= _mm512_fpclass_ps_mask(sum[r][j], 0x99);
  if (lost != 0) return false;
#pragma GCC unroll 4
  for (uint32_t r = 0; r < kMTiles; ++r)
#pragma GCC unroll 4
    for (uint32_t j = 0; j < 2 * kWide; ++j) {
      float* to = out + r * out_stride + 16 * j;
      if (16 * j < left) _mm512_storeu_ps(to, _mm512_fmadd_ps(sum[r][j], _mm512_set1_ps(1 / kRaised), _mm512_loadu_ps(to)));
    }
  return true;
}

template <uint32_t kMTiles>
inline void multiply_halves_rows(const Tile& tile, const uint16_t* weight, const float* exact, uint32_t head_dim, uint32_t width,
                                 bool* loaded, float* out, Scratch& s) {
  for (uint32_t j = 0; j < head_dim; j += 64) {
    const uint32_t left = head_dim - j, columns = left < 64 ? round_up(left, 16) : 64;
    const bool done = left > 32 ? multiply_halves_panel<kMTiles, 2>(tile, weight, j, left, out + j, width)
                                : multiply_halves_panel<kMTiles, 1>(tile, weight, j, left, out + j, width);
    if (done) continue;
    auto* floats = reinterpret_cast<float*>(s.values);
    if (!*loaded) load_values(tile, head_dim, width, floats);
    *loaded = true;
    Ahead nothing{};
    multiply<true>(exact, kTile, kMTiles, {floats + j, width, kPanelColumns}, tile.count, out + j, width, columns, nothing);
  }
}

inline void values_fp16(const Tile& tile, uint32_t rows, uint32_t head_dim, uint32_t width, Scratch& s) {
  auto* weight = reinterpret_cast<uint16_t*>(s.weight);
  for (uint32_t r = 0; r < rows; ++r)
    for (uint32_t i = 0; i < tile.count; i += 16) {
      const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(s.scores + r * kTile + i), _mm512_set1_ps(kRaised));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(weight + r * kTile + i), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
  bool loaded = false;
  uint32_t r = 0;
  for (; r + 4 <= rows; r += 4)
    multiply_halves_rows<4>(tile, weight + r * kTile, s.scores + r * kTile, head_dim, width, &loaded, s.sum + r * width, s);
  for (; r < rows; ++r)
    multiply_halves_rows<1>(tile, weight + r * kTile, s.scores + r * kTile, head_dim, width, &loaded, s.sum + r * width, s);
}

}  // namespace
}  // namespace kvk
