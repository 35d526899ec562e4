#include "core/files/block_file.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/base/checksum.h"
#include "core/base/error.h"
#include "core/format/sha256.h"

namespace kv {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::string_view kSuffix = ".kv";
constexpr size_t kChecked = offsetof(FileHeader, header_checksum);
constexpr uint64_t kMaxMeta = (1ull << 20) + 4096ull * 65535;  // the bounds of a layout, see Layout::parse
constexpr uint32_t kMaxLayerBytesPerToken = 1u << 24;

bool all_zero(const void* data, size_t n) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  return std::all_of(bytes, bytes + n, [](uint8_t byte) { return byte == 0; });
}

// Empty if the table of layer sizes is one that describe() could have written.
std::string_view wrong_layers(const FileHeader& h) {
  static_assert(kMaxLayerSizes == 1 + UINT8_MAX);  // an index cannot lead beyond the table
  uint32_t sizes = 0;
  for (uint32_t i = 0; i < h.layers; ++i) {
    if (h.layer_size_index[i] > sizes) return "a layer has no size";
    if (h.layer_size_index[i] == sizes) ++sizes;
  }
  for (uint32_t i = 0; i < sizes; ++i)
    if (h.layer_sizes[i] == 0 || h.layer_sizes[i] > kMaxLayerBytesPerToken) return "a layer's size is out of bounds";
  if (!all_zero(h.layer_sizes + sizes, 4 * (kMaxLayerSizes - sizes)) ||
      !all_zero(h.layer_size_index + h.layers, kMaxLayers - h.layers) ||
      !all_zero(h.layer_checksums + h.layers, 4 * (kMaxLayers - h.layers)) || !all_zero(h.reserved, sizeof h.reserved))
    return "bytes that must be zero are not";
  return {};
}

}  // namespace

uint64_t FileHeader::layers_bytes() const {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < layers; ++i) bytes += round_up(layer_bytes(i), kLayerAlign);
  return bytes;
}

bool describe(FileHeader& header, const Layout& layout, uint32_t tokens) {
  header.layout = layout_digest(layout);
  header.tokens = tokens;
  header.layers = layout.num_layers();
  header.data_bytes = layout.extent_bytes(tokens);
  std::fill(std::begin(header.layer_sizes), std::end(header.layer_sizes), 0);
  std::fill(std::begin(header.layer_size_index), std::end(header.layer_size_index), 0);
  uint32_t sizes = 0;
  for (uint32_t i = 0; i < header.layers; ++i) {
    const auto size = static_cast<uint32_t>(layout.layer_bytes(i, 1));
    uint32_t* const end = header.layer_sizes + sizes;
    uint32_t* const found = std::find(header.layer_sizes, end, size);
    if (found == end) {
      if (sizes == kMaxLayerSizes) return false;
      header.layer_sizes[sizes++] = size;
    }
    header.layer_size_index[i] = static_cast<uint8_t>(found - header.layer_sizes);
  }
  return true;
}

void encode(const FileHeader& header, std::span<std::byte, kBlockFileHeaderBytes> page) {
  auto* out = reinterpret_cast<FileHeader*>(page.data());
  if (out != &header) std::memcpy(out, &header, sizeof header);
  std::memcpy(out->magic, kBlockFileMagic, sizeof out->magic);
  out->version = kBlockFileVersion;
  out->header_bytes = kBlockFileHeaderBytes;
  out->header_checksum = crc32c(out, kChecked);
}

