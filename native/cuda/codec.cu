// kvk_quantise, kvk_dequantise, kvk_rotate and kvk_turn on a GPU: the arguments checked, then one launch (naive V: two).
//
// Never allocates, never waits. Invariant: what passes the checks keeps every index inside what the caller described; the
// bytes written are those of the CPU library.
#include <cmath>

#include "cuda/codec_checks.h"
#include "cuda/errors.h"
#include "cuda/quantise_tile.h"
#include "cuda/rows_tile.h"

namespace kvk {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kRowLanes = 16;  // that share a token of V

uint32_t blocks_for(uint64_t threads) { return static_cast<uint32_t>((threads + kThreads - 1) / kThreads); }

__device__ uint64_t own_index() { return static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x; }

__device__ void say(const kvk_conversion& c) {
  if (c.status != nullptr) *c.status = KVK_RANGE;  // whoever writes, it is the same
}

// ------------------------------------------------------------ quantise

template <int Dtype>
__global__ void __launch_bounds__(kThreads) quantise_keys(const __grid_constant__ kvk_conversion c, uint32_t groups) {
  const uint32_t pairs = c.head_dim / 2;
  const uint64_t index = own_index();
  if (index >= static_cast<uint64_t>(c.heads) * groups * pairs) return;
  const auto row = static_cast<uint32_t>(index / pairs), channel = static_cast<uint32_t>(index % pairs) * 2;
  if (!quantise_channels<Dtype>(c, row / groups, row % groups, channel)) say(c);
}

template <int Dtype>
__global__ void __launch_bounds__(kThreads) quantise_values(const __grid_constant__ kvk_conversion c) {
  const uint64_t index = own_index(), rows = static_cast<uint64_t>(c.heads) * c.tokens;
  const uint32_t lane = threadIdx.x % kRowLanes;
  const uint64_t wanted = index / kRowLanes, row = wanted < rows ? wanted : rows - 1;  // all lanes take part in the shuffles
  const auto head = static_cast<uint32_t>(row / c.tokens), token = static_cast<uint32_t>(row % c.tokens);
  Extent all = row_extent<Dtype>(c, row_of(c, head, token), lane, kRowLanes);
#pragma unroll
  for (uint32_t apart = kRowLanes / 2; apart > 0; apart /= 2) {
    Extent other;
    other.low = __shfl_xor_sync(0xffffffff, all.low, apart);
    other.high = __shfl_xor_sync(0xffffffff, all.high, apart);
    other.finite = __shfl_xor_sync(0xffffffff, static_cast<int>(all.finite), apart) != 0;
    all.add(other);
  }
  if (wanted >= rows) return;
  if (all.finite)
    quantise_row<Dtype>(c, head, token, all, lane, kRowLanes);
  else
    say(c);
}

__global__ void scale_naively(const __grid_constant__ kvk_conversion c) {
  const uint32_t parts = c.group == 0 ? c.tokens : (c.tokens + c.group - 1) / c.group;
  const uint32_t channels = c.group == 0 ? 1 : c.head_dim;
  const uint64_t index = own_index();
  if (index >= static_cast<uint64_t>(c.heads) * parts * channels) return;
  const auto row = static_cast<uint32_t>(index / channels), channel = static_cast<uint32_t>(index % channels);
  const uint32_t token = row % parts * (c.group == 0 ? 1 : c.group);
  if (!quantise_plainly(c, row / parts, token, channel)) say(c);
}

__global__ void encode_naively(const __grid_constant__ kvk_conversion c) {
  const uint32_t pairs = (c.head_dim + 1) / 2;
  const uint64_t index = own_index();
  if (index >= static_cast<uint64_t>(c.heads) * c.tokens * pairs) return;
  const auto row = static_cast<uint32_t>(index / pairs), channel = static_cast<uint32_t>(index % pairs) * 2;
  encode_plainly(c, row / c.tokens, row % c.tokens, channel);
}

int quantise_naively(const kvk_conversion& c, cudaStream_t stream) {
  const uint32_t parts = c.group == 0 ? c.tokens : (c.tokens + c.group - 1) / c.group;
  const uint64_t scales = static_cast<uint64_t>(c.heads) * parts * (c.group == 0 ? 1 : c.head_dim);
  scale_naively<<<blocks_for(scales), kThreads, 0, stream>>>(c);
  if (int status = launched("scale_naively")) return status;
  encode_naively<<<blocks_for(static_cast<uint64_t>(c.heads) * c.tokens * ((c.head_dim + 1) / 2)), kThreads, 0, stream>>>(c);
  return launched("encode_naively");
}

template <int Dtype>
int quantise_fast(const kvk_conversion& c, cudaStream_t stream) {
  if (c.group == 0) {
    quantise_values<Dtype><<<blocks_for(static_cast<uint64_t>(c.heads) * c.tokens * kRowLanes), kThreads, 0, stream>>>(c);
    return launched("quantise_values");
  }
  const uint32_t groups = (c.tokens + c.group - 1) / c.group;
  const uint64_t threads = static_cast<uint64_t>(c.heads) * groups * (c.head_dim / 2);
  quantise_keys<Dtype><<<blocks_for(threads), kThreads, 0, stream>>>(c, groups);
  return launched("quantise_keys");
}

// ------------------------------------------------------------ dequantise and rotate: rows brought to elements

struct Rows {
  Side side;
  Shape shape;
  uint32_t tokens;
  void* out;
  int64_t out_head_stride, out_token_stride;
};

template <int Dtype>
struct Store {
  void* out;
  int64_t token_stride;
  __device__ void operator()(uint32_t token, uint32_t octet, const float* x) const {
    store_octet<Dtype>(x, at(out, static_cast<int64_t>(token) * token_stride + octet * (Dtype == KVK_F32 ? 4 : 2)));
  }
};

template <int Codec, int Dtype>
__global__ void __launch_bounds__(kThreads) bring_fast(const __grid_constant__ Rows r) {
  const uint32_t pairs = r.shape.head_dim / 16, rows = kThreads / pairs;
  const uint32_t p = threadIdx.x % pairs, row = threadIdx.x / pairs;
  const uint32_t token = blockIdx.x * rows * kRowsInFlight + row;
  if (row >= rows || token >= r.tokens) return;
  const Store<Dtype> store{at(r.out, blockIdx.y * r.out_head_stride), r.out_token_stride};
  bring_rows<Codec>(r.side, r.shape, blockIdx.y, token, r.tokens, rows, p, store);
}

// One thread: the pair of elements that turn together (or two neighbours), so that it works in place too.
__global__ void bring_naively(const __grid_constant__ Rows r, uint32_t dtype) {
  const uint32_t pairs = (r.shape.head_dim + 1) / 2, half = r.shape.rotary_dim / 2;
  const uint64_t index = own_index();
  const uint64_t token = index / pairs;
  if (token >= r.tokens) return;
  const auto p = static_cast<uint32_t>(index % pairs);
  const bool apart = r.side.turn != nullptr && r.shape.rope == KVK_ROPE_HALF && p < half;
  const uint32_t first = apart ? p : 2 * p, second = apart ? p + half : 2 * p + 1;
  const auto t = static_cast<uint32_t>(token);
  const float x = value(r.side, r.shape, blockIdx.y, t, first);
  const float y = second < r.shape.head_dim ? value(r.side, r.shape, blockIdx.y, t, second) : 0;
  void* row = at(r.out, blockIdx.y * r.out_head_stride + static_cast<int64_t>(t) * r.out_token_stride);
  put(dtype, row, first, x);
  if (second < r.shape.head_dim) put(dtype, row, second, y);
}

template <int Codec, int Dtype>
int launch_bring(const Rows& r, uint32_t heads, cudaStream_t stream) {
  const uint32_t rows = kThreads / (r.shape.head_dim / 16) * kRowsInFlight;
  bring_fast<Codec, Dtype><<<dim3((r.tokens + rows - 1) / rows, heads), kThreads, 0, stream>>>(r);
  return launched("bring_fast");
}

int bring(const Rows& r, uint32_t heads, uint32_t dtype, uint32_t path, cudaStream_t stream) {
  const uint32_t bytes = 16;
  const bool fits = path != KVK_CPU_REFERENCE && in_octets(r.shape) && is_aligned(r.side) && is_aligned(r.out, bytes) &&
                    r.out_head_stride % bytes == 0 && r.out_token_stride % bytes == 0;
  if (fits && r.side.codec == KVK_INT8) {
    if (dtype == KVK_BF16) return launch_bring<KVK_INT8, KVK_BF16>(r, heads, stream);
    if (dtype == KVK_F16) return launch_bring<KVK_INT8, KVK_F16>(r, heads, stream);
    return launch_bring<KVK_INT8, KVK_F32>(r, heads, stream);
  }
  if (fits && r.side.codec == KVK_INT4) {
    if (dtype == KVK_BF16) return launch_bring<KVK_INT4, KVK_BF16>(r, heads, stream);
    if (dtype == KVK_F16) return launch_bring<KVK_INT4, KVK_F16>(r, heads, stream);
    return launch_bring<KVK_INT4, KVK_F32>(r, heads, stream);
  }
  if (fits && r.side.codec == dtype) {
    if (dtype == KVK_BF16) return launch_bring<KVK_BF16, KVK_BF16>(r, heads, stream);
    if (dtype == KVK_F16) return launch_bring<KVK_F16, KVK_F16>(r, heads, stream);
    return launch_bring<KVK_F32, KVK_F32>(r, heads, stream);
  }
  const uint64_t threads = static_cast<uint64_t>(r.tokens) * ((r.shape.head_dim + 1) / 2);
  bring_naively<<<dim3(blocks_for(threads), heads), kThreads, 0, stream>>>(r, dtype);
  return launched("bring_naively");
}

}  // namespace
}  // namespace kvk

