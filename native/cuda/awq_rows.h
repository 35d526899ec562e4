// AWQ products of 17 to 64 rows: a block takes 32 to 128 outputs, so that x is read once for all of them.
//
// Eight warps: some side by side over the outputs, 32 each, the others over parts of the inputs. Tiles of x and of weights come
// into shared memory some ahead of their use; which 16 bytes of a row lie where changes with the row, so that eight lanes read
// different banks. Owns that arrangement; what a lane makes of weights is cuda/awq_tile.h's. Invariant: a warp's sums are added
// up in an order that depends on the shape alone.
#pragma once

#include "cuda/awq_tile.h"
#include "cuda/device.h"

namespace kvk::awq {

template <int Dtype, uint32_t kRowTiles, uint32_t kAcross>
struct ManyRows {
  static constexpr uint32_t kWarps = 8, kThreads = kWarps * kLanes, kParts = kWarps / kAcross, kStrips = 2;
  static constexpr uint32_t kRows = 8 * kRowTiles, kOutputs = kStrips * kStrip * kAcross, kSumStride = kOutputs + 4;
  static constexpr uint32_t kRowBytes = 2 * kTile, kPartBytes = kRows * kRowBytes, kWordsAt = kParts * kPartBytes;
  static constexpr uint32_t kWarpWords = kStrips * kLanes * 16, kStageBytes = kWordsAt + kWarps * kWarpWords;
  static constexpr uint32_t kBlocksPerSM = kRowTiles > 4 ? 1 : 2;
  static constexpr uint32_t kMostStages = (kSharedMost / kBlocksPerSM - 1024) / kStageBytes;
  static constexpr uint32_t kStages = kMostStages < 4 ? kMostStages : 4;
  static constexpr uint32_t kSumBytes = 4 * kParts * kRows * kSumStride;
  static constexpr uint32_t kSharedBytes = kStages * kStageBytes > kSumBytes ? kStages * kStageBytes : kSumBytes;

  static KVK_DEVICE_FN uint32_t place(uint32_t row, uint32_t chunk) { return row * kRowBytes + 16 * (chunk ^ row % 2); }

  // What a thread is: its warp's part of the inputs and strips of outputs.
  struct Thread {
    const kvk_awq& a;
    uint8_t* shared;
    uint32_t lane, warp, part, strip, tiles, each;  // tiles of all inputs, and of a part

    KVK_DEVICE_FN bool has(uint32_t s) const { return (strip + s) * kStrip < a.outputs; }
    KVK_DEVICE_FN uint8_t* stage(uint32_t i) const { return shared + i % kStages * kStageBytes; }
  };

  // As they lie: zero points of the group that comes next, scales of the one that ends.
  struct Asked {
    uint32_t zeros[kStrips][2];
    uint16_t scales[kStrips][2];
  };

  static KVK_DEVICE_FN Asked ask(const Thread& me, uint32_t ends, uint32_t next) {
    Asked asked;
#pragma unroll
    for (uint32_t i = 0; i < 2 * kStrips; ++i) {
      const uint32_t strip = me.has(i / 2) ? me.strip + i / 2 : 0;
      asked.zeros[i / 2][i % 2] = me.a.zeros[static_cast<uint64_t>(next) * (me.a.outputs / 8) + 2 * strip + i % 2];
      asked.scales[i / 2][i % 2] =
          me.a.scales[static_cast<uint64_t>(ends) * me.a.outputs + strip * kStrip + 8 * (i % 2) + me.lane / 4];
    }
    return asked;
  }

  static KVK_DEVICE_FN void take_zeros(const Thread& me, const Asked& asked, GroupOf (&groups)[kStrips]) {
#pragma unroll
    for (uint32_t i = 0; i < 2 * kStrips; ++i) {
      const uint32_t z = asked.zeros[i / 2][i % 2] >> 4 * nibble_of(me.lane / 4) & 15;
      groups[i / 2].zero[i % 2] = magic<Dtype>() | z | z << 16;
    }
  }

  // Asks for tile i of every part.
  static KVK_DEVICE_FN void load(const Thread& me, uint32_t i) {
    uint8_t* to = me.stage(i);
    const uint32_t chunk = thread_index() % 8;
#pragma unroll 2
    for (uint32_t j = 0; j < kParts * kRows / (kThreads / 8); ++j) {
      const uint32_t of = j * (kThreads / 8) + thread_index() / 8, part = of / kRows, row = of % kRows;
      const uint32_t tile = part * me.each + i;
      const bool there = row < me.a.rows && tile < me.tiles && i < me.each;
      const void* from = at(me.a.x, there ? row * me.a.x_row_stride + (static_cast<int64_t>(tile) * 8 + chunk) * 16 : 0);
      copy_async(to + part * kPartBytes + place(row, chunk), from, there ? 16 : 0);
    }
    const uint32_t tile = me.part * me.each + i;
#pragma unroll
    for (uint32_t s = 0; s < kStrips; ++s) {
      const bool there = me.has(s) && tile < me.tiles && i < me.each;
      const uint32_t* from = me.a.words + (there ? packed_index(me.a.inputs, me.strip + s, tile, me.lane, 0) : 0);
      copy_async(to + kWordsAt + me.warp * kWarpWords + (s * kLanes + me.lane) * 16, from, there ? 16 : 0);
    }
    copy_commit();
  }

