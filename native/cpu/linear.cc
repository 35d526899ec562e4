// kvk_linear_multiply, kvk_norm_rows and kvk_turn_rows: the arguments checked, the work cut into tasks, the path's loops.
//
// Never allocates. Invariant: what passes the checks keeps every index of the loops inside what the caller described.
#include "cpu/linear.h"

#include <utility>

#include "argument_checks.h"
#include "cpu/paths.h"
#include "cpu/pool.h"

namespace kvk {
namespace {

constexpr uint32_t kTaskRows = 64;  // of a task

int check_rows(uint32_t dtype) {
  if (dtype == KVK_F32 || dtype == KVK_BF16) return KVK_OK;
  return fail(KVK_UNSUPPORTED, "dtype=%u; rows are f32 or bf16", dtype);
}

int check(const kvk_linear* a) {
  if (int status = check_version(a)) return status;
  if (int status = check_count("inputs", a->inputs)) return status;
  if (int status = check_count("outputs", a->outputs)) return status;
  if (int status = check_count("rows", a->rows)) return status;
  if (a->dtype == KVK_ROUNDED && a->up != nullptr) return fail(KVK_UNSUPPORTED, "rounded weights of a gated half");
  if (int status = a->dtype == KVK_ROUNDED ? KVK_OK : check_rows(a->dtype)) return status;
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
  if (int status = check_rows(a->dtype)) return status;
  if (a->rows != 0 && a->width != 0 && (a->x == nullptr || a->weight == nullptr || a->out == nullptr))
    return fail(KVK_INVALID, "a null pointer for %u rows of %u", a->rows, a->width);
  return KVK_OK;
}

int check(const kvk_turns* a) {
  if (int status = check_version(a)) return status;
  for (auto [name, count] : {std::pair{"rows", a->rows}, {"query_heads", a->query_heads}, {"kv_heads", a->kv_heads}})
    if (int status = check_count(name, count)) return status;
  if (int status = check_shape(a->head_dim, KVK_F32)) return status;
  if (int status = check_rows(a->dtype)) return status;
  if (a->head_dim % (2 * kLinearLanes) != 0)
    return fail(KVK_UNSUPPORTED, "head_dim=%u; it must be a multiple of %u", a->head_dim, 2 * kLinearLanes);
  const bool heads = (a->query_heads == 0 || a->q != nullptr) && (a->kv_heads == 0 || a->k != nullptr);
  if (a->rows != 0 && (!heads || a->cos == nullptr || a->sin == nullptr))
    return fail(KVK_INVALID, "a null pointer for %u rows", a->rows);
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

template <class Args, auto Loop>
void run_rows(void* context, uint32_t, uint64_t i) {
  const auto& call = *static_cast<const Call<Args>*>(context);
  const uint32_t start = static_cast<uint32_t>(i) * kTaskRows, left = call.a.rows - start;
  (call.path->*Loop)(call.a, start, start + (left < kTaskRows ? left : kTaskRows));
}

template <class Args, auto Loop>
int by_rows(const Args* args) {
  if (int status = check(args)) return status;
  Call<Args> call{*args, path_of(args->path)};
  if (call.path == nullptr) return KVK_UNSUPPORTED;
  const uint64_t tasks = (uint64_t{args->rows} + kTaskRows - 1) / kTaskRows;
  run_on(args->threads < 1 ? 1 : args->threads, tasks, run_rows<Args, Loop>, &call);
  return KVK_OK;
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

extern "C" int kvk_norm_rows(const kvk_norm* args) { return kvk::by_rows<kvk_norm, &kvk::Path::norm>(args); }

extern "C" int kvk_turn_rows(const kvk_turns* args) { return kvk::by_rows<kvk_turns, &kvk::Path::turn>(args); }