extern "C" {

int kvk_quantise(const kvk_conversion* args) {
  if (int status = kvk::check_launch(args)) return status;
  const kvk_conversion& c = *args;
  if (c.heads == 0 || c.tokens == 0) return KVK_OK;
  auto* stream = static_cast<cudaStream_t>(c.stream);
  if (c.path == KVK_CPU_REFERENCE || !kvk::in_pairs(c)) return kvk::quantise_naively(c, stream);
  if (c.dtype == KVK_F32) return kvk::quantise_fast<KVK_F32>(c, stream);
  return c.dtype == KVK_F16 ? kvk::quantise_fast<KVK_F16>(c, stream) : kvk::quantise_fast<KVK_BF16>(c, stream);
}

int kvk_dequantise(const kvk_conversion* args) {
  if (int status = kvk::check_launch(args)) return status;
  const kvk_conversion& c = *args;
  if (c.heads == 0 || c.tokens == 0) return KVK_OK;
  const kvk::Side side{c.codes, c.codes_head_stride, c.codes_token_stride, c.scale, c.zero, c.scale_head_stride, nullptr, c.codec,
                       c.group};
  const kvk::Rows rows{side, {c.head_dim, KVK_ROPE_HALF, 0}, c.tokens, c.elements, c.head_stride, c.token_stride};
  return kvk::bring(rows, c.heads, c.dtype, c.path, static_cast<cudaStream_t>(c.stream));
}

int kvk_rotate(const kvk_rotation* args) {
  if (int status = kvk::check_launch(args)) return status;
  const kvk_rotation& r = *args;
  if (r.heads == 0 || r.tokens == 0) return KVK_OK;
  const kvk::Side side{r.in, r.in_head_stride, r.in_token_stride, nullptr, nullptr, 0, r.turn, r.dtype, 0};
  const kvk::Rows rows{side, {r.head_dim, r.rope, r.rotary_dim}, r.tokens, r.out, r.out_head_stride, r.out_token_stride};
  return kvk::bring(rows, r.heads, r.dtype, r.path, static_cast<cudaStream_t>(r.stream));
}

void kvk_turn(const float* inv_freq, uint32_t half, int64_t delta, float* turn) {
  for (uint32_t i = 0; i < half; ++i) {
    const double angle = static_cast<double>(delta) * inv_freq[i];
    turn[i] = static_cast<float>(std::cos(angle));
    turn[half + i] = static_cast<float>(std::sin(angle));
  }
}
}
