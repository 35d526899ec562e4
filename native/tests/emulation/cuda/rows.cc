// The CUDA library's quantise, dequantise, rotate, load, score and pages, thread by thread on host memory; for tests only.
//
// Owns the loops over threads that a launch is, and sums where threads meet. Invariant: what a thread does is the tile headers'.
#include <cmath>
#include <vector>

#include "cuda/codec_checks.h"
#include "cuda/load_tile.h"
#include "cuda/pages_tile.h"
#include "cuda/quantise_tile.h"

namespace kvk {
namespace {

constexpr uint32_t kRowLanes = 16;

template <int Dtype>
bool quantise_fast(const kvk_conversion& c) {
  bool held = true;
  for (uint32_t head = 0; head < c.heads; ++head)
    if (c.group != 0) {
      for (uint32_t group = 0; group * c.group < c.tokens; ++group)
        for (uint32_t channel = 0; channel < c.head_dim; channel += 2) held &= quantise_channels<Dtype>(c, head, group, channel);
    } else {
      for (uint32_t token = 0; token < c.tokens; ++token) {
        Extent all = nothing_yet();
        for (uint32_t lane = 0; lane < kRowLanes; ++lane) all.add(row_extent<Dtype>(c, row_of(c, head, token), lane, kRowLanes));
        held &= all.finite;
        for (uint32_t lane = 0; lane < kRowLanes && all.finite; ++lane) quantise_row<Dtype>(c, head, token, all, lane, kRowLanes);
      }
    }
  return held;
}

bool quantise_naively(const kvk_conversion& c) {
  bool held = true;
  for (uint32_t head = 0; head < c.heads; ++head) {
    for (uint32_t token = 0; token < c.tokens; token += c.group == 0 ? 1 : c.group)
      for (uint32_t channel = 0; channel < (c.group == 0 ? 1 : c.head_dim); ++channel)
        held &= quantise_plainly(c, head, token, channel);
    for (uint32_t token = 0; token < c.tokens && held; ++token)
      for (uint32_t channel = 0; channel < c.head_dim; channel += 2) encode_plainly(c, head, token, channel);
  }
  return held;
}

bool quantise(const kvk_conversion& c) {
  if (c.path == KVK_CPU_REFERENCE || !in_pairs(c)) return quantise_naively(c);
  if (c.dtype == KVK_F32) return quantise_fast<KVK_F32>(c);
  return c.dtype == KVK_F16 ? quantise_fast<KVK_F16>(c) : quantise_fast<KVK_BF16>(c);
}

struct Target {
  void* memory;
  int64_t head_stride, token_stride;
};

// One side of one segment of every head, by tiles where the shape allows it.
template <int Dtype>
void bring(const Side& side, const Shape& shape, uint32_t heads, uint32_t first, uint32_t tokens, const Target& to, bool naive) {
  const bool fast =
      !naive && in_octets(shape) && is_aligned(to.memory, 16) && to.head_stride % 16 == 0 && to.token_stride % 16 == 0;
  for (uint32_t head = 0; head < heads; ++head) {
    void* out = at(to.memory, head * to.head_stride);
    for (uint32_t tile = 0; fast && tile * tile_tokens(shape.head_dim) < tokens; ++tile)
      for (uint32_t thread = 0; thread < kLoadThreads; ++thread)
        bring_tile<Dtype>(side, shape, head, first, tokens, tile, thread, StoreAt<Dtype>{out, to.token_stride, first});
    std::vector<float> row(shape.head_dim);
    for (uint32_t t = 0; !fast && t < tokens; ++t) {  // a row at once: it may be turned in place
      for (uint32_t i = 0; i < shape.head_dim; ++i) row[i] = value(side, shape, head, first + t, i);
      for (uint32_t i = 0; i < shape.head_dim; ++i) put(Dtype, at(out, t * to.token_stride), i, row[i]);
    }
  }
}

void bring(const Side& side, const Shape& shape, uint32_t heads, uint32_t first, uint32_t tokens, const Target& to,
           uint32_t dtype, uint32_t path) {
  const bool naive = path == KVK_CPU_REFERENCE;
  if (dtype == KVK_F32) return bring<KVK_F32>(side, shape, heads, first, tokens, to, naive);
  if (dtype == KVK_F16) return bring<KVK_F16>(side, shape, heads, first, tokens, to, naive);
  bring<KVK_BF16>(side, shape, heads, first, tokens, to, naive);
}

// Sums of one token of one side, in double.
void score_token(const kvk_scoring& a, const Side& side, const void* computed, uint32_t token, int64_t column, float* square,
                 float* norm) {
  double apart = 0, size = 0;
  for (uint32_t head = 0; head < a.heads; ++head)
    for (uint32_t i = 0; i < a.head_dim; ++i) {
      const double y = element(a.dtype, at(computed, head * a.head_stride + column * a.token_stride), i);
      const double x = value(side, {a.head_dim, a.rope, a.rotary_dim}, head, token, i);
      apart += (x - y) * (x - y), size += y * y;
    }
  *square = static_cast<float>(apart), *norm = static_cast<float>(size);
}

}  // namespace
}  // namespace kvk

