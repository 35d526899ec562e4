// Attention of few rows over many keys: every warp for itself, over a stretch of keys of its own.
//
// A warp holds 4, 8 or 16 rows and goes through its stretch in tiles: 16 tokens of 16-bit elements, 32 of 8-bit codes, 64 of
// 4-bit codes, the next tile on its way into shared memory while one is computed (cuda/decode_products.h). V's scales go into the
// weights. Invariant: warps meet only at the end, to merge.
#pragma once

#include "cuda/decode_products.h"
#include "cuda/merge.h"

namespace kvk {

template <uint32_t kDim, uint32_t kMostRows>
struct Decode {
  using Products = DecodeProducts<kDim, kMostRows>;
  using State = typename Products::State;
  static constexpr uint32_t kWarps = kMostRows == 4 ? 6 : kMostRows == 8 ? 5 : 4;
  static constexpr uint32_t kMinBlocksPerSM = kDim > 128 ? 1 : 2;  // of a processor
  static constexpr uint32_t kRows = kMostRows, kWidth = kDim, kSets = Products::kSets, kPairs = Products::kPairs;
  static constexpr uint32_t kQueryStride = Products::kQueryStride;
  static constexpr uint32_t kMostTokens = TileShape<kDim, kRows, kInt4>::kTokens;

  static constexpr uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
  static constexpr uint32_t kStage =
      (larger(TileShape<kDim, kRows, kHalf>::kBytes,
              larger(TileShape<kDim, kRows, kInt8>::kBytes, TileShape<kDim, kRows, kInt4>::kBytes)) +
       127) /
      128 * 128;
  static constexpr uint32_t kMergeBytes = 4 * partial_floats(kRows, kDim);

  // Of a block: `rows` of queries in fp32, 16 positions, a word. Of a warp: two descriptions, what each token's weight is
  // multiplied by and adds (or scratch), two tiles (later: its result).
  static constexpr KVK_BOTH uint32_t block_bytes(uint32_t rows) {
    return (4 * rows * kQueryStride + 8 * 16 + 16 + 127) / 128 * 128;
  }
  static constexpr uint32_t kTokensAt = sizeof(TileIteratorState), kTokenBytes = 64 * sizeof(TokenScale);
  static constexpr uint32_t kStagesAt = (kTokensAt + kTokenBytes + 127) / 128 * 128;
  static constexpr uint32_t kWarpBytes = (kStagesAt + larger(2 * kStage, kMergeBytes) + 127) / 128 * 128;
  static_assert(kTokenBytes >= Products::kScratchBytes);

  static uint64_t shared_bytes(uint32_t warps, uint32_t rows) {
    return block_bytes(rows < kRows ? rows : kRows) + static_cast<uint64_t>(warps) * kWarpBytes;
  }

  // Which of K's scales were asked for last, and for which queries: the next tile's may be the same.
  struct Loaded {
    const void* scale = nullptr;
    const float* turn = nullptr;
    Kind kind = static_cast<Kind>(~0u);
  };

  // V's scales and zero points of this lane's tokens of a tile, as they come: looked at when it is computed, not before. Whether
  // the queries are to be made anew for it.
  struct Asked {
    TokenWords words[2] = {};
    uint32_t fresh = 0;
  };

  // ------------------------------------------------------------------------------------------------ loading

  static KVK_DEVICE_FN uint32_t wide(Kind kind, const kvk_segment& s) {
    if (kind == kInt4) return s.k_group < kMostTokens ? 32 : kMostTokens;
    return kind == kInt8 ? 32 : 16;
  }

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

