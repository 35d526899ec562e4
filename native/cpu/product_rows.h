// A few rows times a matrix in 16 bits, for AVX2 and AVX-512: weights become fp32 in registers.
//
// Owns the loops over the outputs that one task has. Never writes outside of them. Invariant: an output's sum is taken in one
// order, 32 sums of every 32nd product that are then added by halves, whatever the rows beside it, the threads and the cut into
// tasks; and all paths but the naive one share this order. Local to the including file (cpu/numbers.h says why).
#pragma once

#include "cpu/numbers.h"
#include "cpu/vector.h"

namespace kvk {
namespace {

constexpr uint32_t kProductStep = 32;                             // inputs at a time
constexpr uint32_t kProductSums = kProductStep / Vector::kLanes;  // registers of an output's sums
// Outputs at a time, of one row and of up to three: their sums stay in registers. Of one row alone it is one output as long as a
// row of weights is within a page: memory is then read in its order, which the processor asks for in time (docs/log.md).
constexpr uint32_t kProductPage = 2048;  // inputs
#if defined(__AVX512F__)
constexpr uint32_t kProductOutputs = 8, kProductFew = 4;
#else
constexpr uint32_t kProductOutputs = 2, kProductFew = 1;
#endif

using ProductFloats = Vector::T;

template <uint32_t kDtype>
inline ProductFloats product_weights(const uint16_t* from) {
#if defined(__AVX512F__)
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  if constexpr (kDtype == KVK_F16) return _mm512_cvtph_ps(halves);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
#else
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  if constexpr (kDtype == KVK_F16) return _mm256_cvtph_ps(halves);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
#endif
}

inline float product_sum(const ProductFloats (&sum)[kProductSums]) {
#if defined(__AVX512F__)
  const __m512 all = _mm512_add_ps(sum[0], sum[1]);
  return Floats8::sum(_mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1)));
#else
  return Floats8::sum(_mm256_add_ps(_mm256_add_ps(sum[0], sum[2]), _mm256_add_ps(sum[1], sum[3])));
#endif
}

// N outputs of R rows. ahead: how many bytes behind these weights the next ones lie, which are asked for meanwhile; 0: none.
template <uint32_t kDtype, uint32_t N, uint32_t R, bool kAhead>
inline void product_outputs(const kvk_product& a, uint32_t first, int64_t ahead, uint32_t row) {
  const uint16_t* from[N];
  const float* x[R];
  for (uint32_t n = 0; n < N; ++n)
    from[n] = at(static_cast<const uint16_t*>(a.weights), (first + int64_t{n}) * a.weight_row_stride);
  for (uint32_t r = 0; r < R; ++r) x[r] = at(static_cast<const float*>(a.x), (row + int64_t{r}) * a.x_row_stride);
  ProductFloats sum[R][N][kProductSums];
#pragma GCC unroll 4
  for (uint32_t r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (uint32_t n = 0; n < N; ++n)
#pragma GCC unroll 4
      for (uint32_t s = 0; s < kProductSums; ++s) sum[r][n][s] = Vector::zero();
  const uint32_t whole = a.inputs / kProductStep * kProductStep;
  for (uint32_t k = 0; k < whole; k += kProductStep) {
    if constexpr (kAhead)
#pragma GCC unroll 8
      for (uint32_t n = 0; n < N; ++n) _mm_prefetch(reinterpret_cast<const char*>(from[n] + k) + ahead, _MM_HINT_T1);
#pragma GCC unroll 4
    for (uint32_t s = 0; s < kProductSums; ++s) {
      ProductFloats value[R];
#pragma GCC unroll 4
      for (uint32_t r = 0; r < R; ++r) value[r] = Vector::load(x[r] + k + s * Vector::kLanes);
#pragma GCC unroll 8
      for (uint32_t n = 0; n < N; ++n) {
        const ProductFloats weights = product_weights<kDtype>(from[n] + k + s * Vector::kLanes);
#pragma GCC unroll 4
        for (uint32_t r = 0; r < R; ++r) sum[r][n][s] = Vector::fma(weights, value[r], sum[r][n][s]);
      }
    }
  }
  if (whole < a.inputs)
    for (uint32_t n = 0; n < N; ++n) {
      alignas(64) uint16_t weights[kProductStep] = {};
      std::memcpy(weights, from[n] + whole, 2 * (a.inputs - whole));
      for (uint32_t r = 0; r < R; ++r) {
        alignas(64) float value[kProductStep] = {};
        std::memcpy(value, x[r] + whole, 4 * (a.inputs - whole));
        for (uint32_t s = 0; s < kProductSums; ++s)
          sum[r][n][s] = Vector::fma(product_weights<kDtype>(weights + s * Vector::kLanes),
                                     Vector::load(value + s * Vector::kLanes), sum[r][n][s]);
      }
    }
  for (uint32_t r = 0; r < R; ++r) {
    float* out = at(static_cast<float*>(a.out), (row + int64_t{r}) * a.out_row_stride);
    for (uint32_t n = 0; n < N; ++n) out[first + n] = product_sum(sum[r][n]);
  }
}

// N outputs of the rows from `row` on.
template <uint32_t kDtype, uint32_t N>
inline void product_more(const kvk_product& a, uint32_t first, uint32_t row) {
  for (; row + 3 <= a.rows; row += 3) product_outputs<kDtype, N, 3, false>(a, first, 0, row);
  for (; row + 2 <= a.rows; row += 2) product_outputs<kDtype, N, 2, false>(a, first, 0, row);
  for (; row < a.rows; ++row) product_outputs<kDtype, N, 1, false>(a, first, 0, row);
}

template <uint32_t kDtype>
void product_in_order(const kvk_product& a, uint32_t start, uint32_t stop) {
  for (uint32_t i = start; i < stop; ++i) product_outputs<kDtype, 1, 1, false>(a, i, 0, 0);
}

template <uint32_t kDtype>
void product_halves(const kvk_product& a, uint32_t start, uint32_t stop) {
  if (a.rows == 1 && a.inputs <= kProductPage) return product_in_order<kDtype>(a, start, stop);
  uint32_t i = start;
  for (; i + kProductOutputs <= stop; i += kProductOutputs) {
    const int64_t ahead = i + 2 * kProductOutputs <= a.outputs ? kProductOutputs * a.weight_row_stride : 0;
    product_outputs<kDtype, kProductOutputs, 1, true>(a, i, ahead, 0);
    for (uint32_t n = 0; n < kProductOutputs && a.rows > 1; n += kProductFew) product_more<kDtype, kProductFew>(a, i + n, 1);
  }
  for (; i < stop; ++i) product_more<kDtype, 1>(a, i, 0);
}

void product_rows(const kvk_product& a, uint32_t start, uint32_t stop) {
  if (a.dtype == KVK_BF16) return product_halves<KVK_BF16>(a, start, stop);
  product_halves<KVK_F16>(a, start, stop);
}

}  // namespace
}  // namespace kvk
