// What the CUDA library's functions ask besides (argument_checks.h): that a launch can hold it.
//
// Owns the limits of a launch. Never looks at memory the arguments point to: it is the device's.
#pragma once

#include "argument_checks.h"

namespace kvk {

constexpr uint32_t kMostHeads = 65535;  // of a launch's second and third dimension

inline int check_heads(uint32_t heads) {
  return heads <= kMostHeads ? KVK_OK : fail(KVK_INVALID, "heads=%u; at most %u", heads, kMostHeads);
}

inline int check_launch(const kvk_conversion* c) {
  if (int status = check_conversion(c)) return status;
  return check_heads(c->heads);
}

inline int check_launch(const kvk_rotation* r) {
  if (int status = check_rotation(r)) return status;
  return check_heads(r->heads);
}

}  // namespace kvk
