// Rows times a weight matrix that lies as torch.nn.Linear has it, one row an output, read where it lies: nothing is packed or
// kept.
//
// A sum's lanes run along the inputs, so x and w are read as they are, and one row of x sums as hundreds do. Owns the loops of
// one task: some outputs, all rows. Never writes outside of its columns of `out`. Invariant: an element's bits depend on its row,
// its weights and their number alone. Local to the including file (cpu/numbers.h says why).
//
// Memory is what few rows wait for, and it is fast only where it is read in its order: one row of weights after the other, or the
// next four asked for in their order while these four are multiplied (docs/log.md has the figures).
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "cpu/linear.h"
#include "cpu/linear_elements.h"
#include "cpu/vector.h"

namespace kvk {
namespace {

constexpr uint32_t kPanel = 4;  // outputs of a tile
#if defined(__AVX512F__)
constexpr uint32_t kTileRows = 6;

inline __m128 sums_of_four(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
  __m512 sum = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  sum = _mm512_add_ps(sum, _mm512_permute_ps(sum, 0x4e));
  sum = _mm512_add_ps(sum, _mm512_permute_ps(sum, 0xb1));
  return _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, sum));
}
#else
constexpr uint32_t kTileRows = 3;

inline __m128 sums_of_four(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256 sum = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
}
#endif

// Four rows of weights that the next tiles want: asked for in the order of memory, a line of 64 bytes after the other, spread
// over the tiles that these four have, into the second cache: the first has no room, and no more of them under way.
template <class E>
struct WeightsAhead {
  static constexpr uint32_t kLine = 64 / sizeof(typename E::Element);  // elements
  static constexpr uint32_t kLines = kPanel * E::kStep / kLine;        // that a step of a tile multiplies, and asks for

  const typename E::Element *next = nullptr, *row = nullptr;  // null: nobody wants any
  uint32_t every = 1, wait = 1;                               // steps between two askings: as many as there are tiles
  uint32_t steps = 1, left = 1;                               // of a row

  WeightsAhead(const typename E::Element* rows, uint32_t inputs, uint32_t tiles)
      : next(rows), row(rows), every(tiles), wait(tiles), steps((inputs + kLine * kLines - 1) / (kLine * kLines)), left(steps) {}

  void step(int64_t w_stride) {
    if (--wait != 0) return;
    wait = every;
    if (next == nullptr) return;
#pragma GCC unroll 8
    for (uint32_t line = 0; line < kLines; ++line) _mm_prefetch(reinterpret_cast<const char*>(next + kLine * line), _MM_HINT_T1);
    next += kLine * kLines;
    if (--left == 0) row += w_stride, next = row, left = steps;
  }
};

// Sums of `Rows` rows and four outputs over `inputs`; `base` + row * base_stride is what they are added to, or null.
template <class E>
struct LinearTile {
  const typename E::Element* x;
  int64_t x_stride;  // in elements, as all here
  const typename E::Element* w;
  int64_t w_stride;
  uint32_t inputs;
  const float* base;
  int64_t base_stride;
  float* out;
  int64_t out_stride;
  uint32_t outputs;  // up to four
};

template <class E>
inline void keep_sums(const LinearTile<E>& t, uint32_t row, __m128 sum) {
  float* out = t.out + row * t.out_stride;
  const float* base = t.base == nullptr ? nullptr : t.base + row * t.base_stride;
  if (t.outputs == kPanel) {
    _mm_storeu_ps(out, base == nullptr ? sum : _mm_add_ps(_mm_loadu_ps(base), sum));
    return;
  }
  float sums[kPanel];
  _mm_storeu_ps(sums, sum);
  for (uint32_t i = 0; i < t.outputs; ++i) out[i] = base == nullptr ? sums[i] : base[i] + sums[i];
}

