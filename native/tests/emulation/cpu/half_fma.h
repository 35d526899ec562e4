// One lane of VFMADDPH by Intel's manual.
//
// Invariant: a * b + c with one rounding, to nearest, half to even; subnormal numbers count, whatever MXCSR says. The product of
// two fp16 numbers is exact in double, and so is the sum wherever its last bits decide a rounding to fp16.
#pragma once

#include <cstdint>

namespace kvk {
namespace {

inline _Float16 half_fma(_Float16 a, _Float16 b, _Float16 c) {
  return static_cast<_Float16>(static_cast<double>(a) * static_cast<double>(b) + static_cast<double>(c));
}

}  // namespace
}  // namespace kvk
