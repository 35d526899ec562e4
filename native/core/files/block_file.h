// One block in one file: a header of 4 KiB, then the bytes of the block's extent as they lay in the pool. Owns the header's
// bytes, the checks that a header must pass before anything in it is believed, and the names of files. Never opens a file.
//
// Invariant: what decode() accepted is consistent in itself and with the file's length: offsets and lengths computed from it
// stay inside the file. That its bytes are the block's is what the checksums say, one per layer and one for the rest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/format/block.h"
#include "core/format/layout.h"

namespace kv {

inline constexpr char kBlockFileMagic[8] = {'K', 'V', 'B', 'L', 'O', 'C', 'K', '1'};
inline constexpr uint32_t kBlockFileVersion = 1;
inline constexpr uint64_t kBlockFileHeaderBytes = 4096;
inline constexpr uint32_t kMaxLayerSizes = 256;  // different layer sizes of one layout; one with more stays in memory

// The file's first 4 KiB. All of it is covered by header_checksum, which comes last.
struct FileHeader {
  char magic[8];
  uint32_t version;
  uint32_t header_bytes;
  Key key;
  Key content_key;  // zero if unknown
  Key identity;     // reuse identity, zero if unknown
  Key layout;       // SHA-256 of the layout's blob
  uint64_t fingerprint;
  uint64_t data_bytes;  // behind the header: layers, their checksums, meta area, padding to a page
  uint32_t tokens;
  uint32_t base_position;
  uint32_t priority;
  uint32_t parent;
  uint32_t created_s;
  uint32_t expiry_s;  // 0: never
  uint32_t layers;
  uint32_t tail_checksum;                // CRC32C of all bytes behind the layers
  uint32_t layer_checksums[kMaxLayers];  // CRC32C of each layer without its padding; zero above `layers`
  uint32_t layer_sizes[kMaxLayerSizes];  // bytes per token, each value once, in order of appearance; then zeros
  uint8_t layer_size_index[kMaxLayers];  // which of them layer i has; zero above `layers`
  uint8_t reserved[316];                 // zero
  uint32_t header_checksum;              // CRC32C of all before

  uint64_t layer_bytes(uint32_t layer) const { return uint64_t{layer_sizes[layer_size_index[layer]]} * tokens; }
  uint64_t layers_bytes() const;  // where the bytes behind the layers start, counted from the end of the header
};
static_assert(sizeof(FileHeader) == kBlockFileHeaderBytes);

// Fills in `layout`, `tokens`, `data_bytes`, `layers` and the layers' sizes. False if the layout has too many different sizes.
bool describe(FileHeader& header, const Layout& layout, uint32_t tokens);

// Writes the header into `page`, with magic, version, length and checksum.
void encode(const FileHeader& header, std::span<std::byte, kBlockFileHeaderBytes> page);

struct Decoded {
  const FileHeader* header = nullptr;  // lies in the page that was decoded
  std::string_view wrong;              // why not, if there is none; a literal
  explicit operator bool() const { return header != nullptr; }
};

// Checks the first 4 KiB (on a multiple of 8) of a file of `file_bytes` bytes.
Decoded decode(std::span<const std::byte, kBlockFileHeaderBytes> page, uint64_t file_bytes);

// Whether that header is of the block that is wanted: empty, or what differs. `digest` is the layout's. A zero identity on either
// side is no statement. After this the layout's own offsets hold for the file.
std::string_view mismatch(const FileHeader& header, const Key& key, const Layout& layout, const Key& digest, const Key& identity);

// Compare the checksum of a layer, or of the bytes behind the layers, at `data`. The caller sees to it that `data` can be read.
bool layer_matches(const FileHeader& header, uint32_t layer, const void* data);
bool tail_matches(const FileHeader& header, const void* data);

// How many levels of directories, of how many hexadecimal digits each. The default makes 256 directories: with 65,536 a scan
// takes 1.8 times as long, three times from a cold disk, and the directories alone take 256 MiB (docs/log.md).
struct Fanout {
  uint32_t levels = 2;
  uint32_t digits = 1;
};
inline constexpr uint32_t kMaxFanoutLevels = 4, kMaxFanoutDigits = 4;

std::string hex(const Key& key);
std::string path_of(const Key& key, Fanout fanout);  // "a/b/<64 digits>.kv"
std::optional<Key> key_of(std::string_view name);    // of a file's last name; nothing if it is not such a name

}  // namespace kv
