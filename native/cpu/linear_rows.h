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

#include "cpu/linear.h"
#include "cpu/numbers.h"
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
struct WeightsAhead {
  static constexpr uint32_t kLines = kPanel * Vector::kLanes / 16;  // that a step of a tile multiplies, and asks for

  const float *next = nullptr, *row = nullptr;  // null: nobody wants any
  uint32_t every = 1, wait = 1;                 // steps between two askings: as many as there are tiles
  uint32_t steps = 1, left = 1;                 // of a row

  WeightsAhead(const float* rows, uint32_t inputs, uint32_t tiles)
      : next(rows), row(rows), every(tiles), wait(tiles), steps((inputs + 16 * kLines - 1) / (16 * kLines)), left(steps) {}

  void step(int64_t w_stride) {
    if (--wait != 0) return;
    wait = every;
    if (next == nullptr) return;
#pragma GCC unroll 8
    for (uint32_t line = 0; line < kLines; ++line) _mm_prefetch(reinterpret_cast<const char*>(next + 16 * line), _MM_HINT_T1);
    next += 16 * kLines;
    if (--left == 0) row += w_stride, next = row, left = steps;
  }
};

// Sums of `Rows` rows and four outputs over `inputs`; `base` + row * base_stride is what they are added to, or null.
struct LinearTile {
  const float* x;
  int64_t x_stride;  // in elements, as all here
  const float* w;
  int64_t w_stride;
  uint32_t inputs;
  const float* base;
  int64_t base_stride;
  float* out;
  int64_t out_stride;
  uint32_t outputs;  // up to four
};

