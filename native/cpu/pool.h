// The kernels' own threads. They wait in the kernel between calls and share nothing with another runtime's: torch's pool is
// neither used nor disturbed.
//
// Owns the threads, for as long as the process lives. Never starts one before it is asked for more than one, and never has two
// calls share them: a second caller meanwhile works alone. After fork() the child starts its own.
#pragma once

#include <cstdint>

namespace kvk {

constexpr uint32_t kMaxThreads = 256;

// Calls work(context, worker, i) for every i below count, on up to `threads` threads, the caller's among them. `worker` is below
// `threads`; no two calls at one time have the same. Returns when all are done.
void run_on(uint32_t threads, uint64_t count, void (*work)(void* context, uint32_t worker, uint64_t i), void* context);

}  // namespace kvk
