// How functions of the CUDA library fail when CUDA does: a status and a sentence, never an exception, never an exit.
//
// Owns what becomes of CUDA's errors. Invariant: CUDA's own last error is read right after each launch, so that none is
// blamed on a later one; errors of kernels that ran are the caller's, who waits for the stream.
#pragma once

#include <cuda_runtime.h>

#include "argument_checks.h"

namespace kvk {

// KVK_OK, or KVK_DEVICE with what CUDA says of `what`.
int checked(cudaError_t error, const char* what);

// To be called right after <<<>>>: KVK_OK if the launch was accepted.
inline int launched(const char* kernel) { return checked(cudaGetLastError(), kernel); }

}  // namespace kvk
