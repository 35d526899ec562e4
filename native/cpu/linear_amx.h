// Linear layers of bf16, and of weights that are rounded to it, in AMX's tile registers: cpu/linear_rows.h's task, in another
// order of sums. Included by amx.cc alone.
//
// Owns the loops of one task. Few rows: weights are the left operand, as they lie or rounded into a stretch of the stack, and the
// rows of x are laid out in pairs beside them. Many rows: weights are laid out once a task, and the rows of x are read where they
// lie. Never writes outside of its columns of `out`. Invariant: an element is the sum of its steps of 32 inputs one after the
// other, each as TDPBF16PS has it, and then its bias: the same bits by either order of operands, for any number of rows.
#pragma once

#include "cpu/attend.h"
#include "cpu/linear_rows.h"
#include "cpu/tiles.h"

namespace kvk {
namespace {

constexpr uint32_t kLinearStep = 32;     // inputs that one multiplication takes
constexpr uint32_t kLinearBeside = 32;   // outputs, or rows of x, multiplied together: two tiles
constexpr uint32_t kLinearLaidOut = 32;  // rows of x from which laying the weights out pays
using LinearWeights = uint16_t[kLinearBeside * kLinearInputs];
using LinearSums = float[kLinearColumns * kLinearBeside];  // [output][row of x]

// One sum of up to 2 x 2 tiles, and the steps that it takes. Strides are in bytes, that of sums too.
struct LinearProduct {
  const void *left, *right;
  int64_t left_stride, right_stride;
  uint32_t steps;
  float* sums;
  int64_t sums_stride;
  bool more;               // sums are there already
  const char *next, *end;  // lines to ask for meanwhile
};

template <uint32_t kHigh, uint32_t kWide>
[[gnu::noinline]] void multiply_linear_tiles(const LinearProduct& p) {
  float *sums = p.sums, *lower = at(sums, 16 * p.sums_stride);
  if (p.more) {
    Tiles::load<0>(sums, p.sums_stride);
    if constexpr (kWide == 2) Tiles::load<1>(sums + 16, p.sums_stride);
    if constexpr (kHigh == 2) Tiles::load<2>(lower, p.sums_stride);
    if constexpr (kHigh == 2 && kWide == 2) Tiles::load<3>(lower + 16, p.sums_stride);
  } else {
    Tiles::zero<0>();
    if constexpr (kWide == 2) Tiles::zero<1>();
    if constexpr (kHigh == 2) Tiles::zero<2>();
    if constexpr (kHigh == 2 && kWide == 2) Tiles::zero<3>();
  }
  const auto *left = static_cast<const uint8_t*>(p.left), *right = static_cast<const uint8_t*>(p.right);
  const char* next = p.next;
  for (uint32_t i = 0; i < p.steps; ++i, left += 2 * kLinearStep, right += 16 * p.right_stride) {
    for (uint32_t line = 0; line < 16 * kHigh && next < p.end; ++line, next += 64) _mm_prefetch(next, _MM_HINT_T1);
    Tiles::load<6>(right, p.right_stride);
    if constexpr (kWide == 2) Tiles::load<7>(right + 64, p.right_stride);
    Tiles::load<4>(left, p.left_stride);
    Tiles::dot_bf16<0, 4, 6>();
    if constexpr (kWide == 2) Tiles::dot_bf16<1, 4, 7>();
    if constexpr (kHigh == 2) Tiles::load<5>(left + 16 * p.left_stride, p.left_stride), Tiles::dot_bf16<2, 5, 6>();
    if constexpr (kHigh == 2 && kWide == 2) Tiles::dot_bf16<3, 5, 7>();
  }
  Tiles::store<0>(sums, p.sums_stride);
  if constexpr (kWide == 2) Tiles::store<1>(sums + 16, p.sums_stride);
  if constexpr (kHigh == 2) Tiles::store<2>(lower, p.sums_stride);
  if constexpr (kHigh == 2 && kWide == 2) Tiles::store<3>(lower + 16, p.sums_stride);
}

inline void multiply_linear_tiles_of(uint32_t high, uint32_t wide, const LinearProduct& p) {
  if (high == 2) return wide == 2 ? multiply_linear_tiles<2, 2>(p) : multiply_linear_tiles<2, 1>(p);
  return wide == 2 ? multiply_linear_tiles<1, 2>(p) : multiply_linear_tiles<1, 1>(p);
}

// ---------------------------------------------------------------- few rows

// Rows of x as a right-hand operand: [pair of inputs][1, 16 or 32 rows] of four bytes. Columns beyond the last row hold that row.
struct LinearRows {
  alignas(64) uint32_t pairs[kLinearInputs / 2 * kLinearBeside];
  uint32_t columns = 0;

