// The AWQ kernels' arrangement (native/cuda/awq_tile.h), compiled by g++: every code of a checkpoint has one place in the
// repacked words and comes back from it; m16n8k16 carried out by hand over the lanes' registers, as PTX describes them, gives
// the product of x and the weights. The oracle is (q - z) * s in double, the order of nibbles the published one.
#include <cmath>
#include <random>
#include <set>

#include "cuda/awq_tile.h"
#include "cuda/rows_tile.h"
#include "tests/check.h"

namespace {

using namespace kvk::awq;

std::mt19937 noise_source(5);

uint32_t bits() { return static_cast<uint32_t>(noise_source()); }
float noise() { return std::normal_distribution<float>()(noise_source); }

// (q - z) * s, by the words of the format.
double weight_of(const kvk_awq& a, uint32_t k, uint32_t n) {
  const uint32_t nibbles[] = {0, 4, 1, 5, 2, 6, 3, 7};  // of columns 0..7
  const uint32_t shift = 4 * nibbles[n % 8], group = k / a.group;
  const int code = a.words[k * (a.outputs / 8) + n / 8] >> shift & 15,
            zero = a.zeros[group * (a.outputs / 8) + n / 8] >> shift & 15;
  return double{kvk::from_half(a.scales[group * a.outputs + n])} * (code - zero);
}

struct Layer {
  std::vector<uint32_t> words, zeros, packed;
  std::vector<uint16_t> scales, x;
  kvk_awq args{};

  Layer(uint32_t inputs, uint32_t outputs, uint32_t group, uint32_t rows, uint32_t dtype) {
    for (size_t i = 0; i < size_t{inputs} * outputs / 8; ++i) words.push_back(bits());
    for (size_t i = 0; i < size_t{inputs / group} * outputs / 8; ++i) zeros.push_back(bits());
    for (size_t i = 0; i < size_t{inputs / group} * outputs; ++i)
      scales.push_back(kvk::to_half(0.01f + 0.01f * std::fabs(noise())));
    for (size_t i = 0; i < size_t{rows} * inputs; ++i)
      x.push_back(dtype == KVK_F16 ? kvk::to_half(noise()) : kvk::to_bf16(noise()));
    x.resize(x.size() + 8);  // for the alignment
    auto* aligned = reinterpret_cast<uint16_t*>((reinterpret_cast<uintptr_t>(x.data()) + 15) / 16 * 16);
    std::memmove(aligned, x.data(), size_t{rows} * inputs * 2);
    args.inputs = inputs, args.outputs = outputs, args.group = group, args.dtype = dtype, args.rows = rows;
    args.words = words.data(), args.zeros = zeros.data(), args.scales = scales.data();
    args.x = aligned, args.x_row_stride = 2 * int64_t{inputs};
    packed.resize(words.size(), 0);
    for (uint32_t strip = 0; strip < outputs / kStrip; ++strip)
      for (uint32_t tile = 0; tile < inputs / kTile; ++tile)
        for (uint32_t lane = 0; lane < kLanes; ++lane)
          for (uint32_t step = 0; step < kSteps; ++step)
            packed[packed_index(inputs, strip, tile, lane, step)] = packed_word(args, strip, tile, lane, step);
  }

  kvk::Words4 lane_words(uint32_t strip, uint32_t tile, uint32_t lane) const {
    const uint32_t* w = packed.data() + packed_index(args.inputs, strip, tile, lane, 0);
    return {{w[0], w[1], w[2], w[3]}};
  }
};

float half_of(uint32_t dtype, uint32_t word, uint32_t i) {
  const auto bits = static_cast<uint16_t>(word >> 16 * i);
  return dtype == KVK_F16 ? kvk::from_half(bits) : kvk::from_bf16(bits);
}

// d += a b of all lanes, from what PTX says of mma.m16n8k16: lane 4g + t holds a[g or g + 8][2t, 2t + 1 or 8 more], b[the same
// k][g], d[g or g + 8][2t, 2t + 1].
void multiply_by_hand(uint32_t dtype, float (&d)[kLanes][4], const uint32_t (&a)[kLanes][4], const uint32_t (&b)[kLanes][2]) {
  float left[16][16], right[16][8];
  for (uint32_t lane = 0; lane < kLanes; ++lane)
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t g = lane / 4, k = 2 * (lane % 4) + i;
      for (uint32_t reg = 0; reg < 4; ++reg) left[g + 8 * (reg % 2)][k + 8 * (reg / 2)] = half_of(dtype, a[lane][reg], i);
      for (uint32_t reg = 0; reg < 2; ++reg) right[k + 8 * reg][g] = half_of(dtype, b[lane][reg], i);
    }
  for (uint32_t lane = 0; lane < kLanes; ++lane)
    for (uint32_t c = 0; c < 4; ++c)
      for (uint32_t k = 0; k < 16; ++k) d[lane][c] += left[lane / 4 + 8 * (c / 2)][k] * right[k][2 * (lane % 4) + c % 2];
}

