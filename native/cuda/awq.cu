// AWQ linear layers: repack once, multiply up to 64 rows on the tensor cores, dequantise for more.
//
// Never allocates, never waits. Up to 16 rows a block of threads owns one or two strips of 16 outputs; its eight warps share out
// the groups of inputs and add up at the end, in an order that depends on nothing. More rows: cuda/awq_rows.h. Invariant: what
// passes the checks keeps every index inside what the caller described.
#include "cuda/awq_tile.h"

#include "cuda/awq_checks.h"
#include "cuda/awq_rows.h"
#include "cuda/errors.h"
#include "cuda/rows_tile.h"

namespace kvk::awq {
namespace {

constexpr uint32_t kWarps = 8;
constexpr uint32_t kThreads = kWarps * kLanes;
constexpr uint32_t kFewBlocks = 264;  // two for each of 132 multiprocessors: below it strips are not taken in pairs

// d += a b: 16 outputs by 16 inputs by 8 rows of x.
template <int Dtype>
__device__ void multiply_add(float* d, const uint32_t* a, const uint32_t* b) {
#if __CUDA_ARCH__ >= 800
  if constexpr (Dtype == KVK_F16)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else  // sm_75: two of half the depth; bf16 is refused before the launch
  if constexpr (Dtype == KVK_F16)
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half)
      asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                   : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                   : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]));
#endif
}

// Read once by one block of threads: not kept in the first cache.
__device__ Words4 load_once(const uint32_t* words) {
  const uint4 four = __ldcs(reinterpret_cast<const uint4*>(words));
  return {{four.x, four.y, four.z, four.w}};
}

// What one warp asks of memory at once: `Tiles` tiles of a group, of each strip.
template <int Strips, int Tiles>
struct Unit {
  Words4 words[Strips][Tiles];
};

template <int Strips, int Tiles>
__device__ Unit<Strips, Tiles> unit_of(const kvk_awq& a, uint32_t strip, uint32_t unit, uint32_t lane) {
  Unit<Strips, Tiles> u;
#pragma unroll
  for (uint32_t s = 0; s < Strips; ++s)
#pragma unroll
    for (uint32_t t = 0; t < Tiles; ++t)
      u.words[s][t] = load_once(a.words + packed_index(a.inputs, strip + s, unit * Tiles + t, lane, 0));
  return u;
}

template <int Dtype, int RowTiles, int Strips, int Tiles>
__device__ void add_unit(const kvk_awq& a, const Unit<Strips, Tiles>& u, uint32_t strip, uint32_t unit, uint32_t lane,
                         float (&sums)[Strips][RowTiles][4]) {
  GroupOf groups[Strips];
  float part[Strips][RowTiles][4] = {};
#pragma unroll
  for (uint32_t s = 0; s < Strips; ++s) groups[s] = group_of<Dtype>(a, unit * Tiles * kTile / a.group, strip + s, lane);
#pragma unroll
  for (uint32_t t = 0; t < Tiles; ++t)
#pragma unroll
    for (uint32_t step = 0; step < kSteps; step += 2) {
      uint32_t weights[2][Strips][4];
#pragma unroll
      for (uint32_t s = 0; s < Strips; ++s) {
        operand_of<Dtype>(u.words[s][t].w[step], groups[s], weights[0][s]);
        operand_of<Dtype>(u.words[s][t].w[step + 1], groups[s], weights[1][s]);
      }
#pragma unroll
      for (uint32_t r = 0; r < RowTiles; ++r) {
        const Words4 x = x_half(a, 8 * r + lane / 4, unit * Tiles + t, lane, step / 2);
#pragma unroll
        for (uint32_t s = 0; s < Strips; ++s) {
          multiply_add<Dtype>(part[s][r], weights[0][s], x.w);
          multiply_add<Dtype>(part[s][r], weights[1][s], x.w + 2);
        }
      }
    }
#pragma unroll
  for (uint32_t s = 0; s < Strips; ++s)
#pragma unroll
    for (uint32_t r = 0; r < RowTiles; ++r)
#pragma unroll
      for (uint32_t c = 0; c < 4; ++c) sums[s][r][c] += groups[s].scale[c / 2] * part[s][r][c];
}

