// What the CUDA library says of itself: its ABI, its last error, and what a device lacks to run it.
//
// Loads on a machine without a GPU or a driver: the runtime is linked in and finds the driver when it is first asked.
#include "cuda/errors.h"

namespace kvk {
namespace {

constexpr int kLeastCapability = 75;

// Asked for its attributes to learn whether this library has code for a device.
__global__ void probe() {}

const char* lacking(int status) { return status == KVK_OK ? nullptr : error_text; }

int look_at(int device) {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess || count == 0) {
    cudaGetLastError();
    return fail(KVK_UNSUPPORTED, "there is no CUDA device: %s",
                cudaGetErrorString(error == cudaSuccess ? cudaErrorNoDevice : error));
  }
  if (device < 0 || device >= count) return fail(KVK_INVALID, "device=%d; this machine has %d", device, count);
  int major = 0, minor = 0, current = 0;
  if (int status = checked(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "its capability"))
    return status;
  if (int status = checked(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "its capability"))
    return status;
  if (10 * major + minor < kLeastCapability)
    return fail(KVK_UNSUPPORTED, "device %d has compute capability %d.%d; the kernels need 7.5", device, major, minor);
  if (int status = checked(cudaGetDevice(&current), "the current device")) return status;
  if (int status = checked(cudaSetDevice(device), "the device")) return status;
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, probe);
  cudaSetDevice(current);
  cudaGetLastError();
  if (error == cudaSuccess) return KVK_OK;
  return fail(KVK_UNSUPPORTED, "this build has no code for compute capability %d.%d: %s", major, minor,
              cudaGetErrorString(error));
}

}  // namespace

int checked(cudaError_t error, const char* what) {
  return error == cudaSuccess ? KVK_OK : fail(KVK_DEVICE, "%s: %s", what, cudaGetErrorString(error));
}

}  // namespace kvk

extern "C" {

uint32_t kvk_abi(void) { return KVK_ABI; }
const char* kvk_last_error(void) { return kvk::error_text; }
const char* kvk_cuda_lacks(int device) { return kvk::lacking(kvk::look_at(device)); }
}
