// A region's messages, and the pins of what is sealed in it.

#include "core/client/region.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <random>
#include <string>

#include "core/base/atomics.h"
#include "core/base/checksum.h"
#include "core/base/error.h"
#include "core/format/meta.h"

namespace kv {
namespace {

constexpr size_t kSealBytes = 64 << 10;  // of one message, before its last block: that has at most 20 KiB

// One byte a token: its blocks say themselves how long they are.
std::vector<uint8_t> region_layout() {
  std::vector<uint8_t> blob = {'K', 'V', 'L', '1'};
  for (const uint32_t word : {1u, 1u, 1u, 1u, 0u, 1u, 0u, 0u, 0u, 1u}) protocol::append(blob, word);
  for (const char letter : std::string("region")) blob.push_back(static_cast<uint8_t>(letter));
  return blob;
}

Key random_key() {
  std::random_device device;
  Key key;
  for (uint64_t& word : key.words) word = uint64_t{device()} << 32 | device();
  return key;
}

}  // namespace

Region::Region(Client& client, uint64_t length) : length_(length) {
  const uint64_t pages = (length + kPageBytes - 1) / kPageBytes;
  attachment_ = client.usable();
  if (length < 1 || length > attachment_->pool_bytes())
    throw Error(Code::InvalidArgument, "length is " + std::to_string(length) + "; it must be 1 to " +
                                           std::to_string(attachment_->pool_bytes()) + ", the namespace's memory");
  const std::vector<uint8_t> told = attachment_->ask(protocol::Op::RegisterLayout, 1, region_layout());
  layout_ = protocol::Reader(told).take<uint32_t>();
  const Key key = random_key();  // nobody asks for it
  number_ = key.words[3];
  std::vector<uint8_t> body;
  protocol::append(body, protocol::CreateHead{layout_, kDefaultPriority, 0, 0});
  protocol::append(body, protocol::CreateItem{key, number_, 1, 0, 0, static_cast<uint32_t>(pages)});
  protocol::GrantItem grant{};
  attachment_->ask(protocol::Op::Create, 1, body, {}, [&](std::span<const uint8_t> answer) {
    grant = protocol::Reader(answer).take<protocol::GrantItem>();
    if (grant.status == static_cast<uint32_t>(Grant::Granted)) parts_ = {{grant.record, grant.generation}};
    if (!parts_.empty()) attachment_->opened(this, parts_);
  });
  extent_ = {grant.offset, grant.length};
  if (parts_.empty())
    throw Error(Code::NoSpace, "no run of " + std::to_string(length) + " bytes in one piece is free for a region");
  if (extent_.length < pages * kPageBytes) {
    close();
    throw Error(Code::Unavailable, "the daemon is of an older version, which has no regions");
  }
  attachment_->tables->writing(extent_);
  attachment_->count_region(1), counted_ = true;
}

// Zeros where nobody writes, and the layers' checksums.
void Region::finish(const Layout& layout, const Wanted& block) {
  std::byte* bytes = data() + block.offset;
  std::vector<uint32_t> sums;
  for (uint32_t layer = 0; layer < layout.num_layers(); ++layer) {
    const uint64_t begin = layout.layer_offset(layer, block.tokens), used = layout.layer_bytes(layer, block.tokens);
    sums.push_back(crc32c(bytes + begin, used));
    std::memset(bytes + begin + used, 0, layout.layer_offset(layer + 1, block.tokens) - begin - used);
  }
  const uint64_t behind = layout.checksums_offset(block.tokens);
  std::memset(bytes + behind, 0, layout.extent_bytes(block.tokens) - behind);
  std::memcpy(bytes + behind, sums.data(), 4 * sums.size());
}

// Of one in pieces.
std::vector<uint32_t> Region::checksums(const Layout& layout, const Wanted& block) const {
  std::vector<uint32_t> sums(layout.num_layers());
  for (uint32_t layer = 0; layer < layout.num_layers(); ++layer)
    each_stretch(block.pieces, layout.layer_offset(layer, block.tokens), layout.layer_bytes(layer, block.tokens),
                 [&](uint64_t at, uint64_t bytes) { return sums[layer] = crc32c(data() + at, bytes, sums[layer]), true; });
  return sums;
}

// Where it lies in the region. Throws InvalidArgument if it cannot.
std::vector<Extent> Region::places(const Layout& layout, const Wanted& block) const {
  const auto refuse = [](const std::string& why) { throw Error(Code::InvalidArgument, why); };
  if (block.tokens < 1 || block.tokens > layout.block_tokens)
    refuse("tokens is " + std::to_string(block.tokens) + "; it must be 1 to " + std::to_string(layout.block_tokens));
  const bool apart = !block.pieces.empty();
  std::vector<Extent> out = block.pieces;
  if (!apart) out.push_back({block.offset, layout.extent_bytes(block.tokens)});
  uint64_t bytes = 0;
  for (const Extent& at : out) {
    if ((at.offset | at.length) % kPageBytes || at.length > extent_.length || at.offset > extent_.length - at.length ||
        at.length == 0)
      refuse(std::to_string(at.length) + " bytes at " + std::to_string(at.offset) + " are not inside the region of " +
             std::to_string(extent_.length) + ", or begin or end within a page");
    bytes += at.length;
  }
  if (!apart) return out;
  if (out.size() > kMaxPieces || !layout.in_whole_pages(block.tokens) || bytes != layout.layers_bytes(block.tokens))
    refuse(std::to_string(out.size()) + " pieces of " + std::to_string(bytes) + " bytes; they must be " +
           std::to_string(kMaxPieces) + " at most and " + std::to_string(layout.layers_bytes(block.tokens)) +
           " bytes, each layer whole pages");
  std::vector<Extent> sorted = out;
  std::sort(sorted.begin(), sorted.end(), [](const Extent& a, const Extent& b) { return a.offset < b.offset; });
  for (size_t i = 1; i < sorted.size(); ++i)
    if (sorted[i - 1].end() > sorted[i].offset) refuse("two pieces of the block overlap");
  return out;
}

bool Region::is_sealed(uint64_t offset, uint64_t length) {
  const std::lock_guard lock(mutex_);
  return touches(runs_, offset, length);
}

void Region::follow(const protocol::RegionItem& change) {
  if (change.opened != protocol::kNoRecord) {
    parts_.push_back({change.opened, change.opened_generation});
    attachment_->opened(this, {&parts_.back(), 1});
  }
  if (change.ended == protocol::kNoRecord) return;
  const protocol::BlockItem ended{change.ended, 0, change.ended_generation};
  std::erase(parts_, Handle{change.ended, change.ended_generation});
  attachment_->ended(this, {&ended, 1});
}

// As Client::pin_all, of blocks that nobody had the time to evict. One without a pin is the store's from now on.
void Region::pin(const std::vector<std::pair<Key, Sealed>>& fresh) {
  std::vector<uint64_t> pins;
  std::vector<uint32_t> pages, slots(fresh.size()), lost;
  for (const auto& [key, sealed] : fresh) {
    pins.push_back(pin_word(sealed.block.record, sealed.block.generation));
    pages.push_back(sealed.pages);
  }
  const size_t taken = attachment_->take_pins(pins, pages, slots.data());
  fence_full();
  for (size_t i = 0; i < fresh.size(); ++i) {
    for (const Extent& at : fresh[i].second.pieces) runs_.emplace(at.offset, at.end());
    const Handle block = fresh[i].second.block;
    const bool held = i < taken && attachment_->board->allowance().covers(slots[i], pages[i]) &&
                      attachment_->index.control(block.record).generation() == block.generation;
    Sealed sealed = fresh[i].second;
    sealed.slot = held ? slots[i] : PinBoard::kNoSlot;
    if (i < taken && !held) lost.push_back(slots[i]);
    sealed_.insert_or_assign(fresh[i].first, std::move(sealed));
  }
  if (!lost.empty()) attachment_->board->clear(lost);
}

std::vector<Region::Sealing> Region::seal(uint32_t layout_id, std::span<const Wanted> blocks, uint32_t priority, uint32_t ttl_s) {
  const std::lock_guard lock(mutex_);
  if (closed_) throw Error(Code::Closed, "the region was given back");
  if (attachment_->foreign()) throw Error(Code::Detached, "this process was forked since it registered the region");
  std::vector<Sealing> out(blocks.size(), Sealing::NoSpace);
  if (!attachment_->connected() || !attachment_->current()) return out;
  const Attachment::Known known = attachment_->layout(layout_id);
  const Layout& layout = known->layout;
  std::vector<size_t> whole, apart;
  Runs here;  // of this call
  for (size_t i = 0; i < blocks.size(); ++i) {
    const Wanted& block = blocks[i];
    const std::vector<Extent> its = places(layout, block);
    const auto taken = [&](const Extent& at) {
      return touches(runs_, at.offset, at.length) || touches(here, at.offset, at.length);
    };
    if (std::any_of(its.begin(), its.end(), taken)) continue;  // sealed: not to be written to
    if (sealed_.contains(block.key)) continue;                 // its memory of before could not be given back any more
    const uint64_t behind = layout.extent_bytes(block.tokens) - layout.layers_bytes(block.tokens);
    if (!block.pieces.empty() && (attachment_->protocol() < protocol::kVersionPieces || behind > kMaxBehind)) continue;
    for (const Extent& at : its) here.emplace(at.offset, at.end());
    (block.pieces.empty() ? whole : apart).push_back(i);
  }
  const protocol::RegionHead head{layout_id, priority, ttl_s, 0};
  bool asked = false;
  for (const auto* which : {&whole, &apart})
    for (size_t first = 0, count; first < which->size(); first += count) {
      count = 0;
      for (size_t bytes = 0; first + count < which->size() && count < kMaxKeysPerMessage && bytes < kSealBytes; ++count)
        bytes += 8 * blocks[(*which)[first + count]].pieces.size() + 4 * layout.num_layers() + sizeof(protocol::PublishItem);
      try {
        if (!ask_to_seal(head, layout, blocks, std::span(*which).subspan(first, count), out)) return out;
      } catch (const Error&) {
        if (!asked) throw;
        return out;
      }
      asked = true;
    }
  return out;
}

// False: the daemon does not answer any more. Throws what it refused it for.
bool Region::ask_to_seal(const protocol::RegionHead& head, const Layout& layout, std::span<const Wanted> blocks,
                         std::span<const size_t> part, std::vector<Sealing>& out) {
  const bool apart = !blocks[part[0]].pieces.empty();
  std::vector<uint8_t> body, behind;
  protocol::append(body, head);
  for (const size_t i : part) {
    const Wanted& block = blocks[i];
    if (!apart) {
      finish(layout, block);
      protocol::append(body, protocol::PublishItem{block.key, extent_.offset + block.offset, block.tokens, 1, random_key()});
      continue;
    }
    const auto pieces = static_cast<uint32_t>(block.pieces.size());
    protocol::append(body, protocol::PiecesItem{block.key, block.tokens, pieces, layout.num_layers(), 0});
    for (const Extent& at : block.pieces) protocol::append(behind, Extent{extent_.offset + at.offset, at.length}.pack());
    protocol::append(behind, checksums(layout, block));
  }
  body.insert(body.end(), behind.begin(), behind.end());
  std::vector<std::pair<Key, Sealed>> fresh;
  const auto take = [&](std::span<const uint8_t> answer) {
    protocol::Reader reader(answer);
    for (const size_t i : part) {
      const auto change = reader.take<protocol::RegionItem>();
      if (!reader.ok()) throw Error(Code::Detached, "the daemon's answer about a region cannot be read");
      out[i] = static_cast<Sealing>(change.status);
      follow(change);
      const auto pages = static_cast<uint32_t>(layout.extent_bytes(blocks[i].tokens) / kPageBytes);
      if (out[i] == Sealing::Sealed)
        fresh.push_back({blocks[i].key, {{change.record, change.generation}, places(layout, blocks[i]), pages, 0}});
    }
  };
  bool sent = false;
  try {
    attachment_->ask(
        apart ? protocol::Op::PublishPieces : protocol::Op::Publish, static_cast<uint32_t>(part.size()), body,
        [&] { sent = true; }, take);
  } catch (const Error& error) {
    if (!sent || (error.code != Code::Detached && error.code != Code::DeadlineExceeded)) throw;
    for (const size_t i : part) lose(places(layout, blocks[i])), out[i] = Sealing::Lost;
    return false;
  }
  pin(fresh);
  return true;
}

// The daemon may have made it a block, and, an older one, more parts of what was around it: a session that is resumed names those
// it knows of, and the memory of the others would be given to anybody while our allocator writes to it.
void Region::lose(std::span<const Extent> pieces) {
  for (const Extent& at : pieces) runs_.emplace(at.offset, at.end());
  attachment_->never_resume();
}

std::vector<Back> Region::give_back(std::span<const Key> keys) {
  const std::lock_guard lock(mutex_);
  if (closed_) throw Error(Code::Closed, "the region was given back");
  if (attachment_->foreign()) throw Error(Code::Detached, "this process was forked since it registered the region");
  std::vector<Back> out(keys.size(), Back::Gone);
  std::vector<size_t> which;
  for (size_t i = 0; i < keys.size(); ++i)
    if (sealed_.contains(keys[i])) which.push_back(i);
  for (size_t first = 0; first < which.size(); first += kMaxKeysPerMessage) {
    const auto part = std::span(which).subspan(first, std::min<size_t>(kMaxKeysPerMessage, which.size() - first));
    std::vector<uint8_t> body;
    protocol::append(body, protocol::RegionHead{layout_, 0, 0, 0});
    for (const size_t i : part) {
      const Handle block = sealed_.at(keys[i]).block;
      protocol::append(body, protocol::TakeBackItem{random_key(), number_, block.record, 0, block.generation});
    }
    std::vector<uint32_t> slots;
    attachment_->ask(protocol::Op::TakeBack, static_cast<uint32_t>(part.size()), body, {}, [&](std::span<const uint8_t> answer) {
      protocol::Reader reader(answer);
      for (const size_t i : part) {
        const auto change = reader.take<protocol::RegionItem>();
        if (!reader.ok()) throw Error(Code::Detached, "the daemon's answer about a region cannot be read");
        follow(change);
        const auto at = sealed_.find(keys[i]);
        if (at == sealed_.end()) continue;  // the key is twice in this call
        out[i] = static_cast<Back>(change.status);
        if (out[i] == Back::Held) continue;
        // Of memory that is gone the run stays as it is: it will be another's.
        if (out[i] == Back::Taken)
          for (const Extent& piece : at->second.pieces) runs_.erase(piece.offset);
        if (at->second.slot != PinBoard::kNoSlot) slots.push_back(at->second.slot);
        sealed_.erase(at);
      }
    });
    attachment_->board->clear(slots);
  }
  return out;
}

void Region::close() {
  if (attachment_->foreign()) return;  // before the lock, which a thread of the parent's may have held at the fork
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  closed_ = true;
  attachment_->tables->used(extent_);
  std::vector<uint32_t> slots;
  for (const auto& [key, sealed] : sealed_)
    if (sealed.slot != PinBoard::kNoSlot) slots.push_back(sealed.slot);
  attachment_->board->clear(slots);
  std::vector<protocol::BlockItem> parts;
  for (const Handle& part : parts_) parts.push_back({part.record, 0, part.generation});
  parts_.clear();
  attachment_->ended(this, parts);
  for (size_t first = 0; first < parts.size(); first += kMaxKeysPerMessage) {
    const auto part = std::span(parts).subspan(first, std::min<size_t>(kMaxKeysPerMessage, parts.size() - first));
    try {
      attachment_->ask(protocol::Op::Abort, static_cast<uint32_t>(part.size()),
                       {reinterpret_cast<const uint8_t*>(part.data()), part.size_bytes()});
    } catch (const Error&) {
      break;  // the session's end gives them up
    }
  }
  if (counted_) attachment_->count_region(-1);
}

}  // namespace kv
