// The tile instructions by Intel's manual (Software Developer's Manual, volume 2: LDTILECFG, TILELOADD, TILESTORED, TILEZERO,
// TDPBF16PS, TDPBSUD), for machines without AMX: tests only. Included by cpu/tiles.h under KVK_EMULATED.
//
// Owns a thread's eight registers. Never does more than the instruction: what raises #GP or #UD there (a shape that is not
// allowed, registers that do not fit each other, none configured) ends the process here, with the reason. Invariant: bf16 sums
// are as the manual has them, even and odd pairs apart, each a fused product and sum in fp32, numbers too small for a normal
// one counting as zero.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace kvk {
namespace {

struct EmulatedTiles {
  TileShapes shapes{};
  bool configured = false;
  alignas(64) uint8_t bytes[8][16][64] = {};
};

inline EmulatedTiles& tiles_here() {
  static thread_local EmulatedTiles tiles;
  return tiles;
}

inline void tile_fault(bool fault, const char* reason) {
  if (!fault) return;
  std::fprintf(stderr, "AMX emulation: %s\n", reason);
  std::abort();
}

inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

inline float of_bf16(uint16_t bits) { return flushed(__builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16)); }

struct Tiles {
  static void configure(const TileShapes& shapes) {
    tile_fault(shapes.palette != 1, "palette is not 1");
    for (uint8_t byte : shapes.reserved) tile_fault(byte != 0, "a reserved byte is not 0");
    for (int tile = 0; tile < 16; ++tile) {
      tile_fault(tile >= 8 && (shapes.rows[tile] | shapes.row_bytes[tile]) != 0, "there are eight tiles");
      tile_fault(shapes.rows[tile] > 16 || shapes.row_bytes[tile] > 64, "a tile has 16 rows of 64 bytes at most");
      tile_fault((shapes.rows[tile] == 0) != (shapes.row_bytes[tile] == 0), "a tile has rows without bytes or the reverse");
    }
    EmulatedTiles& t = tiles_here();
    t.shapes = shapes, t.configured = true;
    std::memset(t.bytes, 0, sizeof t.bytes);
  }

  static void release() {
    EmulatedTiles& t = tiles_here();
    t.configured = false;
    std::memset(t.bytes, 0xff, sizeof t.bytes);  // NaN: nobody may count on them
  }

  template <int kTo>
  static void zero() {
    std::memset(configured(kTo).bytes[kTo], 0, sizeof tiles_here().bytes[kTo]);
  }

  template <int kTo>
  static void load(const void* from, int64_t row_stride) {
    EmulatedTiles& t = configured(kTo);
    std::memset(t.bytes[kTo], 0, sizeof t.bytes[kTo]);  // bytes and rows beyond the shape
    for (int row = 0; row < t.shapes.rows[kTo]; ++row)
      std::memcpy(t.bytes[kTo][row], static_cast<const uint8_t*>(from) + row * row_stride, t.shapes.row_bytes[kTo]);
  }

  template <int kFrom>
  static void store(void* to, int64_t row_stride) {
    EmulatedTiles& t = configured(kFrom);
    for (int row = 0; row < t.shapes.rows[kFrom]; ++row)
      std::memcpy(static_cast<uint8_t*>(to) + row * row_stride, t.bytes[kFrom][row], t.shapes.row_bytes[kFrom]);
  }

  template <int kSum, int kLeft, int kRight>
  static void dot_bf16() {
    EmulatedTiles& t = fitting<kSum, kLeft, kRight>();
    const int columns = t.shapes.row_bytes[kSum] / 4, depth = t.shapes.row_bytes[kLeft] / 4;
    for (int row = 0; row < t.shapes.rows[kSum]; ++row) {
      float even[16] = {}, odd[16] = {};
      for (int k = 0; k < depth; ++k) {
        uint16_t left[2];
        std::memcpy(left, t.bytes[kLeft][row] + 4 * k, 4);
        const float left_even = of_bf16(left[0]), left_odd = of_bf16(left[1]);
        for (int column = 0; column < columns; ++column) {
          uint16_t right[2];
          std::memcpy(right, t.bytes[kRight][k] + 4 * column, 4);
          even[column] = flushed(std::fma(left_even, of_bf16(right[0]), even[column]));
          odd[column] = flushed(std::fma(left_odd, of_bf16(right[1]), odd[column]));
        }
      }
      for (int column = 0; column < columns; ++column) {
        float sum;
        std::memcpy(&sum, t.bytes[kSum][row] + 4 * column, 4);
        sum = flushed(flushed(sum) + flushed(even[column] + odd[column]));
        std::memcpy(t.bytes[kSum][row] + 4 * column, &sum, 4);
      }
    }
  }

  template <int kSum, int kLeft, int kRight>
  static void dot_signed_unsigned() {
    EmulatedTiles& t = fitting<kSum, kLeft, kRight>();
    const int columns = t.shapes.row_bytes[kSum] / 4, depth = t.shapes.row_bytes[kLeft] / 4;
    for (int row = 0; row < t.shapes.rows[kSum]; ++row)
      for (int column = 0; column < columns; ++column) {
        uint32_t sum;
        std::memcpy(&sum, t.bytes[kSum][row] + 4 * column, 4);
        for (int k = 0; k < depth; ++k)
          for (int i = 0; i < 4; ++i)
            sum +=
                static_cast<uint32_t>(static_cast<int8_t>(t.bytes[kLeft][row][4 * k + i]) * t.bytes[kRight][k][4 * column + i]);
        std::memcpy(t.bytes[kSum][row] + 4 * column, &sum, 4);
      }
  }

 private:
  static EmulatedTiles& configured(int tile) {
    EmulatedTiles& t = tiles_here();
    tile_fault(!t.configured, "no tile is configured");
    tile_fault(tile < 0 || tile > 7 || t.shapes.rows[tile] == 0, "this tile is not configured");
    return t;
  }

  template <int kSum, int kLeft, int kRight>
  static EmulatedTiles& fitting() {
    static_assert(kSum != kLeft && kSum != kRight && kLeft != kRight, "#UD: three different tiles");
    configured(kLeft), configured(kRight);
    EmulatedTiles& t = configured(kSum);
    const TileShapes& s = t.shapes;
    tile_fault(s.row_bytes[kSum] % 4 != 0 || s.row_bytes[kLeft] % 4 != 0 || s.row_bytes[kRight] % 4 != 0, "not whole words");
    tile_fault(s.rows[kSum] != s.rows[kLeft], "sum and left operand differ in rows");
    tile_fault(s.row_bytes[kSum] != s.row_bytes[kRight], "sum and right operand differ in columns");
    tile_fault(s.row_bytes[kLeft] / 4 != s.rows[kRight], "left and right operand differ in depth");
    return t;
  }
};

}  // namespace
}  // namespace kvk
