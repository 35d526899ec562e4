// The ways this library can compute, and which of them this machine can run.
//
// Owns the table of paths and the choice between them; never touches tensors. Invariant: path(p) is only handed out if
// lacks(p) is null.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace kvk {

struct Task;  // cpu/attend.h
struct Scratch;

struct Path {
  const char* name;
  bool (*quantise)(const kvk_conversion&);  // false: KVK_RANGE
  void (*dequantise)(const kvk_conversion&);
  void (*rotate)(const kvk_rotation&);
  void (*attend)(const kvk_attention&, const Task&, Scratch);
  void (*multiply)(const kvk_awq&, uint32_t word_start, uint32_t word_stop);  // of eight columns each
  void (*unpack)(const kvk_awq&, uint32_t group_start, uint32_t group_stop);
  void (*linear)(const kvk_linear&, uint32_t output_start, uint32_t output_stop);  // up to kLinearColumns
  void (*norm)(const kvk_norm&, uint32_t row_start, uint32_t row_stop);
  void (*turn)(const kvk_turns&, uint32_t row_start, uint32_t row_stop);
  void (*gate)(uint32_t dtype, float* gate, const float* up, uint32_t count);  // gate = silu(gate) * up, rounded to dtype
  void (*product)(const kvk_product&, uint32_t start, uint32_t stop);          // of outputs
};

extern const Path kReferencePath, kAvx2Path, kAvx512Path, kAvx512VnniPath, kAvx512Fp16Path, kAmxPath;

// What this machine lacks for `path`, or null.
const char* lacks(uint32_t path);
// The path of that number, 0 the one that `auto` stands for; null, with the error set, if it cannot run here.
const Path* path_of(uint32_t path);
uint32_t auto_path();

}  // namespace kvk
