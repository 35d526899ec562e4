// kvk_layer_in and kvk_layer_out: a decoder layer around its attention, of few rows, as a row of calls of this library; and
// kvk_layers: many of them, their attentions between.
//
// Owns the order of the calls, the sums, and what lies between them, in the caller's workspace. Never allocates. Invariant: every
// number is what the calls, one by one, would have given; each checks its own part of the arguments.
#include <cstring>
#include <utility>

#include "argument_checks.h"
#include "attention_check.h"
#include "cpu/numbers.h"
#include "cpu/paths.h"

namespace kvk {
namespace {

constexpr uint64_t kAligned = 64;

// Takes pieces off the workspace; without one it only counts them.
class Room {
 public:
  explicit Room(void* base) : base_(static_cast<char*>(base)) {}
  template <class T = void>
  T* take(uint64_t bytes) {
    char* out = base_ == nullptr ? nullptr : base_ + taken_;
    taken_ += (bytes + kAligned - 1) / kAligned * kAligned;
    return static_cast<T*>(static_cast<void*>(out));
  }
  uint64_t taken() const { return taken_; }

 private:
  char* base_;
  uint64_t taken_ = 0;
};

// What all calls of a layer have in common.
struct Calls {
  uint32_t rows, dtype, path, threads;

  uint64_t width() const { return dtype == KVK_F32 ? 4 : 2; }

  void convert(uint32_t from, const void* in, uint32_t to, void* out, uint64_t count) const {
    const uint64_t in_width = from == KVK_F32 ? 4 : 2, out_width = to == KVK_F32 ? 4 : 2;
    float line[256];
    for (uint64_t i = 0; i < count; i += 256) {
      const auto some = static_cast<uint32_t>(count - i < 256 ? count - i : 256);
      load_row(from, static_cast<const char*>(in) + i * in_width, some, line);
      store_row(to, line, some, static_cast<char*>(out) + i * out_width);
    }
  }

  int norm(const void* x, const void* weight, uint32_t width, float epsilon, uint64_t times, void* out) const {
    const kvk_norm args{
        sizeof args, KVK_ABI, static_cast<uint32_t>(rows * times), width, dtype, path, threads, x, weight, out, width,
        width,       epsilon};
    return kvk_norm_rows(&args);
  }

  // Words times rows of fp32.
  int packed(const kvk_weights& w, const float* x, float* out) const {
    kvk_awq args{};
    args.size = sizeof args, args.abi = KVK_ABI, args.inputs = w.inputs, args.outputs = w.outputs, args.group = w.group;
    args.dtype = dtype, args.path = path, args.rows = rows, args.words = static_cast<const uint32_t*>(w.values);
    args.zeros = w.zeros, args.scales = w.scales, args.x = x, args.bias = w.bias, args.out = out;
    args.x_row_stride = 4 * int64_t{w.inputs}, args.out_row_stride = 4 * int64_t{w.outputs};
    args.threads = threads, args.order = w.order;
    return kvk_awq_multiply(&args);
  }

  int plain(const kvk_weights& w, const void* x, const kvk_weights* up, void* out) const {
    const kvk_linear args{sizeof args,
                          KVK_ABI,
                          w.inputs,
                          w.outputs,
                          rows,
                          dtype,
                          path,
                          threads,
                          x,
                          w.values,
                          up == nullptr ? nullptr : up->values,
                          w.bias,
                          up == nullptr ? nullptr : up->bias,
                          out,
                          w.inputs,
                          w.outputs};
    return kvk_linear_multiply(&args);
  }

  // Rows of `dtype` times weights of any kind; `floats` are the same rows in fp32, wanted where the weights are packed.
  int product(const kvk_weights& w, const void* x, const float* floats, float* sums, void* out) const {
    if (w.group == 0) return plain(w, x, nullptr, out);
    if (int status = packed(w, floats, sums)) return status;
    convert(KVK_F32, sums, dtype, out, uint64_t{rows} * w.outputs);
    return KVK_OK;
  }

