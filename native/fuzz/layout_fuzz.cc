// libFuzzer: the description of a layout. Parsed or refused by InvalidArgument; what was parsed has lengths that only grow with
// the tokens, and a file's header made from it is one that decode() accepts and finds equal.
#include <cstring>

#include "core/base/error.h"
#include "core/files/block_file.h"
#include "core/format/layout.h"

namespace {

void use(const kv::Layout& layout, uint32_t tokens) {
  KV_INVARIANT(layout.layer_offset(layout.num_layers(), tokens) == layout.layers_bytes(tokens));
  KV_INVARIANT(layout.layers_bytes(tokens) % kv::kLayerAlign == 0);
  KV_INVARIANT(layout.checksums_offset(tokens) + uint64_t{4} * layout.num_layers() <= layout.meta_offset(tokens));
  KV_INVARIANT(layout.meta_offset(tokens) + layout.meta_bytes(tokens) <= layout.extent_bytes(tokens));
  KV_INVARIANT(layout.extent_bytes(tokens) <= 1ull << 39);
  alignas(8) static std::byte page[kv::kBlockFileHeaderBytes];
  kv::FileHeader header = {};
  if (!kv::describe(header, layout, tokens)) return;
  kv::encode(header, page);
  const kv::Decoded decoded = kv::decode(page, kv::kBlockFileHeaderBytes + layout.extent_bytes(tokens));
  KV_INVARIANT(decoded);
  KV_INVARIANT(kv::mismatch(*decoded.header, {}, layout, kv::layout_digest(layout), {}).empty());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const kv::Layout layout = kv::Layout::parse({data, size});
    use(layout, 1);
    use(layout, layout.block_tokens / 2 + 1);
    use(layout, layout.block_tokens);
  } catch (const kv::Error& error) {
    KV_INVARIANT(error.code == kv::Code::InvalidArgument);
  }
  return 0;
}
