// Few rows and one tile of keys, as a warp multiplies them: the queries as operands, scores, weights times values.
//
// Owns where a tile's rows lie in shared memory and what a warp keeps in registers. Nothing is dequantised: K's scales are in the
// queries (with a power of two a row that keeps them in fp16); codes become fp16 by putting them under an exponent
// (cuda/numbers.h). Operands are read in the order that costs nothing: which channel or token an mma calls k is free, if both
// sides agree. Never loads, and knows neither segments' order nor the softmax.
#pragma once

#include "cuda/loading.h"
#include "cuda/weights.h"

namespace kvk {

constexpr uint32_t stride_with(uint32_t bytes, uint32_t remainder, uint32_t of) {
  return bytes + (remainder + of - bytes % of) % of;
}

// Where the rows of a tile lie in shared memory. Rows are spread so that what a warp reads at once is in different banks: of K
// eight tokens by 32 channels, of V four tokens (every other) by all channels of a unit.
template <uint32_t kDim, Kind kKind>
struct TileShape {
  static constexpr uint32_t kBits = bits_of_kind(kKind), kRowBytes = kDim * kBits / 8;
  static constexpr uint32_t kTokens = kBits == 16 ? 16 : 32;
  static constexpr uint32_t kKeyStride = kBits == 16  ? stride_with(kRowBytes, 64, 128)
                                         : kBits == 8 ? stride_with(kRowBytes, 32, 64)
                                                      : stride_with(kRowBytes, 16, 32);
  static constexpr uint32_t kValueStride = stride_with(kRowBytes, 16, 32);
  static constexpr uint32_t kValuesAt = kTokens * kKeyStride, kScalesAt = kValuesAt + kTokens * kValueStride;
  static constexpr uint32_t kBytes = kScalesAt + (kBits == 16 ? 0 : 4 * kDim);  // K's scales, then zeros
};

template <uint32_t kDim>
struct DecodeProducts {
  static constexpr uint32_t kUnits = kDim / 32;
  static constexpr uint32_t kValueUnit = kDim % 64 == 0 ? 64 : 32, kOf = kValueUnit / 8;  // channels a lane has of a unit of V
  static constexpr uint32_t kQueryStride = kDim + 4;
  // Beyond 128 channels the queries as operands do not fit into registers beside the sums.
  static constexpr bool kQueriesShared = kDim > 128;
  static constexpr uint32_t kOperandBytes = kQueriesShared ? kUnits * 8 * 32 * 4 : 0;

  // What a warp keeps in registers. Lane 4 g + t has rows g and g + 8.
  struct State {
    float sum[kDim / 8][4];
    uint32_t query[kQueriesShared ? 1 : kUnits][2][4];
    Row row[2];
    float factor[2], bias[2];  // score = product * factor + bias
    const void* held_scale;    // for which segment and group `query` was made
    const float* held_turn;
    const float* turned_by;  // what the rows in shared memory were turned by
    Kind held_kind;
  };

  // ------------------------------------------------------------------------------------------------ queries

  // The rows turned back for a segment that has a turn.
  static KVK_DEVICE_FN void turn_queries(const kvk_attention& a, const float* queries, uint32_t rows, const float* turn,
                                         float* to) {
#pragma unroll 1
    for (uint32_t i = lane_index(); i < rows * kDim; i += 32) {
      const float* row = queries + i / kDim * kQueryStride;
      to[i / kDim * kQueryStride + i % kDim] = turned_back(a, turn, i % kDim, [&](uint32_t j) { return row[j]; });
    }
    sync_warp();
  }

