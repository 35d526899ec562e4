// What the attention kernels share: their parameters, who computes what, which keys a row sees, and the state of a row.
//
// Rows: query token r / group, head r % group of a KV head, so that all heads that read the same keys read them together.
// Invariant: which thread computes what depends on the arguments and the device alone; equal calls give equal bytes.
#pragma once

#include "cuda/device.h"
#include "cuda/operands.h"
#include "kernels.h"

namespace kvk {

// By value to every kernel. All pointers in `a` are the device's.
struct Attention {
  kvk_attention a;
  uint32_t group, rows, row_blocks;
  uint32_t splits;     // splits that the keys of a row are cut into, at most; how many of them there are, the device decides
  float* partial;      // [block][split][row of block][width + 2]: sums, reference, total
  uint32_t* arrivals;  // [block], 0 between calls
};

constexpr uint32_t kMaxArrivals = 1024;  // blocks of rows whose keys are cut; more fill a device by themselves

// Which rows of which KV head, and which of its splits of keys, a thread block has.
struct Work {
  uint32_t batch, kv_head, row_start, split, block;
};

// Late rows first: they see most, and what is long should not begin last.
KVK_DEVICE_FN Work work_of(const Attention& p, uint32_t rows_of_block) {
  const uint32_t block = block_index() / p.splits, of_head = block / p.row_blocks;
  return {of_head / p.a.kv_heads, of_head % p.a.kv_heads, (p.row_blocks - 1 - block % p.row_blocks) * rows_of_block,
          block_index() % p.splits, block};
}

KVK_DEVICE_FN uint32_t head_of(const Attention& p, const Work& work, uint32_t row) {
  return work.kv_head * p.group + row % p.group;
}
KVK_DEVICE_FN const void* query_row(const Attention& p, const Work& work, uint32_t row) {
  return at(p.a.q, work.batch * p.a.q_batch_stride + head_of(p, work, row) * p.a.q_head_stride +
                       static_cast<int64_t>(row / p.group) * p.a.q_token_stride);
}
KVK_DEVICE_FN int64_t position_of(const Attention& p, const Work& work, uint32_t row) {
  return p.a.q_position[static_cast<uint64_t>(work.batch) * p.a.query_tokens + row / p.group];
}

// Element `i` of a row turned back by `turn`: what keys that were not turned forward must meet. `q(i)` is the row.
template <class Row>
KVK_DEVICE_FN float turned_back(const kvk_attention& a, const float* turn, uint32_t i, Row q) {
  if (turn == nullptr || i >= a.rotary_dim) return q(i);
  const uint32_t half = a.rotary_dim / 2;
  const bool halves = a.rope == KVK_ROPE_HALF, second = halves ? i >= half : i % 2 != 0;
  const uint32_t pair = halves ? (second ? i - half : i) : i / 2;
  const uint32_t other = halves ? (second ? i - half : i + half) : i ^ 1;
  const float sine = second ? -turn[half + pair] : turn[half + pair];
  return q(i) * turn[pair] + q(other) * sine;
}

// Keys of a tile that a row sees: start..stop of it.
struct Seen {
  int32_t start, stop;
};

KVK_DEVICE_FN Seen seen(const kvk_attention& a, int64_t position, int64_t first_key, int32_t count) {
  const int64_t ahead = position - first_key;
  int64_t start = 0, stop = count;
  if (a.causal != 0 && ahead + 1 < stop) stop = ahead + 1;
  if (a.window != 0 && ahead - a.window + 1 > 0) start = ahead - a.window + 1;
  return {static_cast<int32_t>(start < count ? start : count), static_cast<int32_t>(stop > 0 ? stop : 0)};
}

// A row of scores under way, in base 2. Weights are 2^(score - reference): the reference follows the largest score plus the
// logarithm of what its value is multiplied by (its scale, where values are codes), and so keeps both the weights and what
// becomes of them in fp16 in range. Each of the four lanes that share a row has its own part of `total` and `shift`.
struct Row {
  float reference, row_sum;
  float shift;  // what is added to all sums of the row at the end: zero points, less what codes stand above themselves
};

// The least logarithm of a scale that moves the reference: a weight is then at most 2^24.
constexpr float kLeastScale = -24.0f;

KVK_DEVICE_FN float exponential_of(float score, float reference) {
  return exp2_fast(score - (reference == -kInfinity ? 0.0f : reference));
}

// What a result with this reference is multiplied by to have the reference `now`. A NaN without any score stays one.
KVK_DEVICE_FN float factor_of(float reference, float now) { return reference == -kInfinity ? 1.0f : exp2_fast(reference - now); }

KVK_DEVICE_FN float capped(const kvk_attention& a, float score) {
  if (a.softcap == 0) return score * kLog2E;
  // cap * tanh(x / cap), by e^-2|x|
  const float x = score / a.softcap, power = exp2_fast((x < 0 ? x : -x) * (2 * kLog2E));
  const float most = (1.0f - power) / (1.0f + power) * a.softcap * kLog2E;
  return x < 0 ? -most : most;
}

// The end of a row: the sink, the division, the log-sum-exp. `share` is what its sums are multiplied by.
struct Ending {
  float share, lse;
};

KVK_DEVICE_FN Ending ending_of(const Attention& p, uint32_t head, float reference, float row_sum) {
  float rescale = 1.0f;
  if (p.a.sinks != nullptr && p.a.sinks[head] != -kInfinity) {  // which would be no sink, and NaN where nothing is seen
    const float sink = p.a.sinks[head] * kLog2E, now = reference > sink ? reference : sink;
    rescale = reference == -kInfinity ? 1.0f : exp2_fast(reference - now);
    row_sum = row_sum * rescale + exp2_fast(sink - now);
    reference = now;
  }
  return {row_sum == 0 ? 0.0f : rescale / row_sum, row_sum == 0 ? -kInfinity : (reference + log2_fast(row_sum)) * kLn2};
}

KVK_DEVICE_FN void store_lse(const Attention& p, const Work& work, uint32_t row, float lse) {
  if (p.a.lse == nullptr) return;
  const uint64_t head = static_cast<uint64_t>(work.batch) * p.a.query_heads + head_of(p, work, row);
  p.a.lse[head * p.a.query_tokens + row / p.group] = lse;
}
KVK_DEVICE_FN void* out_row(const Attention& p, const Work& work, uint32_t row) {
  return at(p.a.out, work.batch * p.a.out_batch_stride + head_of(p, work, row) * p.a.out_head_stride +
                         static_cast<int64_t>(row / p.group) * p.a.out_token_stride);
}

}  // namespace kvk
