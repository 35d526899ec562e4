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
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
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
    // Or where it lies apart: whole pages of the region that one behind the other are its layers.
    std::vector<Extent> pieces = {};
  };
  // As Grant; Lost: the daemon was asked and did not answer. It may have sealed the block, whose memory counts as sealed from
  // then on and is no part of the region any more.
  enum class Sealing : uint8_t { Sealed, Exists, Pending, NoSpace, Lost };
  // Seals blocks that lie at their offsets as their layout says: layer after layer, each on a multiple of kLayerAlign. The pads
  // and what stands behind the layers, up to extent_bytes(), are the block's too and are written here. `layout` is of this
  // region's attachment. Nothing is written to the memory of blocks in pieces. NoSpace: cannot be sealed in place: part of it or
  // its key was sealed here already and not given back, the daemon was another since, or, for pieces, is older.
  // Throws InvalidArgument, before anything is sealed, where one has a refusal().
  std::vector<Sealing> seal(uint32_t layout, std::span<const Wanted> blocks, uint32_t priority, uint32_t ttl_s);
  // Afterwards nobody finds them; Taken: the memory is the allocator's. Held: ask again later. Gone: it will not be.
  std::vector<Back> give_back(std::span<const Key> keys);
  bool is_sealed(uint64_t offset, uint64_t length);  // is any byte of it in a sealed block?
  // Why these buffers of a block cannot be: not inside, not on multiples of kBufferAlign, or overlapping; "" if they can.
  std::string refusal(std::span<const Extent> buffers) const;
  // Why a block cannot be sealed there: not inside, not on whole pages, not its layers; "" if it can.
  std::string refusal(const Layout& layout, const Wanted& block) const;
  // Copies layers of the batch's blocks, from `first` on, out to their buffers, [block][layer][buffer], and compares each with
  // its checksum. Of one that is Corrupt the buffers hold no block. Throws Closed, Detached in a forked child; PinsExhausted,
  // before anything is written.
  std::vector<Answer> load(BlockBatch& batch, uint32_t first, std::span<const Buffers> blocks);
  void close();  // what is sealed stays, and is evicted as any other block. Idempotent

 private:
  static constexpr uint64_t kMaxBehind = 64ull << 10;  // bytes, of one block
  struct Sealed {
    Handle block;
    std::vector<Extent> places;  // in the region
    Extent behind;               // in the pool, of a block in pieces: what stands behind its layers
    uint32_t pages, slot;        // of all of it; of its pin
  };
  struct KeyLess {
    bool operator()(const Key& a, const Key& b) const { return a.words < b.words; }
  };
  using Runs = std::map<uint64_t, uint64_t>;  // offset to end
  std::string refusal_to_load(const BlockBatch::Item& item, uint32_t first, const Buffers& layers, Runs& filled) const;
  Answer load_one(BlockBatch& batch, size_t i, uint32_t first, const Buffers& layers, Runs& filled);
  static bool touches(const Runs& runs, uint64_t offset, uint64_t length);  // does any of them have a byte of it?
  static uint64_t behind_layers(const Layout& layout, uint32_t tokens) {
    return layout.extent_bytes(tokens) - layout.layers_bytes(tokens);
  }
  std::optional<Extent> open_run(uint64_t pages);
  void finish(const Layout& layout, const Wanted& block);
  void finish_behind(const Layout& layout, const Wanted& block, const Extent& behind);
  void make_room_behind(uint64_t length, size_t count);
  static std::vector<Extent> places(const Layout& layout, const Wanted& block);
  std::vector<protocol::PiecesAnswer> read_changes(std::span<const uint8_t> answer, size_t count, bool apart);
  bool ask_to_seal(const protocol::RegionHead& head, const Layout& layout, std::span<const Wanted> blocks,
                   std::span<const size_t> part, std::vector<Sealing>& out);
  void ask_back(std::span<const Key> keys, std::span<const size_t> part, bool apart, std::vector<Back>& out);
  void lose(std::span<const Extent> places);
  void pin(const std::vector<std::pair<Key, Sealed>>& fresh);

  std::shared_ptr<Attachment> attachment_;
  uint64_t length_, number_;
  uint32_t layout_;  // the region's own
  Extent extent_{0, 0};
  std::mutex mutex_;
  std::set<std::pair<uint32_t, uint64_t>> parts_;  // record, generation
  std::map<Key, Sealed, KeyLess> sealed_;
  Runs runs_;                                         // of the sealed ones
  std::map<uint64_t, std::vector<uint64_t>> behind_;  // by length: memory of the pool for what stands behind layers
  bool closed_ = false, counted_ = false;
};

}  // namespace kv
