// Thirty-two lanes of VFMADDPH, for machines without AVX512-FP16: tests only. Included by cpu/halves.h under KVK_EMULATED.
#pragma once

#include "tests/emulation/cpu/half_fma.h"

namespace kvk {
namespace {

struct Halves {
  struct T {
    alignas(64) _Float16 lane[32];
  };
  static T zero() { return {}; }
  static T of(__m512i bits) { return __builtin_bit_cast(T, bits); }
  static __m512i bits(T x) { return __builtin_bit_cast(__m512i, x); }
  static T all(uint16_t bits) { return of(_mm512_set1_epi16(static_cast<short>(bits))); }
  static T fma(T a, T b, T c) {
    T out;
    for (int i = 0; i < 32; ++i) out.lane[i] = half_fma(a.lane[i], b.lane[i], c.lane[i]);
    return out;
  }
};

}  // namespace
}  // namespace kvk
