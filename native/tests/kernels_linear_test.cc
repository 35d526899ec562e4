// The CPU's linear layers and norms over memory of exactly the size that the arguments describe, so that the sanitizers see every
// byte read or written outside it: each path against the naive one, outputs that fill no tile, inputs of more than one block,
// with and without gate and bias; and arguments that must be refused. The oracle is in tests/kernels.
#include <cmath>
#include <random>

#include "kernels.h"
#include "tests/check.h"

namespace {

std::mt19937 noise_source(7);

std::vector<float> noise(uint64_t count, float scale = 1) {
  std::vector<float> out(count);
  for (float& value : out) value = scale * std::normal_distribution<float>()(noise_source);
  return out;
}

struct Layer {
  std::vector<float> x, w, up, bias, up_bias, out;
  kvk_linear args{};

  Layer(uint32_t inputs, uint32_t outputs, uint32_t rows, bool gated, bool biased)
      : x(noise(uint64_t{rows} * inputs)),
        w(noise(uint64_t{outputs} * inputs, 0.03f)),
        up(noise(gated ? uint64_t{outputs} * inputs : 0, 0.03f)),
        bias(noise(biased ? outputs : 0)),
        up_bias(noise(biased && gated ? outputs : 0)),
        out(uint64_t{rows} * outputs) {
    args.size = sizeof args, args.abi = KVK_ABI;
    args.inputs = inputs, args.outputs = outputs, args.rows = rows, args.path = KVK_CPU_REFERENCE, args.threads = 1;
    args.x = x.data(), args.w = w.data(), args.out = out.data();
    args.up = gated ? up.data() : nullptr;
    args.bias = biased ? bias.data() : nullptr;
    args.up_bias = biased && gated ? up_bias.data() : nullptr;
    args.x_row_stride = inputs, args.out_row_stride = outputs;
  }
};

}  // namespace

TEST(rows_times_weights_stay_inside_and_agree_with_the_naive_path) {
  for (uint32_t path = KVK_CPU_AVX2; path <= KVK_CPU_AMX; ++path) {
    if (kvk_cpu_lacks(path) != nullptr) continue;
    for (uint32_t inputs : {16u, 176u, 2064u})
      for (uint32_t outputs : {1u, 5u, 64u, 67u, 130u})
        for (uint32_t rows : {1u, 2u, 3u, 7u, 97u}) {
          Layer layer(inputs, outputs, rows, outputs % 2 == 1, rows % 2 == 1);
          CHECK_EQ(kvk_linear_multiply(&layer.args), KVK_OK);
          const std::vector<float> wanted = layer.out;
          layer.args.path = path;
          for (uint32_t threads : {1u, 3u}) {
            layer.args.threads = threads;
            layer.out.assign(layer.out.size(), NAN);
            CHECK_EQ(kvk_linear_multiply(&layer.args), KVK_OK);
            for (uint64_t i = 0; i < wanted.size(); ++i)
              CHECK(std::fabs(layer.out[i] - wanted[i]) <= 1e-4f + 1e-4f * std::fabs(wanted[i]));
          }
        }
  }
}

TEST(norms_stay_inside_and_agree_with_the_naive_path) {
  for (uint32_t path = KVK_CPU_AVX2; path <= KVK_CPU_AMX; ++path) {
    if (kvk_cpu_lacks(path) != nullptr) continue;
    for (uint32_t width : {1u, 31u, 64u, 577u})
      for (uint32_t rows : {1u, 65u}) {
        const std::vector<float> x = noise(uint64_t{rows} * width), weight = noise(width);
        std::vector<float> wanted(x.size()), found(x.size(), NAN);
        kvk_norm args{sizeof args,   KVK_ABI,       rows,  width, KVK_F32, KVK_CPU_REFERENCE, 2, x.data(),
                      weight.data(), wanted.data(), width, width, 1e-5f};
        CHECK_EQ(kvk_norm_rows(&args), KVK_OK);
        args.path = path, args.out = found.data();
        CHECK_EQ(kvk_norm_rows(&args), KVK_OK);
        for (uint64_t i = 0; i < x.size(); ++i) CHECK(std::fabs(found[i] - wanted[i]) <= 1e-5f * (1 + std::fabs(wanted[i])));
      }
  }
}

namespace {

std::vector<uint16_t> halves(const std::vector<float>& of) {
  std::vector<uint16_t> out(of.size());
  for (uint64_t i = 0; i < of.size(); ++i) out[i] = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, of[i]) >> 16);
  return out;
}

float as_float(uint16_t half) { return __builtin_bit_cast(float, uint32_t{half} << 16); }

}  // namespace

