// The end of attention for one row: the sink, the division by the sum of weights, the log-sum-exp.
//
// Owns that arithmetic and the merging of two partial results. Invariant: local to the including file (cpu/numbers.h).
#pragma once

#include "cpu/attend.h"
#include "cpu/numbers.h"

namespace kvk {
namespace {

// Adds the partial result (sum, most, total) of `other` keys to one, in place.
inline void merge_row(float* sum, float* most, float* total, const float* other, uint32_t width) {
  const float other_most = other[width], other_total = other[width + 1];
  if (other_most == -__builtin_inff() && other_total == 0) return;
  const float now = *most > other_most ? *most : other_most;
  const float own = *most == -__builtin_inff() ? 0.0f : __builtin_exp2f(*most - now);
  const float others = other_most == -__builtin_inff() ? 1.0f : __builtin_exp2f(other_most - now);  // NaN without a largest score
  for (uint32_t i = 0; i < width; ++i) sum[i] = sum[i] * own + other[i] * others;
  *total = *total * own + other_total * others;
  *most = now;
}

// Writes row `row` (query token row / group, query head row % group of kv_head) of the result. `work` has width floats.
inline void finish_row(const kvk_attention& a, uint32_t batch, uint32_t kv_head, uint32_t row, const float* sum, float most,
                       float total, float* work) {
  const uint32_t group = a.query_heads / a.kv_heads, head = kv_head * group + row % group, token = row / group;
  float down = 1.0f;
  if (a.sinks != nullptr && a.sinks[head] != -__builtin_inff()) {  // which would be no sink, and NaN where nothing is seen
    const float sink = a.sinks[head] * 1.44269504f;
    const float now = most > sink ? most : sink;
    down = most == -__builtin_inff() ? 0.0f : __builtin_exp2f(most - now);
    total = (most == -__builtin_inff() ? total : total * down) + __builtin_exp2f(sink - now);
    most = now;
  }
  const float share = total == 0 ? 0.0f : down / total;
  for (uint32_t i = 0; i < a.head_dim; ++i) work[i] = sum[i] * share;
  store_row(a.dtype, work, a.head_dim,
            at(a.out, batch * a.out_batch_stride + head * a.out_head_stride + token * a.out_token_stride));
  if (a.lse != nullptr)
    a.lse[(uint64_t{batch} * a.query_heads + head) * a.query_tokens + token] =
        total == 0 ? -__builtin_inff() : (most + __builtin_log2f(total)) * 0.693147181f;
}

}  // namespace
}  // namespace kvk
