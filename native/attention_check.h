// What kvk_attend() refuses, the same in every library, with the same words.
//
// Owns the checks of kvk_attention and of segments; reads no key. Invariant: the struct's size and version come first.
#pragma once

#include <cmath>
#include <cstdint>

#include "argument_checks.h"

namespace kvk {

inline int check_segment(const kvk_attention& a, const kvk_segment& s) {
  if (s.tokens == 0) return KVK_OK;
  if (s.codec > KVK_INT4) return fail(KVK_INVALID, "codec=%u; the last known is %u", s.codec, KVK_INT4);
  if (s.k == nullptr || s.v == nullptr) return fail(KVK_INVALID, "a segment of %u tokens without K or V", s.tokens);
  if (uint64_t{s.first} + s.tokens > INT32_MAX)
    return fail(KVK_INVALID, "first=%u, tokens=%u; together at most %d, and not negative", s.first, s.tokens, INT32_MAX);
  if (!is_element(s.codec)) {
    if (s.k_group != 32 && s.k_group != 64 && s.k_group != 128)
      return fail(KVK_INVALID, "k_group=%u; it must be 32, 64 or 128", s.k_group);
    if (s.k_scale == nullptr || s.k_zero == nullptr || s.v_scale == nullptr || s.v_zero == nullptr)
      return fail(KVK_INVALID, "a quantised segment of %u tokens without scales", s.tokens);
    if (s.codec == KVK_INT4 && a.head_dim % 2 != 0) return fail(KVK_INVALID, "head_dim=%u; int4 needs an even one", a.head_dim);
  }
  if (s.turn != nullptr && (a.rotary_dim < 2 || a.rotary_dim > a.head_dim || a.rotary_dim % 2 != 0))
    return fail(KVK_INVALID, "rotary_dim=%u of head_dim=%u; it must be even and no more", a.rotary_dim, a.head_dim);
  return KVK_OK;
}

// `segments`: whether they can be read here.
inline int check_attention(const kvk_attention* args, bool segments) {
  if (int status = check_version(args)) return status;
  const kvk_attention& a = *args;
  if (a.head_dim < 1 || a.head_dim > KVK_MAX_HEAD_DIM)
    return fail(KVK_INVALID, "head_dim=%u; it must be from 1 to %u", a.head_dim, KVK_MAX_HEAD_DIM);
  if (a.kv_heads == 0 || a.query_heads % a.kv_heads != 0 || a.query_heads / a.kv_heads > KVK_MAX_GQA || a.query_heads == 0)
    return fail(KVK_INVALID, "query_heads=%u, kv_heads=%u; the first must be 1 to %u times the second", a.query_heads, a.kv_heads,
                KVK_MAX_GQA);
  if (int status = check_count("batch", a.batch)) return status;
  if (int status = check_count("query_heads", a.query_heads)) return status;
  if (int status = check_count("query_tokens", a.query_tokens)) return status;
  if (!is_element(a.dtype)) return fail(KVK_INVALID, "dtype=%u; queries are f32, f16 or bf16", a.dtype);
  if (uint64_t{a.query_tokens} * (a.query_heads / a.kv_heads) > UINT32_MAX - 1024)
    return fail(KVK_INVALID, "query_tokens=%u for %u heads are too many", a.query_tokens, a.query_heads);
  if (a.rope > KVK_ROPE_INTERLEAVED) return fail(KVK_INVALID, "rope=%u; it must be half or interleaved", a.rope);
  if (!(std::fabs(a.scale) <= 1e30f) || !(a.softcap >= 0 && a.softcap <= 1e30f))
    return fail(KVK_INVALID, "scale=%g, softcap=%g; both must be finite, softcap not below 0", a.scale, a.softcap);
  if (a.batch == 0 || a.query_tokens == 0) return KVK_OK;
  if (a.q == nullptr || a.out == nullptr || a.q_position == nullptr || a.sequences == nullptr)
    return fail(KVK_INVALID, "a null pointer for %u rows of %u queries", a.batch, a.query_tokens);
  for (uint32_t b = 0; segments && b < a.batch; ++b) {
    const kvk_sequence& sequence = a.sequences[b];
    if (sequence.count != 0 && sequence.segments == nullptr) return fail(KVK_INVALID, "row %u has no segments", b);
    for (uint64_t i = 0; i < sequence.count; ++i)
      if (int status = check_segment(a, sequence.segments[i])) return status;
    if (int status = check_segment(a, sequence.tail)) return status;
  }
  return KVK_OK;
}

}  // namespace kvk
