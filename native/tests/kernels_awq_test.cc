// The CPU's AWQ kernels, and its product with a matrix in 16 bits, over memory of exactly the size that the arguments describe,
// so that the sanitizers see every byte read or written outside it: each path against the naive one, groups of 32, 64 and 128,
// widths that fill no vector, with and without zeros and bias; and arguments that must be refused. The oracle is in
// tests/kernels.
#include <algorithm>
#include <cmath>
#include <random>

#include "kernels.h"
#include "tests/check.h"

namespace {

std::mt19937 noise_source(7);
uint32_t bits() { return static_cast<uint32_t>(noise_source()); }

struct Layer {
  std::vector<uint32_t> words, zeros;
  std::vector<uint16_t> scales;
  std::vector<float> x, bias, out;
  kvk_awq args{};

  Layer(uint32_t inputs, uint32_t outputs, uint32_t group, uint32_t rows, bool zeroed)
      : words(uint64_t{inputs} * outputs / 8),
        zeros(zeroed ? uint64_t{inputs} / group * outputs / 8 : 0),
        scales(uint64_t{inputs} / group * outputs),
        x(uint64_t{rows} * inputs),
        bias(zeroed ? outputs : 0),
        out(uint64_t{rows} * outputs) {
    for (auto* list : {&words, &zeros})
      for (uint32_t& word : *list) word = bits();
    for (uint16_t& scale : scales) scale = static_cast<uint16_t>(0x2000 | (bits() & 0x3ff));  // 0.0078 and above
    for (auto* list : {&x, &bias})
      for (float& value : *list) value = std::normal_distribution<float>()(noise_source);
    args.size = sizeof args, args.abi = KVK_ABI;
    args.inputs = inputs, args.outputs = outputs, args.group = group, args.rows = rows;
    args.dtype = KVK_F32, args.path = KVK_CPU_REFERENCE;
    args.words = words.data();
    args.zeros = zeroed ? zeros.data() : nullptr;
    args.scales = scales.data();
    args.x = x.data();
    args.bias = zeroed ? bias.data() : nullptr;
    args.out = out.data();
    args.x_row_stride = 4 * int64_t{inputs};
    args.out_row_stride = 4 * int64_t{outputs};
    args.threads = 1;
  }
};

// The same layer with its words in panels.
void lay_in_panels(Layer& layer) {
  const kvk_awq& a = layer.args;
  const uint32_t width = a.outputs / 8;
  std::vector<uint32_t> laid;
  for (uint32_t tile = 0; tile < a.inputs; tile += KVK_AWQ_TILE_INPUTS)
    for (uint32_t panel = 0; panel < width; panel += KVK_AWQ_PANEL_WORDS)
      for (uint32_t k = tile; k < std::min(a.inputs, tile + KVK_AWQ_TILE_INPUTS); ++k)
        for (uint32_t word = panel; word < std::min(width, panel + KVK_AWQ_PANEL_WORDS); ++word)
          laid.push_back(layer.words[uint64_t{k} * width + word]);
  layer.words = laid;
  layer.args.words = layer.words.data();
  layer.args.order = KVK_AWQ_PANELS;
}

bool here(uint32_t path) {
  Layer probe(32, 8, 32, 1, false);
  probe.args.path = path;
  return kvk_awq_multiply(&probe.args) == KVK_OK;
}

}  // namespace

TEST(rows_times_words_stay_inside_and_agree_with_the_naive_path) {
  for (uint32_t path = KVK_CPU_REFERENCE + 1; path < KVK_CPU_REFERENCE + 6; ++path) {
    if (!here(path)) continue;
    for (uint32_t group : {2u, 32u, 64u, 128u, 256u})
      for (uint32_t outputs : {8u, 56u, 64u, 72u, 264u})
        for (uint32_t rows : {1u, 3u, 7u, 16u}) {
          Layer layer(256, outputs, group, rows, rows % 2 == 1);
          CHECK_EQ(kvk_awq_multiply(&layer.args), KVK_OK);
          const std::vector<float> wanted = layer.out;
          layer.args.path = path;
          layer.args.threads = rows % 3 + 1;
          for (uint32_t dtype : {KVK_F32, KVK_BF16}) {
            layer.args.dtype = dtype;
            CHECK_EQ(kvk_awq_multiply(&layer.args), KVK_OK);
            bool near = true;
            for (size_t i = 0; i < wanted.size(); ++i)
              near = near && std::abs(layer.out[i] - wanted[i]) < (dtype == KVK_F32 ? 1e-3f : 2e-2f);
            CHECK(near);
          }
        }
  }
}

