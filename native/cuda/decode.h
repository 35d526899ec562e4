// Attention of few rows over many keys: every warp for itself, over a stretch of keys of its own.
//
// A warp holds 16 rows and goes through its stretch in tiles: 16 tokens of 16-bit elements, 32 of codes, the next tile on its
// way into shared memory while one is computed (cuda/decode_products.h). V's scales go into the weights. Invariant: warps meet
// only at the end, to merge.
#pragma once

#include "cuda/decode_products.h"
#include "cuda/merge.h"

namespace kvk {

template <uint32_t kDim>
struct Decode {
  using Products = DecodeProducts<kDim>;
  using State = typename Products::State;
  static constexpr uint32_t kWarps = 4, kMinBlocksPerSM = kDim > 128 ? 1 : kDim > 64 ? 2 : 3;  // of a processor
  static constexpr uint32_t kRows = 16, kWidth = kDim;
  static constexpr uint32_t kValueUnit = Products::kValueUnit, kOf = Products::kOf, kQueryStride = Products::kQueryStride;
  static constexpr uint32_t kMostTokens = 32;

  static constexpr uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
  static constexpr uint32_t kStage = (larger(TileShape<kDim, kHalf>::kBytes, TileShape<kDim, kInt8>::kBytes) + 15) / 16 * 16;
  static constexpr uint32_t kMergeBytes = 4 * partial_floats(kRows, kDim);

  // Of a block: `rows` of queries in fp32, 16 positions, a word. Of a warp: two descriptions, what each token's weight is
  // multiplied by and adds, two tiles (later: its result), the queries turned, and as operands.
  static constexpr KVK_BOTH uint32_t block_bytes(uint32_t rows) { return 4 * rows * kQueryStride + 8 * kRows + 16; }
  static constexpr uint32_t kTokensAt = sizeof(TileIteratorState), kStagesAt = kTokensAt + kMostTokens * sizeof(TokenScale);
  static constexpr uint32_t kOperandsAt = (kStagesAt + larger(2 * kStage, kMergeBytes) + 15) / 16 * 16;
  static constexpr uint32_t kTurnedAt = kOperandsAt + Products::kOperandBytes;
  static constexpr KVK_BOTH uint32_t warp_bytes(uint32_t rows) { return kTurnedAt + 4 * rows * kQueryStride; }

  static uint64_t shared_bytes(uint32_t warps, uint32_t rows) {
    const uint32_t of_block = rows < kRows ? rows : kRows;
    return block_bytes(of_block) + static_cast<uint64_t>(warps) * warp_bytes(of_block);
  }

  // Which of K's scales were asked for last, and for which queries: the next tile's may be the same.
  struct Loaded {
    const void* scale = nullptr;
    const float* turn = nullptr;
    Kind kind = kHalf;
  };

  // ------------------------------------------------------------------------------------------------ loading

  static KVK_DEVICE_FN void load_scales(const kvk_attention& a, const kvk_segment& s, uint32_t kv_head, const Tile& tile,
                                        uint16_t* to) {
    const uint16_t* scale = scales_of(s.k_scale, s, kv_head, tile.start, a.head_dim);
    const uint16_t* zero = scales_of(s.k_zero, s, kv_head, tile.start, a.head_dim);
    const uint32_t bytes = 2 * a.head_dim;
    if (((reinterpret_cast<uintptr_t>(scale) | reinterpret_cast<uintptr_t>(zero) | bytes) & 15) == 0) {
      for (uint32_t i = lane_index(); i < kDim / 4; i += 32) {
        const uint32_t chunk = i % (kDim / 8);
        const bool there = 16 * chunk < bytes;
        copy_async(to + 8 * i, (i < kDim / 8 ? scale : zero) + (there ? 8 * chunk : 0), there ? 16 : 0);
      }
      return;
    }
#pragma unroll 1
    for (uint32_t i = lane_index(); i < kDim; i += 32)
      to[i] = i < a.head_dim ? scale[i] : 0, to[kDim + i] = i < a.head_dim ? zero[i] : 0;
  }

  // Asks for a tile. Returns the scale of this lane's token (low half) and its zero point, where there are such.
  template <Kind kKind>
  static KVK_DEVICE_FN uint32_t load(const kvk_attention& a, const kvk_segment& s, uint32_t kv_head, const Tile& tile,
                                     uint8_t* stage, Loaded& loaded) {
    using Shape = TileShape<kDim, kKind>;
    load_rows<kDim, kKind, Shape::kTokens, 32>(a, s, at(s.k, kv_head * s.k_head_stride), s.k_token_stride, tile, stage,
                                               Shape::kKeyStride, lane_index());
    load_rows<kDim, kKind, Shape::kTokens, 32>(a, s, at(s.v, kv_head * s.v_head_stride), s.v_token_stride, tile,
                                               stage + Shape::kValuesAt, Shape::kValueStride, lane_index());
    const void* scale = is_quantised(kKind) ? scales_of(s.k_scale, s, kv_head, tile.start, a.head_dim) : nullptr;
    const bool same = scale == loaded.scale && s.turn == loaded.turn && kKind == loaded.kind;
    loaded.scale = scale, loaded.turn = s.turn, loaded.kind = kKind;
    if (!is_quantised(kKind)) return 0;
    if (!same) load_scales(a, s, kv_head, tile, reinterpret_cast<uint16_t*>(stage + Shape::kScalesAt));
    return load_token_scale(s, kv_head, tile, lane_index());
  }

