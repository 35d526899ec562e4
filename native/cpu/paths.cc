#include "cpu/paths.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "argument_checks.h"

#if defined(__x86_64__) && !defined(KVK_EMULATED)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvk {
namespace {

#if defined(KVK_WITHOUT_FP16)  // the compiler has no -mavx512fp16: two files were left out
constexpr const Path *kFp16 = nullptr, *kTiles = nullptr;
#else
constexpr const Path *kFp16 = &kAvx512Fp16Path, *kTiles = &kAmxPath;
#endif
constexpr const Path* kPaths[] = {nullptr, &kReferencePath, &kAvx2Path, &kAvx512Path, &kAvx512VnniPath, kFp16, kTiles};
constexpr const char* kNames[] = {"auto", "reference", "avx2", "avx512", "avx512_vnni", "avx512_fp16", "amx"};
constexpr uint32_t kPathCount = sizeof kPaths / sizeof *kPaths;

// What `auto` stands for. With `problem`, nothing: the environment names what cannot be had.
struct Choice {
  uint32_t path = KVK_CPU_AUTO;
  char problem[200] = "";
};

Choice choose() {
  Choice out;
  const char* wanted = std::getenv("KVK_CPU_PATH");
  const char* missing = "there is no path of that name";
  for (uint32_t path = KVK_CPU_REFERENCE; path < kPathCount; ++path) {
    const char* lacking = lacks(path);
    if (wanted == nullptr && lacking == nullptr) out.path = path;
    if (wanted == nullptr || std::strcmp(wanted, kNames[path]) != 0) continue;
    if (lacking == nullptr) out.path = path;
    missing = lacking;
  }
  if (wanted != nullptr && missing != nullptr)
    std::snprintf(out.problem, sizeof out.problem, "KVK_CPU_PATH=%.40s: %s", wanted, missing);
  return out;
}

const Choice& chosen() {
  static const Choice choice = choose();
  return choice;
}

#if defined(__x86_64__)

// AVX512-FP16 and AMX, of the CPU and of the kernel. A build for tests has both, by emulation.
#if defined(KVK_EMULATED)
const char* lacks_fp16() { return nullptr; }
const char* lacks_amx() { return nullptr; }
#else
const char* lacks_fp16() { return __builtin_cpu_supports("avx512fp16") ? nullptr : "this CPU has no AVX512-FP16"; }

// The kernel saves tile registers for processes only that asked for them; asking once is for all threads and for children
// that are forked, later and now.
const char* lacks_amx() {
  if (!__builtin_cpu_supports("amx-tile") || !__builtin_cpu_supports("amx-bf16") || !__builtin_cpu_supports("amx-int8"))
    return "this CPU has no AMX (TILE, BF16 and INT8)";
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool permitted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return permitted ? nullptr : "the kernel does not let this process use AMX (ARCH_REQ_XCOMP_PERM)";
}
#endif

const char* lacks_avx(uint32_t path) {
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
}

#endif

}  // namespace

const char* lacks(uint32_t path) {
  if (path == KVK_CPU_AUTO) return chosen().problem[0] ? chosen().problem : nullptr;
  if (path == KVK_CPU_REFERENCE) return nullptr;
  if (path >= kPathCount) return "there is no path of that number";
  if (kPaths[path] == nullptr) return "the compiler of this build has no -mavx512fp16";
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (path == KVK_CPU_AMX)
    if (const char* missing = lacks_amx()) return missing;
  if (path >= KVK_CPU_AVX512_FP16)
    if (const char* missing = lacks_fp16()) return missing;
  return lacks_avx(path);
#else
  return "this CPU is no x86-64";
#endif
}

uint32_t auto_path() { return chosen().path; }

const Path* path_of(uint32_t path) {
  if (const char* missing = lacks(path)) {
    fail(KVK_UNSUPPORTED, "path=%u: %s", path, missing);
    return nullptr;
  }
  return kPaths[path == KVK_CPU_AUTO ? auto_path() : path];
}

}  // namespace kvk

extern "C" {

uint32_t kvk_abi(void) { return KVK_ABI; }
const char* kvk_last_error(void) { return kvk::error_text; }
const char* kvk_cpu_lacks(uint32_t path) { return kvk::lacks(path); }
uint32_t kvk_cpu_auto(void) { return kvk::auto_path(); }
}