  // Asks for a tile.
  template <Kind kKind>
  static KVK_DEVICE_FN Asked load(const kvk_attention& a, const kvk_segment& s, uint32_t kv_head, const Tile& tile,
                                  uint8_t* stage, Loaded& loaded) {
    using Shape = TileShape<kDim, kRows, kKind>;
    load_rows<kDim, kKind, Shape::kTokens, 32>(a, s, at(s.k, kv_head * s.k_head_stride), s.k_token_stride, tile, stage, Shape{},
                                               lane_index());
    load_rows<kDim, kKind, Shape::kTokens, 32>(a, s, at(s.v, kv_head * s.v_head_stride), s.v_token_stride, tile,
                                               stage + Shape::kValuesAt, Shape{}, lane_index());
    const void* scale = is_quantised(kKind) ? scales_of(s.k_scale, s, kv_head, tile.start, a.head_dim) : nullptr;
    const bool same = scale == loaded.scale && s.turn == loaded.turn && kKind == loaded.kind;
    loaded.scale = scale, loaded.turn = s.turn, loaded.kind = kKind;
    Asked asked;
    asked.fresh = !same;
    if (!is_quantised(kKind)) return asked;
    if (!same) load_scales(a, s, kv_head, tile, reinterpret_cast<uint16_t*>(stage + Shape::kScalesAt));
#pragma unroll
    for (uint32_t i = 0; i < (Shape::kTokens + 31) / 32; ++i)
      asked.words[i] = load_token_words(s, kv_head, tile, lane_index() + 32 * i);
    return asked;
  }

  static KVK_DEVICE_FN Asked load_any(const kvk_attention& a, const kvk_segment& s, uint32_t kv_head, const Tile& tile,
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
    const int64_t* positions;
    const float* queries;
    TokenScale* tokens;
    uint8_t* stages;

    KVK_DEVICE_FN float* scratch() const { return reinterpret_cast<float*>(tokens); }
  };

  // Scores to base 2 and capped; those of keys that a row does not see become -infinity. All rows see all keys of most tiles.
  template <uint32_t kTiles>
  static KVK_DEVICE_FN void finish_scores(const Warp& warp, const TileIterator& tiles, const Tile& tile, const State& state,
                                          float (&score)[kTiles][2][kSets]) {
    const kvk_attention& a = warp.a;
#pragma unroll
    for (uint32_t i = 0; i < 2 * kTiles * kSets; ++i) {
      float& x = score[i / 2 / kSets][i / kSets % 2][i % kSets];
      x = x * state.factor[i % kSets] + state.bias[i % kSets];
    }
    if (a.softcap != 0)
#pragma unroll
      for (uint32_t i = 0; i < 2 * kTiles * kSets; ++i) {
        float& x = score[i / 2 / kSets][i / kSets % 2][i % kSets];
        x = capped(a, x);
      }
    const auto count = static_cast<int32_t>(tile.count);
    if (count == 16 * kTiles && (a.causal == 0 || tile.first_key + count - 1 <= tiles.least()) &&
        (a.window == 0 || tile.first_key > tiles.most() - a.window))
      return;
    const uint32_t g = lane_index() / 4, t = lane_index() % 4;
#pragma unroll
    for (uint32_t set = 0; set < kSets; ++set) {
      const uint32_t row = 4 * set + t < warp.rows ? 4 * set + t : warp.rows - 1;
      const Seen keys = seen(a, warp.positions[row], tile.first_key, count);
#pragma unroll
      for (uint32_t i = 0; i < 2 * kTiles; ++i) {
        const auto token = static_cast<int32_t>(8 * i + g);
        if (token < keys.start || token >= keys.stop) score[i / 2][i % 2][set] = -kInfinity;
      }
    }
  }

  // Scores become weights in 16 bits, as the next product's operand; `rescale` is what the rows' sums are to be multiplied by.
  // Codes are multiplied as they are: the rows' shifts let them count from the middle on (cuda/weights.h).
  template <Kind kKind, uint32_t kTiles>
  static KVK_DEVICE_FN void weigh(const TokenScale* tokens, const float (&score)[kTiles][2][kSets], State& state,
                                  float (&rescale)[kSets], uint32_t (&weight)[kTiles][kPairs][2]) {
    constexpr float kCentre = kKind == kInt8 ? 128.0f : 8.0f;
    const TokenScale* of_lane = tokens + lane_index() / 4;
    float from[kSets];
#pragma unroll
    for (uint32_t set = 0; set < kSets; ++set) {
      Row& row = state.row[set];
      float most = -kInfinity;
#pragma unroll
      for (uint32_t i = 0; i < 2 * kTiles; ++i) {
        const float reach = score[i / 2][i % 2][set] + (is_quantised(kKind) ? of_lane[8 * i].log : 0.0f);
        most = larger_of(most, reach);
      }
      most = largest_of_column(most);
      const float now = larger_of(most, row.reference);
      from[set] = now == -kInfinity ? 0.0f : now;
      rescale[set] = factor_of(row.reference, now);
      row.reference = now, row.row_sum *= rescale[set], row.shift *= rescale[set];
    }
    if constexpr (is_quantised(kKind)) forget_memory();
#pragma unroll
    for (uint32_t i = 0; i < 2 * kTiles; ++i) {
      const TokenScale token = is_quantised(kKind) ? of_lane[8 * i] : TokenScale{};
      float x[2 * kPairs] = {};
#pragma unroll
      for (uint32_t set = 0; set < kSets; ++set) {
        x[set] = exp2_fast(score[i / 2][i % 2][set] - from[set]);
        state.row[set].row_sum += x[set];
        if (is_quantised(kKind)) state.row[set].shift += x[set] * token.shift, x[set] *= token.scale;
      }
#pragma unroll
      for (uint32_t pair = 0; pair < kPairs; ++pair) {
        const uint32_t both =
            kKind == kBf16 ? pack_bf16(x[2 * pair], x[2 * pair + 1]) : pack_halves(x[2 * pair], x[2 * pair + 1]);
        weight[i / 2][pair][i % 2] = transposed(both);
        if constexpr (is_quantised(kKind)) {
          state.row[2 * pair].shift -= low_half(both) * kCentre;
          if (2 * pair + 1 < kSets) state.row[(2 * pair + 1) % kSets].shift -= high_half(both) * kCentre;
        }
      }
    }
  }

