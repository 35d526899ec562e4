// The queries of a few rows as 16-bit integers with K's scales in them (cpu/decode_int_vnni.h).
//
// Owns the order in which codes come out of their words: the 8 or 4 bits at the same place of all 16-bit words are a "plane", and
// queries have that order here. What is had of four rows is one register, lane 4 * i + row. Invariant: no sum of products with
// codes overflows for head_dim <= kFewHeadDim.
#pragma once

#include "cpu/decode_prefetch.h"
#include "cpu/tile_vnni.h"

namespace kvk {
namespace {

// Of four registers, one a row: lane 4 * i + row has the sum, or the largest, of the row's quarter i.
inline __m512i sum_quarters(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

inline __m512d as_doubles(__m512 x) { return _mm512_castps_pd(x); }

inline __m512 sum_quarters(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(as_doubles(ab), as_doubles(cd))),
                       _mm512_castpd_ps(_mm512_unpackhi_pd(as_doubles(ab), as_doubles(cd))));
}

inline __m512 most_of_quarters(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_max_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  return _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(as_doubles(ab), as_doubles(cd))),
                       _mm512_castpd_ps(_mm512_unpackhi_pd(as_doubles(ab), as_doubles(cd))));
}

// Each lane of a row: the sum, or the largest, of the row's four lanes.
inline __m512 row_sum(__m512 x) {
  x = _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1));
  return _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0x4e));
}

inline __m512 row_most(__m512 x) {
  x = _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1));
  return _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, 0x4e));
}

inline __m512 by_row(const float* four) { return _mm512_broadcast_f32x4(_mm_loadu_ps(four)); }
inline void store_by_row(__m512 x, float* four) { _mm_storeu_ps(four, _mm512_castps512_ps128(x)); }

// sum += the two products of each lane's 16-bit integers. Not the intrinsic: g++ 12 copies its sums from register to register.
inline void multiply_add(__m512i& sum, __m512i a, __m512i b) { asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }

inline __m512 steps_in(__m512 largest) {  // steps to one, where the largest number is kFewLargest steps
  const __mmask16 any = _mm512_cmp_ps_mask(largest, _mm512_setzero_ps(), _CMP_NEQ_UQ);
  return _mm512_maskz_div_ps(any, _mm512_set1_ps(kFewLargest), largest);
}

template <uint32_t kCodec>
struct Planes {
  static constexpr uint32_t kBits = kCodec == KVK_INT8 ? 8 : 4;
  static constexpr uint32_t kCount = 16 / kBits;

  // Plane `kPlane` of the words of x.
  template <uint32_t kPlane>
  static __m512i of(__m512i x) {
    const __m512i low = _mm512_set1_epi16((1 << kBits) - 1);
    if constexpr (kPlane == 0) return _mm512_and_si512(x, low);
    if constexpr (kPlane == kCount - 1) return _mm512_srli_epi16(x, 16 - kBits);
    return _mm512_and_si512(_mm512_srli_epi16(x, kPlane * kBits), low);
  }
};

// The n-th of the 32 channels of a line of 64 bytes that are plane `plane`, as packs_epi32 takes them from two registers.
template <uint32_t kCodec>
constexpr uint32_t channel_of(uint32_t plane, uint32_t n) {
  return Planes<kCodec>::kCount * (n % 16 / 4 * 8 + n / 16 * 4 + n % 4) + plane;
}

// Lines of 64 bytes, of which int4's last may be a half.
template <uint32_t kCodec>
inline uint32_t lines_of(uint32_t head_dim) {
  return (head_dim + 32 * Planes<kCodec>::kCount - 1) / (32 * Planes<kCodec>::kCount);
}

template <uint32_t kCodec>
struct Places {
  alignas(64) uint16_t of[Planes<kCodec>::kCount][32];
  constexpr Places() : of() {
    for (uint32_t plane = 0; plane < Planes<kCodec>::kCount; ++plane)
      for (uint32_t n = 0; n < 32; ++n) of[plane][n] = static_cast<uint16_t>(channel_of<kCodec>(plane, n));
  }
};

template <uint32_t kCodec>
constexpr Places<kCodec> kPlaces;

// The queries in that order, [row][line][plane][32]; zeros for channels and rows that are not there.
template <uint32_t kCodec>
inline void lay_out(const float* q, uint32_t rows, uint32_t head_dim, float* out) {
  for (uint32_t r = 0; r < round_up(rows, kFew); ++r, q += head_dim)
    for (uint32_t line = 0; line < lines_of<kCodec>(head_dim); ++line)
      for (const auto& plane : kPlaces<kCodec>.of)
        for (uint32_t n = 0; n < 32; n += 16, out += 16) {
          const __m256i places = _mm256_load_si256(reinterpret_cast<const __m256i*>(plane + n));
          const __m512i channel = _mm512_add_epi32(_mm512_cvtepu16_epi32(places),
                                                   _mm512_set1_epi32(static_cast<int>(line * 32 * Planes<kCodec>::kCount)));
          const __mmask16 there = _mm512_cmplt_epi32_mask(channel, _mm512_set1_epi32(r < rows ? static_cast<int>(head_dim) : 0));
          _mm512_store_ps(out, _mm512_mask_i32gather_ps(_mm512_setzero_ps(), there, channel, q, 4));
        }
}

