// libFuzzer: the header of a block's file. What decode() accepts must be consistent with the file's length, whatever its bytes;
// every other header is accepted or refused, never read beyond its 4 KiB. Half of the inputs get the checksum they need.
#include <cstring>
#include <memory>

#include "core/base/checksum.h"
#include "core/base/error.h"
#include "core/files/block_file.h"
#include "core/format/layout.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static_assert(kv::kBlockFileHeaderBytes == sizeof(kv::FileHeader));
  alignas(8) static std::byte page[kv::kBlockFileHeaderBytes];
  const size_t taken = std::min(size, sizeof page);
  std::memset(page, 0, sizeof page);
  std::memcpy(page, data, taken);
  auto& header = *reinterpret_cast<kv::FileHeader*>(page);
  // Behind a header's bytes: whether the checksum is made right, and by how much the file's length is off.
  const uint8_t sealed = size > sizeof page ? data[sizeof page] & 1 : 1;
  const uint8_t off = size > sizeof page + 1 ? data[sizeof page + 1] : 0;
  if (sealed) header.header_checksum = kv::crc32c(page, offsetof(kv::FileHeader, header_checksum));
  const uint64_t file_bytes = header.data_bytes + kv::kBlockFileHeaderBytes + off;

  const kv::Decoded decoded = kv::decode(page, file_bytes);
  KV_INVARIANT(decoded.wrong.empty() == static_cast<bool>(decoded));
  if (!decoded) return 0;
  uint64_t at = 0;
  for (uint32_t layer = 0; layer < decoded.header->layers; ++layer) {
    KV_INVARIANT(decoded.header->layer_bytes(layer) > 0);
    at += kv::round_up(decoded.header->layer_bytes(layer), kv::kLayerAlign);
  }
  KV_INVARIANT(at == decoded.header->layers_bytes());
  KV_INVARIANT(at + uint64_t{4} * decoded.header->layers <= decoded.header->data_bytes);
  KV_INVARIANT(kv::kBlockFileHeaderBytes + decoded.header->data_bytes == file_bytes);
  return 0;
}