  template <Kind kKind>
  static KVK_DEVICE_FN void compute(const Warp& warp, const TileIterator& tiles, const Tile& tile, const uint8_t* stage,
                                    const Asked& asked, State& state) {
    using Shape = TileShape<kDim, kRows, kKind>;
    if (asked.fresh != 0) {
      const float* turn = tiles.segment(tile).turn;
      if constexpr (is_quantised(kKind))
        Products::template make_whole_queries<kKind>(warp.a, warp.queries, warp.rows, turn,
                                                     reinterpret_cast<const uint16_t*>(stage + Shape::kScalesAt), warp.scratch(),
                                                     state);
      else
        Products::template make_queries<kKind>(warp.a, warp.queries, warp.rows, turn, warp.scratch(), state);
    }
    if constexpr (is_quantised(kKind)) {
#pragma unroll
      for (uint32_t i = 0; i < Shape::kTokens / 32; ++i)
        warp.tokens[lane_index() + 32 * i] = token_scale(asked.words[i].both(), kKind == kInt8 ? 128.0f : 8.0f);
      sync_warp();
    }
    float score[Shape::kTokens / 16][2][kSets], rescale[kSets];
    uint32_t weight[Shape::kTokens / 16][kPairs][2];
    if constexpr (is_quantised(kKind))
      Products::template whole_scores<kKind>(stage, state, score);
    else
      Products::template scores<kKind>(stage, state, score);
    finish_scores(warp, tiles, tile, state, score);
    weigh<kKind>(warp.tokens, score, state, rescale, weight);
#pragma unroll
    for (uint32_t i = 0; i < kDim / 16 * kPairs * 4; ++i) {
      const uint32_t set = i / 4 % kPairs * 2 + i % 2;
      if (set < kSets) state.sum[i / 4 / kPairs][i / 4 % kPairs][i % 4] *= rescale[set % kSets];
    }
    Products::template add_values<kKind>(stage + Shape::kValuesAt, weight, state);
  }

  static KVK_DEVICE_FN void compute_any(const Warp& warp, const TileIterator& tiles, const Tile& tile, const uint8_t* stage,
                                        const Asked& asked, State& state) {
    Products::take_layout(tile.kind, warp.scratch(), state);
    switch (tile.kind) {
      case kInt8: return compute<kInt8>(warp, tiles, tile, stage, asked, state);
      case kInt4: return compute<kInt4>(warp, tiles, tile, stage, asked, state);
      case kBf16:
        if constexpr (kHasBf16) return compute<kBf16>(warp, tiles, tile, stage, asked, state);
        return;
      default: return compute<kHalf>(warp, tiles, tile, stage, asked, state);
    }
  }

  // ------------------------------------------------------------------------------------------------ a warp, a block

