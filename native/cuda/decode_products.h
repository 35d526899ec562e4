// Few rows and one tile of keys, as a warp multiplies them: the queries as operands, scores, weights times values.
//
// Owns where a tile's rows lie in shared memory and what a warp keeps in registers. Keys are the products' rows and queries
// their columns, so a tile costs no more than its rows ask for. Nothing is dequantised: codes of K meet whole numbers of 16 bits
// that have K's scales in them, as two columns of 8 bits; codes of V are fp16 numbers below the least normal one, 2^-24 each, and
// V's scales are in the weights. Never loads, and knows neither segments' order nor the softmax.
//
// Rows: a set is four of them, lane 4 g + t has row t of each. Of a product's columns 2 t is row t of an even set and 2 t + 1 row
// t of the next; where they are of 8 bits, the high and the low half of row t. Invariant: `sum` is in the layout of `layout`.
#pragma once

#include "cuda/loading.h"
#include "cuda/weights.h"

namespace kvk {

constexpr uint32_t stride_with(uint32_t bytes, uint32_t remainder, uint32_t of) {
  return bytes + (remainder + of - bytes % of) % of;
}

// Where the rows of a tile lie in shared memory. Eight rows at the same 16 bytes are two to a bank at most: pairs of columns of
// 16 bytes change places from row to row, or rows are spread where their number is no power of two. A pair stays together and
// at a multiple of 32 bytes: what a copy would bring elsewhere it asks of the second cache twice.
template <uint32_t kDim, uint32_t kRows, Kind kKind>
struct TileShape {
  static constexpr uint32_t kBits = bits_of_kind(kKind), kRowBytes = kDim * kBits / 8, kChunks = kRowBytes / 16;
  static constexpr uint32_t kTokens = kBits == 16 ? 16 : kBits == 8 || kRows > 4 ? 32 : 64;
  static constexpr bool kExchanged = (kChunks & (kChunks - 1)) == 0;
  static constexpr uint32_t kStride = kExchanged ? kRowBytes : stride_with(kRowBytes, 16, 32);
  static constexpr uint32_t kColumns = kChunks < 8 ? kChunks : 8;
  static constexpr uint32_t kValuesAt = kTokens * kStride, kScalesAt = 2 * kValuesAt;
  static constexpr uint32_t kBytes = kScalesAt + (kBits == 16 ? 0 : 4 * kDim);  // K's scales, then zeros

  static constexpr KVK_DEVICE_FN uint32_t exchange(uint32_t row) {
    return kExchanged ? row / (8 / kColumns) % (kColumns / 2) * 2 : 0;
  }
  static KVK_DEVICE_FN uint32_t place(uint32_t low, uint32_t chunk, uint32_t high) {
    return low * kStride + 16 * (chunk ^ exchange(low) ^ exchange(high)) + high * kStride;
  }
};

template <uint32_t kDim, uint32_t kRows>
struct DecodeProducts {
  static constexpr uint32_t kUnits = kDim / 32, kSets = kRows / 4;
  static constexpr uint32_t kPairs = (kSets + 1) / 2;  // of sets: what a product of 16-bit numbers has as columns
  static constexpr uint32_t kQueryStride = kDim + 4;
  static constexpr uint32_t kScratchBytes = 1024;

  // What a warp keeps in registers.
  struct State {
    float sum[kDim / 16][kPairs][4];
    uint32_t query[kPairs * kDim / 8];
    Row row[kSets];
    float factor[kSets], bias[kSets];  // score = product * factor + bias, in base 2 unless there is a cap
    int32_t start[kSets];              // what a product begins with
    Kind layout;
  };

  // ------------------------------------------------------------------------------------------------ queries

  // Which row a column of product `i` has.
  template <Kind kKind>
  static KVK_DEVICE_FN uint32_t row_of(uint32_t column, uint32_t i, uint32_t rows) {
    const uint32_t row = column / 2 + (is_quantised(kKind) ? 4 * i : 4 * (2 * i + column % 2));
    return row < rows ? row : rows - 1;
  }

  // The two columns that have the halves of a row of codes' queries share out its units, if these are even in number.
  static constexpr bool kShared = kUnits % 2 == 0;
  template <Kind kKind>
  static constexpr uint32_t kLaneUnits = is_quantised(kKind) && kShared ? kUnits / 2 : kUnits;
  template <Kind kKind>
  static KVK_DEVICE_FN uint32_t first_unit(uint32_t column) {
    return is_quantised(kKind) && kShared ? column % 2 * (kUnits / 2) : 0;
  }

