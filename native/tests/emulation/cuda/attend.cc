// The CUDA library's kvk_attend, run by the emulation on host memory; for tests only.
#include "cuda/attend.h"

namespace kvk {

// Of an H100, but for the number of processors: so few keys are still cut.
int device_now(Device* device) {
  *device = {90, 16, 227 << 10, 228 << 10};
  return KVK_OK;
}

}  // namespace kvk

extern "C" {

uint32_t kvk_abi(void) { return KVK_ABI; }
const char* kvk_last_error(void) { return kvk::error_text; }
const char* kvk_cuda_lacks(int) { return nullptr; }
}