template <class E, uint32_t Rows>
inline void multiply_tile(const LinearTile<E>& t, WeightsAhead<E>& ahead) {
  using V = Vector;
  using Factor = typename E::Factor;
  typename V::T sum[Rows][kPanel];
  const typename E::Element* w[kPanel];
#pragma GCC unroll 8
  for (uint32_t j = 0; j < kPanel; ++j) {
    w[j] = t.w + (j < t.outputs ? j : 0) * t.w_stride;
#pragma GCC unroll 8
    for (uint32_t i = 0; i < Rows; ++i) sum[i][j] = V::zero();
  }
  const uint32_t whole = t.inputs / E::kStep * E::kStep;
  if constexpr (Rows <= 2) {  // one row of weights after the other: as fast as memory is read
#pragma GCC unroll 8
    for (uint32_t j = 0; j < kPanel; ++j)
      for (uint32_t p = 0; p < whole; p += E::kStep) {
        const Factor weights = E::factor(w[j] + p);
#pragma GCC unroll 8
        for (uint32_t i = 0; i < Rows; ++i) sum[i][j] = E::fma(E::factor(t.x + i * t.x_stride + p), weights, sum[i][j]);
      }
  } else {
    WeightsAhead<E> asked = ahead;  // in registers meanwhile
    for (uint32_t p = 0; p < whole; p += E::kStep) {
      Factor x[Rows];
#pragma GCC unroll 8
      for (uint32_t i = 0; i < Rows; ++i) x[i] = E::factor(t.x + i * t.x_stride + p);
#pragma GCC unroll 8
      for (uint32_t j = 0; j < kPanel; ++j) {
        const Factor weights = E::factor(w[j] + p);
#pragma GCC unroll 8
        for (uint32_t i = 0; i < Rows; ++i) sum[i][j] = E::fma(x[i], weights, sum[i][j]);
      }
      asked.step(t.w_stride);
    }
    ahead = asked;
  }
  if constexpr (E::kStep > kLinearLanes)
    if (whole != t.inputs)
      for (uint32_t j = 0; j < kPanel; ++j)
        for (uint32_t i = 0; i < Rows; ++i)
          sum[i][j] = E::fma(E::half(t.x + i * t.x_stride + whole), E::half(w[j] + whole), sum[i][j]);
#pragma GCC unroll 8
  for (uint32_t i = 0; i < Rows; ++i) keep_sums(t, i, sums_of_four(sum[i][0], sum[i][1], sum[i][2], sum[i][3]));
}

template <class E>
inline void multiply_tile_of(uint32_t rows, const LinearTile<E>& t, WeightsAhead<E>& ahead) {
  switch (rows) {
    case 1: return multiply_tile<E, 1>(t, ahead);
    case 2: return multiply_tile<E, 2>(t, ahead);
    case 3: return multiply_tile<E, 3>(t, ahead);
#if defined(__AVX512F__)
    case 4: return multiply_tile<E, 4>(t, ahead);
    case 5: return multiply_tile<E, 5>(t, ahead);
    default: return multiply_tile<E, 6>(t, ahead);
#endif
  }
}

// Rows of x, one tile after the other, times the outputs of one panel. t: of the first rows.
template <class E>
inline void multiply_panel(LinearTile<E> t, uint32_t rows, WeightsAhead<E> ahead) {
  const uint32_t tiles = (rows + kTileRows - 1) / kTileRows;
  for (uint32_t tile = 0, row = 0; tile < tiles; ++tile) {
    const uint32_t count = (rows - row + tiles - tile - 1) / (tiles - tile);
    multiply_tile_of(count, t, ahead);
    row += count;
    t.x += count * t.x_stride;
    t.out += count * t.out_stride;
    if (t.base != nullptr) t.base += count * t.base_stride;
  }
}

