// The CUDA library's kvk_attend: cuda/attend.h, on the device that is current.
#include "cuda/attend.h"

#include "cuda/errors.h"

namespace kvk {

extern template int launch<Naive>(const Attention&, const Grid&);
extern template int launch<Decode<64, 4>>(const Attention&, const Grid&);
extern template int launch<Decode<64, 8>>(const Attention&, const Grid&);
extern template int launch<Decode<64, 16>>(const Attention&, const Grid&);
extern template int launch<Decode<96, 4>>(const Attention&, const Grid&);
extern template int launch<Decode<96, 8>>(const Attention&, const Grid&);
extern template int launch<Decode<96, 16>>(const Attention&, const Grid&);
extern template int launch<Decode<128, 4>>(const Attention&, const Grid&);
extern template int launch<Decode<128, 8>>(const Attention&, const Grid&);
extern template int launch<Decode<128, 16>>(const Attention&, const Grid&);
extern template int launch<Decode<256, 4>>(const Attention&, const Grid&);
extern template int launch<Decode<256, 8>>(const Attention&, const Grid&);
extern template int launch<Prefill<64, 1>>(const Attention&, const Grid&);
extern template int launch<Prefill<64, 2>>(const Attention&, const Grid&);
extern template int launch<Prefill<96, 1>>(const Attention&, const Grid&);
extern template int launch<Prefill<96, 2>>(const Attention&, const Grid&);
extern template int launch<Prefill<128, 1>>(const Attention&, const Grid&);
extern template int launch<Prefill<128, 2>>(const Attention&, const Grid&);
extern template int launch<Prefill<256, 1>>(const Attention&, const Grid&);

int device_now(Device* device) {
  int id = 0, major = 0, minor = 0, processors = 0, block = 0, processor = 0;
  if (int status = checked(cudaGetDevice(&id), "the current device")) return status;
  const struct {
    int* value;
    cudaDeviceAttr attribute;
  } wanted[] = {{&major, cudaDevAttrComputeCapabilityMajor},
                {&minor, cudaDevAttrComputeCapabilityMinor},
                {&processors, cudaDevAttrMultiProcessorCount},
                {&block, cudaDevAttrMaxSharedMemoryPerBlockOptin},
                {&processor, cudaDevAttrMaxSharedMemoryPerMultiprocessor}};
  for (const auto& limit : wanted)
    if (int status = checked(cudaDeviceGetAttribute(limit.value, limit.attribute, id), "the device's attributes")) return status;
  *device = {static_cast<uint32_t>(10 * major + minor), static_cast<uint32_t>(processors), static_cast<uint64_t>(block),
             static_cast<uint64_t>(processor)};
  return KVK_OK;
}

}  // namespace kvk
