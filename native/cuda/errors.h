// How functions of the CUDA library fail: a status and a sentence, never an exception, never an exit.
//
// Owns the calling thread's last error. Invariant: CUDA's own last error is read right after each launch, so that none is
// blamed on a later one; errors of kernels that ran are the caller's, who waits for the stream.
#pragma once

#include <cuda_runtime.h>

#include "kernels.h"

namespace kvk {

// Keeps the sentence for kvk_last_error() and returns `status`.
[[gnu::format(printf, 2, 3)]] int fail(int status, const char* format, ...);

// KVK_OK, or KVK_DEVICE with what CUDA says of `what`.
int checked(cudaError_t error, const char* what);

// To be called right after <<<>>>: KVK_OK if the launch was accepted.
inline int launched(const char* kernel) { return checked(cudaGetLastError(), kernel); }

}  // namespace kvk
