#include "cpu/paths.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace kvk {
namespace {

constexpr const Path* kPaths[] = {nullptr, &kReferencePath, &kAvx2Path, &kAvx512Path, &kAvx512VnniPath};
constexpr const char* kNames[] = {"auto", "reference", "avx2", "avx512", "avx512_vnni"};
constexpr uint32_t kPathCount = sizeof kPaths / sizeof *kPaths;

thread_local char error_text[256];

uint32_t choose() {
  uint32_t best = KVK_CPU_REFERENCE;
  const char* wanted = std::getenv("KVK_CPU_PATH");
  for (uint32_t path = KVK_CPU_REFERENCE; path < kPathCount; ++path) {
    if (lacks(path) != nullptr) continue;
    if (wanted != nullptr && std::strcmp(wanted, kNames[path]) == 0) return path;
    best = path;
  }
  return best;
}

}  // namespace

const char* lacks(uint32_t path) {
  if (path == KVK_CPU_AUTO || path == KVK_CPU_REFERENCE) return nullptr;
  if (path >= kPathCount) return "there is no path of that number";
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
    return "this CPU has no AVX2, FMA and F16C";
  if (path == KVK_CPU_AVX2) return nullptr;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512vl"))
    return "this CPU has no AVX-512 F, BW, DQ and VL";
  if (path == KVK_CPU_AVX512) return nullptr;
  if (!__builtin_cpu_supports("avx512vnni") || !__builtin_cpu_supports("avx512bf16"))
    return "this CPU has no AVX-512 VNNI and BF16";
  return nullptr;
#else
  return "this CPU is no x86-64";
#endif
}

uint32_t auto_path() {
  static const uint32_t path = choose();
  return path;
}

const Path* path_of(uint32_t path) {
  if (const char* missing = lacks(path)) {
    fail(KVK_UNSUPPORTED, "path=%u: %s", path, missing);
    return nullptr;
  }
  return kPaths[path == KVK_CPU_AUTO ? auto_path() : path];
}

int fail(int status, const char* format, ...) {
  va_list values;
  va_start(values, format);
  std::vsnprintf(error_text, sizeof error_text, format, values);
  va_end(values);
  return status;
}

}  // namespace kvk

extern "C" {

uint32_t kvk_abi(void) { return KVK_ABI; }
const char* kvk_last_error(void) { return kvk::error_text; }
const char* kvk_cpu_lacks(uint32_t path) { return kvk::lacks(path); }
uint32_t kvk_cpu_auto(void) { return kvk::auto_path(); }
}
