// A region's messages, and the pins of what is sealed in it.

#include "core/client/region.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <string>

#include "core/base/atomics.h"
#include "core/base/checksum.h"
#include "core/base/error.h"
#include "core/format/meta.h"

namespace kv {
namespace {

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
  number_ = random_key().words[3];
  const std::optional<Extent> run = open_run(pages);
  if (!run) throw Error(Code::NoSpace, "no run of " + std::to_string(length) + " bytes in one piece is free for a region");
  extent_ = *run;
  if (extent_.length < pages * kPageBytes) {
    close();
    throw Error(Code::Unavailable, "the daemon is of an older version, which has no regions");
  }
  attachment_->tables->writing(extent_);
  attachment_->count_region(1), counted_ = true;
}

// A further run of this region's, which the daemon keeps apart from others.
std::optional<Extent> Region::open_run(uint64_t pages) {
  std::vector<uint8_t> body;
  protocol::append(body, protocol::CreateHead{layout_, kDefaultPriority, 0, 0});
  protocol::append(body, protocol::CreateItem{random_key(), number_, 1, 0, 0, static_cast<uint32_t>(pages)});
  std::optional<Extent> run;
  attachment_->ask(protocol::Op::Create, 1, body, {}, [&](std::span<const uint8_t> answer) {
    const auto grant = protocol::Reader(answer).take<protocol::GrantItem>();
    if (grant.status != static_cast<uint32_t>(Grant::Granted)) return;
    run = Extent{grant.offset, grant.length};
    const Handle part{grant.record, grant.generation};
    parts_.emplace(part.record, part.generation);
    attachment_->opened(this, {&part, 1});
  });
  return run;
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

// Of one in pieces: what stands behind its layers is written where nothing of the region's lies.
void Region::finish_behind(const Layout& layout, const Wanted& block, const Extent& behind) {
  std::byte* bytes = attachment_->writable(behind.offset);
  std::memset(bytes, 0, behind.length);
  bytes += layout.checksums_offset(block.tokens) - layout.layers_bytes(block.tokens);
  for (uint32_t layer = 0; layer < layout.num_layers(); ++layer, bytes += sizeof(uint32_t)) {
    uint32_t sum = 0;
    each_stretch(block.pieces, layout.layer_offset(layer, block.tokens), layout.layer_bytes(layer, block.tokens),
                 [&](uint64_t at, uint64_t length) { return sum = crc32c(data() + at, length, sum), true; });
    std::memcpy(bytes, &sum, sizeof sum);
  }
}

// Memory of further runs for what stands behind the layers of so many blocks, as far as there is room for it.
void Region::make_room_behind(uint64_t length, size_t count) {
  std::vector<uint64_t>& free = behind_[length];
  if (free.size() >= count) return;
  const uint64_t wanted = count - free.size(), many = std::clamp<uint64_t>(extent_.length / kPageBytes / 64, wanted, 64 + wanted);
  for (const uint64_t blocks : {many, wanted, uint64_t{1}}) {
    const std::optional<Extent> run = open_run(blocks * length / kPageBytes);
    if (!run || run->length < blocks * length) continue;  // of a daemon that took over meanwhile, and knows of no regions
    attachment_->tables->writing(*run);
    for (uint64_t i = blocks; i-- > 0;) free.push_back(run->offset + i * length);
    return;
  }
}

// Where it would lie in the region.
std::vector<Extent> Region::places(const Layout& layout, const Wanted& block) {
  return block.pieces.empty() ? std::vector{Extent{block.offset, layout.extent_bytes(block.tokens)}} : block.pieces;
}

std::string Region::refusal(const Layout& layout, const Wanted& block) const {
  if (block.tokens < 1 || block.tokens > layout.block_tokens)
    return "tokens is " + std::to_string(block.tokens) + "; it must be 1 to " + std::to_string(layout.block_tokens);
  std::vector<Extent> its = places(layout, block);
  uint64_t bytes = 0;
  for (const Extent& at : its) {
    if ((at.offset | at.length) % kPageBytes || at.length == 0 || at.length > extent_.length ||
        at.offset > extent_.length - at.length)
      return std::to_string(at.length) + " bytes at " + std::to_string(at.offset) + " are not inside the region of " +
             std::to_string(extent_.length) + ", or begin or end within a page";
    bytes += at.length;
  }
  if (block.pieces.empty()) return "";
  if (bytes != layout.layers_bytes(block.tokens) || !layout.in_whole_pages(block.tokens))
    return "pieces of " + std::to_string(bytes) + " bytes; they must be the layers of " +
           std::to_string(layout.layers_bytes(block.tokens)) + " bytes, each of whole pages";
  std::sort(its.begin(), its.end(), [](const Extent& a, const Extent& b) { return a.offset < b.offset; });
  for (size_t i = 1; i < its.size(); ++i)
    if (its[i - 1].end() > its[i].offset) return "two pieces of the block overlap";
  return "";
}

bool Region::is_sealed(uint64_t offset, uint64_t length) {
  const std::lock_guard lock(mutex_);
  return touches(runs_, offset, length);
}

// Of an answer about a message's blocks: by block what became of it. What became of the parts of the region is noted here.
std::vector<protocol::PiecesAnswer> Region::read_changes(std::span<const uint8_t> answer, size_t count, bool apart) {
  protocol::Reader reader(answer);
  std::vector<protocol::PiecesAnswer> out;
  std::vector<Handle> opened, ended;
  if (apart) {
    out = reader.take<protocol::PiecesAnswer>(count);
    for (const protocol::PiecesAnswer& block : out)
      for (const auto& [parts, into] : {std::pair{block.opened, &opened}, {block.ended, &ended}})
        for (const protocol::BlockItem& part : reader.take<protocol::BlockItem>(parts))
          into->push_back({part.record, part.generation});
  } else {
    for (const protocol::RegionItem& item : reader.take<protocol::RegionItem>(count)) {
      out.push_back({item.status, item.record, item.generation, 0, 0});
      if (item.opened != protocol::kNoRecord) opened.push_back({item.opened, item.opened_generation});
      if (item.ended != protocol::kNoRecord) ended.push_back({item.ended, item.ended_generation});
    }
  }
  if (!reader.ok()) throw Error(Code::Detached, "the daemon's answer about a region cannot be read");
  for (const Handle& part : opened) parts_.emplace(part.record, part.generation);
  attachment_->opened(this, opened);
  std::vector<protocol::BlockItem> over;
  for (const Handle& part : ended) {
    parts_.erase({part.record, part.generation});
    over.push_back({part.record, 0, part.generation});
  }
  if (!over.empty()) attachment_->ended(this, over);
  return out;
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
    for (const Extent& at : fresh[i].second.places) runs_.emplace(at.offset, at.end());
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
    if (block.pieces.size() >= kMaxPieces) continue;
    if (const std::string why = refusal(layout, block); !why.empty()) throw Error(Code::InvalidArgument, why);
    const std::vector<Extent> its = places(layout, block);
    const auto taken = [&](const Extent& at) {
      return touches(runs_, at.offset, at.length) || touches(here, at.offset, at.length);
    };
    if (std::any_of(its.begin(), its.end(), taken)) continue;  // sealed: not to be written to
    if (sealed_.contains(block.key)) continue;                 // its memory of before could not be given back any more
    if (!block.pieces.empty() &&
        (attachment_->protocol() < protocol::kVersionPieces || behind_layers(layout, block.tokens) > kMaxBehind))
      continue;
    for (const Extent& at : its) here.emplace(at.offset, at.end());
    (block.pieces.empty() ? whole : apart).push_back(i);
  }
  const protocol::RegionHead head{layout_id, priority, ttl_s, 0};
  bool asked = false;
  for (const auto* which : {&whole, &apart})
    for (size_t first = 0, count; first < which->size(); first += count, asked = true) {
      size_t pieces = 0;
      const size_t most = which == &apart ? protocol::kMaxBlocksInPieces : kMaxKeysPerMessage;
      for (count = 0; first + count < which->size() && count < most; ++count) {
        pieces += blocks[(*which)[first + count]].pieces.size() + 1;
        if (which == &apart && count > 0 && pieces > protocol::kMaxPiecesPerMessage) break;
      }
      try {
        if (!ask_to_seal(head, layout, blocks, std::span(*which).subspan(first, count), out)) return out;
      } catch (const Error&) {
        if (!asked) throw;
        return out;
      }
    }
  return out;
}

// All of them in pieces, or none. False: the daemon does not answer any more. Throws what it refused it for.
bool Region::ask_to_seal(const protocol::RegionHead& head, const Layout& layout, std::span<const Wanted> blocks,
                         std::span<const size_t> part, std::vector<Sealing>& out) {
  const bool apart = !blocks[part[0]].pieces.empty();
  std::vector<Extent> behind;  // by block
  if (apart) {
    std::map<uint64_t, size_t> wanted;
    for (const size_t i : part) wanted[behind_layers(layout, blocks[i].tokens)] += 1;
    for (const auto& [length, count] : wanted) make_room_behind(length, count);
    for (const size_t i : part) {
      const uint64_t length = behind_layers(layout, blocks[i].tokens);
      std::vector<uint64_t>& free = behind_[length];
      if (free.empty()) break;
      behind.push_back({free.back(), length});
      free.pop_back();
    }
  }
  const size_t count = apart ? behind.size() : part.size();
  if (count == 0) return true;
  std::vector<uint8_t> body;
  protocol::append(body, head);
  for (size_t k = 0; k < count; ++k) {
    const Wanted& block = blocks[part[k]];
    if (apart) {
      finish_behind(layout, block, behind[k]);
      const auto pieces = static_cast<uint32_t>(block.pieces.size() + 1);
      protocol::append(body, protocol::PiecesItem{block.key, random_key(), block.tokens, 1, pieces, 0});
    } else {
      finish(layout, block);
      protocol::append(body, protocol::PublishItem{block.key, extent_.offset + block.offset, block.tokens, 1, random_key()});
    }
  }
  for (size_t k = 0; k < behind.size(); ++k) {
    for (const Extent& at : blocks[part[k]].pieces) protocol::append(body, Extent{extent_.offset + at.offset, at.length}.pack());
    protocol::append(body, behind[k].pack());
  }
  std::vector<std::pair<Key, Sealed>> fresh;
  const auto take = [&](std::span<const uint8_t> answer) {
    const auto changes = read_changes(answer, count, apart);
    for (size_t k = 0; k < count; ++k) {
      const Wanted& block = blocks[part[k]];
      const auto pages = static_cast<uint32_t>(layout.extent_bytes(block.tokens) / kPageBytes);
      out[part[k]] = static_cast<Sealing>(changes[k].status);
      if (out[part[k]] == Sealing::Sealed)
        fresh.push_back(
            {block.key,
             {{changes[k].record, changes[k].generation}, places(layout, block), apart ? behind[k] : Extent{0, 0}, pages, 0}});
      else if (apart)
        behind_[behind[k].length].push_back(behind[k].offset);
    }
  };
  bool sent = false;
  try {
    attachment_->ask(
        apart ? protocol::Op::PublishPieces : protocol::Op::Publish, static_cast<uint32_t>(count), body, [&] { sent = true; },
        take);
  } catch (const Error& error) {
    if (!sent || (error.code != Code::Detached && error.code != Code::DeadlineExceeded)) {
      for (const Extent& at : behind) behind_[at.length].push_back(at.offset);
      throw;
    }
    for (size_t k = 0; k < count; ++k) lose(places(layout, blocks[part[k]])), out[part[k]] = Sealing::Lost;
    return false;
  }
  pin(fresh);
  return true;
}

// The daemon may have made it a block, and more parts of what was around it: a session that is resumed names those it knows of,
// and the memory of the others would be given to anybody while our allocator writes to it.
void Region::lose(std::span<const Extent> places) {
  for (const Extent& at : places) runs_.emplace(at.offset, at.end());
  attachment_->never_resume();
}

std::vector<Back> Region::give_back(std::span<const Key> keys) {
  const std::lock_guard lock(mutex_);
  if (closed_) throw Error(Code::Closed, "the region was given back");
  if (attachment_->foreign()) throw Error(Code::Detached, "this process was forked since it registered the region");
  std::vector<Back> out(keys.size(), Back::Gone);
  std::map<Key, size_t, KeyLess> asked;
  std::vector<size_t> whole, apart;
  for (size_t i = 0; i < keys.size(); ++i)
    if (const auto at = sealed_.find(keys[i]); at != sealed_.end() && asked.try_emplace(keys[i], i).second)
      (at->second.behind.length ? apart : whole).push_back(i);
  for (const auto* which : {&whole, &apart})
    for (size_t first = 0, count; first < which->size(); first += count) {
      size_t pieces = 0;
      for (count = 0; first + count < which->size() && count < kMaxKeysPerMessage; ++count) {
        pieces += sealed_.at(keys[(*which)[first + count]]).places.size() + 1;
        if (which == &apart && count > 0 && pieces > protocol::kMaxPiecesPerMessage) break;
      }
      ask_back(keys, std::span(*which).subspan(first, count), which == &apart, out);
    }
  for (size_t i = 0; i < keys.size(); ++i)  // a key that is twice in this call is gone behind its first
    if (const auto at = asked.find(keys[i]); at != asked.end() && out[at->second] == Back::Held) out[i] = Back::Held;
  return out;
}

void Region::ask_back(std::span<const Key> keys, std::span<const size_t> part, bool apart, std::vector<Back>& out) {
  std::vector<uint8_t> body;
  protocol::append(body, protocol::RegionHead{layout_, 0, 0, 0});
  for (const size_t i : part) {
    const Handle block = sealed_.at(keys[i]).block;
    protocol::append(body, protocol::TakeBackItem{random_key(), number_, block.record, 0, block.generation});
  }
  std::vector<uint32_t> slots;
  const auto take = [&](std::span<const uint8_t> answer) {
    const auto changes = read_changes(answer, part.size(), apart);
    for (size_t k = 0; k < part.size(); ++k) {
      const auto at = sealed_.find(keys[part[k]]);
      const Back word = out[part[k]] = static_cast<Back>(changes[k].status);
      if (word == Back::Held) continue;
      const Sealed& its = at->second;
      // Of memory that is gone the run stays as it is: it will be another's.
      if (word == Back::Taken) {
        for (const Extent& place : its.places) runs_.erase(place.offset);
        if (apart) behind_[its.behind.length].push_back(its.behind.offset);
      }
      if (its.slot != PinBoard::kNoSlot) slots.push_back(its.slot);
      sealed_.erase(at);
    }
  };
  attachment_->ask(apart ? protocol::Op::TakeBackPieces : protocol::Op::TakeBack, static_cast<uint32_t>(part.size()), body, {},
                   take);
  attachment_->board->clear(slots);
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
  for (const auto& [record, generation] : parts_) parts.push_back({record, 0, generation});
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
