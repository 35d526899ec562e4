// kvk_awq_multiply and kvk_awq_dequantise of the CPU: the arguments checked, the work cut into tasks, the path's loops.
//
// Never allocates. Invariant: what passes the checks keeps every index of the loops inside what the caller described.
#include "cpu/awq.h"

#include "argument_checks.h"
#include "cpu/paths.h"
#include "cpu/pool.h"

namespace kvk {
namespace {

int check_layer(const kvk_awq* a) {
  if (int status = check_version(a)) return status;
  if (int status = check_count("inputs", a->inputs)) return status;
  if (int status = check_count("outputs", a->outputs)) return status;
  if (a->group < 1 || a->inputs % a->group != 0)
    return fail(KVK_INVALID, "group=%u; it must divide inputs=%u", a->group, a->inputs);
  if (a->outputs % 8 != 0) return fail(KVK_INVALID, "outputs=%u; it must be a multiple of 8", a->outputs);
  if (a->order > KVK_AWQ_PANELS) return fail(KVK_INVALID, "order=%u; there are two", a->order);
  if (a->order == KVK_AWQ_PANELS && KVK_AWQ_TILE_INPUTS % a->group != 0)
    return fail(KVK_INVALID, "group=%u; in panels it must divide %u", a->group, KVK_AWQ_TILE_INPUTS);
  return KVK_OK;
}

int check(const kvk_awq* a) {
  if (int status = check_layer(a)) return status;
  if (a->dtype != KVK_F32 && a->dtype != KVK_BF16)
    return fail(KVK_UNSUPPORTED, "dtype=%u; the CPU multiplies f32, or bf16's values as f32", a->dtype);
  if (a->rows > KVK_CPU_AWQ_ROWS) return fail(KVK_INVALID, "rows=%u; at most %u", a->rows, KVK_CPU_AWQ_ROWS);
  const bool nothing = a->rows == 0 || a->outputs == 0 || a->inputs == 0;
  if (!nothing && (a->words == nullptr || a->scales == nullptr || a->x == nullptr || a->out == nullptr))
    return fail(KVK_INVALID, "a null pointer for [%u, %u]", a->inputs, a->outputs);
  return KVK_OK;
}

int check_tile(const kvk_awq* a) {
  if (int status = check_layer(a)) return status;
  if (!is_element(a->dtype)) return fail(KVK_INVALID, "dtype=%u; elements are f32, f16 or bf16", a->dtype);
  if (a->columns % 8 != 0 || a->columns > a->outputs)
    return fail(KVK_INVALID, "columns=%u; it must be a multiple of 8, at most outputs=%u", a->columns, a->outputs);
  if (a->first % 8 != 0 || a->first > a->outputs - a->columns || (a->first != 0 && a->order != KVK_AWQ_PANELS))
    return fail(KVK_INVALID, "first=%u; a multiple of 8, at most outputs=%u less columns=%u, and of panels alone", a->first,
                a->outputs, a->columns);
  const int64_t least = int64_t{a->columns} * (a->dtype == KVK_F32 ? 4 : 2);
  if (a->out_row_stride < least)
    return fail(KVK_INVALID, "out_row_stride=%lld; %u columns take %lld", static_cast<long long>(a->out_row_stride), a->columns,
                static_cast<long long>(least));
  const bool nothing = a->columns == 0 || a->inputs == 0;
  if (!nothing && (a->words == nullptr || a->scales == nullptr || a->out == nullptr))
    return fail(KVK_INVALID, "a null pointer for [%u, %u]", a->inputs, a->columns);
  return KVK_OK;
}

struct Call {
  const kvk_awq& a;
  const Path* path;
  uint32_t task_words;
};

void run_task(void* context, uint32_t, uint64_t i) {
  const Call& call = *static_cast<const Call*>(context);
  const uint32_t start = static_cast<uint32_t>(i) * call.task_words, left = call.a.outputs / 8 - start;
  call.path->multiply(call.a, start, start + (left < call.task_words ? left : call.task_words));
}

void run_group(void* context, uint32_t, uint64_t i) {
  const Call& call = *static_cast<const Call*>(context);
  call.path->unpack(call.a, static_cast<uint32_t>(i), static_cast<uint32_t>(i) + 1);
}

}  // namespace
}  // namespace kvk

extern "C" int kvk_awq_multiply(const kvk_awq* args) {
  if (int status = kvk::check(args)) return status;
  kvk::Call call{*args, kvk::path_of(args->path), 0};
  if (call.path == nullptr) return KVK_UNSUPPORTED;
  if (args->rows == 0 || args->outputs == 0 || args->inputs == 0) return KVK_OK;
  const uint32_t threads = args->threads < 1 ? 1 : args->threads, words = args->outputs / 8;
  call.task_words = kvk::awq_task_words(args->rows, words, threads);
  kvk::run_on(threads, (words + call.task_words - 1) / call.task_words, kvk::run_task, &call);
  return KVK_OK;
}

extern "C" int kvk_awq_dequantise(const kvk_awq* args) {
  if (int status = kvk::check_tile(args)) return status;
  kvk::Call call{*args, kvk::path_of(args->path), 0};
  if (call.path == nullptr) return KVK_UNSUPPORTED;
  if (args->columns == 0 || args->inputs == 0) return KVK_OK;
  kvk::run_on(args->threads < 1 ? 1 : args->threads, args->inputs / args->group, kvk::run_group, &call);
  return KVK_OK;
}