template <int Dtype, int RowTiles, int Strips, int Tiles>
__global__ void __launch_bounds__(kThreads, RowTiles* Strips >= 8 ? 1 : 2) multiply(const __grid_constant__ kvk_awq a) {
  constexpr uint32_t kOutputs = Strips * kStrip, kRows = RowTiles * 8;
  __shared__ float shared[kWarps][kRows][kOutputs];
  const uint32_t warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, strip = blockIdx.x * Strips;
  const uint32_t units = a.inputs / (Tiles * kTile);
  float sums[Strips][RowTiles][4] = {};
  if (warp < units) {
    Unit<Strips, Tiles> next = unit_of<Strips, Tiles>(a, strip, warp, lane);
    for (uint32_t unit = warp; unit < units; unit += kWarps) {
      const Unit<Strips, Tiles> held = next;
      if (unit + kWarps < units) next = unit_of<Strips, Tiles>(a, strip, unit + kWarps, lane);
      add_unit<Dtype, RowTiles, Strips, Tiles>(a, held, strip, unit, lane, sums);
    }
  }
#pragma unroll
  for (uint32_t s = 0; s < Strips; ++s)
#pragma unroll
    for (uint32_t r = 0; r < RowTiles; ++r)
#pragma unroll
      for (uint32_t c = 0; c < 4; ++c) {
        const Place place = sum_place(lane, c);
        shared[warp][8 * r + place.k][s * kStrip + place.n] = sums[s][r][c];
      }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < kRows * kOutputs; i += kThreads) {
    const uint32_t row = i / kOutputs, n = i % kOutputs;
    if (row >= a.rows) break;
    float sum = a.bias == nullptr ? 0 : element(Dtype, a.bias, strip * kStrip + n);
#pragma unroll
    for (uint32_t w = 0; w < kWarps; ++w) sum += shared[w][row][n];
    put(Dtype, at(a.out, row * a.out_row_stride), strip * kStrip + n, sum);
  }
}

// One thread one output of one row, from the checkpoint's words, in double.
__global__ void multiply_naively(const __grid_constant__ kvk_awq a) {
  const uint64_t index = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= static_cast<uint64_t>(a.rows) * a.outputs) return;
  const auto row = static_cast<uint32_t>(index / a.outputs), n = static_cast<uint32_t>(index % a.outputs);
  const void* x = at(a.x, row * a.x_row_stride);
  double sum = a.bias == nullptr ? 0 : element(a.dtype, a.bias, n);
  for (uint32_t k = 0; k < a.inputs; ++k) sum += static_cast<double>(element(a.dtype, x, k)) * weight(a, k, n);
  put(a.dtype, at(a.out, row * a.out_row_stride), n, static_cast<float>(sum));
}

__global__ void repack(const __grid_constant__ kvk_awq a) {
  const uint64_t index = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= static_cast<uint64_t>(a.inputs) * a.outputs / 8) return;
  const auto step = static_cast<uint32_t>(index % kSteps), lane = static_cast<uint32_t>(index / kSteps % kLanes);
  const uint64_t tile = index / kSteps / kLanes, tiles = a.inputs / kTile;
  static_cast<uint32_t*>(a.out)[index] =
      packed_word(a, static_cast<uint32_t>(tile / tiles), static_cast<uint32_t>(tile % tiles), lane, step);
}

template <int Dtype>
__global__ void __launch_bounds__(kThreads) dequantise(const __grid_constant__ kvk_awq a) {
  const uint64_t index = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const uint32_t tiles = a.inputs / kTile;
  if (index >= static_cast<uint64_t>(a.outputs / kStrip) * tiles * kLanes) return;
  const auto lane = static_cast<uint32_t>(index % kLanes), tile = static_cast<uint32_t>(index / kLanes % tiles);
  const auto strip = static_cast<uint32_t>(index / kLanes / tiles);
  float rows[2][16];
  weights_of_lane(a, load_once(a.words + packed_index(a.inputs, strip, tile, lane, 0)), strip, tile, lane, rows);
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    const int64_t row = strip * kStrip + lane / 4 + 8 * i;
    void* out = at(a.out, row * a.out_row_stride + (static_cast<int64_t>(tile) * kTile + 16 * (lane % 4)) * 2);
    store_octet<Dtype>(rows[i], out);
    store_octet<Dtype>(rows[i] + 8, at(out, 16));
  }
}

__global__ void dequantise_naively(const __grid_constant__ kvk_awq a) {
  const uint64_t index = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= static_cast<uint64_t>(a.inputs) * a.outputs) return;
  const uint64_t k = index % a.inputs;
  const auto n = static_cast<uint32_t>(index / a.inputs);
  put(a.dtype, at(a.out, n * a.out_row_stride), static_cast<uint32_t>(k), weight(a, k, n));
}

uint32_t blocks_for(uint64_t threads) { return static_cast<uint32_t>((threads + kThreads - 1) / kThreads); }

template <int Dtype, int RowTiles, int Strips>
int launch_strips(const kvk_awq& a) {
  const uint32_t grid = a.outputs / kStrip / Strips;
  auto* stream = static_cast<cudaStream_t>(a.stream);
  if (a.group % (2 * kTile) == 0)
    multiply<Dtype, RowTiles, Strips, 2><<<grid, kThreads, 0, stream>>>(a);
  else
    multiply<Dtype, RowTiles, Strips, 1><<<grid, kThreads, 0, stream>>>(a);
  return launched("awq multiply");
}

template <int Dtype, int RowTiles>
int launch_rows(const kvk_awq& a) {
  const uint32_t strips = a.outputs / kStrip;
  if constexpr (RowTiles < 8)  // more would not fit into the registers
    if (strips % 2 == 0 && strips >= 2 * kFewBlocks) return launch_strips<Dtype, RowTiles, 2>(a);
  return launch_strips<Dtype, RowTiles, 1>(a);
}

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocksPerSM) multiply_many(const __grid_constant__ kvk_awq a) {
  extern __shared__ __align__(128) uint8_t memory[];
  Kernel::run(a, memory);
}

