// What the AWQ functions ask of a kvk_awq before they touch anything.
//
// Owns these checks. Never looks at memory the arguments point to: it is the device's.
#pragma once

#include "cuda/awq_tile.h"
#include "cuda/codec_checks.h"

namespace kvk::awq {

inline int check_awq(const kvk_awq* a) {
  if (int status = check_version(a)) return status;
  if (a->dtype != KVK_F16 && a->dtype != KVK_BF16)
    return fail(KVK_UNSUPPORTED, "dtype=%u; these kernels compute in f16 or bf16", a->dtype);
  if (a->inputs == 0 || a->outputs == 0 || a->outputs % kStrip != 0)
    return fail(KVK_UNSUPPORTED, "[%u, %u] weights; the outputs must be a multiple of %u", a->inputs, a->outputs, kStrip);
  if (a->group == 0 || a->group % kTile != 0 || a->inputs % a->group != 0)
    return fail(KVK_UNSUPPORTED, "groups of %u of %u inputs; they must divide them, and be multiples of %u", a->group, a->inputs,
                kTile);
  if (a->order != KVK_AWQ_CHECKPOINT) return fail(KVK_UNSUPPORTED, "order=%u; panels are the CPU's", a->order);
  if (a->words == nullptr || a->out == nullptr) return fail(KVK_INVALID, "no words, or nowhere to write");
  return KVK_OK;
}

inline int check_scaled(const kvk_awq* a) {
  if (int status = check_awq(a)) return status;
  if (a->zeros == nullptr || a->scales == nullptr) return fail(KVK_INVALID, "no zeros, or no scales");
  if (!is_aligned(a->words, 16) || !is_aligned(a->out, 16) || a->out_row_stride % 16 != 0)
    return fail(KVK_INVALID, "words, out and its rows must be 16-byte aligned");
  return KVK_OK;
}

inline int check_product(const kvk_awq* a) {
  if (int status = check_scaled(a)) return status;
  if (a->rows > KVK_AWQ_ROWS) return fail(KVK_UNSUPPORTED, "rows=%u; at most %u", a->rows, KVK_AWQ_ROWS);
  if (a->rows != 0 && (a->x == nullptr || !is_aligned(a->x, 16) || a->x_row_stride % 16 != 0))
    return fail(KVK_INVALID, "x and its rows must be 16-byte aligned");
  return KVK_OK;
}

}  // namespace kvk::awq