extern "C" {

int kvk_quantise(const kvk_conversion* args) {
  if (int status = kvk::check_launch(args)) return status;
  if (!kvk::quantise(*args) && args->status != nullptr) *args->status = KVK_RANGE;
  return KVK_OK;
}

int kvk_dequantise(const kvk_conversion* args) {
  if (int status = kvk::check_launch(args)) return status;
  const kvk_conversion& c = *args;
  const kvk::Side side{c.codes, c.codes_head_stride, c.codes_token_stride, c.scale, c.zero, c.scale_head_stride, nullptr, c.codec,
                       c.group};
  kvk::bring(side, {c.head_dim, KVK_ROPE_HALF, 0}, c.heads, 0, c.tokens, {c.elements, c.head_stride, c.token_stride}, c.dtype,
             c.path);
  return KVK_OK;
}

int kvk_rotate(const kvk_rotation* args) {
  if (int status = kvk::check_launch(args)) return status;
  const kvk_rotation& r = *args;
  const kvk::Side side{r.in, r.in_head_stride, r.in_token_stride, nullptr, nullptr, 0, r.turn, r.dtype, 0};
  kvk::bring(side, {r.head_dim, r.rope, r.rotary_dim}, r.heads, 0, r.tokens, {r.out, r.out_head_stride, r.out_token_stride},
             r.dtype, r.path);
  return KVK_OK;
}

void kvk_turn(const float* inv_freq, uint32_t half, int64_t delta, float* turn) {
  for (uint32_t i = 0; i < half; ++i) {
    turn[i] = static_cast<float>(std::cos(static_cast<double>(delta) * inv_freq[i]));
    turn[half + i] = static_cast<float>(std::sin(static_cast<double>(delta) * inv_freq[i]));
  }
}

int kvk_load(const kvk_loading* args) {
  if (int status = kvk::check_version(args)) return status;
  const kvk_loading& a = *args;
  for (uint32_t i = 0; i < a.count; ++i)
    for (bool keys : {true, false}) {
      const kvk_segment& s = a.segments[i];
      kvk::bring(keys ? kvk::keys_of(s) : kvk::values_of(s), {a.head_dim, a.rope, a.rotary_dim}, a.heads, s.first, s.tokens,
                 {kvk::at(keys ? a.k : a.v, a.places[i]), a.head_stride, a.token_stride}, a.dtype, a.path);
    }
  return KVK_OK;
}

int kvk_score(const kvk_scoring* args) {
  if (int status = kvk::check_version(args)) return status;
  const kvk_scoring& a = *args;
  for (uint32_t i = 0; i < a.count; ++i)
    for (bool keys : {true, false}) {
      const kvk_segment& s = a.segments[i];
      for (uint32_t t = 0; t < s.tokens; ++t) {
        const int64_t column = a.columns[i] + t;
        const uint64_t place = (keys ? 0 : a.tokens) + static_cast<uint64_t>(column);
        kvk::score_token(a, keys ? kvk::keys_of(s) : kvk::values_of(s), keys ? a.k : a.v, s.first + t, column, a.square + place,
                         a.norm + place);
      }
    }
  return KVK_OK;
}

int kvk_copy_pages(const kvk_pages* args) {
  if (int status = kvk::check_version(args)) return status;
  bool aligned = kvk::strides_fit(*args, 16);
  for (uint32_t i = 0; i < args->count; ++i) aligned &= kvk::is_aligned(args->from[i], 16) && kvk::is_aligned(args->to[i], 16);
  constexpr uint64_t kThreads = 96;
  for (uint64_t thread = 0; thread < kThreads; ++thread)
    aligned ? kvk::copy_words<kvk::Words4>(*args, thread, kThreads) : kvk::copy_words<uint8_t>(*args, thread, kThreads);
  return KVK_OK;
}
}
