// The CPU's part of the AWQ contract: how a layer's columns are cut into tasks, and where its words lie.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace kvk {

constexpr uint32_t kAwqTaskSums = 32768;  // of all rows of a task, in fp32: they stay in the second cache
constexpr uint32_t kAwqLeastWords = 64;   // of eight columns, of a task
constexpr uint32_t kAwqWholeWords = 16;   // a task's are a multiple of it, but the last one's

// Memory is read along the rows of words, so a task has as long a run of each as its sums and the threads leave it.
inline uint32_t awq_task_words(uint32_t rows, uint32_t words, uint32_t threads) {
  const uint32_t most = kAwqTaskSums / 8 / rows / kAwqWholeWords * kAwqWholeWords;
  const uint32_t even = (words / (4 * threads) + kAwqWholeWords - 1) / kAwqWholeWords * kAwqWholeWords;
  const uint32_t shared = even > kAwqLeastWords ? even : kAwqLeastWords;
  return threads > 1 && shared < most ? shared : most;
}

// Words of rows that lie `stride` words from each other.
struct AwqRun {
  const uint32_t* words;
  uint64_t stride;
};

// From a word of an input on: up to the panel's last word, and up to the tile's last input.
inline AwqRun awq_run(const kvk_awq& a, uint64_t input, uint32_t word) {
  const uint64_t all = a.outputs / 8;
  if (a.order != KVK_AWQ_PANELS) return {a.words + input * all + word, all};
  const uint64_t tile = input / KVK_AWQ_TILE_INPUTS * KVK_AWQ_TILE_INPUTS,
                 panel = word / KVK_AWQ_PANEL_WORDS * KVK_AWQ_PANEL_WORDS;
  const uint64_t inputs = a.inputs - tile < KVK_AWQ_TILE_INPUTS ? a.inputs - tile : KVK_AWQ_TILE_INPUTS;
  const uint64_t width = all - panel < KVK_AWQ_PANEL_WORDS ? all - panel : KVK_AWQ_PANEL_WORDS;
  return {a.words + tile * all + inputs * panel + (input - tile) * width + (word - panel), width};
}

}  // namespace kvk