template <int Dtype>
void multiply_one_strip(const Layer& layer, uint32_t strip, uint32_t row_tile, float (&sums)[kLanes][4]) {
  const kvk_awq& a = layer.args;
  for (uint32_t tile = 0; tile < a.inputs / kTile; ++tile) {
    float part[kLanes][4] = {};
    GroupOf groups[kLanes];
    for (uint32_t lane = 0; lane < kLanes; ++lane) groups[lane] = group_of<Dtype>(a, tile * kTile / a.group, strip, lane);
    for (uint32_t step = 0; step < kSteps; ++step) {
      uint32_t weights[kLanes][4], x[kLanes][2];
      for (uint32_t lane = 0; lane < kLanes; ++lane) {
        operand_of<Dtype>(layer.lane_words(strip, tile, lane).w[step], groups[lane], weights[lane]);
        const kvk::Words4 half = x_half(a, 8 * row_tile + lane / 4, tile, lane, step / 2);
        x[lane][0] = half.w[step % 2 * 2], x[lane][1] = half.w[step % 2 * 2 + 1];
      }
      multiply_by_hand(Dtype, part, weights, x);
    }
    for (uint32_t lane = 0; lane < kLanes; ++lane)
      for (uint32_t c = 0; c < 4; ++c) sums[lane][c] += groups[lane].scale[c / 2] * part[lane][c];
  }
}

template <int Dtype>
void check_product(uint32_t inputs, uint32_t outputs, uint32_t group, uint32_t rows) {
  const Layer layer(inputs, outputs, group, rows, Dtype);
  for (uint32_t strip = 0; strip < outputs / kStrip; ++strip)
    for (uint32_t row_tile = 0; 8 * row_tile < rows; ++row_tile) {
      float sums[kLanes][4] = {};
      multiply_one_strip<Dtype>(layer, strip, row_tile, sums);
      std::set<uint32_t> seen;
      for (uint32_t lane = 0; lane < kLanes; ++lane)
        for (uint32_t c = 0; c < 4; ++c) {
          const Place place = sum_place(lane, c);
          CHECK(seen.insert(place.k * kStrip + place.n).second);
          const uint32_t row = 8 * row_tile + place.k;
          double wanted = 0, size = 0;
          for (uint32_t k = 0; k < inputs && row < rows; ++k) {
            const double term = double{kvk::element(Dtype, kvk::at(layer.args.x, row * layer.args.x_row_stride), k)} *
                                weight_of(layer.args, k, strip * kStrip + place.n);
            wanted += term, size += std::fabs(term);
          }
          CHECK(std::fabs(sums[lane][c] - wanted) <= 1e-6 * size);
        }
    }
}

}  // namespace

TEST(a_word_holds_its_columns_in_the_published_order) {
  const uint32_t order[] = {0, 2, 4, 6, 1, 3, 5, 7};
  for (uint32_t i = 0; i < 8; ++i) CHECK_EQ(nibble_of(order[i]), i);
  const uint32_t word = 0x76543210;
  for (uint32_t i = 0; i < 8; ++i) CHECK_EQ(code_at(&word, 8, 0, order[i]), i);
}

TEST(every_code_has_one_place) {
  std::set<uint32_t> seen;
  for (uint32_t lane = 0; lane < kLanes; ++lane)
    for (uint32_t step = 0; step < kSteps; ++step)
      for (uint32_t j = 0; j < 8; ++j) {
        const Place place = place_of(lane, step, j);
        CHECK(place.n < kStrip && place.k < kTile);
        CHECK(seen.insert(place.n * kTile + place.k).second);
      }
  CHECK_EQ(seen.size(), size_t{kStrip * kTile});
}

TEST(what_a_lane_dequantises_is_the_checkpoints_weights) {
  const Layer layer(256, 48, 128, 1, KVK_F16);
  for (uint32_t strip = 0; strip < 3; ++strip)
    for (uint32_t tile = 0; tile < 4; ++tile)
      for (uint32_t lane = 0; lane < kLanes; ++lane) {
        float rows[2][16];
        weights_of_lane(layer.args, layer.lane_words(strip, tile, lane), strip, tile, lane, rows);
        for (uint32_t i = 0; i < 32; ++i) {
          const uint32_t n = strip * kStrip + lane / 4 + 8 * (i / 16), k = tile * kTile + 16 * (lane % 4) + i % 16;
          CHECK_EQ(rows[i / 16][i % 16], weight(layer.args, k, n));
        }
      }
}

TEST(the_tensor_cores_operands_give_the_product) {
  check_product<KVK_F16>(128, 32, 64, 8);
  check_product<KVK_F16>(256, 16, 128, 3);
  check_product<KVK_BF16>(128, 32, 64, 1);
  check_product<KVK_BF16>(256, 16, 256, 13);
}