  static KVK_DEVICE_FN uint32_t load_any(const kvk_attention& a, const kvk_segment& s, uint32_t kv_head, const Tile& tile,
                                         uint8_t* stage, Loaded& loaded) {
    switch (tile.kind) {
      case kInt8: return load<kInt8>(a, s, kv_head, tile, stage, loaded);
      case kInt4: return load<kInt4>(a, s, kv_head, tile, stage, loaded);
      case kBf16: return load<kBf16>(a, s, kv_head, tile, stage, loaded);
      default: return load<kHalf>(a, s, kv_head, tile, stage, loaded);
    }
  }

  // ------------------------------------------------------------------------------------------------ a tile

  // A warp's places in shared memory, and what it is for.
  struct Warp {
    const kvk_attention& a;
    uint32_t kv_head, rows;
    int64_t position[2];
    const float* queries;
    TokenScale* tokens;
    float* turned;
    uint32_t* operands;
    uint8_t* stages;
  };

  template <Kind kKind>
  static KVK_DEVICE_FN void compute(const Warp& warp, const kvk_segment& s, const Tile& tile, const uint8_t* stage,
                                    uint32_t v_scale, State& state) {
    using Shape = TileShape<kDim, kKind>;
    const void* scale = is_quantised(kKind) ? scales_of(s.k_scale, s, warp.kv_head, tile.start, warp.a.head_dim) : nullptr;
    if (scale != state.held_scale || s.turn != state.held_turn || state.held_kind != kKind) {
      Products::template make_queries<kKind>(warp.a, s.turn == nullptr ? warp.queries : warp.turned, warp.rows,
                                             reinterpret_cast<const uint16_t*>(stage + Shape::kScalesAt), warp.operands, state);
      state.held_scale = scale, state.held_turn = s.turn, state.held_kind = kKind;
    }
    if (is_quantised(kKind)) {
      warp.tokens[lane_index()] = token_scale(v_scale, kKind == kInt8 ? 128.0f : 8.0f);
      sync_warp();
    }
    float score[Shape::kTokens / 8][4], rescale[2];
    uint32_t weight[Shape::kTokens / 16][4];
    Products::template scores<kKind>(stage, warp.operands, state, score);
    in_base_2(warp.a, state.factor, state.bias, score);
    const auto count = static_cast<int32_t>(tile.count);
    const Seen keys[2] = {seen(warp.a, warp.position[0], tile.first_key, count),
                          seen(warp.a, warp.position[1], tile.first_key, count)};
    apply_mask(keys, score);
    exp_and_pack<kKind == kBf16, is_quantised(kKind)>(warp.tokens, kKind == kInt8 ? 1152.0f : 1032.0f, score, state.row, rescale,
                                                      weight);
#pragma unroll
    for (uint32_t i = 0; i < kDim / 2; ++i) state.sum[i / 4][i % 4] *= rescale[i % 4 / 2];
#pragma unroll
    for (uint32_t step = 0; step < Shape::kTokens / 16; ++step)
#pragma unroll
      for (uint32_t unit = 0; unit < kDim / kValueUnit; ++unit)
        Products::template add_values<kKind>(stage + Shape::kValuesAt + 16 * step * Shape::kValueStride, unit, weight[step],
                                             state);
  }

  static KVK_DEVICE_FN void compute_any(const Warp& warp, const kvk_segment& s, const Tile& tile, const uint8_t* stage,
                                        uint32_t v_scale, State& state) {
    if (s.turn != nullptr && s.turn != state.turned_by) {
      Products::turn_queries(warp.a, warp.queries, warp.rows, s.turn, warp.turned);
      state.turned_by = s.turn;
    }
    switch (tile.kind) {
      case kInt8: return compute<kInt8>(warp, s, tile, stage, v_scale, state);
      case kInt4: return compute<kInt4>(warp, s, tile, stage, v_scale, state);
      case kBf16:
        if constexpr (kHasBf16) return compute<kBf16>(warp, s, tile, stage, v_scale, state);
        return;
      default: return compute<kHalf>(warp, s, tile, stage, v_scale, state);
    }
  }

  // ------------------------------------------------------------------------------------------------ a warp, a block