template <class Kernel>
int launch_many(const kvk_awq& a) {
  if (int status = checked(cudaFuncSetAttribute(multiply_many<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                static_cast<int>(Kernel::kSharedBytes)),
                           "shared memory for awq"))
    return status;
  const uint32_t blocks = (a.outputs + Kernel::kOutputs - 1) / Kernel::kOutputs;
  multiply_many<Kernel><<<blocks, Kernel::kThreads, Kernel::kSharedBytes, static_cast<cudaStream_t>(a.stream)>>>(a);
  return launched("awq multiply_many");
}

// As many outputs a block as leave enough blocks for the multiprocessors.
template <int Dtype>
int launch_many_rows(const kvk_awq& a, uint64_t shared_block) {
  if (ManyRows<Dtype, 8, 1>::kSharedBytes > shared_block)
    return a.rows <= 32 ? launch_rows<Dtype, 4>(a) : launch_rows<Dtype, 8>(a);
  constexpr uint32_t kEnough = 96;
  if (a.rows <= 32) {  // two blocks for each
    if (a.outputs >= 4 * kEnough * ManyRows<Dtype, 4, 4>::kOutputs) return launch_many<ManyRows<Dtype, 4, 4>>(a);
    if (a.outputs >= 2 * kEnough * ManyRows<Dtype, 4, 2>::kOutputs) return launch_many<ManyRows<Dtype, 4, 2>>(a);
    return launch_rows<Dtype, 4>(a);
  }
  if (a.outputs >= kEnough * ManyRows<Dtype, 8, 4>::kOutputs) return launch_many<ManyRows<Dtype, 8, 4>>(a);
  if (a.outputs >= kEnough * ManyRows<Dtype, 8, 2>::kOutputs) return launch_many<ManyRows<Dtype, 8, 2>>(a);
  return launch_many<ManyRows<Dtype, 8, 1>>(a);
}

template <int Dtype>
int launch(const kvk_awq& a) {
  if (a.rows <= 8) return launch_rows<Dtype, 1>(a);
  if (a.rows <= 16) return launch_rows<Dtype, 2>(a);
  int device = 0, shared = 0;
  if (int status = checked(cudaGetDevice(&device), "the current device")) return status;
  if (int status = checked(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "its shared memory"))
    return status;
  return launch_many_rows<Dtype>(a, static_cast<uint64_t>(shared));
}

int check_device(const kvk_awq& a) {
  int device = 0, major = 0;
  if (int status = checked(cudaGetDevice(&device), "the current device")) return status;
  if (int status = checked(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "its capability"))
    return status;
  if (a.dtype == KVK_BF16 && major < 8)
    return fail(KVK_UNSUPPORTED, "bf16 needs compute capability 8.0; this device has %d", major);
  return KVK_OK;
}

}  // namespace
}  // namespace kvk::awq

extern "C" {

int kvk_awq_repack(const kvk_awq* args) {
  if (int status = kvk::awq::check_awq(args)) return status;
  if (args->out == args->words) return kvk::fail(KVK_INVALID, "words cannot be repacked in place");
  const uint64_t words = static_cast<uint64_t>(args->inputs) * args->outputs / 8;
  kvk::awq::repack<<<kvk::awq::blocks_for(words), kvk::awq::kThreads, 0, static_cast<cudaStream_t>(args->stream)>>>(*args);
  return kvk::launched("awq repack");
}

int kvk_awq_multiply(const kvk_awq* args) {
  if (int status = kvk::awq::check_product(args)) return status;
  const kvk_awq& a = *args;
  if (a.rows == 0) return KVK_OK;
  if (a.path == KVK_CPU_REFERENCE) {
    const uint32_t blocks = kvk::awq::blocks_for(static_cast<uint64_t>(a.rows) * a.outputs);
    kvk::awq::multiply_naively<<<blocks, kvk::awq::kThreads, 0, static_cast<cudaStream_t>(a.stream)>>>(a);
    return kvk::launched("awq multiply_naively");
  }
  if (int status = kvk::awq::check_device(a)) return status;
  return a.dtype == KVK_F16 ? kvk::awq::launch<KVK_F16>(a) : kvk::awq::launch<KVK_BF16>(a);
}

int kvk_awq_dequantise(const kvk_awq* args) {
  if (int status = kvk::awq::check_scaled(args)) return status;
  const kvk_awq& a = *args;
  auto* stream = static_cast<cudaStream_t>(a.stream);
  const uint64_t weights = static_cast<uint64_t>(a.inputs) * a.outputs;
  const uint32_t threads = kvk::awq::kThreads;
  if (a.path == KVK_CPU_REFERENCE)
    kvk::awq::dequantise_naively<<<kvk::awq::blocks_for(weights), threads, 0, stream>>>(a);
  else if (a.dtype == KVK_F16)
    kvk::awq::dequantise<KVK_F16><<<kvk::awq::blocks_for(weights / 32), threads, 0, stream>>>(a);
  else
    kvk::awq::dequantise<KVK_BF16><<<kvk::awq::blocks_for(weights / 32), threads, 0, stream>>>(a);
  return kvk::launched("awq dequantise");
}
}