  // out = residual + factor * out, each rounded.
  void add(const void* residual, float factor, uint32_t width, void* out) const {
    const uint64_t count = uint64_t{rows} * width;
    for (uint64_t i = 0; i < count; i += 256) {
      const auto some = static_cast<uint32_t>(count - i < 256 ? count - i : 256);
      float first[256], second[256];
      char* to = static_cast<char*>(out) + i * this->width();
      load_row(dtype, static_cast<const char*>(residual) + i * this->width(), some, first);
      load_row(dtype, to, some, second);
      if (factor != 1)
        for (uint32_t j = 0; j < some; ++j) second[j] *= factor;
      if (factor != 1 && dtype == KVK_BF16)
        for (uint32_t j = 0; j < some; ++j) second[j] = from_bf16(to_bf16(second[j]));
      for (uint32_t j = 0; j < some; ++j) first[j] += second[j];
      store_row(dtype, first, some, to);
    }
  }
};

uint32_t wider(uint32_t a, uint32_t b) { return a < b ? b : a; }

template <class Args>
int check_layer(const Args* a) {
  if (int status = check_version(a)) return status;
  if (a->dtype != KVK_F32 && a->dtype != KVK_BF16) return fail(KVK_UNSUPPORTED, "dtype=%u; rows are f32 or bf16", a->dtype);
  if (a->rows > KVK_CPU_AWQ_ROWS) return fail(KVK_INVALID, "rows=%u; at most %u", a->rows, KVK_CPU_AWQ_ROWS);
  return KVK_OK;
}

int check_weights(const char* name, const kvk_weights& w, uint32_t inputs) {
  if (w.inputs == inputs && check_count("outputs", w.outputs) == KVK_OK && w.inputs <= INT32_MAX) return KVK_OK;
  return fail(KVK_INVALID, "%s is [%u, %u] of rows of %u", name, w.outputs, w.inputs, inputs);
}

template <class Args>
int check_room(const Args* a, uint64_t wanted) {
  if (a->workspace_bytes >= wanted && a->workspace != nullptr) return KVK_OK;
  return fail(KVK_WORKSPACE, "workspace_bytes=%llu; %llu are wanted", static_cast<unsigned long long>(a->workspace_bytes),
              static_cast<unsigned long long>(wanted));
}

struct InRoom {
  void* normal;
  float *floats, *sums;
  uint64_t bytes;
  InRoom(const kvk_layer_in& a, void* base) {
    Room room(base);
    const uint64_t rows = a.rows, width = a.dtype == KVK_F32 ? 4 : 2;
    normal = room.take(rows * a.query.inputs * width);
    const bool any = a.query.group != 0 || a.key.group != 0 || a.value.group != 0;
    floats = any ? room.take<float>(rows * a.query.inputs * 4) : nullptr;
    sums = any ? room.take<float>(rows * 4 * wider(a.query.outputs, wider(a.key.outputs, a.value.outputs))) : nullptr;
    bytes = room.taken();
  }
};

struct OutRoom {
  void *normal, *between;
  float *floats, *sums, *up;
  uint64_t bytes;
  OutRoom(const kvk_layer_out& a, void* base) {
    Room room(base);
    const uint64_t rows = a.rows, width = a.dtype == KVK_F32 ? 4 : 2, hidden = a.out.outputs, wide = a.gate.outputs;
    normal = room.take(rows * hidden * width);
    between = room.take(rows * wide * width);
    const bool any = a.out.group != 0 || a.gate.group != 0 || a.up.group != 0 || a.down.group != 0;
    floats = any ? room.take<float>(rows * 4 * wider(a.out.inputs, wider(a.gate.inputs, a.down.inputs))) : nullptr;
    sums = any ? room.take<float>(rows * 4 * wider(a.out.outputs, wider(a.gate.outputs, a.down.outputs))) : nullptr;
    up = any ? room.take<float>(rows * wide * 4) : nullptr;
    bytes = room.taken();
  }
};

int run(const kvk_layer_in& a) {
  const InRoom room(a, a.workspace);
  const Calls calls{a.rows, a.dtype, a.path, a.threads};
  const uint32_t inputs = a.query.inputs;
  if (int status = calls.norm(a.x, a.norm, inputs, a.epsilon, 1, room.normal)) return status;
  if (room.floats != nullptr) calls.convert(a.dtype, room.normal, KVK_F32, room.floats, uint64_t{a.rows} * inputs);
  for (auto [weights, out] : {std::pair{&a.query, a.q}, {&a.key, a.k}, {&a.value, a.v}})
    if (int status = calls.product(*weights, room.normal, room.floats, room.sums, out)) return status;
  const uint32_t heads = a.query.outputs / a.head_dim, kv_heads = a.key.outputs / a.head_dim;
  if (a.query_norm != nullptr) {
    if (int status = calls.norm(a.q, a.query_norm, a.head_dim, a.query_epsilon, heads, a.q)) return status;
    if (int status = calls.norm(a.k, a.key_norm, a.head_dim, a.key_epsilon, kv_heads, a.k)) return status;
  }
  if (a.cos == nullptr) return KVK_OK;
  const kvk_turns turns{sizeof turns, KVK_ABI,   a.rows, heads, kv_heads, a.head_dim, a.dtype,
                        a.path,       a.threads, a.q,    a.k,   a.cos,    a.sin};
  return kvk_turn_rows(&turns);
}

// silu(gate x) * (up x) of packed weights: into floats that hold values of `dtype`.
int gated(const Calls& calls, const kvk_layer_out& a, const OutRoom& room) {
  calls.convert(a.dtype, room.normal, KVK_F32, room.floats, uint64_t{a.rows} * a.gate.inputs);
  if (int status = calls.packed(a.gate, room.floats, room.sums)) return status;
  if (int status = calls.packed(a.up, room.floats, room.up)) return status;
  const Path* path = path_of(a.path);
  if (path == nullptr) return KVK_UNSUPPORTED;
  path->gate(a.dtype, room.sums, room.up, a.rows * a.gate.outputs);
  calls.convert(KVK_F32, room.sums, a.dtype, room.between, uint64_t{a.rows} * a.gate.outputs);
  return KVK_OK;
}

int run(const kvk_layer_out& a) {
  const OutRoom room(a, a.workspace);
  const Calls calls{a.rows, a.dtype, a.path, a.threads};
  const uint32_t hidden = a.out.outputs;
  const auto product = [&](const kvk_weights& w, const void* x, void* out) {
    if (w.group != 0) calls.convert(a.dtype, x, KVK_F32, room.floats, uint64_t{a.rows} * w.inputs);
    return calls.product(w, x, room.floats, room.sums, out);
  };
  if (int status = product(a.out, a.attended, a.middle)) return status;
  calls.add(a.residual, a.factor, hidden, a.middle);
  if (int status = calls.norm(a.middle, a.norm, hidden, a.epsilon, 1, room.normal)) return status;
  if (int status = a.gate.group == 0 ? calls.plain(a.gate, room.normal, &a.up, room.between) : gated(calls, a, room))
    return status;
  if (int status = product(a.down, room.between, a.result)) return status;
  calls.add(a.middle, a.factor, hidden, a.result);
  return KVK_OK;
}

int check(const kvk_layer_in* a) {
  if (int status = check_layer(a)) return status;
  for (auto [name, weights] : {std::pair{"query", &a->query}, {"key", &a->key}, {"value", &a->value}})
    if (int status = check_weights(name, *weights, a->query.inputs)) return status;
  if (int status = check_shape(a->head_dim, a->dtype)) return status;
  if (a->query.outputs % a->head_dim != 0 || a->key.outputs % a->head_dim != 0)
    return fail(KVK_INVALID, "head_dim=%u of %u and %u outputs", a->head_dim, a->query.outputs, a->key.outputs);
  return KVK_OK;
}

int check(const kvk_layer_out* a) {
  if (int status = check_layer(a)) return status;
  const uint32_t hidden = a->out.outputs;
  struct Part {
    const char* name;
    const kvk_weights& weights;
    uint32_t inputs;
  };
  for (const Part& part : {Part{"out", a->out, a->out.inputs}, Part{"gate", a->gate, hidden}, Part{"up", a->up, hidden},
                           Part{"down", a->down, a->gate.outputs}})
    if (int status = check_weights(part.name, part.weights, part.inputs)) return status;
  if (a->down.outputs != hidden || a->up.outputs != a->gate.outputs || (a->up.group == 0) != (a->gate.group == 0))
    return fail(KVK_INVALID, "gate, up and down do not fit each other and rows of %u", hidden);
  return KVK_OK;
}

template <class Args>
int checked(const Args* a, uint64_t wanted) {
  if (int status = check_room(a, wanted)) return status;
  return a->rows == 0 ? KVK_OK : run(*a);
}

int check_tails(const kvk_layer_in& a, const kvk_attention& attention) {
  const uint64_t width = uint64_t{attention.kv_heads} * attention.head_dim;
  if (attention.batch != a.rows || attention.query_tokens != 1 || attention.dtype != a.dtype)
    return fail(KVK_INVALID, "an attention of %u times %u queries, dtype=%u, behind %u rows of %u", attention.batch,
                attention.query_tokens, attention.dtype, a.rows, a.dtype);
  if (width != a.key.outputs || width != a.value.outputs || attention.head_dim != a.head_dim)
    return fail(KVK_INVALID, "kv_heads=%u of %u; K and V have %u and %u", attention.kv_heads, attention.head_dim, a.key.outputs,
                a.value.outputs);
  if (attention.sequences == nullptr) return fail(KVK_INVALID, "a null pointer for %u sequences", a.rows);
  for (uint32_t row = 0; row < a.rows; ++row) {
    const kvk_segment& tail = attention.sequences[row].tail;
    if (tail.codec != a.dtype || tail.tokens == 0 || tail.k == nullptr || tail.v == nullptr)
      return fail(KVK_INVALID, "row %u: a tail of %u tokens, codec=%u; its last is written", row, tail.tokens, tail.codec);
  }
  return KVK_OK;
}

// K and V of each row, as the last token of its tail.
void append(const kvk_layer_in& a, const kvk_attention& attention) {
  const uint64_t bytes = uint64_t{a.head_dim} * (a.dtype == KVK_F32 ? 4 : 2);
  for (uint32_t row = 0; row < a.rows; ++row) {
    const kvk_segment& tail = attention.sequences[row].tail;
    const int64_t last = int64_t{tail.first} + tail.tokens - 1;
    for (uint32_t head = 0; head < attention.kv_heads; ++head) {
      const uint64_t from = (uint64_t{row} * attention.kv_heads + head) * bytes;
      char* k = static_cast<char*>(const_cast<void*>(tail.k)) + last * tail.k_token_stride + head * tail.k_head_stride;
      char* v = static_cast<char*>(const_cast<void*>(tail.v)) + last * tail.v_token_stride + head * tail.v_head_stride;
      std::memcpy(k, static_cast<const char*>(a.k) + from, bytes);
      std::memcpy(v, static_cast<const char*>(a.v) + from, bytes);
    }
  }
}

}  // namespace
}  // namespace kvk

