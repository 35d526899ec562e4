// Host memory made known to the device, copies in order, streams and events: CUDA's own, behind plain C.
//
// Allocates pinned memory, streams and events where it is asked to and nowhere else. Never waits, except kvk_event_synchronise,
// kvk_host_free and unregistering, which CUDA makes wait. Invariant: what is refused leaves nothing behind.
#include "cuda/codec_checks.h"
#include "cuda/errors.h"

namespace kvk {
namespace {

cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t event_of(void* event) { return static_cast<cudaEvent_t>(event); }

int no_pointer(const char* what) { return fail(KVK_INVALID, "%s is null", what); }

bool can(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetAttribute(&value, attribute, device) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  return value != 0;
}

// One call for a layer's thousands of pieces: a call each takes the host longer than the bus takes for the bytes. False where
// the driver has it not, or not for this memory; then nothing was queued.
bool copied_together(void* const* to, const void* const* from, const uint64_t* bytes, uint64_t count, cudaStream_t stream) {
#if CUDART_VERSION >= 13000
  static_assert(sizeof(size_t) == sizeof(uint64_t));
  if (count < 2 || stream == nullptr) return false;
  cudaMemcpyAttributes attributes = {};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  size_t first = 0;
  const auto* sizes = reinterpret_cast<const size_t*>(bytes);
  if (cudaMemcpyBatchAsync(to, from, sizes, count, &attributes, &first, 1, stream) == cudaSuccess) return true;
  cudaGetLastError();
#endif
  return false;
}

int register_memory(const void* memory, uint64_t bytes, bool read_only) {
  if (memory == nullptr || bytes == 0)
    return fail(KVK_INVALID, "no memory to register: %llu bytes", static_cast<unsigned long long>(bytes));
  if (!can(cudaDevAttrCanUseHostPointerForRegisteredMem))
    return fail(KVK_UNSUPPORTED, "this device does not read registered memory at the host's address");
  if (read_only && !can(cudaDevAttrHostRegisterReadOnlySupported))
    return fail(KVK_UNSUPPORTED, "this device cannot register memory that is mapped for reading only");
  const unsigned flags = cudaHostRegisterPortable | cudaHostRegisterMapped | (read_only ? cudaHostRegisterReadOnly : 0u);
  const cudaError_t error = cudaHostRegister(const_cast<void*>(memory), bytes, flags);
  if (error == cudaSuccess) return KVK_OK;
  cudaGetLastError();
  const bool refused = error == cudaErrorNotSupported || error == cudaErrorInvalidValue || error == cudaErrorOperatingSystem ||
                       error == cudaErrorMemoryAllocation;
  return fail(refused ? KVK_UNSUPPORTED : KVK_DEVICE, "registering %llu bytes: %s", static_cast<unsigned long long>(bytes),
              cudaGetErrorString(error));
}

}  // namespace
}  // namespace kvk

extern "C" {

int kvk_host_register(const void* memory, uint64_t bytes, uint32_t read_only) {
  return kvk::register_memory(memory, bytes, read_only != 0);
}

int kvk_host_unregister(const void* memory) {
  return kvk::checked(cudaHostUnregister(const_cast<void*>(memory)), "unregistering");
}

int kvk_host_allocate(uint64_t bytes, void** memory) {
  if (memory == nullptr) return kvk::no_pointer("memory");
  return kvk::checked(cudaHostAlloc(memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped), "allocating pinned memory");
}

int kvk_host_free(void* memory) { return kvk::checked(cudaFreeHost(memory), "freeing pinned memory"); }

int kvk_copy(void* const* to, const void* const* from, const uint64_t* bytes, uint64_t count, void* stream) {
  if (count != 0 && (to == nullptr || from == nullptr || bytes == nullptr)) return kvk::no_pointer("a list of copies");
  if (kvk::copied_together(to, from, bytes, count, kvk::stream_of(stream))) return KVK_OK;
  for (uint64_t i = 0; i < count; ++i) {
    const cudaError_t error = cudaMemcpyAsync(to[i], from[i], bytes[i], cudaMemcpyDefault, kvk::stream_of(stream));
    if (int status = kvk::checked(error, "copying")) return status;
  }
  return KVK_OK;
}

int kvk_stream_create(void** stream) {
  if (stream == nullptr) return kvk::no_pointer("stream");
  cudaStream_t made = nullptr;
  if (int status = kvk::checked(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "creating a stream")) return status;
  *stream = made;
  return KVK_OK;
}

int kvk_stream_destroy(void* stream) { return kvk::checked(cudaStreamDestroy(kvk::stream_of(stream)), "ending a stream"); }

int kvk_event_create(void** event) {
  if (event == nullptr) return kvk::no_pointer("event");
  cudaEvent_t made = nullptr;
  if (int status = kvk::checked(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "creating an event")) return status;
  *event = made;
  return KVK_OK;
}

int kvk_event_destroy(void* event) { return kvk::checked(cudaEventDestroy(kvk::event_of(event)), "ending an event"); }

int kvk_event_record(void* event, void* stream) {
  return kvk::checked(cudaEventRecord(kvk::event_of(event), kvk::stream_of(stream)), "recording an event");
}

int kvk_event_wait(void* event, void* stream) {
  return kvk::checked(cudaStreamWaitEvent(kvk::stream_of(stream), kvk::event_of(event), 0), "waiting for an event");
}

int kvk_event_synchronise(void* event) {
  return kvk::checked(cudaEventSynchronize(kvk::event_of(event)), "waiting for an event");
}
}
