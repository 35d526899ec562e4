// The naive path: plain C++ for any CPU, one key after the other, in double. What the fast paths are measured against.
#include "cpu/attend_result.h"
#include "cpu/awq.h"
#include "cpu/codec_rows.h"
#include "cpu/paths.h"

namespace kvk {
namespace {

// Elements of the key, or of the value, of one token of a segment's block.
void load_key(const kvk_segment& s, uint32_t kv_head, uint64_t token, uint32_t n, float* out) {
  const void* row = at(s.k, kv_head * s.k_head_stride + static_cast<int64_t>(token) * s.k_token_stride);
  if (s.codec != KVK_INT8 && s.codec != KVK_INT4) return load_row(s.codec, row, n, out);
  load_codes(s.codec, static_cast<const uint8_t*>(row), n, out);
  const uint16_t* scale = at(s.k_scale, kv_head * s.k_scale_head_stride) + token / s.k_group * n;
  const uint16_t* zero = at(s.k_zero, kv_head * s.k_scale_head_stride) + token / s.k_group * n;
  for (uint32_t i = 0; i < n; ++i) out[i] = out[i] * from_half(scale[i]) + from_half(zero[i]);
}

void load_value(const kvk_segment& s, uint32_t kv_head, uint64_t token, uint32_t n, float* out) {
  const void* row = at(s.v, kv_head * s.v_head_stride + static_cast<int64_t>(token) * s.v_token_stride);
  if (s.codec != KVK_INT8 && s.codec != KVK_INT4) return load_row(s.codec, row, n, out);
  load_codes(s.codec, static_cast<const uint8_t*>(row), n, out);
  const float scale = from_half(at(s.v_scale, kv_head * s.v_scale_head_stride)[token]);
  const float zero = from_half(at(s.v_zero, kv_head * s.v_scale_head_stride)[token]);
  for (uint32_t i = 0; i < n; ++i) out[i] = out[i] * scale + zero;
}

struct Sums {
  double value[KVK_MAX_HEAD_DIM], row_max, row_sum;
};

void add_key(const kvk_attention& a, const kvk_segment& segment, uint32_t kv_head, uint64_t token, const float* q, Sums& sums) {
  float row[KVK_MAX_HEAD_DIM];
  load_key(segment, kv_head, token, a.head_dim, row);
  double score = 0;
  for (uint32_t i = 0; i < a.head_dim; ++i) score += static_cast<double>(q[i]) * row[i];
  score *= a.scale;
  if (a.softcap != 0) score = a.softcap * __builtin_tanh(score / a.softcap);
  if (score > sums.row_max) {
    const double rescale = sums.row_max == -__builtin_inf() ? 0 : __builtin_exp(sums.row_max - score);
    for (uint32_t i = 0; i < a.head_dim; ++i) sums.value[i] *= rescale;
    sums.row_sum *= rescale;
    sums.row_max = score;
  }
  const double weight = __builtin_exp(score - sums.row_max);
  load_value(segment, kv_head, token, a.head_dim, row);
  for (uint32_t i = 0; i < a.head_dim; ++i) sums.value[i] += weight * row[i];
  sums.row_sum += weight;
}

void attend_naively(const kvk_attention& a, const Task& task, Scratch scratch) {
  const uint32_t group = a.query_heads / a.kv_heads, width = padded(a.head_dim);
  float q[KVK_MAX_HEAD_DIM], turned[KVK_MAX_HEAD_DIM];
  for (uint32_t row = task.row_start; row < task.row_stop; ++row) {
    const int64_t head_at = (task.kv_head * group + row % group) * a.q_head_stride;
    load_row(a.dtype, at(a.q, task.batch * a.q_batch_stride + head_at + row / group * a.q_token_stride), a.head_dim, q);
    const int64_t position = a.q_position[uint64_t{task.batch} * a.query_tokens + row / group];
    Sums sums{};
    sums.row_max = -__builtin_inf();
    const kvk_sequence& sequence = a.sequences[task.batch];
    uint64_t key = 0;
    for (uint64_t i = 0; i <= sequence.count; ++i) {
      const kvk_segment& segment = i < sequence.count ? sequence.segments[i] : sequence.tail;
      if (segment.turn != nullptr) turn_row(q, segment.turn, true, a.rope, a.rotary_dim, a.head_dim, turned);
      for (uint32_t token = 0; token < segment.tokens; ++token, ++key) {
        const int64_t at_position = segment.new_position + token;
        if (key < task.key_start || key >= task.key_stop) continue;
        if (a.causal != 0 && at_position > position) continue;
        if (a.window != 0 && at_position <= position - static_cast<int64_t>(a.window)) continue;
        add_key(a, segment, task.kv_head, uint64_t{segment.first} + token, segment.turn != nullptr ? turned : q, sums);
      }
    }
    float* sum = task.partial == nullptr ? scratch.sum : task.partial + uint64_t{row - task.row_start} * (width + 2);
    for (uint32_t i = 0; i < width; ++i) sum[i] = i < a.head_dim ? static_cast<float>(sums.value[i]) : 0;
    const auto row_max = static_cast<float>(sums.row_max * 1.4426950408889634), row_sum = static_cast<float>(sums.row_sum);
    if (task.partial == nullptr)
      finish_row(a, task.batch, task.kv_head, row, sum, row_max, row_sum, scratch.turned);
    else
      sum[width] = row_max, sum[width + 1] = row_sum;
  }
}

// A column after the other, in double, from the words as the checkpoint has them.
void multiply_naively(const kvk_awq& a, uint32_t word_start, uint32_t word_stop) {
  constexpr uint32_t kColumn[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  const uint64_t stride = a.outputs / 8;
  for (uint32_t row = 0; row < a.rows; ++row)
    for (uint32_t word = word_start; word < word_stop; ++word)
      for (uint32_t nibble = 0; nibble < 8; ++nibble) {
        const uint32_t column = 8 * word + kColumn[nibble];
        const float* x = at(static_cast<const float*>(a.x), static_cast<int64_t>(row) * a.x_row_stride);
        double sum = a.bias == nullptr ? 0 : static_cast<const float*>(a.bias)[column];
        for (uint64_t k = 0; k < a.inputs; ++k) {
          const uint64_t group = k / a.group;
          const int zero = a.zeros == nullptr ? 8 : static_cast<int>(a.zeros[group * stride + word] >> 4 * nibble & 15);
          const int code = static_cast<int>(*awq_run(a, k, word).words >> 4 * nibble & 15);
          sum += double{x[k]} * (code - zero) * from_half(a.scales[group * a.outputs + column]);
        }
        at(static_cast<float*>(a.out), static_cast<int64_t>(row) * a.out_row_stride)[column] = static_cast<float>(sum);
      }
}

void unpack_naively(const kvk_awq& a, uint32_t group_start, uint32_t group_stop) {
  constexpr uint32_t kNibble[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  const uint64_t stride = a.outputs / 8;
  for (uint64_t k = uint64_t{group_start} * a.group; k < uint64_t{group_stop} * a.group; ++k)
    for (uint32_t column = 0; column < a.columns; ++column) {
      const uint64_t group = k / a.group, word = column / 8;
      const uint32_t shift = 4 * kNibble[column % 8];
      const int zero = a.zeros == nullptr ? 8 : static_cast<int>(a.zeros[group * stride + word] >> shift & 15);
      const int code = static_cast<int>(*awq_run(a, k, a.first / 8 + static_cast<uint32_t>(word)).words >> shift & 15);
      const float value = static_cast<float>(code - zero) * from_half(a.scales[group * a.outputs + column]);
      const uint64_t width = a.dtype == KVK_F32 ? 4 : 2;
      store_row(a.dtype, &value, 1, at(static_cast<char*>(a.out), static_cast<int64_t>(k) * a.out_row_stride) + width * column);
    }
}

double dot(uint32_t dtype, const void* x, const void* w, uint32_t count) {
  double sum = 0;
  for (uint32_t k = 0; k < count; ++k) sum += double{element(dtype, x, k)} * element(dtype, w, k);
  return sum;
}

// What an element of `dtype` keeps of it.
float kept(uint32_t dtype, double value) {
  return dtype == KVK_BF16 ? from_bf16(to_bf16(static_cast<float>(value))) : static_cast<float>(value);
}

// Element `i` of rows of `dtype`.
template <class T>
T* place(uint32_t dtype, T* rows, int64_t i) {
  return at(rows, i * (dtype == KVK_F32 ? 4 : 2));
}

void rounded_naively(const kvk_linear& a, uint32_t start, uint32_t stop) {
  for (uint32_t row = 0; row < a.rows; ++row)
    for (uint32_t n = start; n < stop; ++n) {
      const auto* x = static_cast<const uint16_t*>(a.x) + row * a.x_row_stride;
      const auto* w = static_cast<const float*>(a.w) + uint64_t{n} * a.inputs;
      double sum = a.bias == nullptr ? 0 : static_cast<const float*>(a.bias)[n];
      for (uint32_t k = 0; k < a.inputs; ++k) sum += double{from_bf16(x[k])} * kept(KVK_BF16, w[k]);
      static_cast<float*>(a.out)[row * a.out_row_stride + n] = static_cast<float>(sum);
    }
}

void linear_naively(const kvk_linear& a, uint32_t start, uint32_t stop) {
  if (a.dtype == KVK_ROUNDED) return rounded_naively(a, start, stop);
  for (uint32_t row = 0; row < a.rows; ++row)
    for (uint32_t n = start; n < stop; ++n) {
      const void* x = place(a.dtype, a.x, row * a.x_row_stride);
      const auto product = [&](const void* w, const void* bias) {
        const double sum = dot(a.dtype, x, place(a.dtype, w, int64_t{n} * a.inputs), a.inputs);
        return sum + (bias == nullptr ? 0 : element(a.dtype, bias, n));
      };
      double value = product(a.w, a.bias);
      if (a.up != nullptr) {
        const bool whole = a.dtype == KVK_F32;
        if (!whole) value = kept(a.dtype, value);
        value = value / (1 + __builtin_exp(-value));
        const double up = product(a.up, a.up_bias);
        value = whole ? value * up : double{kept(a.dtype, value)} * kept(a.dtype, up);
      }
      const float out = static_cast<float>(value);
      store_row(a.dtype, &out, 1, place(a.dtype, a.out, row * a.out_row_stride + int64_t{n}));
    }
}

void normalise_naively(const kvk_norm& a, uint32_t start, uint32_t stop) {
  for (uint32_t row = start; row < stop; ++row) {
    const void* x = place(a.dtype, a.x, row * a.x_row_stride);
    const double scale = 1 / __builtin_sqrt(dot(a.dtype, x, x, a.width) / a.width + a.epsilon);
    for (uint32_t i = 0; i < a.width; ++i) {
      const double over = element(a.dtype, x, i) * scale;
      const auto out = static_cast<float>(element(a.dtype, a.weight, i) * (a.dtype == KVK_F32 ? over : kept(a.dtype, over)));
      store_row(a.dtype, &out, 1, place(a.dtype, a.out, row * a.out_row_stride + i));
    }
  }
}

void turn_naively(const kvk_turns& a, uint32_t start, uint32_t stop) {
  const uint32_t half = a.head_dim / 2;
  for (int64_t row = start; row < stop; ++row)
    for (int64_t head = 0; head < int64_t{a.query_heads} + a.kv_heads; ++head) {
      const bool query = head < a.query_heads;
      const int64_t of_kind = query ? row * a.query_heads + head : row * a.kv_heads + head - a.query_heads;
      void* x = place(a.dtype, query ? a.q : a.k, of_kind * a.head_dim);
      const void *cos = place(a.dtype, a.cos, row * a.head_dim), *sin = place(a.dtype, a.sin, row * a.head_dim);
      for (uint32_t i = 0; i < half; ++i) {
        const float first = element(a.dtype, x, i), second = element(a.dtype, x, i + half);
        const auto product = [&](float value, const void* by, uint32_t at) {
          return kept(a.dtype, value * element(a.dtype, by, at));
        };
        const float out[2] = {product(first, cos, i) + product(-second, sin, i),
                              product(second, cos, i + half) + product(first, sin, i + half)};
        store_row(a.dtype, &out[0], 1, place(a.dtype, x, i));
        store_row(a.dtype, &out[1], 1, place(a.dtype, x, i + half));
      }
    }
}

void gate_naively(uint32_t dtype, float* gate, const float* up, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    const double value = kept(dtype, gate[i]);
    gate[i] = kept(dtype, double{kept(dtype, value / (1 + __builtin_exp(-value)))} * kept(dtype, up[i]));
  }
}

void product_naively(const kvk_product& a, uint32_t start, uint32_t stop) {
  for (uint32_t row = 0; row < a.rows; ++row)
    for (uint32_t i = start; i < stop; ++i) {
      const void* weights = at(static_cast<const char*>(a.weights), i * a.weight_row_stride);
      const float* x = at(static_cast<const float*>(a.x), static_cast<int64_t>(row) * a.x_row_stride);
      double sum = 0;
      for (uint32_t k = 0; k < a.inputs; ++k) sum += double{x[k]} * element(a.dtype, weights, k);
      at(static_cast<float*>(a.out), static_cast<int64_t>(row) * a.out_row_stride)[i] = static_cast<float>(sum);
    }
}

}  // namespace

const Path kReferencePath{"reference",    quantise_rows,  dequantise_rows,   rotate_rows,  attend_naively, multiply_naively,
                          unpack_naively, linear_naively, normalise_naively, turn_naively, gate_naively,   product_naively};

}  // namespace kvk