  LinearRows(const LinearRows&) = delete;
  LinearRows() {}

  void lay_out(const uint16_t* x, int64_t x_stride, uint32_t rows, uint32_t inputs) {
    columns = rows == 1 ? 1 : round_up(rows, 16);
    const uint32_t depth = round_up(inputs, kLinearStep) / 2;
    std::memset(pairs + uint64_t{inputs} / 2 * columns, 0, size_t{4} * (depth - inputs / 2) * columns);
    if (rows == 1) {
      std::memcpy(pairs, x, 2 * inputs);
      return;
    }
    for (uint32_t t = 0; t < columns; t += 16) {
      const uint8_t* row[16];
      for (uint32_t i = 0; i < 16; ++i)
        row[i] = reinterpret_cast<const uint8_t*>(x + (t + i < rows ? t + i : rows - 1) * x_stride);
      transpose(row, 2 * inputs, pairs + t, columns);
    }
  }
};

// Outputs first..first + count of a matrix over some inputs as a left-hand operand: where they lie, or in `room`.
struct LinearPanel {
  const uint16_t* left;
  int64_t stride;  // elements
};

template <class Element>
inline LinearPanel linear_panel(const Element* w, int64_t w_stride, uint32_t count, uint32_t inputs, LinearWeights& room) {
  if constexpr (sizeof(Element) == 2)
    if (count % 16 == 0 && inputs % kLinearStep == 0) return {w, w_stride};
  const uint32_t stride = round_up(inputs, kLinearStep);
  for (uint32_t j = 0; j < round_up(count, 16); ++j) {
    uint16_t* line = room + uint64_t{j} * stride;
    std::memset(line + inputs, 0, 2 * (stride - inputs));
    if (j >= count)
      std::memset(line, 0, 2 * inputs);
    else if constexpr (sizeof(Element) == 2)
      std::memcpy(line, w + j * w_stride, 2 * inputs);
    else
      round_weights(w + j * w_stride, inputs, line);
  }
  return {room, stride};
}

// What `rows` of x from `row` on give with outputs start..stop of one or two matrices: sums[matrix][output][row].
template <class Element>
inline void sum_few_rows(const kvk_linear& a, uint32_t row, uint32_t rows, uint32_t start, uint32_t stop, LinearSums (&sums)[2]) {
  LinearRows x;
  alignas(64) LinearWeights room;
  const void* matrices[2] = {a.w, a.up};
  for (uint32_t k = 0; k < a.inputs; k += kLinearInputs) {
    const uint32_t inputs = a.inputs - k < kLinearInputs ? a.inputs - k : kLinearInputs;
    x.lay_out(static_cast<const uint16_t*>(a.x) + row * a.x_row_stride + k, a.x_row_stride, rows, inputs);
    Registers::shape(2 * kLinearStep, x.columns);
    for (uint32_t m = 0; m < (a.up == nullptr ? 1 : 2); ++m)
      for (uint32_t column = start; column < stop; column += kLinearBeside) {
        const uint32_t count = stop - column < kLinearBeside ? stop - column : kLinearBeside;
        const Element* w = static_cast<const Element*>(matrices[m]) + uint64_t{column} * a.inputs + k;
        const LinearPanel panel = linear_panel(w, a.inputs, count, inputs, room);
        LinearProduct p{panel.left,
                        x.pairs,
                        2 * panel.stride,
                        int64_t{4} * x.columns,
                        (inputs + kLinearStep - 1) / kLinearStep,
                        sums[m] + (column - start) * kLinearBeside,
                        4 * kLinearBeside,
                        k != 0,
                        nullptr,
                        nullptr};
        if (row == 0 && panel.left == static_cast<const void*>(w) && inputs == a.inputs &&
            a.outputs - column >= 2 * kLinearBeside) {
          p.next = reinterpret_cast<const char*>(w + uint64_t{kLinearBeside} * a.inputs);
          p.end = p.next + uint64_t{2} * kLinearBeside * a.inputs;
        }
        multiply_linear_tiles_of((count + 15) / 16, x.columns > 16 ? 2 : 1, p);
      }
  }
}

// Sums of one matrix the other way round, with its bias: [row of x][kLinearColumns].
inline void lines_of_sums(const LinearSums& sums, uint32_t rows, uint32_t columns, const float* bias, float* lines) {
  for (uint32_t t = 0; t < rows; t += 16)
    for (uint32_t j = 0; j < columns; j += 16) {
      const uint8_t* from[16];
      for (uint32_t i = 0; i < 16; ++i) from[i] = reinterpret_cast<const uint8_t*>(sums + (j + i) * kLinearBeside + t);
      const uint32_t here = rows - t < 16 ? rows - t : 16;
      transpose(from, 4 * here, reinterpret_cast<uint32_t*>(lines) + t * kLinearColumns + j, kLinearColumns);
    }
  if (bias == nullptr) return;
  for (uint32_t r = 0; r < rows; ++r)
    for (uint32_t j = 0; j < columns; ++j) lines[r * kLinearColumns + j] += bias[j];
}

void multiply_few_rows(const kvk_linear& a, uint32_t start, uint32_t stop) {
  const uint32_t columns = stop - start;
  const bool rounded = a.dtype == KVK_ROUNDED;
  float biases[2][kLinearColumns];
  const float *bias = nullptr, *up_bias = as_floats<Bfloat16>(a.up_bias, start, stop, biases[1]);
  if (!rounded)
    bias = as_floats<Bfloat16>(a.bias, start, stop, biases[0]);
  else if (a.bias != nullptr)
    bias = static_cast<const float*>(a.bias) + start;
  alignas(64) LinearSums sums[2];
  alignas(64) float gate[kLinearBeside * kLinearColumns], up[kLinearBeside * kLinearColumns];
  for (uint32_t row = 0; row < a.rows; row += kLinearBeside) {
    const uint32_t rows = a.rows - row < kLinearBeside ? a.rows - row : kLinearBeside;
    (rounded ? sum_few_rows<float> : sum_few_rows<uint16_t>)(a, row, rows, start, stop, sums);
    lines_of_sums(sums[0], rows, columns, bias, gate);
    if (a.up != nullptr) {
      lines_of_sums(sums[1], rows, columns, up_bias, up);
      for (uint32_t r = 0; r < rows; ++r)
        gate_rows<Bfloat16>(gate + r * kLinearColumns, up + r * kLinearColumns, round_up(columns, kLinearLanes));
    }
    for (uint32_t r = 0; r < rows; ++r) {
      const int64_t place = (row + r) * a.out_row_stride + start;
      if (rounded)
        std::memcpy(static_cast<float*>(a.out) + place, gate + r * kLinearColumns, 4 * columns);
      else
        store_floats<Bfloat16>(static_cast<uint16_t*>(a.out) + place, gate + r * kLinearColumns, columns);
    }
  }
}

// ---------------------------------------------------------------- many rows

// Outputs of `columns`, sixteens, over some inputs as right-hand operands: [32 columns][pair of inputs][32] of four bytes.
inline void lay_weights_out(const float* w, int64_t w_stride, uint32_t columns, uint32_t inputs, uint32_t* out) {
  alignas(64) uint16_t line[16][kLinearInputs];
  for (uint32_t j = 0; j < columns; j += 16) {
    const uint8_t* row[16];
    for (uint32_t i = 0; i < 16; ++i) {
      round_weights(w + (j + i) * w_stride, inputs, line[i]);
      row[i] = reinterpret_cast<const uint8_t*>(line[i]);
    }
    transpose(row, 2 * inputs, out + j / kLinearBeside * kLinearBeside * (inputs / 2) + j % kLinearBeside, kLinearBeside);
  }
}

// The last rows of x, fewer than tiles have, and their sums: zeros beyond them.
struct LinearRest {
  alignas(64) uint16_t x[kLinearBeside * kLinearInputs];
  alignas(64) float sums[kLinearBeside * kLinearBeside];

