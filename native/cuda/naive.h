// The naive kernel: one warp a row, one key after the other, fp32, any head dimension and element type.
//
// What the fast kernels are measured against on a GPU, and what computes where none of them can (fp32 queries, head dimensions
// beyond 256). Shares the tiles over segments with them and nothing of their arithmetic.
#pragma once

#include "cuda/attention.h"
#include "cuda/segments.h"

namespace kvk {

struct Naive {
  static constexpr uint32_t kRows = 4, kWarps = 4;  // a row a warp
  static constexpr uint32_t kWidth = 0, kMinBlocksPerSM = 2;
  static constexpr uint32_t kSlots = KVK_MAX_HEAD_DIM / 32;

  static uint64_t shared_bytes(uint32_t warps, uint32_t) {
    return warps * (KVK_MAX_HEAD_DIM * sizeof(float) + sizeof(TileIteratorState));
  }

  static KVK_DEVICE_FN float load(const kvk_segment& s, bool values, uint32_t kv_head, uint32_t token, uint32_t i, uint32_t n) {
    const void* row = values ? at(s.v, kv_head * s.v_head_stride + static_cast<int64_t>(token) * s.v_token_stride)
                             : at(s.k, kv_head * s.k_head_stride + static_cast<int64_t>(token) * s.k_token_stride);
    if (s.codec != KVK_INT8 && s.codec != KVK_INT4) return element(s.codec, row, i);
    const int64_t head = kv_head * (values ? s.v_scale_head_stride : s.k_scale_head_stride);
    const uint64_t which = values ? token : static_cast<uint64_t>(token / s.k_group) * n + i;
    const float scale = from_half(at(values ? s.v_scale : s.k_scale, head)[which]);
    const float zero = from_half(at(values ? s.v_zero : s.k_zero, head)[which]);
    return static_cast<float>(code(s.codec, row, i)) * scale + zero;
  }

  struct Sums {
    float value[kSlots] = {};
    float row_max = -kInfinity, row_sum = 0;
  };

  static KVK_DEVICE_FN void add_key(const kvk_attention& a, const kvk_segment& s, uint32_t kv_head, uint32_t token,
                                    const float (&q)[kSlots], Sums& sums) {
    float score = 0;
#pragma unroll
    for (uint32_t slot = 0; slot < kSlots; ++slot)
      if (const uint32_t i = slot * 32 + lane_index(); i < a.head_dim)
        score += q[slot] * load(s, false, kv_head, token, i, a.head_dim);
    for (uint32_t mask = 16; mask != 0; mask /= 2) score += shuffle_xor(score, mask);
    score = capped(a, score * a.scale);
    const float now = score > sums.row_max ? score : sums.row_max;
    const float rescale = sums.row_max == -kInfinity ? 1.0f : exp2_fast(sums.row_max - now), weight = exponential_of(score, now);
    sums.row_max = now;
    sums.row_sum = sums.row_sum * rescale + weight;
#pragma unroll
    for (uint32_t slot = 0; slot < kSlots; ++slot)
      if (const uint32_t i = slot * 32 + lane_index(); i < a.head_dim)
        sums.value[slot] = sums.value[slot] * rescale + weight * load(s, true, kv_head, token, i, a.head_dim);
  }

  static KVK_DEVICE_FN void run(const Attention& p, uint8_t* shared) {
    const Work work = work_of(p, kRows);
    const uint32_t row = work.row_start + warp_index(), lane = lane_index();
    if (row >= p.rows) return;
    auto* q = reinterpret_cast<float*>(shared) + warp_index() * KVK_MAX_HEAD_DIM;
    auto* state = reinterpret_cast<TileIteratorState*>(shared + kRows * KVK_MAX_HEAD_DIM * sizeof(float)) + warp_index();
    for (uint32_t i = lane; i < p.a.head_dim; i += 32) q[i] = element(p.a.dtype, query_row(p, work, row), i);
    sync_warp();
    const int64_t position = position_of(p, work, row);
    const kvk_sequence& sequence = p.a.sequences[work.batch];
    TileIterator tiles(p.a, sequence, count_keys(sequence), *state, 0, ~uint64_t{0} >> 1, 1, [&](uint32_t) { return position; });
    Sums sums;
    const auto wide = [](Kind, const kvk_segment&) { return 64u; };
    for (Tile tile = tiles.next(wide); tile.count != 0; tile = tiles.next(wide)) {
      const kvk_segment& s = tiles.segment(tile);
      float turned[kSlots];
#pragma unroll
      for (uint32_t slot = 0; slot < kSlots; ++slot) {
        const uint32_t i = slot * 32 + lane;
        turned[slot] = i < p.a.head_dim ? turned_back(p.a, s.turn, i, [&](uint32_t j) { return q[j]; }) : 0.0f;
      }
      const Seen keys = seen(p.a, position, tile.first_key, static_cast<int32_t>(tile.count));
      for (int32_t t = keys.start; t < keys.stop; ++t) add_key(p.a, s, work.kv_head, tile.start + t, turned, sums);
    }
    const Ending ending = ending_of(p, head_of(p, work, row), sums.row_max, sums.row_sum);
#pragma unroll
    for (uint32_t slot = 0; slot < kSlots; ++slot)
      if (const uint32_t i = slot * 32 + lane; i < p.a.head_dim)
        put(p.a.dtype, out_row(p, work, row), i, sums.value[slot] * ending.share);
    if (lane == 0) store_lse(p, work, row, ending.lse);
  }
};

}  // namespace kvk