  // The warp's result to shared memory, in the layout of cuda/merge.h.
  static KVK_DEVICE_FN void store_partial(const State& state, float* to) {
    const uint32_t g = lane_index() / 4, t = lane_index() % 4;
#pragma unroll
    for (uint32_t set = 0; set < kSets; ++set) {
      const uint32_t row = 4 * set + t;
      const float row_sum = sum_of_column(state.row[set].row_sum), shift = sum_of_column(state.row[set].shift);
#pragma unroll
      for (uint32_t i = 0; i < kDim / 8; ++i)
        to[row * kDim + Products::template channel_of<kHalf>(i / 2, i % 2, g).of] =
            state.sum[i / 2][set / 2][i % 2 * 2 + set % 2] + shift;
      if (g == 0) to[kRows * kDim + row] = state.row[set].reference, to[kRows * (kDim + 1) + row] = row_sum;
    }
  }

  static KVK_DEVICE_FN State init_state() {
    State state;
#pragma unroll
    for (uint32_t i = 0; i < kDim / 16 * kPairs * 4; ++i) state.sum[i / 4 / kPairs][i / 4 % kPairs][i % 4] = 0;
#pragma unroll
    for (uint32_t set = 0; set < kSets; ++set)
      state.row[set] = {-kInfinity, 0, 0}, state.factor[set] = state.bias[set] = 0, state.start[set] = 0;
#pragma unroll
    for (uint32_t& word : state.query) word = 0;
    state.layout = kHalf;
    return state;
  }

  // All of a warp's keys: one tile is computed while the next comes.
  static KVK_DEVICE_FN void mainloop(const Warp& warp, TileIterator& tiles, State& state) {
    Loaded loaded;
    Tile tile{0, 0, 0, kHalf, 0};
    Asked asked;
    uint32_t stage = 0;
    for (;;) {
      const Tile then = tiles.next(wide);
      Asked then_asked;
      if (then.count != 0)
        then_asked = load_any(warp.a, tiles.segment(then), warp.kv_head, then, warp.stages + stage * kStage, loaded);
      copy_commit();
      stage ^= 1;
      if (tile.count != 0) {
        copy_wait<1>();
        sync_warp();
        compute_any(warp, tiles, tile, warp.stages + stage * kStage, asked, state);
        sync_warp();
      } else if (then.count == 0) {
        break;
      }
      tile = then, asked = then_asked;
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
    const Counted counted = count_keys(sequence);
    const uint64_t keys = counted.all, workers = static_cast<uint64_t>(p.splits) * warps;
    const uint64_t each = (keys + workers - 1) / workers, step = each < 64 ? 64 : (each + 31) / 32 * 32;
    const auto used = static_cast<uint32_t>((keys + step * warps - 1) / (step * warps));
    if (work.split > 0 && work.split >= used) return;

    auto* queries = reinterpret_cast<float*>(shared);
    auto* positions = reinterpret_cast<int64_t*>(shared + 4 * room * kQueryStride);
    uint8_t* of_warp = shared + block_bytes(room) + warp_index() * kWarpBytes;
    for (uint32_t i = thread_index(); i < rows * kDim; i += threads_in_block()) {
      const uint32_t row = i / kDim, channel = i % kDim;
      queries[row * kQueryStride + channel] =
          channel < p.a.head_dim ? element(p.a.dtype, query_row(p, work, work.row_start + row), channel) : 0.0f;
      if (channel == 0) positions[row] = position_of(p, work, work.row_start + row);
    }
    sync_block();

    const Warp warp{
        p.a, work.kv_head, rows, positions, queries, reinterpret_cast<TokenScale*>(of_warp + kTokensAt), of_warp + kStagesAt};
    State state = init_state();
    const uint64_t start = (static_cast<uint64_t>(work.split) * warps + warp_index()) * step;
    TileIterator tiles(p.a, sequence, counted, *reinterpret_cast<TileIteratorState*>(of_warp), start, start + step, rows,
                       [&](uint32_t i) { return positions[i]; });
    mainloop(warp, tiles, state);
    Products::take_layout(kHalf, warp.scratch(), state);
    store_partial(state, reinterpret_cast<float*>(warp.stages));
    sync_block();
    const Partials parts{reinterpret_cast<float*>(shared + block_bytes(room) + kStagesAt), warps, kRows, kDim, kWarpBytes / 4};
    auto* last = reinterpret_cast<uint32_t*>(shared + 4 * room * kQueryStride + 8 * 16);
    finish_or_leave(p, work, parts, rows, used > 1 ? used : 1, last);
  }
};

}  // namespace kvk
