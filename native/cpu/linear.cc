// kvk_linear_multiply and kvk_norm_rows: the arguments checked, the work cut into tasks, the path's loops.
//
// Never allocates. Invariant: what passes the checks keeps every index of the loops inside what the caller described.
#include "cpu/linear.h"

#include "argument_checks.h"
#include "cpu/paths.h"
#include "cpu/pool.h"

namespace kvk {
namespace {

constexpr uint32_t kNormRows = 64;  // of a task

int check(const kvk_linear* a) {
  if (int status = check_version(a)) return status;
  if (int status = check_count("inputs", a->inputs)) return status;
  if (int status = check_count("outputs", a->outputs)) return status;
  if (int status = check_count("rows", a->rows)) return status;
  if (a->inputs % kLinearLanes != 0)
    return fail(KVK_UNSUPPORTED, "inputs=%u; it must be a multiple of %u", a->inputs, kLinearLanes);
  if (a->rows == 0 || a->outputs == 0) return KVK_OK;
  if (a->inputs == 0) return fail(KVK_UNSUPPORTED, "inputs=0; there is nothing to sum");
  if (a->w == nullptr || a->x == nullptr || a->out == nullptr)
    return fail(KVK_INVALID, "a null pointer for %u rows of [%u, %u]", a->rows, a->inputs, a->outputs);
  return KVK_OK;
}

int check(const kvk_norm* a) {
  if (int status = check_version(a)) return status;
  if (int status = check_count("rows", a->rows)) return status;
  if (int status = check_count("width", a->width)) return status;
  if (a->rows != 0 && a->width != 0 && (a->x == nullptr || a->weight == nullptr || a->out == nullptr))
    return fail(KVK_INVALID, "a null pointer for %u rows of %u", a->rows, a->width);
  return KVK_OK;
}

template <class Args>
struct Call {
  const Args& a;
  const Path* path;
};

void run_columns(void* context, uint32_t, uint64_t i) {
  const auto& call = *static_cast<const Call<kvk_linear>*>(context);
  const uint32_t start = static_cast<uint32_t>(i) * kLinearColumns, left = call.a.outputs - start;
  call.path->linear(call.a, start, start + (left < kLinearColumns ? left : kLinearColumns));
}

void run_rows(void* context, uint32_t, uint64_t i) {
  const auto& call = *static_cast<const Call<kvk_norm>*>(context);
  const uint32_t start = static_cast<uint32_t>(i) * kNormRows, left = call.a.rows - start;
  call.path->norm(call.a, start, start + (left < kNormRows ? left : kNormRows));
}

}  // namespace
}  // namespace kvk

extern "C" int kvk_linear_multiply(const kvk_linear* args) {
  if (int status = kvk::check(args)) return status;
  kvk::Call<kvk_linear> call{*args, kvk::path_of(args->path)};
  if (call.path == nullptr) return KVK_UNSUPPORTED;
  const uint64_t tasks = args->rows == 0 ? 0 : (uint64_t{args->outputs} + kvk::kLinearColumns - 1) / kvk::kLinearColumns;
  kvk::run_on(args->threads < 1 ? 1 : args->threads, tasks, kvk::run_columns, &call);
  return KVK_OK;
}

extern "C" int kvk_norm_rows(const kvk_norm* args) {
  if (int status = kvk::check(args)) return status;
  kvk::Call<kvk_norm> call{*args, kvk::path_of(args->path)};
  if (call.path == nullptr) return KVK_UNSUPPORTED;
  const uint64_t tasks = args->width == 0 ? 0 : (uint64_t{args->rows} + kvk::kNormRows - 1) / kvk::kNormRows;
  kvk::run_on(args->threads < 1 ? 1 : args->threads, tasks, kvk::run_rows, &call);
  return KVK_OK;
}
