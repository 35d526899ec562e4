// A layout says how the bytes of one block are arranged. The daemon knows sizes per token and nothing else of it.
//
// Block of n tokens: layer i starts at the running sum of the earlier layers, each rounded up to kLayerAlign; behind the layers
// stand one CRC32C per layer (u32, padded to kLayerAlign), then the meta area; the extent is that rounded up to a page.
//
// A namespace keeps its layouts in slots of its table. A slot whose layout no block has any more is given to another one, under
// the next generation: an id names both, so that one told before is refused and never taken for what lies there now.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/format/block.h"

namespace kv {

constexpr uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

enum class Dtype : uint32_t { Uint8 = 0, Float16 = 1, Bfloat16 = 2, Float32 = 3, Int8 = 4 };
constexpr uint32_t dtype_bytes(Dtype dtype) {
  return dtype == Dtype::Float32 ? 4 : dtype == Dtype::Float16 || dtype == Dtype::Bfloat16 ? 2 : 1;
}

class Layout {
 public:
  // Parses a blob (docs/formats.md). Throws InvalidArgument that names the field, its value and its limit.
  static Layout parse(std::span<const uint8_t> blob);

  uint32_t num_layers() const { return static_cast<uint32_t>(bytes_per_token_.size()); }
  uint64_t layer_bytes(uint32_t layer, uint32_t tokens) const { return uint64_t{bytes_per_token_[layer]} * tokens; }
  uint64_t layer_offset(uint32_t layer, uint32_t tokens) const;
  uint64_t layers_bytes(uint32_t tokens) const { return layer_offset(num_layers(), tokens); }
  uint64_t checksums_offset(uint32_t tokens) const { return layers_bytes(tokens); }
  uint64_t meta_offset(uint32_t tokens) const {
    return checksums_offset(tokens) + round_up(uint64_t{4} * num_layers(), kLayerAlign);
  }
  uint64_t meta_bytes(uint32_t tokens) const { return meta_fixed + uint64_t{meta_per_token} * tokens; }
  uint64_t extent_bytes(uint32_t tokens) const { return round_up(meta_offset(tokens) + meta_bytes(tokens), kPageBytes); }

  // Whether each layer is whole pages, so that a block may lie in pieces.
  bool in_whole_pages(uint32_t tokens) const;
  // What a region has: however long it is, nobody who goes by its layout looks behind its first page.
  bool is_one_page() const { return block_tokens == 1 && extent_bytes(1) == kPageBytes; }

  uint32_t kv_per_layer = 2;
  uint32_t num_kv_heads = 0;
  uint32_t head_dim = 0;
  Dtype dtype = Dtype::Uint8;
  uint32_t block_tokens = 0;
  uint32_t codec = 0;
  uint32_t meta_fixed = 0;
  uint32_t meta_per_token = 0;
  std::vector<uint8_t> blob;

 private:
  std::vector<uint32_t> bytes_per_token_;
  bool uniform_ = true;
};

// The digest by which layouts travel: files and other hosts know nothing of slots. Worth keeping: it hashes the blob.
Key layout_digest(const Layout& layout);

inline constexpr uint32_t kLastLayoutGeneration = 0xffff;  // a slot that has had so many is not given away again
constexpr uint32_t layout_id(uint32_t slot, uint32_t generation) { return generation << 16 | slot; }
constexpr uint32_t layout_slot(uint32_t id) { return id & 0xffff; }
constexpr uint32_t layout_generation(uint32_t id) { return id >> 16; }
static_assert(kMaxLayouts <= 0x10000);

// A layout as it is registered in one pool.
struct KnownLayout {
  uint32_t id;
  Key digest;
  Layout layout;
};

// A slot's words, in the daemon's mapping and in its clients'. Only the daemon changes one, and only while no block has its
// layout.
class LayoutSlot {
 public:
  LayoutSlot(std::byte* table, uint32_t slot);
  static uint32_t count(const TableHeader& header) {
    return static_cast<uint32_t>((header.geometry_offset - header.layouts_offset) / kLayoutSlotBytes);
  }
  uint32_t generation() const { return generation_->load(std::memory_order_acquire); }
  // What lies there, or nothing: it is empty, or was given away under the look.
  std::optional<std::vector<uint8_t>> blob() const;
  // Killed between any two of its steps, it leaves the slot empty.
  void change(uint32_t generation, std::span<const uint8_t> blob);

 private:
  std::byte* bytes_;
  std::atomic<uint32_t>*length_, *generation_;
};

}  // namespace kv
