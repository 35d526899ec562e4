// The words of one task of kvk_awq_multiply(), part by part of the inputs, in whole numbers.
//
// Owns the task's sums in fp32 and the order in which parts are added. Never writes outside of its columns. Invariant: that order
// depends on neither rows, threads nor the cut into tasks. Local to the including file (cpu/numbers.h says why).
#pragma once

#if defined(__AVX512VNNI__)
#include "cpu/awq_vnni.h"
#else
#include "cpu/awq_avx2.h"
#endif

namespace kvk {
namespace {

// What one tile of the inputs adds: of each panel of the task part by part, as they lie in its words.
template <uint32_t D>
void multiply_tile(const kvk_awq& a, uint32_t start, uint32_t inputs, uint32_t part, uint32_t word_start, uint32_t word_stop,
                   AwqNumbers<D>& x, float (*total)[8][kLane]) {
  const uint32_t panels = (word_stop - word_start + kLane - 1) / kLane;
  for (uint32_t r = 0; r < a.rows; ++r) {
    const float* row = at(static_cast<const float*>(a.x), static_cast<int64_t>(r) * a.x_row_stride) + start;
    for (uint32_t i = 0; i * part < inputs; ++i) awq_digits(row + i * part, {i, i * part, part}, x, r);
  }
  for (uint32_t panel = 0; panel < panels; ++panel) {
    const uint32_t word = word_start + panel * kLane, count = word_stop - word < kLane ? word_stop - word : kLane;
    for (uint32_t i = 0; i * part < inputs; ++i) {
      const AwqSlice slice{i, i * part, part};
      const AwqColumns columns(a, (start + slice.at) / a.group, word, count);
      const AwqRun run = awq_run(a, start + slice.at, word);
      // Asked for also where panels are read in their order: not every processor, or what virtualises it, asks by itself.
      const AwqRun ahead = awq_ahead(a, start + slice.at, inputs, word_start, word_stop, word);
      awq_panel(a.rows, columns, run, ahead, count, slice, x, total + panel, panels);
    }
  }
}

template <uint32_t D>
void multiply_codes(const kvk_awq& a, uint32_t word_start, uint32_t word_stop) {
  alignas(64) float total[kAwqTaskSums / (8 * kLane)][8][kLane];
  const uint32_t panels = (word_stop - word_start + kLane - 1) / kLane;
  std::memset(total, 0, a.rows * panels * sizeof total[0]);
  AwqNumbers<D> x;
  for (uint32_t start = 0, inputs; start < a.inputs; start += inputs) {
    const uint32_t left = a.group - start % a.group;  // of the group
    uint32_t part = left < kAwqPart ? left : kAwqPart;
    inputs = part;
    if (kAwqPart % a.group == 0) inputs = a.inputs - start < kAwqPart ? a.inputs - start : kAwqPart;
    multiply_tile<D>(a, start, inputs, part, word_start, word_stop, x, total);
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

void multiply_awq_codes(const kvk_awq& a, uint32_t word_start, uint32_t word_stop) {
  if (a.group % 4 != 0) return multiply_awq(a, word_start, word_stop);
  if (a.dtype == KVK_BF16) return multiply_codes<2>(a, word_start, word_stop);
  multiply_codes<3>(a, word_start, word_stop);
}

}  // namespace
}  // namespace kvk
