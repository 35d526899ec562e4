// kvk_attend: checks, cuts the work into tasks, runs them, merges what was cut along the keys.
//
// Never allocates: tasks are counted, not listed, and all memory is the caller's workspace. Invariant: which task computes what
// depends on the arguments alone, so two calls with equal arguments give equal bytes.
#include "cpu/attend.h"

#include "attention_check.h"
#include "cpu/attend_result.h"
#include "cpu/paths.h"
#include "cpu/pool.h"

namespace kvk {
namespace {

constexpr uint64_t kAlign = 64;
constexpr uint64_t kKeysPerCut = 512;  // fewer are not worth a merge

uint64_t keys_of(const kvk_sequence& sequence) {
  uint64_t keys = sequence.tail.tokens;
  for (uint64_t i = 0; i < sequence.count; ++i) keys += sequence.segments[i].tokens;
  return keys;
}

// How the work is cut: (row of the batch, KV head, block of rows), and each of these into `cuts` stretches of keys.
struct Plan {
  const kvk_attention& a;
  const Path* path;
  uint32_t rows, row_blocks, cuts, threads;
  uint64_t blocks;  // in all
  uint8_t* scratch;
  float* partial;

  uint64_t partial_floats() const { return uint64_t{kRows} * (padded(a.head_dim) + 2); }
  uint64_t bytes() const {
    return kAlign + threads * scratch_bytes(a.head_dim) + (cuts > 1 ? blocks * cuts * partial_floats() * sizeof(float) : 0);
  }
  void place(void* workspace) {
    scratch = at(static_cast<uint8_t*>(workspace), static_cast<int64_t>(-reinterpret_cast<uintptr_t>(workspace) % kAlign));
    partial = reinterpret_cast<float*>(scratch + threads * scratch_bytes(a.head_dim));
  }
  // Late rows first: they see most, and what is long should not begin last.
  Task task(uint64_t block) const {
    const uint64_t of_head = block / row_blocks;
    const auto rows_at = static_cast<uint32_t>(row_blocks - 1 - block % row_blocks) * kRows;
    return {static_cast<uint32_t>(of_head / a.kv_heads),
            static_cast<uint32_t>(of_head % a.kv_heads),
            rows_at,
            rows_at + kRows < rows ? rows_at + kRows : rows,
            0,
            0,
            nullptr};
  }
};

Plan plan_of(const kvk_attention& a) {
  Plan plan{a, nullptr, a.query_tokens * (a.query_heads / a.kv_heads), 0, 1, a.threads, 0, nullptr, nullptr};
  if (plan.threads < 1) plan.threads = 1;
  if (plan.threads > kMaxThreads) plan.threads = kMaxThreads;
  plan.row_blocks = (plan.rows + kRows - 1) / kRows;
  plan.blocks = uint64_t{a.batch} * a.kv_heads * plan.row_blocks;
  if (plan.threads > 1 && plan.blocks != 0 && plan.blocks < 2 * plan.threads) {
    uint64_t most = 0;
    for (uint32_t b = 0; b < a.batch; ++b) most = keys_of(a.sequences[b]) > most ? keys_of(a.sequences[b]) : most;
    const uint64_t wanted = (4 * plan.threads + plan.blocks - 1) / plan.blocks, sensible = most / kKeysPerCut;
    plan.cuts = static_cast<uint32_t>(wanted < sensible ? wanted : sensible);
    if (plan.cuts < 1) plan.cuts = 1;
  }
  return plan;
}

void run_task(void* context, uint32_t worker, uint64_t i) {
  const Plan& plan = *static_cast<const Plan*>(context);
  Task task = plan.task(i / plan.cuts);
  const uint64_t cut = i % plan.cuts, keys = keys_of(plan.a.sequences[task.batch]);
  const uint64_t step = ((keys + plan.cuts - 1) / plan.cuts + kTile - 1) / kTile * kTile;
  task.key_start = cut * step < keys ? cut * step : keys;
  task.key_stop = cut + 1 == plan.cuts || (cut + 1) * step > keys ? keys : (cut + 1) * step;
  if (plan.cuts > 1) task.partial = plan.partial + i * plan.partial_floats();
  plan.path->attend(plan.a, task, scratch_at(plan.scratch + worker * scratch_bytes(plan.a.head_dim), plan.a.head_dim));
}

void merge_task(void* context, uint32_t worker, uint64_t i) {
  const Plan& plan = *static_cast<const Plan*>(context);
  const Task task = plan.task(i);
  const uint32_t width = padded(plan.a.head_dim);
  const Scratch scratch = scratch_at(plan.scratch + worker * scratch_bytes(plan.a.head_dim), plan.a.head_dim);
  for (uint32_t row = task.row_start; row < task.row_stop; ++row) {
    float* part = plan.partial + i * plan.cuts * plan.partial_floats() + uint64_t{row - task.row_start} * (width + 2);
    float row_max = part[width], row_sum = part[width + 1];
    for (uint32_t cut = 1; cut < plan.cuts; ++cut) merge_row(part, &row_max, &row_sum, part + cut * plan.partial_floats(), width);
    finish_row(plan.a, task.batch, task.kv_head, row, part, row_max, row_sum, scratch.turned);
  }
}

}  // namespace
}  // namespace kvk

extern "C" {

uint64_t kvk_attention_workspace(const kvk_attention* args) {
  if (kvk::check_attention(args, true) != KVK_OK) return 0;
  return kvk::plan_of(*args).bytes();
}

int kvk_attend(const kvk_attention* args) {
  if (int status = kvk::check_attention(args, true)) return status;
  kvk::Plan plan = kvk::plan_of(*args);
  plan.path = kvk::path_of(args->path);
  if (plan.path == nullptr) return KVK_UNSUPPORTED;
  if (plan.blocks == 0) return KVK_OK;
  if (args->workspace == nullptr || args->workspace_bytes < plan.bytes())
    return kvk::fail(KVK_WORKSPACE, "a workspace of %llu bytes; %llu are needed",
                     static_cast<unsigned long long>(args->workspace == nullptr ? 0 : args->workspace_bytes),
                     static_cast<unsigned long long>(plan.bytes()));
  plan.place(args->workspace);
  kvk::run_on(plan.threads, plan.blocks * plan.cuts, kvk::run_task, &plan);
  if (plan.cuts > 1) kvk::run_on(plan.threads, plan.blocks, kvk::merge_task, &plan);
  return KVK_OK;
}
}