// Some rows of x times outputs start..stop of w: into out [rows][stop - start], whose rows are out_stride apart.
template <class E>
inline void multiply_block(const kvk_linear& a, const void* weights, const float* bias, uint32_t row_start, uint32_t rows,
                           uint32_t start, uint32_t stop, float* out, int64_t out_stride) {
  const uint32_t tiles = (rows + kTileRows - 1) / kTileRows;
  const auto* x = static_cast<const typename E::Element*>(a.x) + row_start * a.x_row_stride;
  const auto* w = static_cast<const typename E::Element*>(weights);
  for (uint32_t k = 0; k < a.inputs; k += E::kInputs) {
    const uint32_t inputs = a.inputs - k < E::kInputs ? a.inputs - k : E::kInputs;
    for (uint32_t column = start; column < stop; column += kPanel) {
      LinearTile<E> t{x + k,
                      a.x_row_stride,
                      w + uint64_t{column} * a.inputs + k,
                      a.inputs,
                      inputs,
                      nullptr,
                      0,
                      out + (column - start),
                      out_stride,
                      stop - column < kPanel ? stop - column : kPanel};
      if (k != 0) t.base = t.out, t.base_stride = out_stride;
      if (k == 0 && bias != nullptr) t.base = bias + (column - start);
      WeightsAhead<E> ahead(a.outputs - column >= 2 * kPanel ? t.w + kPanel * t.w_stride : nullptr, inputs, tiles);
      multiply_panel(t, rows, ahead);
    }
  }
}

// Weights as bf16; count a multiple of kLinearLanes.
inline void round_weights(const float* from, uint32_t count, uint16_t* to) {
  for (uint32_t i = 0; i < count; i += Vector::kLanes)
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i),
                        __builtin_bit_cast(__m256i, _mm512_cvtneps_pbh(Vector::load(from + i))));
#else
    Bfloat16::store(to + i, Vector::load(from + i));
#endif
}

// KVK_ROUNDED: a panel's weights are rounded once for all rows that stay in the cache.
void multiply_rounded(const kvk_linear& a, uint32_t start, uint32_t stop) {
  alignas(64) uint16_t panel[kPanel * kLinearInputs];
  const uint32_t fit = kLinearBytes / sizeof(uint16_t) / (a.inputs < kLinearInputs ? a.inputs : kLinearInputs);
  const uint32_t most = fit < kLinearRows ? fit / kTileRows * kTileRows : kLinearRows;
  const auto* x = static_cast<const uint16_t*>(a.x);
  const auto *w = static_cast<const float*>(a.w), *bias = static_cast<const float*>(a.bias);
  for (uint32_t row = 0; row < a.rows; row += most)
    for (uint32_t k = 0; k < a.inputs; k += kLinearInputs)
      for (uint32_t column = start; column < stop; column += kPanel) {
        const uint32_t rows = a.rows - row < most ? a.rows - row : most;
        const uint32_t inputs = a.inputs - k < kLinearInputs ? a.inputs - k : kLinearInputs;
        const uint32_t outputs = stop - column < kPanel ? stop - column : kPanel;
        for (uint32_t j = 0; j < outputs; ++j)
          round_weights(w + (uint64_t{column} + j) * a.inputs + k, inputs, panel + j * inputs);
        float* out = static_cast<float*>(a.out) + row * a.out_row_stride + column;
        LinearTile<Bfloat16> t{
            x + row * a.x_row_stride + k, a.x_row_stride, panel, inputs, inputs, nullptr, 0, out, a.out_row_stride, outputs};
        if (k != 0) t.base = out, t.base_stride = a.out_row_stride;
        if (k == 0 && bias != nullptr) t.base = bias + column;
        multiply_panel(t, rows, WeightsAhead<Bfloat16>(nullptr, inputs, 1));
      }
}

// gate = silu(gate) * up, in place; each of them, silu and the product rounded to elements. 2^128 is infinity, and so what is far
// below zero has 0 for its sigmoid, and -infinity has no silu, as torch has it.
template <class E>
inline void gate_rows(float* gate, const float* up, uint32_t count) {
  using V = Vector;
  for (uint32_t i = 0; i < count; i += V::kLanes) {
    const typename V::T g = E::rounded(V::load(gate + i));
    const typename V::T power = V::max(V::all(-128.0f), V::mul(g, V::all(1.44269504f)));  // a NaN stays one
    const typename V::T sigmoid = V::div(V::all(1.0f), V::add(V::all(1.0f), exp2(V::sub(V::zero(), power))));
    V::store(gate + i, V::mul(E::rounded(V::mul(g, sigmoid)), E::rounded(V::load(up + i))));
  }
}

