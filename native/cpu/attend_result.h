// The end of attention for one row: the sink, the division by the sum of weights, the log-sum-exp.
//
// Owns that arithmetic and the merging of two partial results. Invariant: local to the including file (cpu/numbers.h).
#pragma once

#include "cpu/attend.h"
#include "cpu/numbers.h"

namespace kvk {
namespace {

// Adds the partial result (sum, row_max, row_sum) of `other` keys to one, in place.
inline void merge_row(float* sum, float* row_max, float* row_sum, const float* other, uint32_t width) {
  const float other_max = other[width], other_sum = other[width + 1];
  if (other_max == -__builtin_inff() && other_sum == 0) return;
  const float now = *row_max > other_max ? *row_max : other_max;
  const float kept = *row_max == -__builtin_inff() ? 0.0f : __builtin_exp2f(*row_max - now);
  const float others = other_max == -__builtin_inff() ? 1.0f : __builtin_exp2f(other_max - now);  // NaN without a largest score
  for (uint32_t i = 0; i < width; ++i) sum[i] = sum[i] * kept + other[i] * others;
  *row_sum = *row_sum * kept + other_sum * others;
  *row_max = now;
}

// Writes row `row` (query token row / group, query head row % group of kv_head) of the result. `work` has width floats.
inline void finish_row(const kvk_attention& a, uint32_t batch, uint32_t kv_head, uint32_t row, const float* sum, float row_max,
                       float row_sum, float* work) {
  const uint32_t group = a.query_heads / a.kv_heads, head = kv_head * group + row % group, token = row / group;
  float rescale = 1.0f;
  if (a.sinks != nullptr && a.sinks[head] != -__builtin_inff()) {  // which would be no sink, and NaN where nothing is seen
    const float sink = a.sinks[head] * 1.44269504f;
    const float now = row_max > sink ? row_max : sink;
    rescale = row_max == -__builtin_inff() ? 0.0f : __builtin_exp2f(row_max - now);
    row_sum = (row_max == -__builtin_inff() ? row_sum : row_sum * rescale) + __builtin_exp2f(sink - now);
    row_max = now;
  }
  const float share = row_sum == 0 ? 0.0f : rescale / row_sum;
  for (uint32_t i = 0; i < a.head_dim; ++i) work[i] = sum[i] * share;
  store_row(a.dtype, work, a.head_dim,
            at(a.out, batch * a.out_batch_stride + head * a.out_head_stride + token * a.out_token_stride));
  if (a.lse != nullptr)
    a.lse[(uint64_t{batch} * a.query_heads + head) * a.query_tokens + token] =
        row_sum == 0 ? -__builtin_inff() : (row_max + __builtin_log2f(row_sum)) * 0.693147181f;
}

}  // namespace
}  // namespace kvk
