// kvk_quantise, kvk_dequantise, kvk_rotate, kvk_turn: the arguments checked, then the path's loops.
//
// Never allocates. Invariant: what passes the checks keeps every index of the loops inside what the caller described.
#include <cmath>

#include "cpu/paths.h"

namespace kvk {
namespace {

bool is_element(uint32_t dtype) { return dtype == KVK_F32 || dtype == KVK_F16 || dtype == KVK_BF16; }

// What quantising, dequantising and rotating have in common. KVK_OK or a status.
template <class Args>
int check(const Args* a) {
  if (a == nullptr || a->size != sizeof(Args) || a->abi != KVK_ABI)
    return fail(KVK_INVALID, "a struct of %u bytes, ABI %u; this library has %zu, ABI %u", a == nullptr ? 0 : a->size,
                a == nullptr ? 0 : a->abi, sizeof(Args), KVK_ABI);
  if (a->head_dim < 1 || a->head_dim > KVK_MAX_HEAD_DIM)
    return fail(KVK_INVALID, "head_dim=%u; it must be from 1 to %u", a->head_dim, KVK_MAX_HEAD_DIM);
  if (!is_element(a->dtype)) return fail(KVK_INVALID, "dtype=%u; elements are f32, f16 or bf16", a->dtype);
  return KVK_OK;
}

int check_conversion(const kvk_conversion* c) {
  if (int status = check(c)) return status;
  if (c->codec != KVK_INT8 && c->codec != KVK_INT4) return fail(KVK_INVALID, "codec=%u; it must be int8 or int4", c->codec);
  if (c->codec == KVK_INT4 && c->head_dim % 2 != 0) return fail(KVK_INVALID, "head_dim=%u; int4 needs an even one", c->head_dim);
  if (c->group != 0 && c->group != 32 && c->group != 64 && c->group != 128)
    return fail(KVK_INVALID, "group=%u; it must be 0, 32, 64 or 128", c->group);
  const bool nothing = c->heads == 0 || c->tokens == 0;
  if (!nothing && (c->elements == nullptr || c->codes == nullptr || c->scale == nullptr || c->zero == nullptr))
    return fail(KVK_INVALID, "a null pointer for %u heads of %u tokens", c->heads, c->tokens);
  return KVK_OK;
}

}  // namespace
}  // namespace kvk

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
  if (int status = kvk::check(args)) return status;
  if (args->rotary_dim < 2 || args->rotary_dim > args->head_dim || args->rotary_dim % 2 != 0)
    return kvk::fail(KVK_INVALID, "rotary_dim=%u of head_dim=%u; it must be even and no more", args->rotary_dim, args->head_dim);
  if (args->rope > KVK_ROPE_INTERLEAVED) return kvk::fail(KVK_INVALID, "rope=%u; it must be half or interleaved", args->rope);
  if (args->heads != 0 && args->tokens != 0 && (args->in == nullptr || args->out == nullptr || args->turn == nullptr))
    return kvk::fail(KVK_INVALID, "a null pointer for %u heads of %u tokens", args->heads, args->tokens);
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
