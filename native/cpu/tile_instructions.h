// The tile instructions of AMX-TILE, AMX-BF16 and AMX-INT8, as g++ and clang assemble them. Included by cpu/tiles.h alone.
//
// Inline assembly because the compilers' own functions take register numbers as literals only, not as template arguments. The
// compiler keeps nothing in tile registers, so none is named as overwritten.
#pragma once

namespace kvk {
namespace {

struct Tiles {
  static void configure(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }
  static void release() { asm volatile("tilerelease"); }

  template <int kTo>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTo));
  }
  template <int kTo>
  static void load(const void* from, int64_t row_stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(row_stride), "i"(kTo) : "memory");
  }
  template <int kFrom>
  static void store(void* to, int64_t row_stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(row_stride), "i"(kFrom) : "memory");
  }
  // kSum += kLeft * kRight, pairs of bf16, fp32 sums.
  template <int kSum, int kLeft, int kRight>
  static void dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kLeft), "i"(kRight));
  }
  // The same for four bytes, signed on the left and unsigned on the right, 32-bit sums.
  template <int kSum, int kLeft, int kRight>
  static void dot_signed_unsigned() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kLeft), "i"(kRight));
  }
};

}  // namespace
}  // namespace kvk
