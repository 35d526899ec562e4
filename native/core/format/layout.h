// A layout says how the bytes of one block are arranged. The daemon knows sizes per token and nothing else of it.
//
// Block of n tokens: layer i starts at the running sum of the earlier layers, each rounded up to kLayerAlign; behind the layers
// stand one CRC32C per layer (u32, padded to kLayerAlign), then the meta area; the extent is that rounded up to a page.
#pragma once

#include <cstdint>
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

}  // namespace kv
