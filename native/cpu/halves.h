// Thirty-two fp16 numbers at once, multiplied and added as fp16 (AVX512-FP16).
//
// Owns the two operations that need that instruction set; all else is AVX-512's own. Invariant: for tests the same type exists
// without the instructions (tests/emulation/cpu/halves.h), built with KVK_EMULATED.
#pragma once

#include <immintrin.h>

#include <cstdint>

#if defined(KVK_EMULATED)
#include "tests/emulation/cpu/halves.h"
#else
namespace kvk {
namespace {

struct Halves {
  using T = __m512h;
  static T zero() { return _mm512_setzero_ph(); }
  static T of(__m512i bits) { return _mm512_castsi512_ph(bits); }
  static __m512i bits(T x) { return _mm512_castph_si512(x); }
  static T all(uint16_t bits) { return _mm512_castsi512_ph(_mm512_set1_epi16(static_cast<short>(bits))); }
  static T fma(T a, T b, T c) { return _mm512_fmadd_ph(a, b, c); }  // one rounding; subnormal numbers are kept
};

}  // namespace
}  // namespace kvk
#endif
