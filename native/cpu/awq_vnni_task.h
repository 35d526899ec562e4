// The words of one task of kvk_awq_multiply(), part by part of the inputs, for CPUs with AVX-512 VNNI.
//
// Owns the task's sums in fp32 and the order in which parts are added. Never writes outside of its columns. Invariant: that order
// depends on neither rows, threads nor the cut into tasks. Local to the including file (cpu/numbers.h says why).
#pragma once

#include "cpu/awq_vnni_many.h"

namespace kvk {
namespace {

template <uint32_t D>
void multiply_codes(const kvk_awq& a, uint32_t word_start, uint32_t word_stop) {
  alignas(64) float total[kAwqTaskSums / (8 * kLane)][8][kLane];
  const uint32_t panels = (word_stop - word_start + kLane - 1) / kLane;
  std::memset(total, 0, a.rows * panels * sizeof total[0]);
  const uint64_t stride = a.outputs / 8;
  AwqNumbers<D> x;
  for (uint32_t start = 0, inputs; start < a.inputs; start += inputs) {
    const uint32_t left = a.group - start % a.group;  // of the group
    inputs = left < kAwqPart ? left : kAwqPart;
    for (uint32_t r = 0; r < a.rows; ++r)
      awq_digits(at(static_cast<const float*>(a.x), static_cast<int64_t>(r) * a.x_row_stride) + start, inputs, x, r);
    for (uint32_t panel = 0; panel < panels; ++panel) {
      const uint32_t word = word_start + panel * kLane, count = word_stop - word < kLane ? word_stop - word : kLane;
      const AwqColumns columns(a, start / a.group, word, count);
      const uint32_t* words = a.words + start * stride + word;
      const uint32_t* ahead = awq_ahead(a, words, inputs, word_start, word_stop, word);
      if (a.rows >= kAwqMany) {
        awq_many(a, columns, words, ahead, count, inputs, x, total + panel, panels);
        continue;
      }
      uint32_t row = 0;
      awq_panel<4>(a, columns, words, ahead, count, inputs, x, row, total + panel, panels);
      awq_panel<2>(a, columns, words, ahead, count, inputs, x, row, total + panel, panels);
      awq_panel<1>(a, columns, words, ahead, count, inputs, x, row, total + panel, panels);
    }
  }
  for (uint32_t r = 0; r < a.rows; ++r) {
    float* out = at(static_cast<float*>(a.out), static_cast<int64_t>(r) * a.out_row_stride);
    for (uint32_t word = word_start; word < word_stop; ++word) {
      const uint32_t panel = (word - word_start) / kLane, local = (word - word_start) % kLane;
      for (uint32_t i = 0; i < 8; ++i) {
        const uint32_t column = 8 * word + static_cast<uint32_t>(kByteColumn[i / 4][i % 4]);
        const float bias = a.bias == nullptr ? 0 : static_cast<const float*>(a.bias)[column];
        out[column] = total[r * panels + panel][2 * (local % 4) + i / 4][local / 4 * 4 + i % 4] + bias;
      }
    }
  }
}

void multiply_awq_vnni(const kvk_awq& a, uint32_t word_start, uint32_t word_stop) {
  if (a.group % 4 != 0) return multiply_awq(a, word_start, word_stop);
  if (a.dtype == KVK_BF16) return multiply_codes<2>(a, word_start, word_stop);
  multiply_codes<3>(a, word_start, word_stop);
}

}  // namespace
}  // namespace kvk