TEST(tiles_of_columns_stay_inside_and_have_the_bits_of_the_naive_path) {
  for (uint32_t path = KVK_CPU_REFERENCE + 1; path < KVK_CPU_REFERENCE + 6; ++path) {
    if (!here(path)) continue;
    for (uint32_t group : {32u, 64u, 128u})
      for (uint32_t dtype : {KVK_F32, KVK_F16, KVK_BF16})
        for (uint32_t first : {0u, 8u, 40u}) {
          const uint32_t outputs = 72, columns = outputs - first, width = dtype == KVK_F32 ? 4 : 2;
          Layer layer(256, outputs, group, 0, first == 8);
          std::vector<uint8_t> wanted(uint64_t{256} * columns * width), found(wanted.size());
          kvk_awq& a = layer.args;
          a.dtype = dtype;
          a.columns = columns;
          a.words += first / 8;
          a.zeros = a.zeros == nullptr ? nullptr : a.zeros + first / 8;
          a.scales += first;
          a.out_row_stride = int64_t{columns} * width;
          a.out = wanted.data();
          CHECK_EQ(kvk_awq_dequantise(&a), KVK_OK);
          a.out = found.data();
          a.path = path;
          a.threads = 3;
          CHECK_EQ(kvk_awq_dequantise(&a), KVK_OK);
          CHECK(found == wanted);
        }
  }
}

TEST(words_in_panels_stay_inside_and_give_the_same_bits) {
  for (uint32_t path = KVK_CPU_REFERENCE; path < KVK_CPU_REFERENCE + 6; ++path) {
    if (!here(path)) continue;
    for (uint32_t group : {2u, 32u, 64u, 128u})
      for (uint32_t inputs : {128u, 320u})
        for (uint32_t outputs : {8u, 64u, 136u, 264u})
          for (uint32_t rows : {1u, 3u, 16u}) {
            if (inputs % group != 0) continue;
            Layer layer(inputs, outputs, group, rows, rows == 3);
            layer.args.path = path;
            layer.args.threads = rows % 3 + 1;
            layer.args.dtype = rows == 16 ? KVK_BF16 : KVK_F32;
            CHECK_EQ(kvk_awq_multiply(&layer.args), KVK_OK);
            const std::vector<float> wanted = layer.out;
            std::fill(layer.out.begin(), layer.out.end(), 0.0f);
            lay_in_panels(layer);
            CHECK_EQ(kvk_awq_multiply(&layer.args), KVK_OK);
            CHECK(layer.out == wanted);
          }
  }
}

TEST(tiles_of_columns_out_of_panels_have_the_same_bits) {
  for (uint32_t path = KVK_CPU_REFERENCE; path < KVK_CPU_REFERENCE + 6; ++path) {
    if (!here(path)) continue;
    for (uint32_t first : {0u, 8u, 128u, 136u}) {
      Layer layer(192, 200, 32, 0, true);
      kvk_awq& a = layer.args;
      std::vector<float> wanted(uint64_t{192} * (200 - first)), found(wanted.size());
      a.path = path, a.threads = 3, a.columns = 200 - first, a.out_row_stride = int64_t{a.columns} * 4;
      a.words += first / 8, a.zeros += first / 8, a.scales += first, a.out = wanted.data();
      CHECK_EQ(kvk_awq_dequantise(&a), KVK_OK);
      lay_in_panels(layer);
      a.first = first, a.out = found.data();
      CHECK_EQ(kvk_awq_dequantise(&a), KVK_OK);
      CHECK(found == wanted);
    }
  }
}

