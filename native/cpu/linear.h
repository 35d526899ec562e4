// The CPU's part of a linear layer: how its columns are cut into tasks.
#pragma once

#include <cstdint>

namespace kvk {

constexpr uint32_t kLinearColumns = 64;       // of a task
constexpr uint32_t kLinearInputs = 2048;      // of bf16, summed before a sum is added to what was summed; of fp32 fewer
constexpr uint32_t kLinearLanes = 16;         // inputs are a multiple of it
constexpr uint32_t kLinearRows = 96;          // of x at one time, at most
constexpr uint32_t kLinearBytes = 256 << 10;  // of x at one time, so that they stay in the second cache

}  // namespace kvk