  // Eight channels of a row, times K's scales where these are codes; adds to `zero` what their zero points give.
  template <Kind kKind>
  static KVK_DEVICE_FN void scaled(const float* row, const uint16_t* scales, uint32_t channel, float (&value)[8], float& zero) {
    const auto first = *reinterpret_cast<const Floats4*>(row + channel),
               second = *reinterpret_cast<const Floats4*>(row + channel + 4);
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) value[i] = i < 4 ? first.x[i] : second.x[i - 4];
    if (!is_quantised(kKind)) return;
    const auto scale = *reinterpret_cast<const Words4*>(scales + channel),
               low = *reinterpret_cast<const Words4*>(scales + kDim + channel);
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      const float by = i % 2 == 0 ? low_half(scale.w[i / 2]) : high_half(scale.w[i / 2]);
      const float least = i % 2 == 0 ? low_half(low.w[i / 2]) : high_half(low.w[i / 2]);
      zero += value[i] * (least + (kKind == kInt8 ? 128.0f : 8.0f) * by);
      value[i] *= by;
    }
  }

  // The rows as keys of this kind and group meet them. Channels of a unit: lane t has 8 t .. 8 t + 7; two of them are one word,
  // next to each other, but of int4 four apart, as the words of its codes come.
  template <Kind kKind>
  static KVK_DEVICE_FN void make_queries(const kvk_attention& a, const float* queries, uint32_t rows, const uint16_t* scales,
                                         uint32_t* operands, State& state) {
    const uint32_t group = lane_index() / 4, t = lane_index() % 4;
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      const uint32_t row = group + 8 * h;
      const float* q = queries + (row < rows ? row : rows - 1) * kQueryStride;
      float value[8], most = 0, zero = 0, unused = 0;
#pragma unroll 1
      for (uint32_t unit = 0; kKind != kBf16 && unit < kUnits; ++unit) {
        scaled<kKind>(q, scales, 32 * unit + 8 * t, value, zero);
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) {
          const float size = value[i] < 0 ? -value[i] : value[i];
          most = size > most ? size : most;
        }
      }
      // The largest becomes 2^13 to 2^14. The exponent is kept so that neither factor leaves fp32.
      const int32_t exponent = static_cast<int32_t>(bits_of(largest_of_row(most)) >> 23) - 127;
      const int32_t by = kKind == kBf16 ? 0 : 13 - (exponent < -100 ? -100 : exponent > 100 ? 100 : exponent);
      const float prescale = float_of(static_cast<uint32_t>(by + 127) << 23);
      state.factor[h] = a.scale * float_of(static_cast<uint32_t>(127 - by) << 23);
      float rounded = 0;