TEST(what_does_not_fit_is_refused) {
  Layer layer(256, 64, 32, 1, true);
  auto refused = [&](auto change) {
    kvk_awq a = layer.args;
    change(a);
    return kvk_awq_dequantise(&a) == KVK_INVALID;
  };
  CHECK(refused([](kvk_awq& a) { a.columns = 12; }));
  CHECK(refused([](kvk_awq& a) { a.columns = 72; }));
  CHECK(refused([](kvk_awq& a) { a.columns = 64, a.out_row_stride = 255; }));
  CHECK(refused([](kvk_awq& a) { a.columns = 64, a.out = nullptr; }));
  CHECK(refused([](kvk_awq& a) { a.columns = 64, a.dtype = 77; }));
  CHECK(refused([](kvk_awq& a) { a.group = 48; }));
  CHECK(refused([](kvk_awq& a) { a.group = 0; }));
  CHECK(refused([](kvk_awq& a) { a.outputs = 60; }));
  CHECK(refused([](kvk_awq& a) { a.size -= 8; }));
  CHECK(!refused([](kvk_awq& a) { a.columns = 0; }));
  CHECK(refused([](kvk_awq& a) { a.order = 2; }));
  CHECK(refused([](kvk_awq& a) { a.order = KVK_AWQ_PANELS, a.group = 256; }));
  CHECK(refused([](kvk_awq& a) { a.first = 8, a.columns = 8; }));  // of the checkpoint's order
  CHECK(refused([](kvk_awq& a) { a.order = KVK_AWQ_PANELS, a.first = 12, a.columns = 8; }));
  CHECK(refused([](kvk_awq& a) { a.order = KVK_AWQ_PANELS, a.first = 64, a.columns = 8; }));
}

TEST(rows_times_a_matrix_stay_inside_and_agree_with_the_naive_path) {
  for (uint32_t path = KVK_CPU_REFERENCE; path < KVK_CPU_REFERENCE + 6; ++path) {
    if (!here(path)) continue;
    for (uint32_t inputs : {1u, 31u, 32u, 70u})
      for (uint32_t outputs : {1u, 7u, 8u, 29u})
        for (uint32_t rows : {1u, 2u, 3u, 7u}) {
          std::vector<uint16_t> weights(uint64_t{outputs} * inputs);
          for (uint16_t& weight : weights) weight = static_cast<uint16_t>(0x3c00 | (bits() & 0x83ff));  // 1 to 2, either sign
          std::vector<float> x(uint64_t{rows} * inputs), wanted(uint64_t{rows} * outputs), found(wanted.size());
          for (float& value : x) value = std::normal_distribution<float>()(noise_source);
          kvk_product a{};
          a.size = sizeof a, a.abi = KVK_ABI, a.inputs = inputs, a.outputs = outputs, a.rows = rows;
          a.dtype = KVK_F16, a.path = KVK_CPU_REFERENCE, a.threads = 1;
          a.weights = weights.data();
          a.x = x.data();
          a.out = wanted.data();
          a.weight_row_stride = 2 * int64_t{inputs};
          a.x_row_stride = 4 * int64_t{inputs};
          a.out_row_stride = 4 * int64_t{outputs};
          CHECK_EQ(kvk_multiply(&a), KVK_OK);
          a.path = path;
          a.threads = rows;
          a.out = found.data();
          CHECK_EQ(kvk_multiply(&a), KVK_OK);
          bool near = true;
          for (size_t i = 0; i < wanted.size(); ++i) near = near && std::abs(found[i] - wanted[i]) < 1e-3f;
          CHECK(near);
        }
  }
}

TEST(a_matrix_that_does_not_fit_is_refused) {
  kvk_product a{};
  a.size = sizeof a, a.abi = KVK_ABI, a.inputs = 32, a.outputs = 8, a.rows = 1, a.dtype = KVK_BF16, a.path = KVK_CPU_REFERENCE;
  CHECK_EQ(kvk_multiply(&a), KVK_INVALID);  // no pointers
  a.outputs = 0;
  CHECK_EQ(kvk_multiply(&a), KVK_OK);
  a.rows = KVK_PRODUCT_ROWS + 1;
  CHECK_EQ(kvk_multiply(&a), KVK_INVALID);
  a.rows = 1;
  a.dtype = KVK_F32;
  CHECK_EQ(kvk_multiply(&a), KVK_INVALID);
}
