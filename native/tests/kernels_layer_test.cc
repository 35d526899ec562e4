// kvk_layer_before and kvk_layer_behind over memory of exactly the size that the arguments describe, the workspace too: numbers
// and packed words, fp32 and bf16, beside the same calls one by one, to the bit; and arguments that must be refused.
#include <cmath>
#include <cstring>
#include <random>

#include "kernels.h"
#include "tests/check.h"

namespace {

constexpr uint32_t kHidden = 48, kHeadDim = 32, kQuery = 96, kKey = 32, kWide = 80, kGroup = 16;

std::mt19937 noise_source(11);

// Elements of either type; bf16 as its bits.
struct Elements {
  uint32_t dtype;
  std::vector<float> floats;
  std::vector<uint16_t> halves;

  Elements(uint32_t kind, uint64_t count, float scale = 1) : dtype(kind) {
    for (uint64_t i = 0; i < count; ++i) {
      const float value = scale * std::normal_distribution<float>()(noise_source);
      if (kind == KVK_F32)
        floats.push_back(value);
      else
        halves.push_back(static_cast<uint16_t>(__builtin_bit_cast(uint32_t, value) >> 16));
    }
  }
  void* data() { return dtype == KVK_F32 ? static_cast<void*>(floats.data()) : halves.data(); }
  bool operator==(const Elements&) const = default;
};

struct Packed {
  std::vector<uint32_t> words, zeros;
  std::vector<uint16_t> scales;

  Packed(uint32_t inputs, uint32_t outputs)
      : words(uint64_t{inputs} * outputs / 8), zeros(inputs / kGroup * outputs / 8), scales(inputs / kGroup * outputs, 0x2400) {
    for (uint32_t& word : words) word = static_cast<uint32_t>(noise_source());
    for (uint32_t& word : zeros) word = static_cast<uint32_t>(noise_source());
  }
};

struct Weights {
  Elements numbers, bias;
  Packed packed;
  kvk_weights made{};

  Weights(uint32_t dtype, bool words, uint32_t inputs, uint32_t outputs)
      : numbers(dtype, words ? 0 : uint64_t{inputs} * outputs, 0.2f),
        bias(words ? uint32_t{KVK_F32} : dtype, outputs),
        packed(words ? inputs : 0, words ? outputs : 0) {
    made.inputs = inputs, made.outputs = outputs, made.group = words ? kGroup : 0;
    made.values = words ? static_cast<const void*>(packed.words.data()) : numbers.data();
    made.bias = bias.data(), made.zeros = packed.zeros.data(), made.scales = packed.scales.data();
  }
};

struct Layer {
  uint32_t dtype, rows;
  Weights query, key, value, out, gate, up, down;
  Elements x, first, second, heads, cos, sin, q, k, v, attended, middle, result;
  std::vector<char> workspace;
  kvk_layer_in before{};
  kvk_layer_out behind{};

  Layer(uint32_t kind, uint32_t count, bool words)
      : dtype(kind),
        rows(count),
        query(kind, words, kHidden, kQuery),
        key(kind, words, kHidden, kKey),
        value(kind, words, kHidden, kKey),
        out(kind, words, kQuery, kHidden),
        gate(kind, words, kHidden, kWide),
        up(kind, words, kHidden, kWide),
        down(kind, words, kWide, kHidden),
        x(kind, count * kHidden),
        first(kind, kHidden),
        second(kind, kHidden),
        heads(kind, kHeadDim),
        cos(kind, count * kHeadDim),
        sin(kind, count * kHeadDim),
        q(kind, count * kQuery),
        k(kind, count * kKey),
        v(kind, count * kKey),
        attended(kind, count * kQuery),
        middle(kind, count * kHidden),
        result(kind, count * kHidden) {
    before.size = sizeof before, before.abi = KVK_ABI, before.rows = rows, before.head_dim = kHeadDim, before.dtype = dtype;
    before.epsilon = 1e-5f, before.query_epsilon = 1e-4f, before.key_epsilon = 1e-3f;
    before.x = x.data(), before.norm = first.data(), before.query_norm = before.key_norm = heads.data();
    before.cos = cos.data(), before.sin = sin.data(), before.q = q.data(), before.k = k.data(), before.v = v.data();
    before.query = query.made, before.key = key.made, before.value = value.made;
    behind.size = sizeof behind, behind.abi = KVK_ABI, behind.rows = rows, behind.dtype = dtype;
    behind.epsilon = 1e-5f, behind.factor = 0.5f;
    behind.attended = attended.data(), behind.residual = x.data(), behind.norm = second.data();
    behind.middle = middle.data(), behind.result = result.data();
    behind.out = out.made, behind.gate = gate.made, behind.up = up.made, behind.down = down.made;
  }

