// The CPU's part of the AWQ contract: how a layer's columns are cut into tasks.
#pragma once

#include <cstdint>

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

}  // namespace kvk
