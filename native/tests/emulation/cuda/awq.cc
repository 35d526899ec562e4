// The CUDA library's AWQ functions on host memory, and its transfer functions, done at once; for tests only.
//
// Owns the loops over threads, and m16n8k16 over the registers of 32 lanes as PTX describes them; of more than 16 rows the kernel
// itself runs (cuda/awq_rows.h). Invariant: what a lane holds is cuda/awq_tile.h's.
#include "cuda/awq_rows.h"
#include "cuda/awq_tile.h"

#include <cstdlib>
#include <vector>

#include "cuda/awq_checks.h"
#include "cuda/rows_tile.h"

namespace kvk::awq {
namespace {

float half_of(uint32_t dtype, uint32_t word, uint32_t i) {
  const auto bits = static_cast<uint16_t>(word >> 16 * i);
  return dtype == KVK_F16 ? from_half(bits) : from_bf16(bits);
}

void multiply_add(uint32_t dtype, float (&d)[kLanes][4], const uint32_t (&a)[kLanes][4], const uint32_t (&b)[kLanes][2]) {
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

const uint32_t* lane_words(const kvk_awq& a, uint32_t strip, uint32_t tile, uint32_t lane) {
  return a.words + packed_index(a.inputs, strip, tile, lane, 0);
}

template <int Dtype>
void multiply_strip(const kvk_awq& a, uint32_t strip, uint32_t row_tile, float (&sums)[kLanes][4]) {
  for (uint32_t tile = 0; tile < a.inputs / kTile; ++tile) {
    float part[kLanes][4] = {};
    GroupOf groups[kLanes];
    for (uint32_t lane = 0; lane < kLanes; ++lane) groups[lane] = group_of<Dtype>(a, tile * kTile / a.group, strip, lane);
    for (uint32_t step = 0; step < kSteps; ++step) {
      uint32_t weights[kLanes][4], x[kLanes][2];
      for (uint32_t lane = 0; lane < kLanes; ++lane) {
        operand_of<Dtype>(lane_words(a, strip, tile, lane)[step], groups[lane], weights[lane]);
        const Words4 half = x_half(a, 8 * row_tile + lane / 4, tile, lane, step / 2);
        x[lane][0] = half.w[step % 2 * 2], x[lane][1] = half.w[step % 2 * 2 + 1];
      }
      multiply_add(Dtype, part, weights, x);
    }
    for (uint32_t lane = 0; lane < kLanes; ++lane)
      for (uint32_t c = 0; c < 4; ++c) sums[lane][c] += groups[lane].scale[c / 2] * part[lane][c];
  }
}

template <int Dtype>
void multiply(const kvk_awq& a) {
  for (uint32_t strip = 0; strip < a.outputs / kStrip; ++strip)
    for (uint32_t row_tile = 0; 8 * row_tile < a.rows; ++row_tile) {
      float sums[kLanes][4] = {};
      multiply_strip<Dtype>(a, strip, row_tile, sums);
      for (uint32_t lane = 0; lane < kLanes; ++lane)
        for (uint32_t c = 0; c < 4; ++c) {
          const Place place = sum_place(lane, c);
          const uint32_t row = 8 * row_tile + place.k, n = strip * kStrip + place.n;
          if (row < a.rows)
            put(Dtype, at(a.out, row * a.out_row_stride), n, sums[lane][c] + (a.bias == nullptr ? 0 : element(Dtype, a.bias, n)));
        }
    }
}

template <class Kernel>
void run_rows(const kvk_awq& a) {
  struct Call {
    static void body(const void* a) { Kernel::run(*static_cast<const kvk_awq*>(a), kvk::emulation::shared()); }
  };
  const uint32_t blocks = (a.outputs + Kernel::kOutputs - 1) / Kernel::kOutputs;
  kvk::emulation::run(blocks, Kernel::kThreads, Kernel::kSharedBytes, Call::body, &a);
}

template <int Dtype, uint32_t kRowTiles>
void multiply_rows(const kvk_awq& a) {
  if (a.outputs <= 32) return run_rows<ManyRows<Dtype, kRowTiles, 1>>(a);
  a.outputs <= 128 ? run_rows<ManyRows<Dtype, kRowTiles, 2>>(a) : run_rows<ManyRows<Dtype, kRowTiles, 4>>(a);
}

void multiply_naively(const kvk_awq& a) {
  for (uint32_t row = 0; row < a.rows; ++row)
    for (uint32_t n = 0; n < a.outputs; ++n) {
      double sum = a.bias == nullptr ? 0 : element(a.dtype, a.bias, n);
      for (uint32_t k = 0; k < a.inputs; ++k) sum += double{element(a.dtype, at(a.x, row * a.x_row_stride), k)} * weight(a, k, n);
      put(a.dtype, at(a.out, row * a.out_row_stride), n, static_cast<float>(sum));
    }
}

}  // namespace
}  // namespace kvk::awq

extern "C" {

int kvk_awq_repack(const kvk_awq* args) {
  using namespace kvk::awq;
  if (int status = check_awq(args)) return status;
  for (uint32_t strip = 0; strip < args->outputs / kStrip; ++strip)
    for (uint32_t tile = 0; tile < args->inputs / kTile; ++tile)
      for (uint32_t lane = 0; lane < kLanes; ++lane)
        for (uint32_t step = 0; step < kSteps; ++step)
          static_cast<uint32_t*>(args->out)[packed_index(args->inputs, strip, tile, lane, step)] =
              packed_word(*args, strip, tile, lane, step);
  return KVK_OK;
}

int kvk_awq_multiply(const kvk_awq* args) {
  using namespace kvk::awq;
  if (int status = check_product(args)) return status;
  if (args->path == KVK_CPU_REFERENCE)
    multiply_naively(*args);
  else if (args->rows > 16 && args->rows <= 32)
    args->dtype == KVK_F16 ? multiply_rows<KVK_F16, 4>(*args) : multiply_rows<KVK_BF16, 4>(*args);
  else if (args->rows > 16)
    args->dtype == KVK_F16 ? multiply_rows<KVK_F16, 8>(*args) : multiply_rows<KVK_BF16, 8>(*args);
  else
    args->dtype == KVK_F16 ? multiply<KVK_F16>(*args) : multiply<KVK_BF16>(*args);
  return KVK_OK;
}

int kvk_awq_dequantise(const kvk_awq* args) {
  using namespace kvk::awq;
  if (int status = check_scaled(args)) return status;
  const kvk_awq& a = *args;
  for (uint32_t n = 0; n < a.outputs && a.path == KVK_CPU_REFERENCE; ++n)
    for (uint32_t k = 0; k < a.inputs; ++k) kvk::put(a.dtype, kvk::at(a.out, n * a.out_row_stride), k, weight(a, k, n));
  for (uint32_t strip = 0; strip < a.outputs / kStrip && a.path != KVK_CPU_REFERENCE; ++strip)
    for (uint32_t tile = 0; tile < a.inputs / kTile; ++tile)
      for (uint32_t lane = 0; lane < kLanes; ++lane) {
        const uint32_t* w = lane_words(a, strip, tile, lane);
        float rows[2][16];
        weights_of_lane(a, {{w[0], w[1], w[2], w[3]}}, strip, tile, lane, rows);
        for (uint32_t i = 0; i < 32; ++i) {
          const uint32_t n = strip * kStrip + lane / 4 + 8 * (i / 16), k = tile * kTile + 16 * (lane % 4) + i % 16;
          kvk::put(a.dtype, kvk::at(a.out, n * a.out_row_stride), k, rows[i / 16][i % 16]);
        }
      }
  return KVK_OK;
}

// Every copy is done when it is asked for, so streams and events are names only.

int kvk_host_register(const void*, uint64_t, uint32_t) { return KVK_OK; }
int kvk_host_unregister(const void*) { return KVK_OK; }
int kvk_host_allocate(uint64_t bytes, void** memory) { return (*memory = std::malloc(bytes)) != nullptr ? KVK_OK : KVK_DEVICE; }
int kvk_host_free(void* memory) { return std::free(memory), KVK_OK; }

int kvk_copy(void* const* to, const void* const* from, const uint64_t* bytes, uint64_t count, void*) {
  for (uint64_t i = 0; i < count; ++i) std::memcpy(to[i], from[i], bytes[i]);
  return KVK_OK;
}

int kvk_stream_create(void** stream) { return kvk_host_allocate(1, stream); }
int kvk_stream_destroy(void* stream) { return kvk_host_free(stream); }
int kvk_event_create(void** event) { return kvk_host_allocate(1, event); }
int kvk_event_destroy(void* event) { return kvk_host_free(event); }
int kvk_event_record(void*, void*) { return KVK_OK; }
int kvk_event_wait(void*, void*) { return KVK_OK; }
int kvk_event_synchronise(void*) { return KVK_OK; }
}