  void take(const uint16_t* from, int64_t stride, uint32_t rows, uint32_t inputs) {
    for (uint32_t r = 0; r < rows; ++r) std::memcpy(x + r * inputs, from + r * stride, 2 * inputs);
    std::memset(x + rows * inputs, 0, 2 * (kLinearBeside - rows) * inputs);
  }
};

// Adds what some inputs give to `rows` rows of out, up to kLinearBeside, and the bias where they are the last inputs.
inline void add_to_rows(LinearProduct p, uint32_t rows, uint32_t columns, const float* bias, float* out, int64_t out_stride,
                        LinearRest& rest) {
  for (uint32_t r = 0; r < rows; ++r) {  // where sums go is in no cache
    __builtin_prefetch(out + r * out_stride, 1);
    __builtin_prefetch(out + r * out_stride + columns - 1, 1);
  }
  const bool whole = rows == kLinearBeside;
  p.sums = whole ? out : rest.sums, p.sums_stride = whole ? 4 * out_stride : 4 * kLinearBeside;
  if (!whole && p.more)
    for (uint32_t r = 0; r < rows; ++r) std::memcpy(rest.sums + r * kLinearBeside, out + r * out_stride, 4 * columns);
  multiply_linear_tiles_of(2, columns / 16, p);
  if (whole && bias == nullptr) return;
  for (uint32_t r = 0; r < rows; ++r)
    for (uint32_t i = 0; i < columns; i += 16) {
      const Vector::T sum = Vector::load(at(p.sums, r * p.sums_stride) + i);
      Vector::store(out + r * out_stride + i, bias == nullptr ? sum : Vector::add(sum, Vector::load(bias + i)));
    }
}

// KVK_ROUNDED, outputs by sixteens, whole steps of inputs.
void multiply_many_rows(const kvk_linear& a, uint32_t start, uint32_t stop) {
  alignas(64) uint32_t pairs[kLinearInputs / 2 * kLinearColumns];
  LinearRest rest;
  const uint32_t whole = a.rows / kLinearBeside * kLinearBeside;
  const auto* x = static_cast<const uint16_t*>(a.x);
  const float *w = static_cast<const float*>(a.w), *bias = static_cast<const float*>(a.bias);
  Registers::shape(2 * kLinearStep);
  for (uint32_t k = 0; k < a.inputs; k += kLinearInputs) {
    const uint32_t inputs = a.inputs - k < kLinearInputs ? a.inputs - k : kLinearInputs;
    const float* added = k + inputs == a.inputs ? bias : nullptr;
    lay_weights_out(w + uint64_t{start} * a.inputs + k, a.inputs, stop - start, inputs, pairs);
    rest.take(x + whole * a.x_row_stride + k, a.x_row_stride, a.rows - whole, inputs);
    for (uint32_t column = start; column < stop; column += kLinearBeside) {
      const uint32_t columns = stop - column < kLinearBeside ? stop - column : kLinearBeside;
      LinearProduct p{x + k,
                      pairs + (column - start) * (inputs / 2),
                      2 * a.x_row_stride,
                      4 * kLinearBeside,
                      inputs / kLinearStep,
                      nullptr,
                      0,
                      k != 0,
                      nullptr,
                      nullptr};
      auto* out = static_cast<float*>(a.out) + column;
      for (uint32_t row = 0; row < whole; row += kLinearBeside, out += kLinearBeside * a.out_row_stride) {
        p.left = x + row * a.x_row_stride + k;
        add_to_rows(p, kLinearBeside, columns, added == nullptr ? nullptr : added + column, out, a.out_row_stride, rest);
      }
      if (whole == a.rows) continue;
      p.left = rest.x, p.left_stride = 2 * inputs;
      add_to_rows(p, a.rows - whole, columns, added == nullptr ? nullptr : added + column, out, a.out_row_stride, rest);
    }
  }
}

// Outputs start..stop, up to kLinearColumns of them.
void multiply_linear_amx(const kvk_linear& a, uint32_t start, uint32_t stop) {
  if (a.dtype != KVK_ROUNDED && a.dtype != KVK_BF16) return multiply_linear(a, start, stop);
  const Registers registers;
  if (a.dtype == KVK_ROUNDED && a.rows >= kLinearLaidOut && a.inputs % kLinearStep == 0 && (stop - start) % 16 == 0)
    return multiply_many_rows(a, start, stop);
  multiply_few_rows(a, start, stop);
}

}  // namespace
}  // namespace kvk