  // Eight channels of `from`, 32 of a unit, that lane t multiplies with.
  template <Kind kKind>
  static KVK_DEVICE_FN void eight_of(const float* from, uint32_t t, float (&x)[8]) {
    if constexpr (is_quantised(kKind)) {
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        const auto four = *reinterpret_cast<const Floats4*>(from + (kKind == kInt8 ? 16 * i + 4 * t : 8 * t + 4 * i));
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) x[4 * i + j] = four.x[j];
      }
    } else {
#pragma unroll
      for (uint32_t i = 0; i < 8; ++i) x[i] = from[8 * (i / 2) + 2 * t + i % 2];
    }
  }
  // The same of K's scales or zeros.
  template <Kind kKind>
  static KVK_DEVICE_FN void eight_of(const uint16_t* from, uint32_t t, float (&x)[8]) {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const auto four = *reinterpret_cast<const Words2*>(from + (kKind == kInt8 ? 16 * i + 4 * t : 8 * t + 4 * i));
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) x[4 * i + j] = j % 2 == 0 ? low_half(four.w[j / 2]) : high_half(four.w[j / 2]);
    }
  }

  // The channels of this lane's column, turned back where the segment was: by way of `scratch`, a unit of eight columns at a
  // time.
  template <Kind kKind>
  static KVK_DEVICE_FN void load_column(const kvk_attention& a, const float* queries, uint32_t rows, const float* turn,
                                        uint32_t i, float* scratch, float (&value)[kLaneUnits<kKind>][8]) {
    const uint32_t lane = lane_index(), t = lane % 4;
    const float* row = queries + row_of<kKind>(lane / 4, i, rows) * kQueryStride;
#pragma unroll
    for (uint32_t unit = 0; unit < kLaneUnits<kKind>; ++unit) {
      if (turn == nullptr) {
        eight_of<kKind>(row + 32 * (unit + first_unit<kKind>(lane / 4)), t, value[unit]);
        continue;
      }
#pragma unroll 1
      for (uint32_t column = 0; column < 8; ++column) {
        const float* q = queries + row_of<kKind>(column, i, rows) * kQueryStride;
        const uint32_t channel = 32 * (unit + first_unit<kKind>(column)) + lane;
        scratch[32 * column + lane] = turned_back(a, turn, channel, [&](uint32_t j) { return q[j]; });
      }
      sync_warp();
      eight_of<kKind>(scratch + lane / 4 * 32, t, value[unit]);
      sync_warp();
    }
  }

  // The power of two that brings `most` below 2^15, and to 2^(to - 1) or more: as its exponent, kept so that neither it nor its
  // reciprocal leaves fp32.
  static KVK_DEVICE_FN int32_t up_to(float most, int32_t to) {
    const int32_t exponent = static_cast<int32_t>(bits_of(most) >> 23) - 127;
    return to - (exponent < -100 ? -100 : exponent > 100 ? 100 : exponent);
  }
  static KVK_DEVICE_FN float power_of_2(int32_t exponent) { return float_of(static_cast<uint32_t>(exponent + 127) << 23); }

  // The rows as 16-bit keys meet them.
  template <Kind kKind>
  static KVK_DEVICE_FN void make_queries(const kvk_attention& a, const float* queries, uint32_t rows, const float* turn,
                                         float* scratch, State& state) {
    const uint32_t t = lane_index() % 4;
    const float base = a.softcap == 0 ? a.scale * kLog2E : a.scale;
#pragma unroll
    for (uint32_t pair = 0; pair < kPairs; ++pair) {
      float value[kLaneUnits<kKind>][8], most = 0;
      load_column<kKind>(a, queries, rows, turn, pair, scratch, value);
#pragma unroll
      for (uint32_t i = 0; kKind != kBf16 && i < kDim / 4; ++i) most = larger_of(most, size_of(value[i / 8][i % 8]));
      const int32_t by = kKind == kBf16 ? 0 : up_to(largest_of_row(most), 13);
      const float up = power_of_2(by), down = power_of_2(-by) * base;
#pragma unroll
      for (uint32_t i = 0; i < kDim / 8; ++i) {
        const float low = value[i / 4][2 * (i % 4)], high = value[i / 4][2 * (i % 4) + 1];
        state.query[pair * (kDim / 8) + i] = kKind == kBf16 ? pack_bf16(low, high) : pack_halves(low * up, high * up);
      }
#pragma unroll
      for (uint32_t set = 2 * pair; set < 2 * pair + 2 && set < kSets; ++set)
        state.factor[set] = shuffle(down, 8 * t + set % 2 * 4), state.bias[set] = 0;
    }
  }

  // The rows as codes meet them: whole numbers of 16 bits in two columns. Products count codes from the middle on.
  template <Kind kKind>
  static KVK_DEVICE_FN void make_whole_queries(const kvk_attention& a, const float* queries, uint32_t rows, const float* turn,
                                               const uint16_t* scales, float* scratch, State& state) {
    constexpr float kCentre = kKind == kInt8 ? 128.0f : 8.0f;
    constexpr uint32_t kMagic = 0x4b400080;  // 3 * 2^22 + 128: plus a number below 2^15, its last bits are that number's + 128
    constexpr uint32_t kWords = kLaneUnits<kKind> * 2;
    const uint32_t t = lane_index() % 4, column = lane_index() / 4, first = first_unit<kKind>(column);
    const bool high = column % 2 == 0;
    const float base = a.softcap == 0 ? a.scale * kLog2E : a.scale;
#pragma unroll
    for (uint32_t set = 0; set < kSets; ++set) {
      float value[kLaneUnits<kKind>][8], most = 0, zero = 0;
      load_column<kKind>(a, queries, rows, turn, set, scratch, value);
#pragma unroll
      for (uint32_t unit = 0; unit < kLaneUnits<kKind>; ++unit) {
        float scale[8], least[8];
        eight_of<kKind>(scales + 32 * (unit + first), t, scale);
        eight_of<kKind>(scales + kDim + 32 * (unit + first), t, least);
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) {
          float& x = value[unit][i];
          zero += x * (least[i] + kCentre * scale[i]);
          x *= scale[i];
          most = larger_of(most, size_of(x));
        }
      }
      most = largest_of_row(most), zero = sum_of_row(zero);
      if constexpr (kShared) most = larger_of(most, shuffle_xor(most, 4)), zero += shuffle_xor(zero, 4);
      const int32_t by = up_to(most * 1.0078125f, 14);
      const float up = power_of_2(by), down = power_of_2(-by) * base;
      uint32_t total = 0, halves[2][kWords];  // low ones, high ones
#pragma unroll
      for (uint32_t i = 0; i < kWords; ++i) {
        uint32_t whole[4];
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) {
          whole[j] = bits_of(value[i / 2][kKind == kInt8 ? 4 * (i % 2) + j : 2 * j + i % 2] * up + float_of(kMagic));
          total += whole[j];
        }
        const uint32_t front = permute(whole[0], whole[1], 0x5140), back = permute(whole[2], whole[3], 0x5140);
        halves[0][i] = permute(front, back, 0x5410) ^ 0x80808080, halves[1][i] = permute(front, back, 0x7632);
      }
      total -= 4 * kWords * kMagic;
      total += shuffle_xor(total, 1);
      total += shuffle_xor(total, 2);
      if constexpr (kShared) total += shuffle_xor(total, 4);
