// Attention on the CPU: what the driver (attend.cc) and the paths (attend_rows.h, reference.cc) agree on.
//
// Owns the sizes of a tile, a task and a thread's scratch. Invariant: a task touches its own scratch, its own rows of the
// result and nothing else, so tasks run in any order on any thread.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace kvk {

constexpr uint32_t kTile = 64;  // keys looked at together
constexpr uint32_t kRows = 64;  // query rows looked at together: row r is query token r / group, head r % group of its KV head

constexpr uint32_t round_up(uint32_t value, uint32_t to) { return (value + to - 1) / to * to; }
inline uint32_t padded(uint32_t head_dim) { return round_up(head_dim, 16); }

// Rows of one KV head of one batch row, against some of its keys. Keys are counted through the segments, then the tail.
struct Task {
  uint32_t batch, kv_head;
  uint32_t row_start, row_stop;
  uint64_t key_start, key_stop;
  float* partial;  // null: the result is complete; else [rows][padded + 2]: sums, largest score (base 2), sum of weights
};

// A thread's scratch, 64-byte aligned; `width` is padded(head_dim).
struct Scratch {
  float* q;         // [kRows][width]
  float* turned;    // [kRows][width]: q as a segment's keys see it
  float* sum;       // [kRows][width]: weights times values so far
  float* scores;    // [kRows][kTile]; becomes weights
  float* row_max;   // [kRows]: largest score so far, base 2
  float* row_sum;   // [kRows]: sum of weights so far
  float* step;      // [kRows]: of integers that stand for a row's queries or weights
  float* shift;     // [kRows]: what is added to all that such integers give
  uint8_t* query;   // [kRows][4 * width]: queries as a path multiplies them
  uint8_t* weight;  // [kRows][4 * kTile]
  uint8_t* keys;    // [width][kTile] of four bytes: keys of a tile as a path multiplies them
  uint8_t* values;  // [kTile][width] of four bytes
};

inline uint64_t scratch_bytes(uint32_t head_dim) {
  const uint64_t width = padded(head_dim);
  return 4 * (4 * kRows * width + 2 * kTile * width + 2 * kRows * kTile + 4 * kRows);
}

inline Scratch scratch_at(void* memory, uint32_t head_dim) {
  const uint64_t width = padded(head_dim);
  auto* at = static_cast<float*>(memory);
  const auto take = [&at](uint64_t count) {
    float* taken = at;
    at += count;
    return taken;
  };
  const auto bytes = [](float* p) { return reinterpret_cast<uint8_t*>(p); };
  Scratch s{};
  s.q = take(kRows * width), s.turned = take(kRows * width), s.sum = take(kRows * width);
  s.scores = take(kRows * kTile);
  s.row_max = take(kRows), s.row_sum = take(kRows), s.step = take(kRows), s.shift = take(kRows);
  s.query = bytes(take(kRows * width)), s.weight = bytes(take(kRows * kTile));
  s.keys = bytes(take(kTile * width)), s.values = bytes(take(kTile * width));
  return s;
}

}  // namespace kvk
