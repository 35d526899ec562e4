// AWQ weights as the tensor cores want them: where each of a checkpoint's four bits goes, and what a lane makes of them.
//
// The weights are the first operand of m16n8k16 (16 outputs by 16 inputs), x transposed the second: up to 8 rows of x cost one
// multiplication. Tiles of 16 outputs by 64 inputs, a "strip" of them along the inputs, one after the other; in a tile lane 4g +
// t holds outputs g and g + 8 of inputs 16t .. 16t + 15: four words, one a step. Which of the 16 inputs is which k of a step is
// free, as long as x agrees: so a lane's x is 32 bytes in a row.
//
// Owns that arrangement; host and device alike. Never allocates. Invariant: (q - z) is exact in fp16 and in bf16; scales are
// applied to sums, in fp32.
#pragma once

#include "cuda/numbers.h"

namespace kvk::awq {

constexpr uint32_t kStrip = 16;  // outputs
constexpr uint32_t kTile = 64;   // inputs
constexpr uint32_t kSteps = kTile / 16;
constexpr uint32_t kLanes = 32;

// Column c of eight is this nibble of a checkpoint's word (the columns of nibbles 0..7 are 0 2 4 6 1 3 5 7).
KVK_BOTH uint32_t nibble_of(uint32_t column) { return column / 2 + 4 * (column % 2); }

// The code of input k and output n, from a checkpoint's words.
KVK_BOTH uint32_t code_at(const uint32_t* words, uint32_t outputs, uint64_t k, uint32_t n) {
  return words[k * (outputs / 8) + n / 8] >> 4 * nibble_of(n % 8) & 15;
}

struct Place {
  uint32_t n, k;  // in a tile
};

// Where nibble `j` of a lane's word of one step stands. Nibbles j and j + 4 are the two halves of operand register j % 4.
KVK_BOTH Place place_of(uint32_t lane, uint32_t step, uint32_t j) {
  const uint32_t g = lane / 4, t = lane % 4, reg = j % 4;
  return {g + 8 * (reg % 2), 16 * t + 4 * step + 2 * (reg / 2) + j / 4};
}

KVK_BOTH uint64_t packed_index(uint32_t inputs, uint32_t strip, uint32_t tile, uint32_t lane, uint32_t step) {
  return ((static_cast<uint64_t>(strip) * (inputs / kTile) + tile) * kLanes + lane) * kSteps + step;
}

KVK_BOTH uint32_t packed_word(const kvk_awq& a, uint32_t strip, uint32_t tile, uint32_t lane, uint32_t step) {
  uint32_t word = 0;
  KVK_UNROLL
  for (uint32_t j = 0; j < 8; ++j) {
    const Place place = place_of(lane, step, j);
    word |= code_at(a.words, a.outputs, static_cast<uint64_t>(tile) * kTile + place.k, strip * kStrip + place.n) << 4 * j;
  }
  return word;
}

// 1024 + code in fp16, 128 + code in bf16: exactly, and with the code in the last bits.
template <int Dtype>
KVK_BOTH constexpr uint32_t magic() {
  return Dtype == KVK_F16 ? 0x64006400u : 0x43004300u;
}

// One minus the other, of both halves; exact for what is used here.
template <int Dtype>
KVK_BOTH uint32_t subtract(uint32_t from, uint32_t what) {
#if defined(__CUDA_ARCH__)
  uint32_t out = 0;
  if constexpr (Dtype == KVK_F16) {
    const __half2 d = __hsub2(*reinterpret_cast<const __half2*>(&from), *reinterpret_cast<const __half2*>(&what));
    out = *reinterpret_cast<const uint32_t*>(&d);
  } else {
    const __nv_bfloat162 d =
        __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&from), *reinterpret_cast<const __nv_bfloat162*>(&what));
    out = *reinterpret_cast<const uint32_t*>(&d);
  }
  return out;
