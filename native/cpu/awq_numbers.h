// Rows of x as whole numbers of a few bytes, for products with the packed words of an AWQ layer that are exact.
//
// Owns where they lie. Never computes. Invariant: an element of x is off by at most 2^-22 (of two bytes, for bf16's values,
// 2^-14) of the largest in its part of the row (128 inputs at most), and nothing else is rounded before the part's sum is whole;
// so a call's bits depend on neither rows, threads nor the cut into tasks, and are those of every path that has this. Local to
// the including file (cpu/numbers.h says why).
#pragma once

#include "cpu/awq_rows.h"

namespace kvk {
namespace {

constexpr uint32_t kAwqPart = 128;  // inputs at most: 240 * 128 of each is exact in fp32
static_assert(kAwqPart == KVK_AWQ_TILE_INPUTS);

// Rows of a tile of the inputs, an element as D bytes, the lowest first; its parts are one behind the other.
template <uint32_t D>
struct AwqNumbers {
  alignas(64) int8_t digit[KVK_CPU_AWQ_ROWS][D][kAwqPart];
  float sum[kAwqPart / 4][KVK_CPU_AWQ_ROWS][D];
  float unit[kAwqPart / 4][KVK_CPU_AWQ_ROWS];  // NaN: an element is none, or infinite
};

// A part of a tile: its number there, its first input there, and how many there are.
struct AwqSlice {
  uint32_t part, at, inputs;
};

// Columns of lane 4 q + j: 8 (4 q + i) + this, of word i of each quarter and its lower or upper nibbles.
constexpr int kByteColumn[2][4] = {{0, 4, 1, 5}, {2, 6, 3, 7}};

}  // namespace
}  // namespace kvk
