// Results of stretches of keys become one: the warps of a block, then, in the block that ends last, the blocks.
//
// Owns the layout of a partial result: [row][width] sums, then [row] references and [row] totals. Invariant: `arrivals` is 0
// again when the last block is done, so a captured graph can be replayed.
#pragma once

#include "cuda/attention.h"

namespace kvk {

// `count` partial results of `rows` rows, `step` floats apart.
struct Partials {
  const float* first;
  uint32_t count, rows, width;
  uint64_t step;

  KVK_DEVICE_FN const float* sums(uint32_t i, uint32_t row) const { return first + i * step + row * width; }
  KVK_DEVICE_FN float reference(uint32_t i, uint32_t row) const { return first[i * step + rows * width + row]; }
  KVK_DEVICE_FN float row_sum(uint32_t i, uint32_t row) const { return first[i * step + rows * (width + 1) + row]; }
};

constexpr KVK_BOTH uint64_t partial_floats(uint32_t rows, uint32_t width) { return static_cast<uint64_t>(rows) * (width + 2); }

// use(row, channel, four sums from there on, reference, total) for every row, a warp each.
template <class Use>
KVK_DEVICE_FN void merge_rows(const Partials& parts, uint32_t rows, Use use) {
  for (uint32_t row = warp_index(); row < rows; row += threads_in_block() / 32) {
    float reference = -kInfinity, row_sum = 0;
    for (uint32_t i = lane_index(); i < parts.count; i += 32) {
      const float other = parts.reference(i, row);
      reference = other > reference ? other : reference;
    }
    for (uint32_t mask = 16; mask != 0; mask /= 2) {
      const float other = shuffle_xor(reference, mask);
      reference = other > reference ? other : reference;
    }
    for (uint32_t i = lane_index(); i < parts.count; i += 32)
      row_sum += parts.row_sum(i, row) * factor_of(parts.reference(i, row), reference);
    for (uint32_t mask = 16; mask != 0; mask /= 2) row_sum += shuffle_xor(row_sum, mask);
    for (uint32_t channel = 4 * lane_index(); channel < parts.width; channel += 128) {
      float sum[4] = {0, 0, 0, 0};
#pragma unroll 16
      for (uint32_t i = 0; i < parts.count; ++i) {
        const float factor = factor_of(parts.reference(i, row), reference);
        const auto part = *reinterpret_cast<const Floats4*>(parts.sums(i, row) + channel);
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) sum[j] += part.x[j] * factor;
      }
      use(row, channel, sum, reference, row_sum);
    }
  }
}

// Four channels of a row of the result.
KVK_DEVICE_FN void store_channels(const kvk_attention& a, void* row, uint32_t channel, const float (&x)[4]) {
  void* to = at(row, channel * static_cast<int64_t>(a.dtype == KVK_F32 ? 4 : 2));
  if (a.dtype != KVK_F32 && channel + 4 <= a.head_dim && (reinterpret_cast<uintptr_t>(to) & 7) == 0) {
    if (a.dtype == KVK_BF16)
      *static_cast<Words2*>(to) = {{pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3])}};
    else
      *static_cast<Words2*>(to) = {{pack_halves(x[0], x[1]), pack_halves(x[2], x[3])}};
    return;
  }
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i)
    if (channel + i < a.head_dim) put(a.dtype, row, channel + i, x[i]);
}

// Writes the rows of the result, all threads of the block together.
KVK_DEVICE_FN void finish(const Attention& p, const Work& work, const Partials& parts, uint32_t rows) {
  merge_rows(parts, rows, [&](uint32_t row, uint32_t channel, float (&sum)[4], float reference, float row_sum) {
    const uint32_t of_all = work.row_start + row;
    const Ending ending = ending_of(p, head_of(p, work, of_all), reference, row_sum);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) sum[i] *= ending.share;
    store_channels(p.a, out_row(p, work, of_all), channel, sum);
    if (channel == 0) store_lse(p, work, of_all, ending.lse);
  });
}

// The block's own result (`parts`, in shared memory) is the whole result if it is the only one of `used`; else it is left in
// device memory, and the last block to arrive makes one of all. `last` is a word of shared memory.
KVK_DEVICE_FN void finish_or_leave(const Attention& p, const Work& work, const Partials& parts, uint32_t rows, uint32_t used,
                                   uint32_t* last) {
  if (used == 1) return finish(p, work, parts, rows);
  const uint64_t step = partial_floats(parts.rows, parts.width);
  float* all = p.partial + static_cast<uint64_t>(work.block) * p.splits * step;
  float* part = all + work.split * step;
  merge_rows(parts, rows, [&](uint32_t row, uint32_t channel, float (&sum)[4], float reference, float row_sum) {
    *reinterpret_cast<Floats4*>(part + row * parts.width + channel) = {{sum[0], sum[1], sum[2], sum[3]}};
    if (channel == 0) part[parts.rows * parts.width + row] = reference, part[parts.rows * (parts.width + 1) + row] = row_sum;
  });
  fence_device();
  sync_block();
  if (thread_index() == 0) {
    *last = add_atomically(p.arrivals + work.block, 1) + 1 == used;
    if (*last) p.arrivals[work.block] = 0;
  }
  sync_block();
  if (!*last) return;
  fence_device();
  finish(p, work, {all, used, parts.rows, parts.width, step}, rows);
}

}  // namespace kvk
