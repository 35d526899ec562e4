// kvk_quantise, kvk_dequantise, kvk_rotate, kvk_turn: the arguments checked, then the path's loops.
//
// Never allocates. Invariant: what passes the checks keeps every index of the loops inside what the caller described.
#include <cmath>

#include "argument_checks.h"
#include "cpu/paths.h"

extern "C" {

int kvk_quantise(const kvk_conversion* args) {
  if (int status = kvk::check_conversion(args)) return status;
  const kvk::Path* path = kvk::path_of(args->path);
  if (path == nullptr) return KVK_UNSUPPORTED;
  if (path->quantise(*args)) return KVK_OK;
  return kvk::fail(KVK_RANGE, "a value that is not finite or beyond 65504, which fp16 scales cannot hold");
}

int kvk_dequantise(const kvk_conversion* args) {
  if (int status = kvk::check_conversion(args)) return status;
  const kvk::Path* path = kvk::path_of(args->path);
  if (path == nullptr) return KVK_UNSUPPORTED;
  path->dequantise(*args);
  return KVK_OK;
}

int kvk_rotate(const kvk_rotation* args) {
  if (int status = kvk::check_rotation(args)) return status;
  const kvk::Path* path = kvk::path_of(args->path);
  if (path == nullptr) return KVK_UNSUPPORTED;
  path->rotate(*args);
  return KVK_OK;
}

void kvk_turn(const float* inv_freq, uint32_t half, int64_t delta, float* turn) {
  for (uint32_t i = 0; i < half; ++i) {
    const double angle = static_cast<double>(delta) * inv_freq[i];
    turn[i] = static_cast<float>(std::cos(angle));
    turn[half + i] = static_cast<float>(std::sin(angle));
  }
}
}
