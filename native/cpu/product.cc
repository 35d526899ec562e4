// kvk_multiply: the arguments checked, the outputs cut into tasks, the path's loops.
//
// Never allocates. Invariant: what passes the checks keeps every index of the loops inside what the caller described.
#include "argument_checks.h"
#include "cpu/paths.h"
#include "cpu/pool.h"

namespace kvk {
namespace {

constexpr uint32_t kTaskBytes = 1 << 20;  // of weights: threads that are late take fewer
constexpr uint32_t kTaskOutputs = 16;     // a task has a multiple of it, but the last one

int check(const kvk_product* a) {
  if (int status = check_version(a)) return status;
  if (int status = check_count("inputs", a->inputs)) return status;
  if (int status = check_count("outputs", a->outputs)) return status;
  if (a->dtype != KVK_F16 && a->dtype != KVK_BF16) return fail(KVK_INVALID, "dtype=%u; weights are f16 or bf16", a->dtype);
  if (a->rows > KVK_PRODUCT_ROWS) return fail(KVK_INVALID, "rows=%u; at most %u", a->rows, KVK_PRODUCT_ROWS);
  const bool nothing = a->rows == 0 || a->outputs == 0;
  if (!nothing && (a->out == nullptr || (a->inputs != 0 && (a->weights == nullptr || a->x == nullptr))))
    return fail(KVK_INVALID, "a null pointer for [%u, %u]", a->outputs, a->inputs);
  return KVK_OK;
}

struct Call {
  const kvk_product& a;
  const Path* path;
  uint32_t task_outputs;
};

void run_task(void* context, uint32_t, uint64_t i) {
  const Call& call = *static_cast<const Call*>(context);
  const uint32_t start = static_cast<uint32_t>(i) * call.task_outputs, left = call.a.outputs - start;
  call.path->product(call.a, start, start + (left < call.task_outputs ? left : call.task_outputs));
}

}  // namespace
}  // namespace kvk

extern "C" int kvk_multiply(const kvk_product* args) {
  if (int status = kvk::check(args)) return status;
  kvk::Call call{*args, kvk::path_of(args->path), 0};
  if (call.path == nullptr) return KVK_UNSUPPORTED;
  if (args->rows == 0 || args->outputs == 0) return KVK_OK;
  const uint32_t of_size = kvk::kTaskBytes / (2 * (args->inputs < 1 ? 1 : args->inputs));
  call.task_outputs = of_size / kvk::kTaskOutputs * kvk::kTaskOutputs;
  if (call.task_outputs < kvk::kTaskOutputs) call.task_outputs = kvk::kTaskOutputs;
  const uint64_t tasks = (uint64_t{args->outputs} + call.task_outputs - 1) / call.task_outputs;
  kvk::run_on(args->threads < 1 ? 1 : args->threads, tasks, kvk::run_task, &call);
  return KVK_OK;
}