// A group's scales, or zero points, in that order.
template <uint32_t kCodec>
inline void lay_out_halves(const uint16_t* from, uint32_t head_dim, float* out) {
  using P = Planes<kCodec>;
  for (uint32_t line = 0; line < lines_of<kCodec>(head_dim); ++line, from += 32 * P::kCount) {
    const bool half = P::kCount == 4 && head_dim - line * 128 < 128;
    const __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + 32);
    for (uint32_t plane = 0; plane < P::kCount; ++plane, out += 32) {
      const __m512i places = _mm512_load_si512(kPlaces<kCodec>.of[plane]);
      __m512i x = _mm512_permutex2var_epi16(a, places, b);
      if (P::kCount == 4) {  // places beyond 64 are those of the other two; of half a line they are not there
        const __m512i c = half ? _mm512_setzero_si512() : _mm512_loadu_si512(from + 64);
        const __m512i d = half ? _mm512_setzero_si512() : _mm512_loadu_si512(from + 96);
        x = _mm512_mask_blend_epi16(0xff00ff00, x, _mm512_permutex2var_epi16(c, places, d));
      }
      _mm512_store_ps(out, _mm512_cvtph_ps(_mm512_castsi512_si256(x)));
      _mm512_store_ps(out + 16, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1)));
    }
  }
}

// The queries with one group's scales of K in them as 16-bit integers, [four rows][sixteen bytes of a key][plane][row], each of
// them four times beside itself for four keys; s.step and s.shift.
template <uint32_t kCodec>
inline void fold_few(const Tile& tile, uint32_t group, uint32_t rows, uint32_t head_dim, const float* laid, Stream& stream,
                     Scratch& s) {
  constexpr uint32_t kPlanes = Planes<kCodec>::kCount;
  const kvk_segment& segment = *tile.segment;
  const int64_t start = tile.kv_head * segment.k_scale_head_stride + int64_t{2} * group * head_dim;
  alignas(64) float scale[kFewHeadDim], zero[kFewHeadDim];
  lay_out_halves<kCodec>(at(segment.k_scale, start), head_dim, scale);
  lay_out_halves<kCodec>(at(segment.k_zero, start), head_dim, zero);
  const uint32_t width = lines_of<kCodec>(head_dim) * 32 * Planes<kCodec>::kCount;
  auto* out = reinterpret_cast<__m512i*>(s.query);
  const uint32_t lines = stream.of_step(1, width / 16);
  for (uint32_t r = 0; r < rows; r += kFew, laid += kFew * width, out += kFew * width / 8) {
    __m512 most[kFew], sum[kFew], all[kFew];
    __m512i whole_sum[kFew];
#pragma GCC unroll 4
    for (uint32_t i = 0; i < kFew; ++i) most[i] = sum[i] = all[i] = _mm512_setzero_ps(), whole_sum[i] = _mm512_setzero_si512();
    for (uint32_t j = 0; j < width; j += 16) {
      if (r == 0) stream.ask(lines);
#pragma GCC unroll 4
      for (uint32_t i = 0; i < kFew; ++i) {
        const __m512 x = _mm512_load_ps(laid + i * width + j), scaled = _mm512_mul_ps(x, _mm512_load_ps(scale + j));
        most[i] = _mm512_max_ps(_mm512_abs_ps(scaled), most[i]);
        all[i] = _mm512_add_ps(all[i], scaled);
        sum[i] = _mm512_fmadd_ps(x, _mm512_load_ps(zero + j), sum[i]);
      }
    }
    const __m512 largest = row_most(most_of_quarters(most[0], most[1], most[2], most[3]));
    alignas(16) float per_step[kFew];
    store_by_row(steps_in(largest), per_step);
    store_by_row(_mm512_mul_ps(largest, _mm512_set1_ps(1 / kFewLargest)), s.step + r);
    for (uint32_t j = 0; j < width; j += 32)
#pragma GCC unroll 4
      for (uint32_t i = 0; i < kFew; ++i) {
        __m512i whole[2];
#pragma GCC unroll 2
        for (uint32_t h = 0; h < 2; ++h) {
          const uint32_t at_x = j + 16 * h;
          const __m512 x = _mm512_mul_ps(_mm512_load_ps(laid + i * width + at_x), _mm512_load_ps(scale + at_x));
          whole[h] = _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(per_step[i])));
        }
        const __m512i words = _mm512_packs_epi32(whole[0], whole[1]);
        multiply_add(whole_sum[i], words, _mm512_set1_epi16(1));
        __m512i* to = out + (j / 32 / kPlanes * 4 * kPlanes + j / 32 % kPlanes) * kFew + i;
        _mm512_store_si512(to, _mm512_shuffle_i32x4(words, words, 0x00));
        _mm512_store_si512(to + kPlanes * kFew, _mm512_shuffle_i32x4(words, words, 0x55));
        _mm512_store_si512(to + 2 * kPlanes * kFew, _mm512_shuffle_i32x4(words, words, 0xaa));
        _mm512_store_si512(to + 3 * kPlanes * kFew, _mm512_shuffle_i32x4(words, words, 0xff));
      }
#pragma GCC unroll 4
    for (uint32_t i = 0; i < kFew; ++i) {
      const __m512 lost = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(whole_sum[i]), _mm512_set1_ps(s.step[r + i]), all[i]);
      sum[i] = _mm512_fmadd_ps(lost, _mm512_set1_ps(middle(kCodec)), sum[i]);
    }
    store_by_row(row_sum(sum_quarters(sum[0], sum[1], sum[2], sum[3])), s.shift + r);
  }
}

}  // namespace
}  // namespace kvk