template <class E>
inline void gate_elements(float* gate, const float* up, uint32_t count) {
  const uint32_t whole = count / Vector::kLanes * Vector::kLanes;
  gate_rows<E>(gate, up, whole);
  float rest[2][Vector::kLanes] = {};
  std::memcpy(rest[0], gate + whole, 4 * (count - whole));
  std::memcpy(rest[1], up + whole, 4 * (count - whole));
  gate_rows<E>(rest[0], rest[1], Vector::kLanes);
  std::memcpy(gate + whole, rest[0], 4 * (count - whole));
  for (uint32_t i = 0; i < count; ++i) gate[i] = E::from(E::to(gate[i]));
}

void gate_floats(uint32_t dtype, float* gate, const float* up, uint32_t count) {
  if (dtype == KVK_BF16) return gate_elements<Bfloat16>(gate, up, count);
  gate_elements<Float32>(gate, up, count);
}

template <class E>
inline void store_floats(typename E::Element* out, const float* in, uint32_t count) {
  uint32_t i = 0;
  for (; i + Vector::kLanes <= count; i += Vector::kLanes) E::store(out + i, Vector::load(in + i));
  for (; i < count; ++i) out[i] = E::to(in[i]);
}

template <class E>
inline const float* as_floats(const void* bias, uint32_t start, uint32_t stop, float* room) {
  if (bias == nullptr) return nullptr;
  const auto* in = static_cast<const typename E::Element*>(bias);
  for (uint32_t i = start; i < stop; ++i) room[i - start] = E::from(in[i]);
  return room;
}

template <class E>
inline void multiply_elements(const kvk_linear& a, uint32_t start, uint32_t stop) {
  using Element = typename E::Element;
  constexpr uint32_t kFit = kLinearBytes / sizeof(Element);
  constexpr bool kAtOnce = sizeof(Element) == sizeof(float);  // sums are what is wanted
  const uint32_t fit = kFit / (a.inputs < E::kInputs ? a.inputs : E::kInputs) / kTileRows * kTileRows;
  const uint32_t most = fit < kTileRows ? kTileRows : fit < kLinearRows ? fit : kLinearRows;
  const uint32_t columns = stop - start, whole = (columns + kLinearLanes - 1) / kLinearLanes * kLinearLanes;
  float biases[2][kLinearColumns];
  const float* bias = as_floats<E>(a.bias, start, stop, biases[0]);
  const float* up_bias = as_floats<E>(a.up_bias, start, stop, biases[1]);
  for (uint32_t row = 0; row < a.rows; row += most) {
    const uint32_t rows = a.rows - row < most ? a.rows - row : most;
    Element* out = static_cast<Element*>(a.out) + row * a.out_row_stride + start;
    if constexpr (kAtOnce)
      if (a.up == nullptr) {
        multiply_block<E>(a, a.w, bias, row, rows, start, stop, out, a.out_row_stride);
        continue;
      }
    alignas(64) float gate[kLinearRows * kLinearColumns], up[kLinearRows * kLinearColumns];
    multiply_block<E>(a, a.w, bias, row, rows, start, stop, gate, kLinearColumns);
    if (a.up != nullptr) multiply_block<E>(a, a.up, up_bias, row, rows, start, stop, up, kLinearColumns);
    for (uint32_t i = 0; i < rows; ++i) {
      float* line = gate + i * kLinearColumns;
      if (a.up != nullptr) {
        for (uint32_t j = columns; j < whole; ++j) line[j] = up[i * kLinearColumns + j] = 0;
        gate_rows<E>(line, up + i * kLinearColumns, whole);
      }
      store_floats<E>(out + i * a.out_row_stride, line, columns);
    }
  }
}

// Outputs start..stop, up to kLinearColumns of them.
void multiply_linear(const kvk_linear& a, uint32_t start, uint32_t stop) {
  if (a.dtype == KVK_ROUNDED) return multiply_rounded(a, start, stop);
  if (a.dtype == KVK_BF16) return multiply_elements<Bfloat16>(a, start, stop);
  multiply_elements<Float32>(a, start, stop);
}

