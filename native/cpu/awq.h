// The CPU's part of the AWQ contract: how a layer's columns are cut into tasks.
#pragma once

#include <cstdint>

namespace kvk {

constexpr uint32_t kAwqTaskWords = 32;  // of eight columns; a task's sums of all rows stay in the first cache

}  // namespace kvk
