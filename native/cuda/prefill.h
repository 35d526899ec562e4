// Attention of many rows: a block of 4 warps takes 64 or 128 rows, and tiles of keys that all of them multiply with.
//
// FlashAttention 2: queries stay in shared memory, K and V of a tile come while the other is multiplied. Codes are expanded to
// fp16 where they landed: K with its scales, V as whole numbers, its scales being in the weights (cuda/weights.h). Where keys are
// not bf16 the queries are fp16, with a power of two a row that keeps them in range.
// Invariant: a warp reads of the queries its own rows only; K and V change hands at a block's barrier.
#pragma once

#include "cuda/loading.h"
#include "cuda/merge.h"
#include "cuda/queries.h"
#include "cuda/weights.h"

namespace kvk {

// kMTiles: how many times 16 rows a warp has.
template <uint32_t kDim, uint32_t kMTiles>
struct Prefill {
  static constexpr uint32_t kWarps = 4, kMinBlocksPerSM = kDim > 128 ? 1 : 2;
  static constexpr uint32_t kThreads = 32 * kWarps, kOwnRows = 16 * kMTiles, kRows = kWarps * kOwnRows, kWidth = kDim;
  static constexpr uint32_t kTokens = kDim * kMTiles > 128 ? 32 : 64;
  static constexpr uint32_t kBlocks = kTokens / 8;  // of an mma's result
  // 16 bytes more than a row: eight rows at the same column lie in different banks.
  static constexpr uint32_t kStride = 2 * kDim + 16;
  static constexpr uint32_t kQueryBytes = kRows * kStride, kTileBytes = kTokens * kStride;
  static constexpr uint32_t kKeysAt = kQueryBytes, kValuesAt = kKeysAt + kTileBytes;
  static constexpr uint64_t kFloatBytes = 4 * partial_floats(kRows, kDim);  // the result, in the end, over all of these
  static constexpr uint32_t kTokensAt =
      kValuesAt + kTileBytes > kFloatBytes ? kValuesAt + kTileBytes : (kFloatBytes + 15) / 16 * 16;
  static constexpr uint32_t kPositionsAt = kTokensAt + kTokens * sizeof(TokenScale);
  static constexpr uint32_t kUpAt = kPositionsAt + 8 * kRows, kIteratorsAt = kUpAt + 4 * kRows;
  static constexpr uint32_t kLastAt = kIteratorsAt + kWarps * sizeof(TileIteratorState);

  static constexpr uint32_t kSharedBytes = kLastAt + 16;
  static uint64_t shared_bytes(uint32_t, uint32_t) { return kSharedBytes; }

  // What a warp keeps in registers. Lane 4 g + t has rows g and g + 8 of each sixteen.
  struct State {
    float sum[kMTiles][kDim / 8][4];
    Row row[kMTiles][2];
    const float* held_turn;  // for which the queries in shared memory were made
    uint32_t held_half;      // 1: in fp16, 0: in bf16, 2: not at all
  };

  struct Block {
    const Attention& p;
    Work work;
    uint32_t rows;
    uint8_t* shared;

    KVK_DEVICE_FN int64_t position(uint32_t row) const { return reinterpret_cast<const int64_t*>(shared + kPositionsAt)[row]; }
    KVK_DEVICE_FN float prescale(uint32_t row) const { return reinterpret_cast<const float*>(shared + kUpAt)[row]; }
    KVK_DEVICE_FN TokenScale* tokens() const { return reinterpret_cast<TokenScale*>(shared + kTokensAt); }
  };

  // ------------------------------------------------------------------------------------------------ queries

  // The warp's rows as operands, one lane a row. `half`: fp16, times the row's power of two.
  static KVK_DEVICE_FN void make_queries(const Block& b, const float* turn, bool half) {
    const uint32_t row = warp_index() * kOwnRows + lane_index();
    sync_warp();  // who still reads the queries of before
    if (lane_index() < kOwnRows) {
      const void* from = query_row(b.p, b.work, b.work.row_start + (row < b.rows ? row : b.rows - 1));
      uint8_t* to = b.shared + row * kStride;
      const float prescale = half ? b.prescale(row) : 1.0f;
#pragma unroll 2
      for (uint32_t channel = 0; channel < kDim; channel += 8) {
        float x[8];
        Words4 words;
        load_turned(b.p.a, from, turn, channel, x);
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i)
          words.w[i] = half ? pack_halves(x[2 * i] * prescale, x[2 * i + 1] * prescale) : pack_bf16(x[2 * i], x[2 * i + 1]);
        *reinterpret_cast<Words4*>(to + 2 * channel) = words;
      }
    }
    sync_warp();
  }