  static KVK_DEVICE_FN void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (Dtype == KVK_BF16)
      mma_bf16(c, a, b0, b1);
    else
      mma_f16(c, a, b0, b1);
  }

  static KVK_DEVICE_FN void add_tile(const Thread& me, uint32_t i, const GroupOf (&groups)[kStrips],
                                     float (&part)[kStrips][kRowTiles][4]) {
    const uint8_t* stage = me.stage(i);
    const uint8_t* x = stage + me.part * kPartBytes;
    const uint8_t* words = stage + kWordsAt + me.warp * kWarpWords + me.lane * 16;
    Words4 loaded[kStrips];
#pragma unroll
    for (uint32_t s = 0; s < kStrips; ++s) loaded[s] = *reinterpret_cast<const Words4*>(words + s * kLanes * 16);
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      uint32_t weights[2][kStrips][4];
#pragma unroll
      for (uint32_t s = 0; s < 2 * kStrips; ++s)
        operand_of<Dtype>(loaded[s / 2].w[2 * half + s % 2], groups[s / 2], weights[s % 2][s / 2]);
#pragma unroll
      for (uint32_t first = 0; first < kRowTiles; first += 4) {  // products that wait for each other lie eight apart
        Words4 of[4];
#pragma unroll
        for (uint32_t r = 0; r < 4; ++r)
          of[r] = *reinterpret_cast<const Words4*>(x + place(8 * (first + r) + me.lane / 4, 2 * (me.lane % 4) + half));
#pragma unroll
        for (uint32_t i = 0; i < 2 * 4 * kStrips; ++i) {
          const uint32_t step = i / 4 / kStrips, r = i / kStrips % 4, s = i % kStrips;
          multiply_add(part[s][first + r], weights[step][s], of[r].w[2 * step], of[r].w[2 * step + 1]);
        }
      }
    }
  }

  static KVK_DEVICE_FN void finish(const Thread& me, const float (&sums)[kStrips][kRowTiles][4]) {
    auto* shared = reinterpret_cast<float*>(me.shared);
    const uint32_t column = me.warp % kAcross * kStrips * kStrip;
#pragma unroll
    for (uint32_t i = 0; i < kStrips * kRowTiles * 4; ++i) {
      const uint32_t s = i / 4 / kRowTiles, r = i / 4 % kRowTiles;
      const Place to = sum_place(me.lane, i % 4);
      shared[(me.part * kRows + 8 * r + to.k) * kSumStride + column + s * kStrip + to.n] = sums[s][r][i % 4];
    }
    sync_block();
    const uint32_t first = block_index() * kOutputs;
    for (uint32_t i = thread_index(); i < me.a.rows * kOutputs; i += kThreads) {
      const uint32_t row = i / kOutputs, n = i % kOutputs;
      if (first + n >= me.a.outputs) continue;
      float sum = me.a.bias == nullptr ? 0 : element(Dtype, me.a.bias, first + n);
#pragma unroll
      for (uint32_t part = 0; part < kParts; ++part) sum += shared[(part * kRows + row) * kSumStride + n];
      put(Dtype, at(me.a.out, row * me.a.out_row_stride), first + n, sum);
    }
  }

  static KVK_DEVICE_FN void run(const kvk_awq& a, uint8_t* shared) {
    if constexpr (kStages >= 2 && kSharedBytes <= kSharedMost) multiply(a, shared);  // where it can run at all
  }

  static KVK_DEVICE_FN void multiply(const kvk_awq& a, uint8_t* shared) {
    const uint32_t warp = warp_index(), tiles = a.inputs / kTile;
    const Thread me{a,
                    shared,
                    lane_index(),
                    warp,
                    warp / kAcross,
                    (block_index() * kAcross + warp % kAcross) * kStrips,
                    tiles,
                    (tiles + kParts - 1) / kParts};
    const uint32_t group_tiles = a.group / kTile, begin = me.part * me.each;
    const uint32_t left = begin < tiles ? tiles - begin : 0, count = left < me.each ? left : me.each;
#pragma unroll
    for (uint32_t i = 0; i < kStages - 1; ++i) load(me, i);
    float sums[kStrips][kRowTiles][4] = {}, part[kStrips][kRowTiles][4] = {};
    GroupOf groups[kStrips] = {};
    uint32_t group = count != 0 ? begin / group_tiles : 0, in_group = begin % group_tiles;
    Asked asked = ask(me, group, group);
    take_zeros(me, asked, groups);
    for (uint32_t i = 0; i < me.each; ++i) {
      copy_wait<kStages - 2>();
      sync_block();
      load(me, i + kStages - 1);
      if (i >= count) continue;
      const bool last = i + 1 == count, ends = in_group + 1 == group_tiles || last;
      if (ends) asked = ask(me, group, last ? group : group + 1);
      add_tile(me, i, groups, part);
      ++in_group;
      if (!ends) continue;
#pragma unroll
      for (uint32_t j = 0; j < kStrips * kRowTiles * 4; ++j) {
        float& x = part[j / 4 / kRowTiles][j / 4 % kRowTiles][j % 4];
        sums[j / 4 / kRowTiles][j / 4 % kRowTiles][j % 4] += from_half(asked.scales[j / 4 / kRowTiles][j % 4 / 2]) * x;
        x = 0;
      }
      take_zeros(me, asked, groups);
      ++group, in_group = 0;
    }
    copy_wait<0>();
    sync_block();
    finish(me, sums);
  }
};

}  // namespace kvk::awq
