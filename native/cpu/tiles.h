// AMX's tile registers: eight of 16 rows of 64 bytes, and the instructions that load, multiply and store them.
//
// Owns the shapes that the kernels use (tiles 0 to 3 are sums of 16 x 16 in four bytes, 4 and 5 left operands, 6 and 7 right
// ones) and when a thread's registers are configured. Never leaves them configured behind a task: whoever else uses AMX in
// this thread (oneDNN in torch) finds them as it left them, free, and a thread that sleeps has less to be saved. Invariant: for
// tests the same functions exist without the instructions (tests/emulation/cpu/tiles.h), built with KVK_EMULATED.
#pragma once

#include <cstdint>

namespace kvk {
namespace {

// What LDTILECFG reads.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Left operands have 16 rows of `depth_bytes` (16, 32 or 64), right ones as many groups of four bytes for `columns`: sixteen, or
// fewer, for which one tile is enough.
inline TileShapes shapes_for(uint32_t depth_bytes, uint32_t columns = 16) {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) {
    shapes.rows[tile] = static_cast<uint8_t>(tile < 6 ? 16 : depth_bytes / 4);
    shapes.row_bytes[tile] = static_cast<uint16_t>(tile == 4 || tile == 5 ? depth_bytes : 4 * columns);
  }
  return shapes;
}

}  // namespace
}  // namespace kvk

#if defined(KVK_EMULATED)
#include "tests/emulation/cpu/tiles.h"
#else
#include "cpu/tile_instructions.h"
#endif

namespace kvk {
namespace {

// The registers of the calling thread, for one task.
class Registers {
 public:
  Registers() { shaped_ = 0; }
  ~Registers() {
    if (shaped_ != 0) Tiles::release();
    shaped_ = 0;
  }
  Registers(const Registers&) = delete;
  Registers& operator=(const Registers&) = delete;

  static void shape(uint32_t depth_bytes, uint32_t columns = 16) {
    if (columns > 16) columns = 16;  // of each of two tiles
    if (shaped_ == (depth_bytes | columns << 8)) return;
    Tiles::configure(shapes_for(depth_bytes, columns));
    shaped_ = depth_bytes | columns << 8;
  }

 private:
  inline static thread_local uint32_t shaped_ = 0;  // depth_bytes and columns; 0: not configured
};

}  // namespace
}  // namespace kvk
