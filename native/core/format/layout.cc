#include "core/format/layout.h"

#include <algorithm>
#include <cstring>

#include "core/base/atomics.h"
#include "core/base/error.h"
#include "core/format/sha256.h"

namespace kv {
namespace {

constexpr size_t kFixedBytes = 4 + 9 * 4;
constexpr uint32_t kMaxLayerBytesPerToken = 1u << 24;
constexpr size_t kMaxNameBytes = 256;
constexpr uint32_t kMaxCodec = 1;  // none, or KIVI (kvclient.blocks.codec)

void bound(const char* field, uint64_t value, uint64_t low, uint64_t high) {
  if (value < low || value > high)
    throw Error(Code::InvalidArgument, std::string("layout: ") + field + " is " + std::to_string(value) + ", must be " +
                                           std::to_string(low) + " to " + std::to_string(high));
}

}  // namespace

Layout Layout::parse(std::span<const uint8_t> blob) {
  bound("length of the description", blob.size(), kFixedBytes + 4, kLayoutSlotBytes - 8);
  if (std::memcmp(blob.data(), "KVL1", 4) != 0)
    throw Error(Code::InvalidArgument, "layout: description does not start with KVL1");
  auto word = [&](size_t i) {
    uint32_t value;
    std::memcpy(&value, blob.data() + 4 + 4 * i, 4);
    return value;
  };
  const uint32_t layers = word(0);
  bound("num_layers", layers, 1, kMaxLayers);
  bound("length of the description", blob.size(), kFixedBytes + 4ull * layers, kFixedBytes + 4ull * layers + kMaxNameBytes);
  bound("dtype", word(4), 0, 4);

  Layout layout;
  layout.kv_per_layer = word(1);
  layout.num_kv_heads = word(2);
  layout.head_dim = word(3);
  layout.dtype = static_cast<Dtype>(word(4));
  layout.block_tokens = word(5);
  layout.codec = word(6);
  layout.meta_fixed = word(7);
  layout.meta_per_token = word(8);
  bound("kv_per_layer", layout.kv_per_layer, 1, 2);
  bound("num_kv_heads", layout.num_kv_heads, 1, 65536);
  bound("head_dim", layout.head_dim, 1, 65536);
  bound("block_tokens", layout.block_tokens, 1, 65535);
  bound("codec", layout.codec, 0, kMaxCodec);
  bound("meta_fixed", layout.meta_fixed, 0, 1u << 20);
  bound("meta_per_token", layout.meta_per_token, 0, 4096);
  for (uint32_t i = 0; i < layers; ++i) {
    bound("layer_bytes_per_token", word(9 + i), 1, kMaxLayerBytesPerToken);
    layout.bytes_per_token_.push_back(word(9 + i));
  }
  layout.uniform_ = std::all_of(layout.bytes_per_token_.begin(), layout.bytes_per_token_.end(),
                                [&](uint32_t b) { return b == layout.bytes_per_token_[0]; });
  layout.blob.assign(blob.begin(), blob.end());
  bound("bytes of a full block", layout.extent_bytes(layout.block_tokens), 1, 1ull << 39);
  return layout;
}

bool Layout::in_whole_pages(uint32_t tokens) const {
  return std::ranges::all_of(bytes_per_token_, [&](uint64_t bytes) { return bytes * tokens % kPageBytes == 0; });
}

uint64_t Layout::layer_offset(uint32_t layer, uint32_t tokens) const {
  if (uniform_) return layer * round_up(uint64_t{bytes_per_token_[0]} * tokens, kLayerAlign);
  uint64_t offset = 0;
  for (uint32_t i = 0; i < layer; ++i) offset += round_up(layer_bytes(i, tokens), kLayerAlign);
  return offset;
}

Key layout_digest(const Layout& layout) { return Sha256().update(layout.blob.data(), layout.blob.size()).finish(); }

LayoutSlot::LayoutSlot(std::byte* table, uint32_t slot)
    : bytes_(table + reinterpret_cast<TableHeader*>(table)->layouts_offset + slot * kLayoutSlotBytes),
      length_(reinterpret_cast<std::atomic<uint32_t>*>(bytes_)),
      generation_(reinterpret_cast<std::atomic<uint32_t>*>(bytes_ + kLayoutSlotBytes - 4)) {}

std::optional<std::vector<uint8_t>> LayoutSlot::blob() const {
  const uint32_t before = generation(), length = length_->load(std::memory_order_acquire);
  if (length == 0 || length > kLayoutSlotBytes - 8) return std::nullopt;
  std::vector<uint8_t> out(length);
  std::memcpy(out.data(), bytes_ + 4, length);
  fence_full();
  if (generation() != before || length_->load(std::memory_order_relaxed) != length) return std::nullopt;
  return out;
}

void LayoutSlot::change(uint32_t generation, std::span<const uint8_t> blob) {
  length_->store(0, std::memory_order_release);
  generation_->store(generation, std::memory_order_release);
  fence_full();
  if (!blob.empty()) std::memcpy(bytes_ + 4, blob.data(), blob.size());  // nothing may lie at null
  length_->store(static_cast<uint32_t>(blob.size()), std::memory_order_release);
}

}  // namespace kv
