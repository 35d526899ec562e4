// kvk_attend of the CUDA library: checks, which kernel, how the keys are cut; and the table of segments a device reads.
//
// Included by attend.cu, and by the emulation, which so runs the same decisions. Never allocates and never waits for the device;
// all that it queues is one kernel. Invariant: what it decides depends on the arguments of the host and the device alone, not on
// what lies in device memory, so a captured call can be replayed while the tail grows.
#pragma once

#include "attention_check.h"
#include "cuda/decode.h"
#include "cuda/launch.h"
#include "cuda/naive.h"
#include "cuda/prefill.h"

namespace kvk {

constexpr uint64_t kArrivalBytes = kMaxArrivals * sizeof(uint32_t);
constexpr uint32_t kMostSplits = 128;
constexpr uint32_t kDecodeRows = 64;  // more rows than this read the keys together in the other kernel

struct Plan {
  Attention p;
  Grid grid;
  int (*start)(const Attention&, const Grid&);
  uint64_t bytes;  // of workspace
};

template <class Kernel>
int plan_for(const kvk_attention& a, const Device& device, bool cut, Plan* plan) {
  plan->start = launch<Kernel>;
  const uint32_t rows = a.query_tokens * (a.query_heads / a.kv_heads);
  uint32_t warps = Kernel::kWarps;
  while (warps > 1 && Kernel::shared_bytes(warps, rows) > device.shared_block && Kernel::kWidth != 0) --warps;
  plan->grid = {0, warps, Kernel::shared_bytes(warps, rows)};
  if (plan->grid.shared_bytes > device.shared_block)
    return fail(KVK_UNSUPPORTED, "head_dim=%u needs %llu bytes of shared memory; a block has %llu", a.head_dim,
                static_cast<unsigned long long>(plan->grid.shared_bytes), static_cast<unsigned long long>(device.shared_block));
  Attention& p = plan->p;
  p.a = a;
  p.group = a.query_heads / a.kv_heads;
  p.rows = rows;
  p.row_blocks = (p.rows + Kernel::kRows - 1) / Kernel::kRows;
  p.splits = 1;
  const uint64_t blocks = static_cast<uint64_t>(a.batch) * a.kv_heads * p.row_blocks;
  uint64_t at_once = device.shared_processor / (plan->grid.shared_bytes + 1024);  // 1 KiB of each block is CUDA's
  if (at_once > Kernel::kMinBlocksPerSM) at_once = Kernel::kMinBlocksPerSM;
  if (cut && blocks != 0 && blocks <= kMaxArrivals) {
    uint64_t splits = a.threads != 0 ? a.threads : device.processors * (at_once == 0 ? 1 : at_once) / blocks;
    if (splits > kMostSplits) splits = kMostSplits;
    if (splits > 1) p.splits = static_cast<uint32_t>(splits);
  }
  if (blocks * p.splits > INT32_MAX)
    return fail(KVK_INVALID, "batch=%u, kv_heads=%u, query_tokens=%u; these are more blocks than a grid has", a.batch, a.kv_heads,
                a.query_tokens);
  plan->grid.blocks = static_cast<uint32_t>(blocks * p.splits);
  plan->bytes = kArrivalBytes;
  if (p.splits > 1) plan->bytes += blocks * p.splits * partial_floats(Kernel::kRows, Kernel::kWidth) * sizeof(float);
  return KVK_OK;
}

template <uint32_t kDim>
int plan_decode(const kvk_attention& a, const Device& device, Plan* plan) {
  const uint64_t rows = static_cast<uint64_t>(a.query_tokens) * (a.query_heads / a.kv_heads);
  if (rows <= 4) return plan_for<Decode<kDim, 4>>(a, device, true, plan);
  if constexpr (kDim <= 128)
    if (rows > 8) return plan_for<Decode<kDim, 16>>(a, device, true, plan);
  return plan_for<Decode<kDim, 8>>(a, device, true, plan);  // more do not fit into the registers of 256 channels
}

inline int plan_decode(const kvk_attention& a, const Device& device, Plan* plan) {
  if (a.head_dim <= 64) return plan_decode<64>(a, device, plan);
  if (a.head_dim <= 96) return plan_decode<96>(a, device, plan);
  return a.head_dim <= 128 ? plan_decode<128>(a, device, plan) : plan_decode<256>(a, device, plan);
}

// 128 rows where there are so many and the device's blocks have the room, else 64.
template <uint32_t kDim>
int plan_prefill(const kvk_attention& a, const Device& device, Plan* plan) {
  using Tall = Prefill<kDim, 2>;
  if (static_cast<uint64_t>(a.query_tokens) * (a.query_heads / a.kv_heads) > 64 &&
      Tall::shared_bytes(0, 0) <= device.shared_block)
    return plan_for<Tall>(a, device, true, plan);
  return plan_for<Prefill<kDim, 1>>(a, device, true, plan);
}

inline int plan_prefill(const kvk_attention& a, const Device& device, Plan* plan) {
  if (a.head_dim <= 64) return plan_prefill<64>(a, device, plan);
  if (a.head_dim <= 96) return plan_prefill<96>(a, device, plan);
  if (a.head_dim <= 128) return plan_prefill<128>(a, device, plan);
  return plan_for<Prefill<256, 1>>(a, device, true, plan);
}

inline int plan_path(const kvk_attention& a, const Device& device, uint32_t path, Plan* plan) {
  if (path == KVK_CUDA_REFERENCE) return plan_for<Naive>(a, device, false, plan);
  if (path != KVK_CUDA_DECODE && path != KVK_CUDA_PREFILL)
    return fail(KVK_UNSUPPORTED, "path=%u: there is no path of that number", path);
  if (a.dtype == KVK_F32 || a.head_dim > 256)
    return fail(KVK_UNSUPPORTED, "path=%u, dtype=%u, head_dim=%u; this kernel has 16-bit queries of at most 256", path, a.dtype,
                a.head_dim);
  return path == KVK_CUDA_DECODE ? plan_decode(a, device, plan) : plan_prefill(a, device, plan);
}

inline int plan_of(const kvk_attention* args, Plan* plan) {
  if (int status = check_attention(args, false)) return status;
  Device device;
  if (int status = device_now(&device)) return status;
  const kvk_attention& a = *args;
  if (a.path != KVK_CUDA_AUTO) return plan_path(a, device, a.path, plan);
  // Before compute capability 8.0 there is no product of bf16; what it becomes then, fp16, has not its range.
  const bool narrow = a.dtype == KVK_BF16 && device.capability < 80;
  const bool few = static_cast<uint64_t>(a.query_tokens) * (a.query_heads / a.kv_heads) <= kDecodeRows;
  if (!narrow && !few && plan_path(a, device, KVK_CUDA_PREFILL, plan) == KVK_OK) return KVK_OK;
  if (!narrow && plan_path(a, device, KVK_CUDA_DECODE, plan) == KVK_OK) return KVK_OK;
  return plan_path(a, device, KVK_CUDA_REFERENCE, plan);
}

}  // namespace kvk