inline void keep_sums(const LinearTile& t, uint32_t row, __m128 sum) {
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

template <uint32_t Rows>
inline void multiply_tile(const LinearTile& t, WeightsAhead& ahead) {
  using V = Vector;
  typename V::T sum[Rows][kPanel];
  const float* w[kPanel];
#pragma GCC unroll 8
  for (uint32_t j = 0; j < kPanel; ++j) {
    w[j] = t.w + (j < t.outputs ? j : 0) * t.w_stride;
#pragma GCC unroll 8
    for (uint32_t i = 0; i < Rows; ++i) sum[i][j] = V::zero();
  }
  if constexpr (Rows <= 2) {  // one row of weights after the other: as fast as memory is read
#pragma GCC unroll 8
    for (uint32_t j = 0; j < kPanel; ++j)
      for (uint32_t p = 0; p < t.inputs; p += V::kLanes) {
        const typename V::T weights = V::load(w[j] + p);
#pragma GCC unroll 8
        for (uint32_t i = 0; i < Rows; ++i) sum[i][j] = V::fma(V::load(t.x + i * t.x_stride + p), weights, sum[i][j]);
      }
  } else {
    WeightsAhead asked = ahead;  // in registers meanwhile
    for (uint32_t p = 0; p < t.inputs; p += V::kLanes) {
      typename V::T x[Rows];
#pragma GCC unroll 8
      for (uint32_t i = 0; i < Rows; ++i) x[i] = V::load(t.x + i * t.x_stride + p);
#pragma GCC unroll 8
      for (uint32_t j = 0; j < kPanel; ++j) {
        const typename V::T weights = V::load(w[j] + p);
#pragma GCC unroll 8
        for (uint32_t i = 0; i < Rows; ++i) sum[i][j] = V::fma(x[i], weights, sum[i][j]);
      }
      asked.step(t.w_stride);
    }
    ahead = asked;
  }
#pragma GCC unroll 8
  for (uint32_t i = 0; i < Rows; ++i) keep_sums(t, i, sums_of_four(sum[i][0], sum[i][1], sum[i][2], sum[i][3]));
}

inline void multiply_tile_of(uint32_t rows, const LinearTile& t, WeightsAhead& ahead) {
  switch (rows) {
    case 1: return multiply_tile<1>(t, ahead);
    case 2: return multiply_tile<2>(t, ahead);
    case 3: return multiply_tile<3>(t, ahead);
#if defined(__AVX512F__)
    case 4: return multiply_tile<4>(t, ahead);
    case 5: return multiply_tile<5>(t, ahead);
    default: return multiply_tile<6>(t, ahead);
#endif
  }
}

// Rows row_start.. of x times outputs start..stop of w: into out [rows][stop - start], whose rows are out_stride apart.
inline void multiply_block(const kvk_linear& a, const float* w, const float* bias, uint32_t row_start, uint32_t rows,
                           uint32_t start, uint32_t stop, float* out, int64_t out_stride) {
  const uint32_t tiles = (rows + kTileRows - 1) / kTileRows;
  const float* x = a.x + row_start * a.x_row_stride;
  for (uint32_t k = 0; k < a.inputs; k += kLinearInputs) {
    const uint32_t inputs = a.inputs - k < kLinearInputs ? a.inputs - k : kLinearInputs;
    for (uint32_t column = start; column < stop; column += kPanel) {
      LinearTile t{x + k,
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
      if (k == 0 && bias != nullptr) t.base = bias + column;
      WeightsAhead ahead(a.outputs - column >= 2 * kPanel ? t.w + kPanel * t.w_stride : nullptr, inputs, tiles);
      for (uint32_t tile = 0, row = 0; tile < tiles; ++tile) {
        const uint32_t count = (rows - row + tiles - tile - 1) / (tiles - tile);
        multiply_tile_of(count, t, ahead);
        row += count;
        t.x += count * t.x_stride;
        t.out += count * out_stride;
        if (t.base != nullptr) t.base += count * t.base_stride;
      }
    }
  }
}

// gate = silu(gate) * up, in place.
inline void gate_rows(float* gate, const float* up, uint32_t count) {
  using V = Vector;
  for (uint32_t i = 0; i < count; i += V::kLanes) {
    const typename V::T g = V::load(gate + i);
    const typename V::T power = V::max(V::all(-126.0f), V::mul(g, V::all(1.44269504f)));  // a NaN stays one
    const typename V::T sigmoid = V::div(V::all(1.0f), V::add(V::all(1.0f), exp2(V::sub(V::zero(), power))));
    V::store(gate + i, V::mul(V::mul(g, sigmoid), V::load(up + i)));
  }
}

// Outputs start..stop, up to kLinearColumns of them.
void multiply_linear(const kvk_linear& a, uint32_t start, uint32_t stop) {
  const uint32_t fit = kLinearBytes / 4 / (a.inputs < kLinearInputs ? a.inputs : kLinearInputs) / kTileRows * kTileRows;
  const uint32_t most = fit < kTileRows ? kTileRows : fit < kLinearRows ? fit : kLinearRows;
  for (uint32_t row = 0; row < a.rows; row += most) {
    const uint32_t rows = a.rows - row < most ? a.rows - row : most;
    float* out = a.out + row * a.out_row_stride + start;
    if (a.up == nullptr) {
      multiply_block(a, a.w, a.bias, row, rows, start, stop, out, a.out_row_stride);
      continue;
    }
    alignas(64) float gate[kLinearRows * kLinearColumns], up[kLinearRows * kLinearColumns];
    multiply_block(a, a.w, a.bias, row, rows, start, stop, gate, kLinearColumns);
    multiply_block(a, a.up, a.up_bias, row, rows, start, stop, up, kLinearColumns);
    for (uint32_t i = 0; i < rows; ++i) {
      float* line = gate + i * kLinearColumns;
      const uint32_t columns = stop - start, whole = (columns + kLinearLanes - 1) / kLinearLanes * kLinearLanes;
      for (uint32_t j = columns; j < whole; ++j) line[j] = up[i * kLinearColumns + j] = 0;
      gate_rows(line, up + i * kLinearColumns, whole);
      __builtin_memcpy(out + i * a.out_row_stride, line, 4 * columns);
    }
  }
}

// The heads of a token: each x * cos + half(x) * sin, as torch rounds it.
inline void turn_heads(float* x, uint32_t heads, uint32_t head_dim, const float* cos, const float* sin) {
  using V = Vector;
  const uint32_t half = head_dim / 2;
  for (uint32_t head = 0; head < heads; ++head, x += head_dim)
    for (uint32_t i = 0; i < half; i += V::kLanes) {
      const typename V::T first = V::load(x + i), second = V::load(x + half + i);
      V::store(x + i, V::sub(V::mul(first, V::load(cos + i)), V::mul(second, V::load(sin + i))));
      V::store(x + half + i, V::add(V::mul(second, V::load(cos + half + i)), V::mul(first, V::load(sin + half + i))));
    }
}

void turn_rows(const kvk_turns& a, uint32_t row_start, uint32_t row_stop) {
  for (uint64_t row = row_start; row < row_stop; ++row) {
    const float *cos = a.cos + row * a.head_dim, *sin = a.sin + row * a.head_dim;
    turn_heads(a.q + row * a.query_heads * a.head_dim, a.query_heads, a.head_dim, cos, sin);
    turn_heads(a.k + row * a.kv_heads * a.head_dim, a.kv_heads, a.head_dim, cos, sin);
  }
}

// A row over the root of the mean of its squares, times the weights.
void normalise_rows(const kvk_norm& a, uint32_t row_start, uint32_t row_stop) {
  using V = Vector;
  for (uint64_t row = row_start; row < row_stop; ++row) {
    const float* x = a.x + static_cast<int64_t>(row) * a.x_row_stride;
    float* out = a.out + static_cast<int64_t>(row) * a.out_row_stride;
    typename V::T sum[2] = {V::zero(), V::zero()};
    const uint32_t whole = a.width / (2 * V::kLanes) * (2 * V::kLanes);
    for (uint32_t i = 0; i < whole; i += 2 * V::kLanes)
      for (uint32_t j = 0; j < 2; ++j) {
        const typename V::T value = V::load(x + i + j * V::kLanes);
        sum[j] = V::fma(value, value, sum[j]);
      }
    float squares = V::sum(V::add(sum[0], sum[1]));
    for (uint32_t i = whole; i < a.width; ++i) squares += x[i] * x[i];
    const float scale = 1.0f / __builtin_sqrtf(squares / static_cast<float>(a.width) + a.epsilon);
    for (uint32_t i = 0; i < whole; i += V::kLanes)
      V::store(out + i, V::mul(V::load(a.weight + i), V::mul(V::load(x + i), V::all(scale))));
    for (uint32_t i = whole; i < a.width; ++i) out[i] = a.weight[i] * (x[i] * scale);
  }
}

}  // namespace
}  // namespace kvk