  // The warp's result to shared memory, in the layout of cuda/merge.h.
  static KVK_DEVICE_FN void store_partial(const State& state, float* to) {
    const uint32_t group = lane_index() / 4, t = lane_index() % 4;
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      const uint32_t row = group + 8 * h;
      const float row_sum = sum_of_row(state.row[h].row_sum), shift = sum_of_row(state.row[h].shift);
#pragma unroll
      for (uint32_t i = 0; i < kDim / 8; ++i)
#pragma unroll
        for (uint32_t j = 0; j < 2; ++j)
          to[row * kDim + i / kOf * kValueUnit + (2 * t + j) * kOf + i % kOf] = state.sum[i][2 * h + j] + shift;
      if (t == 0) to[kRows * kDim + row] = state.row[h].reference, to[kRows * (kDim + 1) + row] = row_sum;
    }
  }

  static KVK_DEVICE_FN State init_state() {
    State state;
#pragma unroll
    for (uint32_t i = 0; i < kDim / 8; ++i) state.sum[i][0] = state.sum[i][1] = state.sum[i][2] = state.sum[i][3] = 0;
    state.row[0] = state.row[1] = {-kInfinity, 0, 0};
    state.held_scale = nullptr, state.held_turn = state.turned_by = nullptr, state.held_kind = static_cast<Kind>(~0u);
    return state;
  }

  // All of a warp's keys: one tile is computed while the next comes.
  static KVK_DEVICE_FN void mainloop(const Warp& warp, TileIterator& tiles, State& state) {
    Loaded loaded;
    Tile tile{0, 0, 0, kHalf, 0};
    uint32_t v_scale = 0, stage = 0;
    for (;;) {
      const Tile then = tiles.next(16, 32);
      uint32_t then_scale = 0;
      if (then.count != 0)
        then_scale = load_any(warp.a, tiles.segment(then), warp.kv_head, then, warp.stages + stage * kStage, loaded);
      copy_commit();
      stage ^= 1;
      if (tile.count != 0) {
        copy_wait<1>();
        sync_warp();
        compute_any(warp, tiles.segment(tile), tile, warp.stages + stage * kStage, v_scale, state);
        sync_warp();
      } else if (then.count == 0) {
        break;
      }
      tile = then, v_scale = then_scale;
    }
    copy_wait<0>();
    sync_warp();
  }

  static KVK_DEVICE_FN void run(const Attention& p, uint8_t* shared) {
    const Work work = work_of(p, kRows);
    const uint32_t rows = p.rows - work.row_start < kRows ? p.rows - work.row_start : kRows;
    const uint32_t room = p.rows < kRows ? p.rows : kRows;  // rows that shared memory was asked for
    const uint32_t warps = threads_in_block() / 32;
    const kvk_sequence& sequence = p.a.sequences[work.batch];
    const uint64_t keys = keys_of(sequence), workers = static_cast<uint64_t>(p.splits) * warps;
    const uint64_t each = (keys + workers - 1) / workers, step = each < 64 ? 64 : (each + 31) / 32 * 32;
    const auto used = static_cast<uint32_t>((keys + step * warps - 1) / (step * warps));
    if (work.split > 0 && work.split >= used) return;

    auto* queries = reinterpret_cast<float*>(shared);
    auto* positions = reinterpret_cast<int64_t*>(shared + 4 * room * kQueryStride);
    uint8_t* own = shared + block_bytes(room) + warp_index() * warp_bytes(room);
    for (uint32_t i = thread_index(); i < rows * kDim; i += threads_in_block()) {
      const uint32_t row = i / kDim, channel = i % kDim;
      queries[row * kQueryStride + channel] =
          channel < p.a.head_dim ? element(p.a.dtype, query_row(p, work, work.row_start + row), channel) : 0.0f;
      if (channel == 0) positions[row] = position_of(p, work, work.row_start + row);
    }
    sync_block();

    const uint32_t row = lane_index() / 4;
    const Warp warp{p.a,
                    work.kv_head,
                    rows,
                    {positions[row < rows ? row : rows - 1], positions[row + 8 < rows ? row + 8 : rows - 1]},
                    queries,
                    reinterpret_cast<TokenScale*>(own + kTokensAt),
                    reinterpret_cast<float*>(own + kTurnedAt),
                    reinterpret_cast<uint32_t*>(own + kOperandsAt),
                    own + kStagesAt};
    State state = init_state();
    const uint64_t start = (static_cast<uint64_t>(work.split) * warps + warp_index()) * step;
    TileIterator tiles(p.a, sequence, *reinterpret_cast<TileIteratorState*>(own), start, start + step, rows,
                       [&](uint32_t i) { return positions[i]; });
    mainloop(warp, tiles, state);
    store_partial(state, reinterpret_cast<float*>(warp.stages));
    sync_block();
    const Partials parts{reinterpret_cast<float*>(shared + block_bytes(room) + kStagesAt), warps, kRows, kDim,
                         warp_bytes(room) / 4};
    auto* last = reinterpret_cast<uint32_t*>(shared + 4 * room * kQueryStride + 8 * kRows);
    finish_or_leave(p, work, parts, rows, used > 1 ? used : 1, last);
  }
};

}  // namespace kvk