extern "C" {

uint64_t kvk_attention_workspace(const kvk_attention* args) {
  kvk::Plan plan{};
  return kvk::plan_of(args, &plan) == KVK_OK ? plan.bytes : 0;
}

int kvk_attend(const kvk_attention* args) {
  kvk::Plan plan{};
  if (int status = kvk::plan_of(args, &plan)) return status;
  if (plan.grid.blocks == 0) return KVK_OK;
  if (args->workspace == nullptr || args->workspace_bytes < plan.bytes)
    return kvk::fail(KVK_WORKSPACE, "a workspace of %llu bytes; %llu are needed",
                     static_cast<unsigned long long>(args->workspace == nullptr ? 0 : args->workspace_bytes),
                     static_cast<unsigned long long>(plan.bytes));
  plan.p.arrivals = static_cast<uint32_t*>(args->workspace);
  plan.p.partial = reinterpret_cast<float*>(static_cast<uint8_t*>(args->workspace) + kvk::kArrivalBytes);
  return plan.start(plan.p, plan.grid);
}

uint64_t kvk_cuda_table(const kvk_attention* args, void* table, uint64_t bytes, uint64_t device) {
  if (kvk::check_attention(args, true) != KVK_OK) return 0;
  uint64_t segments = 0;
  for (uint32_t b = 0; b < args->batch; ++b) segments += args->sequences[b].count;
  const uint64_t head = args->batch * sizeof(kvk_sequence), needed = head + segments * sizeof(kvk_segment);
  if (table == nullptr) return needed;
  if (bytes < needed) {
    kvk::fail(KVK_WORKSPACE, "a table of %llu bytes; %llu are needed", static_cast<unsigned long long>(bytes),
              static_cast<unsigned long long>(needed));
    return 0;
  }
  auto* rows = static_cast<kvk_sequence*>(table);
  auto* next = reinterpret_cast<kvk_segment*>(static_cast<uint8_t*>(table) + head);
  uint64_t at = device + head;
  for (uint32_t b = 0; b < args->batch; ++b) {
    const kvk_sequence& from = args->sequences[b];
    rows[b] = {reinterpret_cast<const kvk_segment*>(at), from.count, from.tail};
    for (uint64_t i = 0; i < from.count; ++i) *next++ = from.segments[i];
    at += from.count * sizeof(kvk_segment);
  }
  return needed;
}
}
