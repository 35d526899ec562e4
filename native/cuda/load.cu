// kvk_load and kvk_score: a layer's segments, where they lie, brought to elements in one launch; stored, or compared.
//
// Never allocates, never waits; host pointers are read as the device reads them. Invariant: block (x, y, z) of threads touches
// tile x / 2 of K or V (x % 2) of segment z, and, storing, head y of it, nothing else.
#include "cuda/codec_checks.h"
#include "cuda/errors.h"
#include "cuda/load_tile.h"

namespace kvk {
namespace {

KVK_BOTH Shape shape_of(const kvk_loading& a) { return {a.head_dim, a.rope, a.rotary_dim}; }
KVK_BOTH Shape shape_of(const kvk_scoring& a) { return {a.head_dim, a.rope, a.rotary_dim}; }

// A segment, copied word by word into shared memory: many threads read its fields.
__device__ void fetch(const kvk_segment* from, kvk_segment& to) {
  const auto* words = reinterpret_cast<const uint64_t*>(from);
  if (threadIdx.x < sizeof(kvk_segment) / 8) reinterpret_cast<uint64_t*>(&to)[threadIdx.x] = words[threadIdx.x];
  __syncthreads();
}

template <int Dtype>
__global__ void __launch_bounds__(kLoadThreads) load_fast(const __grid_constant__ kvk_loading a) {
  __shared__ kvk_segment segment;
  fetch(a.segments + blockIdx.z, segment);
  const bool keys = blockIdx.x % 2 == 0;
  void* out = at(keys ? a.k : a.v, a.places[blockIdx.z] + blockIdx.y * a.head_stride);
  const StoreAt<Dtype> store{out, a.token_stride, segment.first};
  bring_tile<Dtype>(keys ? keys_of(segment) : values_of(segment), shape_of(a), blockIdx.y, segment.first, segment.tokens,
                    blockIdx.x / 2, threadIdx.x, store);
}

// One thread an element.
__global__ void load_naively(const __grid_constant__ kvk_loading a) {
  __shared__ kvk_segment segment;
  fetch(a.segments + blockIdx.z, segment);
  const bool keys = blockIdx.x % 2 == 0;
  const uint64_t index = static_cast<uint64_t>(blockIdx.x / 2) * kLoadThreads + threadIdx.x;
  if (index >= static_cast<uint64_t>(segment.tokens) * a.head_dim) return;
  const auto token = static_cast<uint32_t>(index / a.head_dim), i = static_cast<uint32_t>(index % a.head_dim);
  const Side side = keys ? keys_of(segment) : values_of(segment);
  const int64_t bytes = a.places[blockIdx.z] + blockIdx.y * a.head_stride + static_cast<int64_t>(token) * a.token_stride;
  put(a.dtype, at(keys ? a.k : a.v, bytes), i, value(side, shape_of(a), blockIdx.y, segment.first + token, i));
}

template <int Dtype>
__global__ void __launch_bounds__(kLoadThreads) score_fast(const __grid_constant__ kvk_scoring a) {
  __shared__ kvk_segment segment;
  __shared__ float sums[2][kLoadThreads * kRowsInFlight];  // [row][pair]
  fetch(a.segments + blockIdx.z, segment);
  const bool keys = blockIdx.x % 2 == 0;
  const Side side = keys ? keys_of(segment) : values_of(segment);
  const uint32_t tile = blockIdx.x / 2, pairs = a.head_dim / 16, rows = rows_at_once(a.head_dim);
  if (tile * tile_tokens(a.head_dim) >= segment.tokens) return;  // the whole block of threads
  const uint32_t row = threadIdx.x / pairs, p = threadIdx.x % pairs;
  const uint32_t token = segment.first + tile * tile_tokens(a.head_dim) + row;
  const int64_t column = a.columns[blockIdx.z];
  float square[kRowsInFlight] = {}, norm[kRowsInFlight] = {};
  for (uint32_t head = 0; head < a.heads; ++head) {
    const void* computed = at(keys ? a.k : a.v, head * a.head_stride + column * a.token_stride);
    const Compare<Dtype> compare{computed, a.token_stride, segment.first, token, rows, square, norm};
    bring_tile<Dtype>(side, shape_of(a), head, segment.first, segment.tokens, tile, threadIdx.x, compare);
  }
#pragma unroll
  for (uint32_t r = 0; r < kRowsInFlight; ++r)
    if (row < rows) sums[0][(r * rows + row) * pairs + p] = square[r], sums[1][(r * rows + row) * pairs + p] = norm[r];
  __syncthreads();
  for (uint32_t in_tile = threadIdx.x; in_tile < tile_tokens(a.head_dim); in_tile += kLoadThreads) {
    const uint32_t t = tile * tile_tokens(a.head_dim) + in_tile;
    if (t >= segment.tokens) break;
    float s = 0, n = 0;
    for (uint32_t i = 0; i < pairs; ++i) s += sums[0][in_tile * pairs + i], n += sums[1][in_tile * pairs + i];
    const uint64_t place = (keys ? 0 : a.tokens) + static_cast<uint64_t>(column) + t;
    a.square[place] = s;
    a.norm[place] = n;
  }
}

// One thread a token, in double.
__global__ void score_naively(const __grid_constant__ kvk_scoring a) {
  __shared__ kvk_segment segment;
  fetch(a.segments + blockIdx.z, segment);
  const bool keys = blockIdx.x % 2 == 0;
  const uint32_t token = blockIdx.x / 2 * kLoadThreads + threadIdx.x;
  if (token >= segment.tokens) return;
  const Side side = keys ? keys_of(segment) : values_of(segment);
  const int64_t column = a.columns[blockIdx.z] + token;
  double square = 0, norm = 0;
  for (uint32_t head = 0; head < a.heads; ++head) {
    const void* computed = at(keys ? a.k : a.v, head * a.head_stride + column * a.token_stride);
    for (uint32_t i = 0; i < a.head_dim; ++i) {
      const double y = element(a.dtype, computed, i);
      const double apart = static_cast<double>(value(side, shape_of(a), head, segment.first + token, i)) - y;
      square += apart * apart;
      norm += y * y;
    }
  }
  const uint64_t place = (keys ? 0 : a.tokens) + static_cast<uint64_t>(column);
  a.square[place] = static_cast<float>(square);
  a.norm[place] = static_cast<float>(norm);
}

template <class Args>
int check_segments(const Args* a) {
  if (int status = check_version(a)) return status;
  if (int status = check_shape(a->head_dim, a->dtype)) return status;
  if (int status = check_heads(a->heads)) return status;
  if (int status = check_turning(a->rope, a->rotary_dim, a->head_dim, 0)) return status;
  if (int status = check_count("most_tokens", a->most_tokens)) return status;
  if (a->count > kMostHeads) return fail(KVK_INVALID, "count=%u segments; at most %u in one call", a->count, kMostHeads);
  if (a->count != 0 && a->heads != 0 && (a->segments == nullptr || a->k == nullptr || a->v == nullptr))
    return fail(KVK_INVALID, "a null pointer for %u segments of %u heads", a->count, a->heads);
  return KVK_OK;
}

template <class Args>
bool is_fast(const Args& a) {
  const uint32_t bytes = 16;
  return a.path != KVK_CPU_REFERENCE && in_octets(shape_of(a)) && is_aligned(a.k, bytes) && is_aligned(a.v, bytes) &&
         a.head_stride % bytes == 0 && a.token_stride % bytes == 0;
}

uint32_t tiles(uint64_t items, uint32_t each) { return static_cast<uint32_t>(2 * ((items + each - 1) / each)); }

}  // namespace
}  // namespace kvk