extern "C" uint64_t kvk_layer_in_workspace(const kvk_layer_in* args) {
  return kvk::check(args) == KVK_OK ? kvk::InRoom(*args, nullptr).bytes : 0;
}

extern "C" uint64_t kvk_layer_out_workspace(const kvk_layer_out* args) {
  return kvk::check(args) == KVK_OK ? kvk::OutRoom(*args, nullptr).bytes : 0;
}

extern "C" int kvk_layer_before(const kvk_layer_in* args) {
  if (int status = kvk::check(args)) return status;
  return kvk::checked(args, kvk::InRoom(*args, nullptr).bytes);
}

extern "C" int kvk_layer_behind(const kvk_layer_out* args) {
  if (int status = kvk::check(args)) return status;
  return kvk::checked(args, kvk::OutRoom(*args, nullptr).bytes);
}

extern "C" int kvk_layers(const kvk_layer_in* before, const kvk_attention* attention, const kvk_layer_out* behind,
                          uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    if (int status = kvk_layer_before(&before[i])) return status;
    if (int status = kvk::check_attention(&attention[i], true)) return status;
    if (int status = kvk::check_tails(before[i], attention[i])) return status;
    kvk::append(before[i], attention[i]);
    if (int status = kvk_attend(&attention[i])) return status;
    if (int status = kvk_layer_behind(&behind[i])) return status;
  }
  return KVK_OK;
}