  void run(uint32_t path, uint32_t threads) {
    before.path = behind.path = path, before.threads = behind.threads = threads;
    workspace.assign(kvk_layer_in_workspace(&before), 0);
    before.workspace = workspace.data(), before.workspace_bytes = workspace.size();
    CHECK_EQ(kvk_layer_before(&before), KVK_OK);
    workspace.assign(kvk_layer_out_workspace(&behind), 0);
    behind.workspace = workspace.data(), behind.workspace_bytes = workspace.size();
    CHECK_EQ(kvk_layer_behind(&behind), KVK_OK);
  }
};

// The part before the attention by single calls; of numbers.
void check_before(Layer& layer, uint32_t path) {
  const uint32_t rows = layer.rows, dtype = layer.dtype;
  Elements normal(dtype, rows * kHidden), q(dtype, rows * kQuery), k(dtype, rows * kKey), v(dtype, rows * kKey);
  const auto norm = [&](Elements& in, Elements& weight, uint32_t count, uint32_t width, float epsilon, Elements& out) {
    const kvk_norm args{sizeof args, KVK_ABI,       count,      width, dtype, path,   1,
                        in.data(),   weight.data(), out.data(), width, width, epsilon};
    CHECK_EQ(kvk_norm_rows(&args), KVK_OK);
  };
  const auto product = [&](Weights& w, Elements& out) {
    kvk_linear args{};
    args.size = sizeof args, args.abi = KVK_ABI, args.inputs = kHidden, args.outputs = w.made.outputs, args.rows = rows;
    args.dtype = dtype, args.path = path, args.x = normal.data(), args.w = w.numbers.data(), args.bias = w.bias.data();
    args.out = out.data(), args.x_row_stride = kHidden, args.out_row_stride = w.made.outputs;
    CHECK_EQ(kvk_linear_multiply(&args), KVK_OK);
  };
  norm(layer.x, layer.first, rows, kHidden, 1e-5f, normal);
  product(layer.query, q), product(layer.key, k), product(layer.value, v);
  norm(q, layer.heads, rows * kQuery / kHeadDim, kHeadDim, 1e-4f, q);
  norm(k, layer.heads, rows * kKey / kHeadDim, kHeadDim, 1e-3f, k);
  const kvk_turns turns{sizeof turns, KVK_ABI, rows,     kQuery / kHeadDim, kKey / kHeadDim,  kHeadDim,        dtype,
                        path,         1,       q.data(), k.data(),          layer.cos.data(), layer.sin.data()};
  CHECK_EQ(kvk_turn_rows(&turns), KVK_OK);
  CHECK(q == layer.q && k == layer.k && v == layer.v);
}

}  // namespace

TEST(a_layer_stays_inside_and_has_the_bits_of_its_calls) {
  for (uint32_t path = KVK_CPU_REFERENCE; path <= KVK_CPU_AMX; ++path) {
    if (kvk_cpu_lacks(path) != nullptr) continue;
    for (uint32_t dtype : {KVK_F32, KVK_BF16})
      for (uint32_t rows : {1u, 7u, 48u})
        for (bool words : {false, true}) {
          Layer layer(dtype, rows, words);
          layer.run(path, 1);
          const Elements q = layer.q, result = layer.result;
          if (!words) check_before(layer, path);
          layer.run(path, 3);
          CHECK(q == layer.q && result == layer.result);
        }
  }
}

TEST(a_rows_bits_are_its_own) {
  for (uint32_t dtype : {KVK_F32, KVK_BF16})
    for (bool words : {false, true}) {
      Layer layer(dtype, 7, words);
      layer.run(KVK_CPU_AUTO, 1);
      const Elements q = layer.q, result = layer.result;
      layer.before.rows = layer.behind.rows = 1;
      layer.run(KVK_CPU_AUTO, 1);
      const uint64_t width = dtype == KVK_F32 ? 4 : 2;
      CHECK(std::memcmp(Elements(q).data(), layer.q.data(), width * kQuery) == 0);
      CHECK(std::memcmp(Elements(result).data(), layer.result.data(), width * kHidden) == 0);
    }
}