#pragma unroll
      for (uint32_t unit = 0; unit < kUnits; ++unit) {
        scaled<kKind>(q, scales, 32 * unit + 8 * t, value, unused);
#pragma unroll
        for (uint32_t word = 0; word < 4; ++word) {
          const uint32_t low = kKind == kInt4 ? word : 2 * word, high = kKind == kInt4 ? low + 4 : low + 1;
          const uint32_t both =
              kKind == kBf16 ? pack_bf16(value[low], value[high]) : pack_halves(value[low] * prescale, value[high] * prescale);
          if constexpr (kQueriesShared)
            operands[((2 * unit + word / 2) * 32 + lane_index()) * 4 + word % 2 * 2 + h] = both;
          else
            state.query[unit][word / 2][word % 2 * 2 + h] = both;
          if (is_quantised(kKind)) rounded += low_half(both) + high_half(both);
        }
      }
      state.bias[h] = 0;
      if (is_quantised(kKind))
        state.bias[h] = sum_of_row(zero) * a.scale - sum_of_row(rounded) * (kKind == kInt8 ? 1152.0f : 1032.0f) * state.factor[h];
    }
  }

  // ------------------------------------------------------------------------------------------------ products

  template <Kind kKind>
  static KVK_DEVICE_FN void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (kKind == kBf16)
      mma_bf16(c, a, b0, b1);
    else
      mma_f16(c, a, b0, b1);
  }

  // Eight channels of a key as four words of two 16-bit numbers; codes as 1024 + code.
  template <Kind kKind>
  static KVK_DEVICE_FN Words4 key_words(const uint8_t* row, uint32_t unit, uint32_t t) {
    if constexpr (bits_of_kind(kKind) == 16) return *reinterpret_cast<const Words4*>(row + 64 * unit + 16 * t);
    if constexpr (kKind == kInt8) {
      const auto x = *reinterpret_cast<const Words2*>(row + 32 * unit + 8 * t);
      return {{permute(x.w[0], 0x64646464, 0x4140), permute(x.w[0], 0x64646464, 0x4342), permute(x.w[1], 0x64646464, 0x4140),
               permute(x.w[1], 0x64646464, 0x4342)}};
    }
    const uint32_t x = *reinterpret_cast<const uint32_t*>(row + 16 * unit + 4 * t);
    return {{(x & 0x000f000f) | 0x64006400, (x >> 4 & 0x000f000f) | 0x64006400, (x >> 8 & 0x000f000f) | 0x64006400,
             (x >> 12 & 0x000f000f) | 0x64006400}};
  }

  template <Kind kKind>
  static KVK_DEVICE_FN void scores(const uint8_t* keys, const uint32_t* operands, const State& state,
                                   float (&score)[TileShape<kDim, kKind>::kTokens / 8][4]) {
    using Shape = TileShape<kDim, kKind>;
    const uint32_t group = lane_index() / 4, t = lane_index() % 4;
#pragma unroll
    for (uint32_t j = 0; j < Shape::kTokens / 8; ++j) score[j][0] = score[j][1] = score[j][2] = score[j][3] = 0;
#pragma unroll
    for (uint32_t unit = 0; unit < kUnits; ++unit) {
      uint32_t query[2][4];
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        Words4 held{};
        if constexpr (kQueriesShared)
          held = *reinterpret_cast<const Words4*>(operands + ((2 * unit + i) * 32 + lane_index()) * 4);
#pragma unroll
        for (uint32_t word = 0; word < 4; ++word)
          query[i][word] = kQueriesShared ? held.w[word] : state.query[kQueriesShared ? 0 : unit][i][word];
      }
#pragma unroll
      for (uint32_t j = 0; j < Shape::kTokens / 8; ++j) {
        const Words4 key = key_words<kKind>(keys + (8 * j + group) * Shape::kKeyStride, unit, t);
        multiply<kKind>(score[j], query[0], key.w[0], key.w[1]);
        multiply<kKind>(score[j], query[1], key.w[2], key.w[3]);
      }
    }
  }

  // sum += weights x values of 16 tokens, one unit of channels: a lane has kOf of them next to each other, block i the i-th.
  template <Kind kKind>
  static KVK_DEVICE_FN void add_values(const uint8_t* values, uint32_t unit, const uint32_t (&weight)[4], State& state) {
    using Shape = TileShape<kDim, kKind>;
    constexpr uint32_t kLaneBytes = kOf * Shape::kBits / 8;
    const uint32_t group = lane_index() / 4, t = lane_index() % 4;
    const uint8_t* from = values + 2 * t * Shape::kValueStride + unit * kValueUnit * Shape::kBits / 8 + group * kLaneBytes;
    uint32_t x[4][kLaneBytes < 4 ? 1 : kLaneBytes / 4];  // of tokens 2t, 2t + 1, 2t + 8, 2t + 9
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const uint8_t* row = from + (i % 2 + i / 2 * 8) * Shape::kValueStride;
      if constexpr (kLaneBytes == 16) {
        const auto words = *reinterpret_cast<const Words4*>(row);
        x[i][0] = words.w[0], x[i][1] = words.w[1], x[i][2] = words.w[2], x[i][3] = words.w[3];
      } else if constexpr (kLaneBytes == 8) {
        const auto words = *reinterpret_cast<const Words2*>(row);
        x[i][0] = words.w[0], x[i][1] = words.w[1];
      } else if constexpr (kLaneBytes == 4) {
        x[i][0] = *reinterpret_cast<const uint32_t*>(row);
      } else {
        x[i][0] = *reinterpret_cast<const uint16_t*>(row);
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kOf; ++i) {
      uint32_t b[2];
#pragma unroll
      for (uint32_t pair = 0; pair < 2; ++pair) {
        const auto& one = x[2 * pair];
        const auto& other = x[2 * pair + 1];
        if constexpr (Shape::kBits == 16) {
          b[pair] = permute(one[i / 2], other[i / 2], i % 2 == 0 ? 0x5410 : 0x7632);
        } else if constexpr (kKind == kInt8) {
          const uint32_t both = permute(one[i / 4], other[i / 4], i % 4 < 2 ? 0x5140 : 0x7362);
          b[pair] = permute(both, 0x64646464, i % 2 == 0 ? 0x4140 : 0x4342);
        } else {
          const uint32_t both = permute(one[0], other[0], i < 4 ? 0x5410 : 0x7632);
          b[pair] = (both >> 4 * (i % 4) & 0x000f000f) | 0x64006400;
        }
      }
      multiply<kKind>(state.sum[unit * kOf + i], weight, b[0], b[1]);
    }
  }
};

}  // namespace kvk