Decoded decode(std::span<const std::byte, kBlockFileHeaderBytes> page, uint64_t file_bytes) {
  KV_INVARIANT(reinterpret_cast<uintptr_t>(page.data()) % alignof(FileHeader) == 0);
  const auto& h = *reinterpret_cast<const FileHeader*>(page.data());
  if (file_bytes < kBlockFileHeaderBytes) return {nullptr, "shorter than a header"};
  if (std::memcmp(h.magic, kBlockFileMagic, sizeof h.magic) != 0) return {nullptr, "not a block file"};
  if (h.version != kBlockFileVersion) return {nullptr, "of another version"};
  if (h.header_bytes != kBlockFileHeaderBytes) return {nullptr, "header of another length"};
  if (crc32c(&h, kChecked) != h.header_checksum) return {nullptr, "the header's checksum differs"};
  if (h.data_bytes != file_bytes - kBlockFileHeaderBytes) return {nullptr, "of another length than its header says"};
  if (h.tokens == 0 || h.tokens > kMaxTokens) return {nullptr, "tokens out of bounds"};
  if (h.layers == 0 || h.layers > kMaxLayers) return {nullptr, "layers out of bounds"};
  if (h.base_position > kMaxBasePosition) return {nullptr, "base position out of bounds"};
  if (h.priority > kMaxPriority) return {nullptr, "priority out of bounds"};
  if (const std::string_view wrong = wrong_layers(h); !wrong.empty()) return {nullptr, wrong};
  // At most 512 layers of at most 2^24 x 2^20 bytes: no overflow.
  const uint64_t least = h.layers_bytes() + round_up(uint64_t{4} * h.layers, kLayerAlign);
  if (h.data_bytes % kPageBytes != 0 || h.data_bytes < least || h.data_bytes - least > kMaxMeta + kPageBytes)
    return {nullptr, "its layers do not fit its length"};
  return {&h, {}};
}

std::string_view mismatch(const FileHeader& header, const Key& key, const Layout& layout, const Key& digest,
                          const Key& identity) {
  if (header.key != key) return "of another block";
  if (header.identity != identity && header.identity != Key{} && identity != Key{}) return "of another model";
  // The digest alone would do for what was written here; the rest is for a header made up to fit it.
  bool same = header.layout == digest && header.layers == layout.num_layers() && header.tokens <= layout.block_tokens &&
              header.data_bytes == layout.extent_bytes(header.tokens);
  for (uint32_t i = 0; same && i < header.layers; ++i) same = header.layer_bytes(i) == layout.layer_bytes(i, header.tokens);
  return same ? std::string_view{} : "of another layout";
}

bool layer_matches(const FileHeader& header, uint32_t layer, const void* data) {
  return crc32c(data, header.layer_bytes(layer)) == header.layer_checksums[layer];
}

bool tail_matches(const FileHeader& header, const void* data) {
  return crc32c(data, header.data_bytes - header.layers_bytes()) == header.tail_checksum;
}

std::string hex(const Key& key) {
  static constexpr char kDigits[] = "0123456789abcdef";
  const auto* bytes = reinterpret_cast<const uint8_t*>(&key);
  std::string text(2 * kKeyBytes, '0');
  for (size_t i = 0; i < kKeyBytes; ++i) {
    text[2 * i] = kDigits[bytes[i] >> 4];
    text[2 * i + 1] = kDigits[bytes[i] & 15];
  }
  return text;
}

std::string path_of(const Key& key, Fanout fanout) {
  const std::string name = hex(key);
  std::string path;
  path.reserve(96);
  for (uint32_t level = 0; level < fanout.levels; ++level) path.append(name, level * fanout.digits, fanout.digits) += '/';
  return path.append(name).append(kSuffix);
}

std::optional<Key> key_of(std::string_view name) {
  if (name.size() != 2 * kKeyBytes + kSuffix.size() || !name.ends_with(kSuffix)) return std::nullopt;
  Key key;
  auto* bytes = reinterpret_cast<uint8_t*>(&key);
  std::memset(bytes, 0, kKeyBytes);
  for (size_t i = 0; i < 2 * kKeyBytes; ++i) {
    const char c = name[i];
    if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'))) return std::nullopt;
    bytes[i / 2] = static_cast<uint8_t>(bytes[i / 2] << 4 | (c <= '9' ? c - '0' : c - 'a' + 10));
  }
  return key;
}

}  // namespace kv