// Layers around an attention of one query a row, each over a tail of its own.
struct Stack {
  static constexpr uint32_t kTokens = 5, kLayers = 3;
  std::vector<Layer> layers;
  std::vector<Elements> sides;  // [K, V][rows][tokens][heads][head_dim] of each layer
  std::vector<kvk_sequence> sequences;
  std::vector<int64_t> positions;
  std::vector<char> workspace;
  std::vector<kvk_layer_in> before;
  std::vector<kvk_attention> attention;
  std::vector<kvk_layer_out> behind;
  Elements flow[2];

  Stack(uint32_t dtype, uint32_t rows)
      : positions(rows, kTokens - 1), workspace(1 << 20), flow{{dtype, rows * kHidden}, {dtype, rows * kHidden}} {
    const uint64_t width = dtype == KVK_F32 ? 4 : 2;
    layers.reserve(kLayers);
    for (uint32_t i = 0; i < kLayers; ++i) {
      layers.emplace_back(dtype, rows, false);
      sides.emplace_back(dtype, uint64_t{2} * rows * kTokens * kKey);
    }
    sequences.resize(kLayers * rows);
    for (uint32_t i = 0; i < kLayers; ++i) {
      for (uint32_t row = 0; row < rows; ++row) {
        kvk_segment& tail = sequences[i * rows + row].tail;
        char* k = static_cast<char*>(sides[i].data()) + row * kTokens * kKey * width;
        tail.k = k, tail.v = k + rows * kTokens * kKey * width, tail.codec = dtype, tail.tokens = kTokens;
        tail.k_token_stride = tail.v_token_stride = kKey * width, tail.k_head_stride = tail.v_head_stride = kHeadDim * width;
      }
      Layer& layer = layers[i];
      kvk_attention a{};
      a.size = sizeof a, a.abi = KVK_ABI, a.batch = rows, a.query_heads = kQuery / kHeadDim, a.kv_heads = kKey / kHeadDim;
      a.head_dim = kHeadDim, a.query_tokens = 1, a.dtype = dtype, a.q = layer.q.data(), a.out = layer.attended.data();
      a.q_batch_stride = a.out_batch_stride = kQuery * width, a.q_head_stride = a.out_head_stride = kHeadDim * width;
      a.q_token_stride = a.out_token_stride = kQuery * width, a.q_position = positions.data(), a.scale = 0.2f, a.causal = 1;
      a.sequences = sequences.data() + i * rows, a.threads = 1;
      layer.before.x = layer.behind.residual = flow[i % 2].data(), layer.behind.result = flow[1 - i % 2].data();
      layer.before.threads = layer.behind.threads = 1;
      before.push_back(layer.before), attention.push_back(a), behind.push_back(layer.behind);
    }
    for (uint32_t i = 0; i < kLayers; ++i) {
      before[i].workspace = attention[i].workspace = behind[i].workspace = workspace.data();
      before[i].workspace_bytes = attention[i].workspace_bytes = behind[i].workspace_bytes = workspace.size();
    }
  }
};

TEST(layers_have_the_bits_of_their_calls_one_by_one) {
  for (uint32_t dtype : {KVK_F32, KVK_BF16})
    for (uint32_t rows : {1u, 5u}) {
      Stack stack(dtype, rows);
      const Elements begun = stack.flow[0];
      CHECK_EQ(kvk_layers(stack.before.data(), stack.attention.data(), stack.behind.data(), Stack::kLayers), KVK_OK);
      const Elements answered = stack.flow[1];
      const std::vector<Elements> kept = stack.sides;
      stack.flow[0] = begun;
      const uint64_t bytes = kHeadDim * (dtype == KVK_F32 ? 4 : 2);
      for (uint32_t i = 0; i < Stack::kLayers; ++i) {
        Layer& layer = stack.layers[i];
        stack.before[i].x = stack.behind[i].residual = stack.flow[i % 2].data();
        stack.behind[i].result = stack.flow[1 - i % 2].data();
        CHECK_EQ(kvk_layer_before(&stack.before[i]), KVK_OK);
        for (uint32_t row = 0; row < rows; ++row) {  // of one head
          const kvk_segment& tail = stack.sequences[i * rows + row].tail;
          const int64_t last = (Stack::kTokens - 1) * tail.k_token_stride;
          CHECK(std::memcmp(static_cast<const char*>(tail.k) + last, static_cast<char*>(layer.k.data()) + row * bytes, bytes) ==
                0);
          CHECK(std::memcmp(static_cast<const char*>(tail.v) + last, static_cast<char*>(layer.v.data()) + row * bytes, bytes) ==
                0);
        }
        CHECK_EQ(kvk_attend(&stack.attention[i]), KVK_OK);
        CHECK_EQ(kvk_layer_behind(&stack.behind[i]), KVK_OK);
      }
      CHECK(stack.flow[1] == answered && stack.sides == kept);
    }
}