  // Positions, and the powers of two that bring each row's largest to 2^13 .. 2^14: turned, it still fits fp16.
  static KVK_DEVICE_FN void look_at_rows(const Block& b) {
    for (uint32_t row = thread_index(); row < kRows; row += kThreads) {
      const uint32_t of = b.work.row_start + (row < b.rows ? row : b.rows - 1);
      reinterpret_cast<int64_t*>(b.shared + kPositionsAt)[row] = position_of(b.p, b.work, of);
      const void* from = query_row(b.p, b.work, of);
      float most = 0;
#pragma unroll 2
      for (uint32_t channel = 0; channel < kDim; channel += 8) {
        float x[8];
        load_eight(b.p.a, from, channel, x);
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) {
          const float size = x[i] < 0 ? -x[i] : x[i];
          most = size > most ? size : most;
        }
      }
      const int32_t exponent = static_cast<int32_t>(bits_of(most) >> 23) - 127;
      const int32_t by = 13 - (exponent < -100 ? -100 : exponent > 100 ? 100 : exponent);
      reinterpret_cast<float*>(b.shared + kUpAt)[row] = float_of(static_cast<uint32_t>(by + 127) << 23);
    }
  }

  // ------------------------------------------------------------------------------------------------ keys and values

  static KVK_DEVICE_FN void load_any(const Block& b, const kvk_segment& s, const Tile& tile, bool values) {
    const void* from = values ? at(s.v, b.work.kv_head * s.v_head_stride) : at(s.k, b.work.kv_head * s.k_head_stride);
    const int64_t stride = values ? s.v_token_stride : s.k_token_stride;
    uint8_t* to = b.shared + (values ? kValuesAt : kKeysAt);
    switch (tile.kind) {
      case kInt8:
        return load_rows<kDim, kInt8, kTokens, kThreads>(b.p.a, s, from, stride, tile, to, RowsOf<kDim>{}, thread_index());
      case kInt4:
        return load_rows<kDim, kInt4, kTokens, kThreads>(b.p.a, s, from, stride, tile, to, RowsOf<kDim / 2>{}, thread_index());
      case kBf16:
        return load_rows<kDim, kBf16, kTokens, kThreads>(b.p.a, s, from, stride, tile, to, RowsOf<kStride>{}, thread_index());
      default:
        return load_rows<kDim, kHalf, kTokens, kThreads>(b.p.a, s, from, stride, tile, to, RowsOf<kStride>{}, thread_index());
    }
  }

  // Eight channels of codes, as they lie; and as fp16 numbers 1024 + code.
  template <Kind kKind>
  static KVK_DEVICE_FN Words2 codes_at(const uint8_t* codes) {
    if constexpr (kKind == kInt8) return *reinterpret_cast<const Words2*>(codes);
    return {{*reinterpret_cast<const uint32_t*>(codes), 0}};
  }
  template <Kind kKind>
  static KVK_DEVICE_FN Words4 expanded(Words2 codes) {
    if constexpr (kKind == kInt4) {  // the nibbles of a word, each in a byte: even channels and odd ones, brought together
      const uint32_t even = codes.w[0] & 0x0f0f0f0f, odd = codes.w[0] >> 4 & 0x0f0f0f0f;
      codes.w[0] = permute(even, odd, 0x5140), codes.w[1] = permute(even, odd, 0x7362);
    }
    return {{permute(codes.w[0], 0x64646464, 0x4140), permute(codes.w[0], 0x64646464, 0x4342),
             permute(codes.w[1], 0x64646464, 0x4140), permute(codes.w[1], 0x64646464, 0x4342)}};
  }

  // Eight channels of K's scales or zero points.
  static KVK_DEVICE_FN Words4 load_scales(const kvk_attention& a, const uint16_t* scales, uint32_t channel) {
    if (channel + 8 <= a.head_dim && (reinterpret_cast<uintptr_t>(scales + channel) & 15) == 0)
      return *reinterpret_cast<const Words4*>(scales + channel);
    Words4 out{};
#pragma unroll 1
    for (uint32_t i = 0; i < 8 && channel + i < a.head_dim; ++i) {
      const uint32_t bits = static_cast<uint32_t>(scales[channel + i]) << 16 * (i % 2);
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) out.w[j] |= i / 2 == j ? bits : 0;
    }
    return out;
  }

  // Codes that landed at the beginning of a tile's place become its 16-bit elements: all are read before any is written.
  template <Kind kKind, bool kValues>
  static KVK_DEVICE_FN void expand(const Block& b, const kvk_segment& s, const Tile& tile) {
    constexpr uint32_t kEights = kDim / 8, kEach = kTokens * kEights / kThreads, kBits = bits_of_kind(kKind);
    static_assert(kTokens * kEights % kThreads == 0);
    constexpr uint32_t kLess = 0xe400e400;                                  // -1024
    constexpr uint32_t kCentre = kKind == kInt8 ? 0xe480e480 : 0xe408e408;  // -1152, -1032
    uint8_t* place = b.shared + (kValues ? kValuesAt : kKeysAt);
    Words2 held[kEach];
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) held[i] = codes_at<kKind>(place + (thread_index() + i * kThreads) * kBits);
    sync_block();
    Words4 scale{}, zero{};
    uint32_t group = ~0u;
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      const uint32_t at_eight = thread_index() + i * kThreads, token = at_eight / kEights, channel = at_eight % kEights * 8;
      Words4 words = expanded<kKind>(held[i]);
      if constexpr (!kValues) {
        const uint32_t of_token = token < tile.count ? (tile.start + token) / s.k_group : group;
        // A thread has one channel where a row's eights divide the threads.
        if (of_token != group || (kThreads % kEights != 0 && token < tile.count)) {
          scale = load_scales(b.p.a, scales_of(s.k_scale, s, b.work.kv_head, tile.start + token, b.p.a.head_dim), channel);
          zero = load_scales(b.p.a, scales_of(s.k_zero, s, b.work.kv_head, tile.start + token, b.p.a.head_dim), channel);
          group = of_token;
        }
      }
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j)
        words.w[j] = kValues ? add_halves(words.w[j], kCentre)
                             : clamp_halves(fma_halves(add_halves(words.w[j], kLess), scale.w[j], zero.w[j]));
      *reinterpret_cast<Words4*>(place + token * kStride + 2 * channel) = words;
    }
    sync_block();
  }

  template <bool kValues>
  static KVK_DEVICE_FN void expand_any(const Block& b, const kvk_segment& s, const Tile& tile) {
    if (tile.kind == kInt8) expand<kInt8, kValues>(b, s, tile);
    if (tile.kind == kInt4) expand<kInt4, kValues>(b, s, tile);
  }

  // ------------------------------------------------------------------------------------------------ a tile

  template <bool kBf16Operands>
  static KVK_DEVICE_FN void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (kBf16Operands)
      mma_bf16(c, a, b0, b1);
    else
      mma_f16(c, a, b0, b1);
  }

  template <bool kBf16Operands>
  static KVK_DEVICE_FN void scores(const uint8_t* shared, float (&score)[kMTiles][kBlocks][4]) {
    const uint32_t lane = lane_index();
    const uint8_t* queries = shared + (warp_index() * kOwnRows + lane % 16) * kStride + lane / 16 * 16;
    const uint8_t* keys = shared + kKeysAt + (lane / 16 * 8 + lane % 8) * kStride + lane / 8 % 2 * 16;
#pragma unroll
    for (uint32_t i = 0; i < kMTiles * kBlocks * 4; ++i) score[i / 4 / kBlocks][i / 4 % kBlocks][i % 4] = 0;
#pragma unroll
    for (uint32_t step = 0; step < kDim / 16; ++step) {
      uint32_t a[kMTiles][4];
#pragma unroll
      for (uint32_t high = 0; high < kMTiles; ++high) load_matrices(a[high], queries + 16 * high * kStride + 32 * step);
#pragma unroll
      for (uint32_t j = 0; j < kBlocks; j += 2) {
        uint32_t m[4];
        load_matrices(m, keys + 8 * j * kStride + 32 * step);
#pragma unroll
        for (uint32_t high = 0; high < kMTiles; ++high) {
          multiply<kBf16Operands>(score[high][j], a[high], m[0], m[1]);
          multiply<kBf16Operands>(score[high][j + 1], a[high], m[2], m[3]);
        }
      }
    }
  }

  template <bool kBf16Operands>
  static KVK_DEVICE_FN void add_values(const uint8_t* shared, const uint32_t (&weight)[kMTiles][kBlocks / 2][4], State& state) {
    const uint32_t lane = lane_index();
    const uint8_t* values = shared + kValuesAt + lane % 16 * kStride + lane / 16 * 16;
#pragma unroll
    for (uint32_t step = 0; step < kBlocks / 2; ++step)
#pragma unroll
      for (uint32_t i = 0; i < kDim / 8; i += 2) {
        uint32_t m[4];
        load_matrices_transposed(m, values + 16 * step * kStride + 16 * i);
#pragma unroll
        for (uint32_t high = 0; high < kMTiles; ++high) {
          multiply<kBf16Operands>(state.sum[high][i], weight[high][step], m[0], m[1]);
          multiply<kBf16Operands>(state.sum[high][i + 1], weight[high][step], m[2], m[3]);
        }
      }
  }

  // Scores to weights. All rows see all keys of most tiles.
  template <bool kBf16Operands, bool kCodes>
  static KVK_DEVICE_FN void online_softmax(const Block& b, const TileIterator& tiles, const Tile& tile,
                                           float (&score)[kMTiles][kBlocks][4], uint32_t (&weight)[kMTiles][kBlocks / 2][4],
                                           State& state) {
    const kvk_attention& a = b.p.a;
    const auto count = static_cast<int32_t>(tile.count);
    const bool all = count == kTokens && (a.causal == 0 || tile.first_key + count - 1 <= tiles.least()) &&
                     (a.window == 0 || tile.first_key > tiles.most() - a.window);
#pragma unroll
    for (uint32_t high = 0; high < kMTiles; ++high) {
      const uint32_t row = warp_index() * kOwnRows + 16 * high + lane_index() / 4;
      float factor[2] = {a.scale, a.scale}, rescale[2];
      const float bias[2] = {0, 0};
      if constexpr (!kBf16Operands) {  // a power of two: its reciprocal is exact
        factor[0] *= float_of((254u << 23) - bits_of(b.prescale(row)));
        factor[1] *= float_of((254u << 23) - bits_of(b.prescale(row + 8)));
      }
      in_base_2(a, factor, bias, score[high]);
      if (!all) {
        const Seen keys[2] = {seen(a, b.position(row), tile.first_key, count),
                              seen(a, b.position(row + 8), tile.first_key, count)};
        apply_mask(keys, score[high]);
      }
      exp_and_pack<kBf16Operands, kCodes>(b.tokens(), 0.0f, score[high], state.row[high], rescale, weight[high]);
#pragma unroll
      for (uint32_t i = 0; i < kDim / 2; ++i) state.sum[high][i / 4][i % 4] *= rescale[i % 4 / 2];
    }
  }

  static KVK_DEVICE_FN uint32_t wide(Kind, const kvk_segment&) { return kTokens; }

  // One tile: K is there or on its way; V is asked for while K is multiplied, the next tile's K while V is. Returns the next
  // tile.
  template <bool kBf16Operands, bool kCodes>
  static KVK_DEVICE_FN Tile compute(const Block& b, const Tile& tile, TileIterator& tiles, State& state) {
    const kvk_segment& s = tiles.segment(tile);
    if (state.held_half != !kBf16Operands || state.held_turn != s.turn) {
      make_queries(b, s.turn, !kBf16Operands);
      state.held_half = !kBf16Operands, state.held_turn = s.turn;
    }
    copy_wait<0>();
    sync_block();  // K is there for all, V's place is free
    load_any(b, s, tile, true);
    copy_commit();
    TokenWords token{};
    if (kCodes && thread_index() < kTokens) token = load_token_words(s, b.work.kv_head, tile, thread_index());
    if constexpr (kCodes) expand_any<false>(b, s, tile);
    float score[kMTiles][kBlocks][4];
    scores<kBf16Operands>(b.shared, score);
    if (kCodes && thread_index() < kTokens)
      b.tokens()[thread_index()] = token_scale(token.both(), tile.kind == kInt8 ? 128.0f : 8.0f);
    copy_wait<0>();
    sync_block();  // V is there for all, K's place is free
    uint32_t weight[kMTiles][kBlocks / 2][4];
    online_softmax<kBf16Operands, kCodes>(b, tiles, tile, score, weight, state);
    const Tile then = tiles.next(wide);
    if (then.count != 0) load_any(b, tiles.segment(then), then, false);
    copy_commit();
    if constexpr (kCodes) expand_any<true>(b, s, tile);
    add_values<kBf16Operands>(b.shared, weight, state);
    return then;
  }

  // ------------------------------------------------------------------------------------------------ a block

  // The warp's rows of the result to shared memory, in the layout of cuda/merge.h.
  static KVK_DEVICE_FN void store_partial(const State& state, float* to) {
    const uint32_t group = lane_index() / 4, t = lane_index() % 4;
#pragma unroll
    for (uint32_t i = 0; i < 2 * kMTiles; ++i) {
      const uint32_t high = i / 2, h = i % 2, row = warp_index() * kOwnRows + 16 * high + 8 * h + group;
      const float row_sum = sum_of_row(state.row[high][h].row_sum), shift = sum_of_row(state.row[high][h].shift);
#pragma unroll
      for (uint32_t j = 0; j < kDim / 8; ++j) {
        to[row * kDim + 8 * j + 2 * t] = state.sum[high][j][2 * h] + shift;
        to[row * kDim + 8 * j + 2 * t + 1] = state.sum[high][j][2 * h + 1] + shift;
      }
      if (t == 0) to[kRows * kDim + row] = state.row[high][h].reference, to[kRows * (kDim + 1) + row] = row_sum;
    }
  }

  static KVK_DEVICE_FN void run(const Attention& p, uint8_t* shared) {
    if constexpr (kSharedBytes <= kSharedMost) attend(p, shared);  // where it can run at all
  }

  static KVK_DEVICE_FN void attend(const Attention& p, uint8_t* shared) {
    const Work work = work_of(p, kRows);
    const kvk_sequence& sequence = p.a.sequences[work.batch];
    const Counted counted = count_keys(sequence);
    const uint64_t keys = counted.all, each = (keys + p.splits - 1) / p.splits;
    const uint64_t step = each < 256 ? 256 : (each + kTokens - 1) / kTokens * kTokens;
    const auto used = static_cast<uint32_t>((keys + step - 1) / step);
    if (work.split > 0 && work.split >= used) return;
    const Block b{p, work, p.rows - work.row_start < kRows ? p.rows - work.row_start : kRows, shared};
    look_at_rows(b);
    sync_block();
    State state;
#pragma unroll
    for (uint32_t i = 0; i < kMTiles * kDim / 2; ++i) state.sum[i / (kDim / 2)][i / 4 % (kDim / 8)][i % 4] = 0;
#pragma unroll
    for (uint32_t i = 0; i < 2 * kMTiles; ++i) state.row[i / 2][i % 2] = {-kInfinity, 0, 0};
    state.held_turn = nullptr, state.held_half = 2;

    auto* place = reinterpret_cast<TileIteratorState*>(shared + kIteratorsAt) + warp_index();
    TileIterator tiles(p.a, sequence, counted, *place, work.split * step, (work.split + 1) * step, b.rows,
                       [&](uint32_t row) { return b.position(row); });
    Tile tile = tiles.next(wide);
    if (tile.count != 0) load_any(b, tiles.segment(tile), tile, false);
    copy_commit();
    while (tile.count != 0) {
      if (is_quantised(tile.kind))
        tile = compute<false, true>(b, tile, tiles, state);
      else if (kHasBf16 && tile.kind == kBf16)
        tile = compute<kHasBf16, false>(b, tile, tiles, state);
      else
        tile = compute<false, false>(b, tile, tiles, state);
    }
    copy_wait<0>();
    sync_block();
    store_partial(state, reinterpret_cast<float*>(shared));
    sync_block();
    finish_or_leave(p, work, {reinterpret_cast<const float*>(shared), 1, kRows, kDim, 0}, b.rows, used > 1 ? used : 1,
                    reinterpret_cast<uint32_t*>(shared + kLastAt));
  }
};

}  // namespace kvk
