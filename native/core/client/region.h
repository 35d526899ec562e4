// A region: memory of the pool in one piece for an allocator of the caller's own, and the blocks sealed where they lie in it.
// Thread-safe; nothing here knows Python.
//
// Each sealed block holds a pin of this session's, so that it is not evicted while the region has it; given back, its memory is
// the allocator's again. Blocks are loaded into buffers anywhere in it, but for what is sealed there. Invariant: `parts_` are the
// unsealed parts, as the daemon last answered.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "core/client/client.h"

namespace kv {

class Region {
 public:
  // Throws NoSpace, InvalidArgument, Detached, Unavailable from a daemon that knows of no regions.
  Region(Client& client, uint64_t length);
  ~Region() { close(); }
  Region(const Region&) = delete;

  std::byte* data() const { return attachment_->writable(extent_.offset); }
  uint64_t length() const { return length_; }
  uint64_t attachment() const { return attachment_->number(); }

  static constexpr uint64_t kBufferAlign = 64;
  enum class Loaded : uint8_t { Yes, Missing, Pending, Corrupt, Lost, Refused };
  struct Answer {
    Loaded word;
    std::string why;
  };
  using Buffers = std::vector<std::vector<Extent>>;  // of one block: [layer][buffer]

  struct Wanted {
    Key key;
    uint64_t offset;  // in the region, a multiple of a page
    uint32_t tokens;
    std::vector<Extent> pieces = {};  // then it lies there, and not at the offset: its layers, one behind the other
  };
  // As Grant; Lost: the daemon was asked and did not answer. It may have sealed the block, whose memory counts as sealed from
  // then on and is no part of the region any more.
  enum class Sealing : uint8_t { Sealed, Exists, Pending, NoSpace, Lost };
  // Seals blocks that lie at their offsets as their layout says: layer after layer, each on a multiple of kLayerAlign. The pads
  // and what stands behind the layers, up to extent_bytes(), are the block's too and are written here. Or that lie in pieces, of
  // whole pages all, as their layers must be: nothing is written here then. `layout` is of this region's attachment. NoSpace:
  // cannot be sealed in place: part of it or its key was sealed here already and not given back, the daemon was another since,
  // or, in pieces, is an older one. Throws InvalidArgument: tokens, or where it lies; Closed; Detached in a forked child.
  std::vector<Sealing> seal(uint32_t layout, std::span<const Wanted> blocks, uint32_t priority, uint32_t ttl_s);
  // Afterwards nobody finds them; Taken: the memory is the allocator's. Held: ask again later. Gone: it will not be.
  std::vector<Back> give_back(std::span<const Key> keys);
  bool is_sealed(uint64_t offset, uint64_t length);  // is any byte of it in a sealed block?
  // Why these buffers of a block cannot be: not inside, not on multiples of kBufferAlign, or overlapping; "" if they can.
  std::string refusal(std::span<const Extent> buffers) const;
  // Copies layers of the batch's blocks, from `first` on, out to their buffers, [block][layer][buffer], and compares each with
  // its checksum. Of one that is Corrupt the buffers hold no block. Throws Closed, Detached in a forked child; PinsExhausted,
  // before anything is written.
  std::vector<Answer> load(BlockBatch& batch, uint32_t first, std::span<const Buffers> blocks);
  void close();  // what is sealed stays, and is evicted as any other block. Idempotent

 private:
  struct Sealed {
    Handle block;
    std::vector<Extent> pieces;
    uint32_t pages;  // of the block
    uint32_t slot;   // of its pin
  };
  struct KeyLess {
    bool operator()(const Key& a, const Key& b) const { return a.words < b.words; }
  };
  using Runs = std::map<uint64_t, uint64_t>;                                // offset to end
  static bool touches(const Runs& runs, uint64_t offset, uint64_t length);  // has any of them a byte of it?
  std::string refusal_to_load(const BlockBatch::Item& item, uint32_t first, const Buffers& layers, Runs& filled) const;
  Answer load_one(BlockBatch& batch, size_t i, uint32_t first, const Buffers& layers, Runs& filled);
  std::vector<Extent> places(const Layout& layout, const Wanted& block) const;
  void finish(const Layout& layout, const Wanted& block);
  std::vector<uint32_t> checksums(const Layout& layout, const Wanted& block) const;
  bool ask_to_seal(const protocol::RegionHead& head, const Layout& layout, std::span<const Wanted> blocks,
                   std::span<const size_t> part, std::vector<Sealing>& out);
  void follow(const protocol::RegionItem& change);
  void lose(std::span<const Extent> pieces);
  void pin(const std::vector<std::pair<Key, Sealed>>& fresh);

  std::shared_ptr<Attachment> attachment_;
  uint64_t length_, number_;
  uint32_t layout_;  // the region's own
  Extent extent_{0, 0};
  std::mutex mutex_;
  std::vector<Handle> parts_;
  std::map<Key, Sealed, KeyLess> sealed_;
  Runs runs_;  // of the sealed ones
  bool closed_ = false, counted_ = false;
};

}  // namespace kv