TEST(bf16_stays_inside_and_agrees_with_the_naive_path) {
  for (uint32_t path = KVK_CPU_AVX2; path <= KVK_CPU_AMX; ++path) {
    if (kvk_cpu_lacks(path) != nullptr) continue;
    for (uint32_t inputs : {16u, 176u, 2064u})
      for (uint32_t outputs : {1u, 5u, 67u, 130u})
        for (uint32_t rows : {1u, 2u, 3u, 7u, 97u}) {
          Layer layer(inputs, outputs, rows, outputs % 2 == 1, rows % 2 == 1);
          const auto x = halves(layer.x), w = halves(layer.w), up = halves(layer.up), bias = halves(layer.bias),
                     up_bias = halves(layer.up_bias);
          std::vector<uint16_t> wanted(layer.out.size()), found(wanted.size(), 0x7fc0);
          layer.args.dtype = KVK_BF16, layer.args.x = x.data(), layer.args.w = w.data(), layer.args.out = wanted.data();
          if (!up.empty()) layer.args.up = up.data();
          if (!bias.empty()) layer.args.bias = bias.data();
          if (!up_bias.empty()) layer.args.up_bias = up_bias.data();
          CHECK_EQ(kvk_linear_multiply(&layer.args), KVK_OK);
          layer.args.path = path, layer.args.out = found.data();
          CHECK_EQ(kvk_linear_multiply(&layer.args), KVK_OK);
          for (uint64_t i = 0; i < wanted.size(); ++i) {
            const float value = as_float(wanted[i]);
            CHECK(std::fabs(as_float(found[i]) - value) <= 1e-3f + 0.02f * std::fabs(value));
          }
        }
    for (uint32_t width : {1u, 31u, 64u, 577u}) {
      const auto x = halves(noise(uint64_t{65} * width)), weight = halves(noise(width));
      std::vector<uint16_t> wanted(x.size()), found(x.size());
      kvk_norm args{sizeof args,   KVK_ABI,       65,    width, KVK_BF16, KVK_CPU_REFERENCE, 2, x.data(),
                    weight.data(), wanted.data(), width, width, 1e-5f};
      CHECK_EQ(kvk_norm_rows(&args), KVK_OK);
      args.path = path, args.out = found.data();
      CHECK_EQ(kvk_norm_rows(&args), KVK_OK);
      for (uint64_t i = 0; i < x.size(); ++i)
        CHECK(std::fabs(as_float(found[i]) - as_float(wanted[i])) <= 0.02f * (1e-3f + std::fabs(as_float(wanted[i]))));
    }
    for (uint32_t dim : {32u, 96u}) {
      const auto q = halves(noise(uint64_t{65} * 3 * dim)), k = halves(noise(uint64_t{65} * dim));
      const auto cos = halves(noise(uint64_t{65} * dim)), sin = halves(noise(uint64_t{65} * dim));
      auto q_naive = q, k_naive = k, q_here = q, k_here = k;
      kvk_turns args{sizeof args,    KVK_ABI,        65,         3,         1, dim, KVK_BF16, KVK_CPU_REFERENCE, 2,
                     q_naive.data(), k_naive.data(), cos.data(), sin.data()};
      CHECK_EQ(kvk_turn_rows(&args), KVK_OK);
      args.path = path, args.q = q_here.data(), args.k = k_here.data();
      CHECK_EQ(kvk_turn_rows(&args), KVK_OK);
      CHECK(q_here == q_naive && k_here == k_naive);
    }
  }
}

TEST(weights_that_are_rounded_stay_inside_and_agree_with_the_naive_path) {
  for (uint32_t path = KVK_CPU_AVX2; path <= KVK_CPU_AMX; ++path) {
    if (kvk_cpu_lacks(path) != nullptr) continue;
    for (uint32_t inputs : {16u, 176u, 2064u, 2112u})
      for (uint32_t outputs : {1u, 5u, 48u, 67u})
        for (uint32_t rows : {1u, 3u, 7u, 33u, 97u}) {
          Layer layer(inputs, outputs, rows, false, rows % 2 == 1);
          const auto x = halves(layer.x);
          layer.args.dtype = KVK_ROUNDED, layer.args.x = x.data();
          CHECK_EQ(kvk_linear_multiply(&layer.args), KVK_OK);
          const std::vector<float> wanted = layer.out;
          layer.args.path = path, layer.args.threads = 2;
          layer.out.assign(layer.out.size(), NAN);
          CHECK_EQ(kvk_linear_multiply(&layer.args), KVK_OK);
          for (uint64_t i = 0; i < wanted.size(); ++i)
            CHECK(std::fabs(layer.out[i] - wanted[i]) <= 1e-4f + 1e-4f * std::fabs(wanted[i]));
        }
  }
}

TEST(wrong_arguments_are_refused) {
  Layer layer(32, 8, 2, false, false);
  const kvk_linear right = layer.args;
  auto refused = [&](int status) {
    CHECK_EQ(kvk_linear_multiply(&layer.args), status);
    layer.args = right;
  };
  layer.args.size -= 8, refused(KVK_INVALID);
  layer.args.inputs = 24, refused(KVK_UNSUPPORTED);
  layer.args.inputs = 0, refused(KVK_UNSUPPORTED);
  layer.args.rows = static_cast<uint32_t>(-1), refused(KVK_INVALID);
  layer.args.outputs = static_cast<uint32_t>(-1), refused(KVK_INVALID);
  layer.args.x = nullptr, refused(KVK_INVALID);
  layer.args.path = 99, refused(KVK_UNSUPPORTED);
  layer.args.dtype = KVK_F16, refused(KVK_UNSUPPORTED);
  layer.args.dtype = KVK_ROUNDED, layer.args.up = layer.w.data(), refused(KVK_UNSUPPORTED);
  layer.args.rows = 0, layer.args.x = nullptr, refused(KVK_OK);
  kvk_norm norm{};
  CHECK_EQ(kvk_norm_rows(&norm), KVK_INVALID);
  norm.size = sizeof norm, norm.abi = KVK_ABI, norm.rows = 1, norm.width = 4;
  CHECK_EQ(kvk_norm_rows(&norm), KVK_INVALID);
}