#pragma unroll
      for (uint32_t i = 0; i < kWords; ++i) {
        const uint32_t kept = high ? halves[1][i] : halves[0][i];
        if constexpr (kShared) {  // the other column made the other units of this half
          const uint32_t other = shuffle_xor(high ? halves[0][i] : halves[1][i], 4);
          state.query[set * (kDim / 16) + i] = high ? kept : other,
                                          state.query[set * (kDim / 16) + kWords + i] = high ? other : kept;
        } else {
          state.query[set * (kDim / 16) + i] = kept;
        }
      }
      state.factor[set] = shuffle(down, 8 * t), state.bias[set] = shuffle(zero, 8 * t) * base;
      state.start[set] = static_cast<int32_t>(shuffle(total, 8 * t)) * -static_cast<int32_t>(kCentre);
    }
  }

  // ------------------------------------------------------------------------------------------------ scores

  template <Kind kKind>
  static KVK_DEVICE_FN void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (kKind == kBf16)
      mma_bf16(c, a, b0, b1);
    else
      mma_f16(c, a, b0, b1);
  }

  // score[m][h][set]: of token 16 m + 8 h + g.
  template <Kind kKind>
  static KVK_DEVICE_FN void scores(const uint8_t* keys, const State& state,
                                   float (&score)[TileShape<kDim, kRows, kKind>::kTokens / 16][2][kSets]) {
    using Shape = TileShape<kDim, kRows, kKind>;
    const uint32_t lane = lane_index();
    float c[kPairs][2][4];
#pragma unroll
    for (uint32_t i = 0; i < kPairs * 8; ++i) c[i / 8][i / 4 % 2][i % 4] = 0;
#pragma unroll
    for (uint32_t step = 0; step < kDim / 16; ++step) {
      uint32_t m[4];
      load_matrices(m, keys + Shape::place(lane % 16, 2 * step + lane / 16, 0));
#pragma unroll
      for (uint32_t pair = 0; pair < kPairs; ++pair) {
        const uint32_t* b = state.query + pair * (kDim / 8) + 2 * step;
        multiply<kKind>(c[pair][step % 2], m, b[0], b[1]);
      }
    }
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h)
#pragma unroll
      for (uint32_t set = 0; set < kSets; ++set)
        score[0][h][set] = c[set / 2][0][2 * h + set % 2] + c[set / 2][1][2 * h + set % 2];
  }

  // The same of codes, 16 tokens at a time, or all where there is the room: products that wait for each other lie apart then.
  template <Kind kKind>
  static KVK_DEVICE_FN void whole_scores(const uint8_t* keys, const State& state,
                                         float (&score)[TileShape<kDim, kRows, kKind>::kTokens / 16][2][kSets]) {
    using Shape = TileShape<kDim, kRows, kKind>;
    constexpr uint32_t kAtOnce = kSets > 1 ? 1 : Shape::kTokens / 16, kLoads = (Shape::kChunks + 1) / 2;
    const uint32_t lane = lane_index();
#pragma unroll
    for (uint32_t first = 0; first < Shape::kTokens / 16; first += kAtOnce) {
      int32_t c[kAtOnce][kSets][4];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce * kSets * 4; ++i)
        c[i / 4 / kSets][i / 4 % kSets][i % 4] = i % 2 == 0 ? 0 : state.start[i / 4 % kSets];
#pragma unroll
      for (uint32_t load = 0; load < kLoads; ++load) {
        uint32_t m[kAtOnce][4];
        const uint32_t chunk = 2 * load + 1 < Shape::kChunks ? 2 * load + lane / 16 : 2 * load;
#pragma unroll
        for (uint32_t of = 0; of < kAtOnce; ++of) load_matrices(m[of], keys + Shape::place(lane % 16, chunk, 16 * (first + of)));
        if constexpr (kKind == kInt8) {
#pragma unroll
          for (uint32_t i = 0; i < kAtOnce * kSets; ++i) {
            const uint32_t* b = state.query + i % kSets * (kDim / 16) + 2 * load;
            mma_u8(c[i / kSets][i % kSets], m[i / kSets], b[0], b[1]);
          }
        } else {
#pragma unroll
          for (uint32_t half = 0; half < 2 && 2 * load + half < Shape::kChunks; ++half)
#pragma unroll
            for (uint32_t of = 0; of < kAtOnce; ++of) {
              const uint32_t low = m[of][2 * half], high = m[of][2 * half + 1];
              const uint32_t a[4] = {low & 0x0f0f0f0f, high & 0x0f0f0f0f, low >> 4 & 0x0f0f0f0f, high >> 4 & 0x0f0f0f0f};
#pragma unroll
              for (uint32_t set = 0; set < kSets; ++set) {
                const uint32_t* b = state.query + set * (kDim / 16) + 2 * (2 * load + half);
                mma_u8(c[of][set], a, b[0], b[1]);
              }
            }
        }
      }
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce * 2 * kSets; ++i) {
        const uint32_t of = i / kSets / 2, h = i / kSets % 2, set = i % kSets;
        score[first + of][h][set] = static_cast<float>(c[of][set][2 * h] * 256 + c[of][set][2 * h + 1]);
      }
    }
  }

  // ------------------------------------------------------------------------------------------------ values

  // sum += weights x values. weight[m][pair][h]: of tokens 16 m + 8 h .. + 7.
  template <Kind kKind>
  static KVK_DEVICE_FN void add_values(const uint8_t* values,
                                       const uint32_t (&weight)[TileShape<kDim, kRows, kKind>::kTokens / 16][kPairs][2],
                                       State& state) {
    using Shape = TileShape<kDim, kRows, kKind>;
    constexpr uint32_t kLoads = (Shape::kChunks + 1) / 2, kTilesOf = 16 / Shape::kBits;
    const uint32_t lane = lane_index(), row = lane % 8 + lane / 16 * 8;
#pragma unroll
    for (uint32_t m = 0; m < Shape::kTokens / 16; ++m)
#pragma unroll
      for (uint32_t load = 0; load < kLoads; ++load) {
        const bool both = 2 * load + 1 < Shape::kChunks;
        uint32_t x[4];
        load_matrices_transposed(x, values + Shape::place(row, both ? 2 * load + lane / 8 % 2 : 2 * load, 16 * m));
#pragma unroll
        for (uint32_t i = 0; i < (both ? kTilesOf : kTilesOf / 2); ++i) {
          uint32_t a[4];
#pragma unroll
          for (uint32_t j = 0; j < 4; ++j) a[j] = both ? codes<kKind>(x[j], i) : codes<kKind>(x[j / 2 * 2], 2 * i + j % 2);
#pragma unroll
          for (uint32_t pair = 0; pair < kPairs; ++pair)
            multiply<kKind>(state.sum[kTilesOf * load + i][pair], a, weight[m][pair][0], weight[m][pair][1]);
        }
      }
  }

  // Code `i` of both halves of a word, as the last bits of two halves; of int4 every other one 16 times as large.
  template <Kind kKind>
  static KVK_DEVICE_FN uint32_t codes(uint32_t word, uint32_t i) {
    if constexpr (kKind == kInt8) return i == 0 ? word & 0x00ff00ff : permute(word, 0, 0x4341);
    if constexpr (kKind == kInt4) return (i < 2 ? word : word >> 8) & (i % 2 == 0 ? 0x000f000f : 0x00f000f0);
    return word;
  }

  // Which channel lane 4 g + t has in sum[tile][][2 half ..], and what it is multiplied by to be a sum of numbers, not of codes.
  struct Channel {
    uint32_t of;
    float unit;
  };
  template <Kind kKind>
  static KVK_DEVICE_FN Channel channel_of(uint32_t tile, uint32_t half, uint32_t g) {
    if constexpr (kKind == kInt8) return {32 * (tile / 2) + 16 * half + 2 * g + tile % 2, 0x1p24f};
    if constexpr (kKind == kInt4) {
      const uint32_t start = tile / 4 * 64, i = start + 64 <= kDim ? tile % 4 : 2 * (tile % 2) + half;
      return {start + (start + 64 <= kDim ? 32 * half : 0) + 4 * g + i, i % 2 == 0 ? 0x1p24f : 0x1p20f};
    }
    return {16 * tile + 8 * half + g, 1};
  }

  // The sums from one layout into another, 64 channels of a set at a time by way of `scratch`.
  template <Kind kFrom, Kind kTo>
  static KVK_DEVICE_FN void change_layout(float* scratch, State& state) {
    const uint32_t g = lane_index() / 4, t = lane_index() % 4;
#pragma unroll
    for (uint32_t part = 0; part < kSets * ((kDim + 63) / 64); ++part) {
      const uint32_t set = part % kSets, first = part / kSets * 4;
      sync_warp();
#pragma unroll
      for (uint32_t i = 0; i < 8; ++i)
        if (first + i / 2 < kDim / 16) {
          const Channel channel = channel_of<kFrom>(first + i / 2, i % 2, g);
          scratch[channel.of % 64 * 4 + t] = state.sum[first + i / 2][set / 2][i % 2 * 2 + set % 2] * channel.unit;
        }
      sync_warp();
#pragma unroll
      for (uint32_t i = 0; i < 8; ++i)
        if (first + i / 2 < kDim / 16) {
          const Channel channel = channel_of<kTo>(first + i / 2, i % 2, g);
          state.sum[first + i / 2][set / 2][i % 2 * 2 + set % 2] = scratch[channel.of % 64 * 4 + t] * (1.0f / channel.unit);
        }
    }
    sync_warp();
  }

  static KVK_DEVICE_FN void take_layout(Kind kind, float* scratch, State& state) {
    const Kind layout = is_quantised(kind) ? kind : kHalf;
    if (state.layout == layout) return;
    if (state.layout == kInt8) change_layout<kInt8, kHalf>(scratch, state);
    if (state.layout == kInt4) change_layout<kInt4, kHalf>(scratch, state);
    if (layout == kInt8) change_layout<kHalf, kInt8>(scratch, state);
    if (layout == kInt4) change_layout<kHalf, kInt4>(scratch, state);
    state.layout = layout;
  }
};

}  // namespace kvk