TEST(what_does_not_fit_layers_is_refused) {
  Stack stack(KVK_F32, 2);
  const auto refused = [&](int status) {
    CHECK_EQ(kvk_layers(stack.before.data(), stack.attention.data(), stack.behind.data(), Stack::kLayers), status);
  };
  const auto wrong = [&](auto& field, auto value, int status) {
    const auto was = field;
    field = value;
    refused(status);
    field = was;
  };
  kvk_attention& attention = stack.attention[0];
  wrong(attention.batch, 1u, KVK_INVALID);
  wrong(attention.query_tokens, 2u, KVK_INVALID);
  wrong(attention.dtype, uint32_t{KVK_BF16}, KVK_INVALID);
  wrong(attention.kv_heads, 2u, KVK_INVALID);
  const std::vector<Elements> kept = stack.sides;  // nothing is written for an attention that would be refused
  constexpr uint32_t kWraps = (1u << 27) + 1;      // times kHeadDim, in 32 bits: kKey
  static_assert(kWraps * kHeadDim == kKey);
  attention.query_heads = kWraps;
  wrong(attention.kv_heads, kWraps, KVK_INVALID);
  attention.query_heads = kQuery / kHeadDim;
  wrong(attention.query_heads, 0u, KVK_INVALID);
  wrong(stack.sequences[1].tail.first, uint32_t{INT32_MAX}, KVK_INVALID);
  CHECK(stack.sides == kept);
  wrong(attention.size, 8u, KVK_INVALID);
  wrong(attention.sequences, static_cast<const kvk_sequence*>(nullptr), KVK_INVALID);
  wrong(attention.workspace_bytes, uint64_t{1}, KVK_WORKSPACE);
  wrong(stack.sequences[1].tail.tokens, 0u, KVK_INVALID);
  wrong(stack.sequences[1].tail.codec, uint32_t{KVK_INT8}, KVK_INVALID);
  wrong(stack.sequences[1].tail.k, static_cast<const void*>(nullptr), KVK_INVALID);
  wrong(stack.before[0].rows, 49u, KVK_INVALID);
  wrong(stack.behind[0].workspace_bytes, uint64_t{1}, KVK_WORKSPACE);
  refused(KVK_OK);
}

TEST(what_does_not_fit_a_layer_is_refused) {
  Layer layer(KVK_F32, 2, false);
  layer.run(KVK_CPU_AUTO, 1);
  const kvk_layer_in before = layer.before;
  const kvk_layer_out behind = layer.behind;
  const auto refused = [&](int status) {
    CHECK_EQ(kvk_layer_before(&layer.before), status);
    layer.before = before;
  };
  layer.before.rows = 49, refused(KVK_INVALID);
  layer.before.dtype = KVK_F16, refused(KVK_UNSUPPORTED);
  layer.before.key.inputs = 32, refused(KVK_INVALID);
  layer.before.head_dim = 40, refused(KVK_INVALID);
  layer.before.workspace_bytes = 1, refused(KVK_WORKSPACE);
  layer.before.workspace = nullptr, refused(KVK_WORKSPACE);
  layer.before.x = nullptr, refused(KVK_INVALID);
  layer.before.path = 99, refused(KVK_UNSUPPORTED);
  const auto refused_behind = [&](int status) {
    CHECK_EQ(kvk_layer_behind(&layer.behind), status);
    layer.behind = behind;
  };
  layer.behind.up.outputs = 64, refused_behind(KVK_INVALID);
  layer.behind.up.group = kGroup, refused_behind(KVK_INVALID);
  layer.behind.down.inputs = 64, refused_behind(KVK_INVALID);
  layer.behind.down.outputs = 64, refused_behind(KVK_INVALID);
  layer.behind.workspace_bytes = 0, refused_behind(KVK_WORKSPACE);
  layer.behind.attended = nullptr, refused_behind(KVK_INVALID);
  CHECK_EQ(kvk_layer_in_workspace(nullptr), 0u);
  CHECK_EQ(kvk_layer_out_workspace(nullptr), 0u);
}