#else
  uint32_t out = 0;
  for (uint32_t i = 0; i < 2; ++i) {
    const auto x = static_cast<uint16_t>(from >> 16 * i), y = static_cast<uint16_t>(what >> 16 * i);
    const uint16_t d = Dtype == KVK_F16 ? to_half(from_half(x) - from_half(y)) : to_bf16(from_bf16(x) - from_bf16(y));
    out |= static_cast<uint32_t>(d) << 16 * i;
  }
  return out;
#endif
}

// Zero points and scales of a lane's two outputs in one group of inputs.
struct GroupOf {
  uint32_t zero[2];  // with the magic number, in both halves
  float scale[2];
};

template <int Dtype>
KVK_BOTH GroupOf group_of(const kvk_awq& a, uint32_t group, uint32_t strip, uint32_t lane) {
  const uint32_t g = lane / 4;
  GroupOf out;
  KVK_UNROLL
  for (uint32_t i = 0; i < 2; ++i) {
    const uint64_t row = static_cast<uint64_t>(group) * a.outputs;
    const uint32_t z = a.zeros[row / 8 + 2 * strip + i] >> 4 * nibble_of(g) & 15;
    out.zero[i] = magic<Dtype>() | z | z << 16;
    out.scale[i] = from_half(a.scales[row + strip * kStrip + 8 * i + g]);
  }
  return out;
}

// The four registers of the first operand: q - z.
template <int Dtype>
KVK_BOTH void operand_of(uint32_t word, const GroupOf& group, uint32_t* registers) {
  KVK_UNROLL
  for (uint32_t j = 0; j < 4; ++j)
    registers[j] = subtract<Dtype>((word >> 4 * j & 0x000f000f) | magic<Dtype>(), group.zero[j % 2]);
}

// Half of a lane's x of one tile: 8 inputs of row `row`, for steps 2 half and 2 half + 1, two registers each of the second
// operand.
KVK_BOTH Words4 x_half(const kvk_awq& a, uint32_t row, uint32_t tile, uint32_t lane, uint32_t half) {
  if (row >= a.rows) return {};
  const int64_t k = static_cast<int64_t>(tile) * kTile + 16 * (lane % 4) + 8 * half;
  return *static_cast<const Words4*>(at(a.x, row * a.x_row_stride + 2 * k));
}

// What a sum of a lane is: register c of m16n8's result.
KVK_BOTH Place sum_place(uint32_t lane, uint32_t c) { return {lane / 4 + 8 * (c / 2), 2 * (lane % 4) + c % 2}; }  // n, row of x

// w[k][n] of checkpoint words, in fp32.
KVK_BOTH float weight(const kvk_awq& a, uint64_t k, uint32_t n) {
  const uint64_t group = k / a.group;
  const int code = static_cast<int>(code_at(a.words, a.outputs, k, n)),
            zero = static_cast<int>(code_at(a.zeros, a.outputs, group, n));
  return times(static_cast<float>(code - zero), from_half(a.scales[group * a.outputs + n]));
}

// Rows g and g + 8 of a tile, 16 inputs each, from one lane's four words: fp32, what is then rounded.
KVK_BOTH void weights_of_lane(const kvk_awq& a, const Words4& words, uint32_t strip, uint32_t tile, uint32_t lane,
                              float (&out)[2][16]) {
  const GroupOf group = group_of<KVK_F16>(a, tile * kTile / a.group, strip, lane);
  KVK_UNROLL
  for (uint32_t step = 0; step < kSteps; ++step) KVK_UNROLL
  for (uint32_t j = 0; j < 8; ++j) {
    const uint32_t i = j % 2;
    const int centred = static_cast<int>(words.w[step] >> 4 * j & 15) - static_cast<int>(group.zero[i] & 15);
    out[i][4 * step + 2 * (j % 4 / 2) + j / 4] = times(static_cast<float>(centred), group.scale[i]);
  }
}

}  // namespace kvk::awq