extern "C" {

int kvk_load(const kvk_loading* args) {
  if (int status = kvk::check_segments(args)) return status;
  const kvk_loading& a = *args;
  if (a.count == 0 || a.heads == 0 || a.most_tokens == 0) return KVK_OK;
  if (a.places == nullptr) return kvk::fail(KVK_INVALID, "no places for %u segments", a.count);
  auto* stream = static_cast<cudaStream_t>(a.stream);
  if (!kvk::is_fast(a)) {
    const dim3 grid(kvk::tiles(static_cast<uint64_t>(a.most_tokens) * a.head_dim, kvk::kLoadThreads), a.heads, a.count);
    kvk::load_naively<<<grid, kvk::kLoadThreads, 0, stream>>>(a);
    return kvk::launched("load_naively");
  }
  const dim3 grid(kvk::tiles(a.most_tokens, kvk::tile_tokens(a.head_dim)), a.heads, a.count);
  if (a.dtype == KVK_BF16)
    kvk::load_fast<KVK_BF16><<<grid, kvk::kLoadThreads, 0, stream>>>(a);
  else if (a.dtype == KVK_F16)
    kvk::load_fast<KVK_F16><<<grid, kvk::kLoadThreads, 0, stream>>>(a);
  else
    kvk::load_fast<KVK_F32><<<grid, kvk::kLoadThreads, 0, stream>>>(a);
  return kvk::launched("load_fast");
}

int kvk_score(const kvk_scoring* args) {
  if (int status = kvk::check_segments(args)) return status;
  const kvk_scoring& a = *args;
  if (a.count == 0 || a.heads == 0 || a.most_tokens == 0) return KVK_OK;
  if (a.columns == nullptr || a.square == nullptr || a.norm == nullptr)
    return kvk::fail(KVK_INVALID, "no columns, or nowhere to write, for %u segments", a.count);
  auto* stream = static_cast<cudaStream_t>(a.stream);
  if (!kvk::is_fast(a)) {
    const dim3 grid(kvk::tiles(a.most_tokens, kvk::kLoadThreads), 1, a.count);
    kvk::score_naively<<<grid, kvk::kLoadThreads, 0, stream>>>(a);
    return kvk::launched("score_naively");
  }
  const dim3 grid(kvk::tiles(a.most_tokens, kvk::tile_tokens(a.head_dim)), 1, a.count);
  if (a.dtype == KVK_BF16)
    kvk::score_fast<KVK_BF16><<<grid, kvk::kLoadThreads, 0, stream>>>(a);
  else if (a.dtype == KVK_F16)
    kvk::score_fast<KVK_F16><<<grid, kvk::kLoadThreads, 0, stream>>>(a);
  else
    kvk::score_fast<KVK_F32><<<grid, kvk::kLoadThreads, 0, stream>>>(a);
  return kvk::launched("score_fast");
}
}
