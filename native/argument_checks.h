// What functions of all kernel libraries ask of the structs of native/kernels.h before they touch anything, and how they fail:
// a status and a sentence, the same words everywhere.
//
// Owns the calling thread's last error. Never looks at memory the arguments point to: it may be a device's. Invariant: a
// struct's size and version come first.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>

#include "kernels.h"

namespace kvk {

inline thread_local char error_text[256];

// Keeps the sentence for kvk_last_error() and returns `status`.
[[gnu::format(printf, 2, 3)]] inline int fail(int status, const char* format, ...) {
  va_list values;
  va_start(values, format);
  std::vsnprintf(error_text, sizeof error_text, format, values);
  va_end(values);
  return status;
}

inline bool is_element(uint32_t dtype) { return dtype == KVK_F32 || dtype == KVK_F16 || dtype == KVK_BF16; }

template <class Args>
int check_version(const Args* a) {
  if (a != nullptr && a->size == sizeof(Args) && a->abi == KVK_ABI) return KVK_OK;
  return fail(KVK_INVALID, "a struct of %u bytes, ABI %u; this library has %zu, ABI %u", a == nullptr ? 0 : a->size,
              a == nullptr ? 0 : a->abi, sizeof(Args), KVK_ABI);
}

inline int check_shape(uint32_t head_dim, uint32_t dtype) {
  if (head_dim < 1 || head_dim > KVK_MAX_HEAD_DIM)
    return fail(KVK_INVALID, "head_dim=%u; it must be from 1 to %u", head_dim, KVK_MAX_HEAD_DIM);
  if (!is_element(dtype)) return fail(KVK_INVALID, "dtype=%u; elements are f32, f16 or bf16", dtype);
  return KVK_OK;
}

// A count. Whoever passes a negative number, which C and ctypes take, means none of more than 2^31.
inline int check_count(const char* name, uint32_t count) {
  return count <= INT32_MAX ? KVK_OK : fail(KVK_INVALID, "%s=%u; at most %d, and not negative", name, count, INT32_MAX);
}

inline int check_turning(uint32_t rope, uint32_t rotary_dim, uint32_t head_dim, uint32_t least) {
  if (rotary_dim < least || rotary_dim > head_dim || rotary_dim % 2 != 0)
    return fail(KVK_INVALID, "rotary_dim=%u of head_dim=%u; it must be even and no more", rotary_dim, head_dim);
  if (rope > KVK_ROPE_INTERLEAVED) return fail(KVK_INVALID, "rope=%u; it must be half or interleaved", rope);
  return KVK_OK;
}

inline int check_conversion(const kvk_conversion* c) {
  if (int status = check_version(c)) return status;
  if (int status = check_shape(c->head_dim, c->dtype)) return status;
  if (c->codec != KVK_INT8 && c->codec != KVK_INT4) return fail(KVK_INVALID, "codec=%u; it must be int8 or int4", c->codec);
  if (c->codec == KVK_INT4 && c->head_dim % 2 != 0) return fail(KVK_INVALID, "head_dim=%u; int4 needs an even one", c->head_dim);
  if (c->group != 0 && c->group != 32 && c->group != 64 && c->group != 128)
    return fail(KVK_INVALID, "group=%u; it must be 0, 32, 64 or 128", c->group);
  if (int status = check_count("heads", c->heads)) return status;
  if (int status = check_count("tokens", c->tokens)) return status;
  const bool nothing = c->heads == 0 || c->tokens == 0;
  if (!nothing && (c->elements == nullptr || c->codes == nullptr || c->scale == nullptr || c->zero == nullptr))
    return fail(KVK_INVALID, "a null pointer for %u heads of %u tokens", c->heads, c->tokens);
  return KVK_OK;
}

inline int check_rotation(const kvk_rotation* r) {
  if (int status = check_version(r)) return status;
  if (int status = check_shape(r->head_dim, r->dtype)) return status;
  if (int status = check_turning(r->rope, r->rotary_dim, r->head_dim, 2)) return status;
  if (int status = check_count("heads", r->heads)) return status;
  if (int status = check_count("tokens", r->tokens)) return status;
  if (r->heads != 0 && r->tokens != 0 && (r->in == nullptr || r->out == nullptr || r->turn == nullptr))
    return fail(KVK_INVALID, "a null pointer for %u heads of %u tokens", r->heads, r->tokens);
  return KVK_OK;
}

}  // namespace kvk