// The heads of a token: each x * cos + half(x) * sin, as torch rounds it.
template <class E>
inline void turn_heads(typename E::Element* x, uint32_t heads, uint32_t head_dim, const typename E::Element* cos,
                       const typename E::Element* sin) {
  using V = Vector;
  const uint32_t half = head_dim / 2;
  const auto product = [](typename V::T a, const typename E::Element* b) { return E::rounded(V::mul(a, E::load(b))); };
  for (uint32_t head = 0; head < heads; ++head, x += head_dim)
    for (uint32_t i = 0; i < half; i += V::kLanes) {
      const typename V::T first = E::load(x + i), second = E::load(x + half + i);
      E::store(x + i, V::sub(product(first, cos + i), product(second, sin + i)));
      E::store(x + half + i, V::add(product(second, cos + half + i), product(first, sin + half + i)));
    }
}

template <class E>
inline void turn_elements(const kvk_turns& a, uint32_t row_start, uint32_t row_stop) {
  using Element = typename E::Element;
  for (uint64_t row = row_start; row < row_stop; ++row) {
    const auto *cos = static_cast<const Element*>(a.cos) + row * a.head_dim,
               *sin = static_cast<const Element*>(a.sin) + row * a.head_dim;
    turn_heads<E>(static_cast<Element*>(a.q) + row * a.query_heads * a.head_dim, a.query_heads, a.head_dim, cos, sin);
    turn_heads<E>(static_cast<Element*>(a.k) + row * a.kv_heads * a.head_dim, a.kv_heads, a.head_dim, cos, sin);
  }
}

void turn_rows(const kvk_turns& a, uint32_t row_start, uint32_t row_stop) {
  if (a.dtype == KVK_BF16) return turn_elements<Bfloat16>(a, row_start, row_stop);
  turn_elements<Float32>(a, row_start, row_stop);
}

// A row over the root of the mean of its squares, times the weights; both products rounded to elements.
template <class E>
inline void normalise_elements(const kvk_norm& a, uint32_t row_start, uint32_t row_stop) {
  using V = Vector;
  using Element = typename E::Element;
  const auto* weight = static_cast<const Element*>(a.weight);
  for (uint64_t row = row_start; row < row_stop; ++row) {
    const Element* x = static_cast<const Element*>(a.x) + static_cast<int64_t>(row) * a.x_row_stride;
    Element* out = static_cast<Element*>(a.out) + static_cast<int64_t>(row) * a.out_row_stride;
    typename V::T sum[2] = {V::zero(), V::zero()};
    const uint32_t whole = a.width / (2 * V::kLanes) * (2 * V::kLanes);
    for (uint32_t i = 0; i < whole; i += 2 * V::kLanes)
      for (uint32_t j = 0; j < 2; ++j) {
        const typename V::T value = E::load(x + i + j * V::kLanes);
        sum[j] = V::fma(value, value, sum[j]);
      }
    float squares = V::sum(V::add(sum[0], sum[1]));
    for (uint32_t i = whole; i < a.width; ++i) squares += E::from(x[i]) * E::from(x[i]);
    const float scale = 1.0f / __builtin_sqrtf(squares / static_cast<float>(a.width) + a.epsilon);
    for (uint32_t i = 0; i < whole; i += V::kLanes)
      E::store(out + i, V::mul(E::load(weight + i), E::rounded(V::mul(E::load(x + i), V::all(scale)))));
    for (uint32_t i = whole; i < a.width; ++i) out[i] = E::to(E::from(weight[i]) * E::from(E::to(E::from(x[i]) * scale)));
  }
}

void normalise_rows(const kvk_norm& a, uint32_t row_start, uint32_t row_stop) {
  if (a.dtype == KVK_BF16) return normalise_elements<Bfloat16>(a, row_start, row_stop);
  normalise_elements<Float32>(a, row_start, row_stop);
}

}  // namespace
}  // namespace kvk
