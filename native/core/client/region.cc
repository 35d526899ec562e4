// A region's messages, and the pins of what is sealed in it.

#include "core/client/region.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <random>
#include <string>

#include "core/base/atomics.h"
#include "core/base/checksum.h"
#include "core/base/copy.h"
#include "core/base/error.h"

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

// Does any of these runs, offset to end, have a byte of it?
bool touches(const std::map<uint64_t, uint64_t>& runs, uint64_t offset, uint64_t length) {
  const auto next = runs.upper_bound(offset);
  return (next != runs.end() && next->first < offset + length) || (next != runs.begin() && std::prev(next)->second > offset);
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
    pages.push_back(static_cast<uint32_t>(sealed.length / kPageBytes));
  }
  const size_t taken = attachment_->take_pins(pins, pages, slots.data());
  fence_full();
  for (size_t i = 0; i < fresh.size(); ++i) {
    runs_.emplace(fresh[i].second.offset, fresh[i].second.offset + fresh[i].second.length);
    const Handle block = fresh[i].second.block;
    const bool held = i < taken && attachment_->board->allowance().covers(slots[i], pages[i]) &&
                      attachment_->index.control(block.record).generation() == block.generation;
    Sealed sealed = fresh[i].second;
    sealed.slot = held ? slots[i] : PinBoard::kNoSlot;
    if (i < taken && !held) lost.push_back(slots[i]);
    sealed_.insert_or_assign(fresh[i].first, sealed);
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
  std::vector<size_t> which;
  std::map<uint64_t, uint64_t> here;  // of this call: where each ends
  for (size_t i = 0; i < blocks.size(); ++i) {
    const Wanted& block = blocks[i];
    if (block.tokens < 1 || block.tokens > layout.block_tokens)
      throw Error(Code::InvalidArgument,
                  "tokens is " + std::to_string(block.tokens) + "; it must be 1 to " + std::to_string(layout.block_tokens));
    const uint64_t bytes = layout.extent_bytes(block.tokens);
    if (block.offset % kPageBytes || bytes > extent_.length || block.offset > extent_.length - bytes)
      throw Error(Code::InvalidArgument, std::to_string(bytes) + " bytes at " + std::to_string(block.offset) +
                                             " are not inside the region of " + std::to_string(extent_.length) +
                                             ", or begin within a page");
    if (touches(runs_, block.offset, bytes) || touches(here, block.offset, bytes)) continue;  // sealed: not to be written to
    if (sealed_.contains(block.key)) continue;  // its memory of before could not be given back any more
    here.emplace(block.offset, block.offset + bytes);
    which.push_back(i);
  }
  for (size_t first = 0; first < which.size(); first += kMaxKeysPerMessage) {
    const auto part = std::span(which).subspan(first, std::min<size_t>(kMaxKeysPerMessage, which.size() - first));
    std::vector<uint8_t> body;
    protocol::append(body, protocol::RegionHead{layout_id, priority, ttl_s, 0});
    for (const size_t i : part) {
      finish(layout, blocks[i]);
      protocol::append(
          body, protocol::PublishItem{blocks[i].key, extent_.offset + blocks[i].offset, blocks[i].tokens, 1, random_key()});
    }
    std::vector<std::pair<Key, Sealed>> fresh;
    const auto take = [&](std::span<const uint8_t> answer) {
      protocol::Reader reader(answer);
      for (const size_t i : part) {
        const auto change = reader.take<protocol::RegionItem>();
        if (!reader.ok()) throw Error(Code::Detached, "the daemon's answer about a region cannot be read");
        out[i] = static_cast<Sealing>(change.status);
        follow(change);
        if (out[i] == Sealing::Sealed)
          fresh.push_back(
              {blocks[i].key, {{change.record, change.generation}, blocks[i].offset, layout.extent_bytes(blocks[i].tokens), 0}});
      }
    };
    bool sent = false;
    try {
      attachment_->ask(protocol::Op::Publish, static_cast<uint32_t>(part.size()), body, [&] { sent = true; }, take);
    } catch (const Error& error) {
      const bool unknown = sent && (error.code == Code::Detached || error.code == Code::DeadlineExceeded);
      if (!unknown && first == 0) throw;
      if (unknown)
        for (const size_t i : part) lose(blocks[i].offset, layout.extent_bytes(blocks[i].tokens)), out[i] = Sealing::Lost;
      return out;
    }
    pin(fresh);
  }
  return out;
}

// The daemon may have made it a block, and more parts of what was around it: a session that is resumed names those it knows of,
// and the memory of the others would be given to anybody while our allocator writes to it.
void Region::lose(uint64_t offset, uint64_t length) {
  runs_.emplace(offset, offset + length);
  attachment_->never_resume();
}

std::string Region::refusal(std::span<const Extent> buffers) const {
  for (const Extent& at : buffers) {
    if (at.length < 1 || at.length > length_ || at.offset > length_ - at.length)
      return std::to_string(at.length) + " bytes at " + std::to_string(at.offset) + " are not inside the region of " +
             std::to_string(length_);
    if (at.offset % kBufferAlign)
      return "offset " + std::to_string(at.offset) + " is no multiple of " + std::to_string(kBufferAlign);
  }
  std::vector<Extent> all(buffers.begin(), buffers.end());
  std::sort(all.begin(), all.end(), [](const Extent& a, const Extent& b) { return a.offset < b.offset; });
  for (size_t i = 1; i < all.size(); ++i)
    if (all[i - 1].offset + all[i - 1].length > all[i].offset) return "two buffers of the block overlap";
  return "";
}

std::string Region::refusal_to_load(const BlockBatch::Item& item, uint32_t first, const Buffers& layers, Runs& filled) const {
  const uint64_t stop = uint64_t{first} + layers.size();
  if (stop > item.layout->num_layers())
    return "layers up to " + std::to_string(stop) + "; the block has " + std::to_string(item.layout->num_layers());
  std::vector<Extent> all;
  for (const std::vector<Extent>& buffers : layers) all.insert(all.end(), buffers.begin(), buffers.end());
  if (std::string why = refusal(all); !why.empty()) return why;
  for (const Extent& at : all)
    if (touches(runs_, at.offset, at.length) || touches(filled, at.offset, at.length))
      return std::to_string(at.length) + " bytes at " + std::to_string(at.offset) + " are of a block that is " +
             (touches(runs_, at.offset, at.length) ? "sealed there" : "loaded there in this call");
  for (size_t i = 0; i < layers.size(); ++i) {
    uint64_t have = 0;
    for (const Extent& at : layers[i]) have += at.length;
    const uint32_t layer = first + static_cast<uint32_t>(i);
    if (const uint64_t want = item.layout->layer_bytes(layer, item.at.shape.tokens); have != want)
      return "layer " + std::to_string(layer) + ": " + std::to_string(have) + " bytes in its buffers, " + std::to_string(want) +
             " in the block";
  }
  for (const Extent& at : all) filled.emplace(at.offset, at.offset + at.length);
  return "";
}

std::vector<Region::Answer> Region::load(BlockBatch& batch, uint32_t first, std::span<const Buffers> blocks) {
  const std::lock_guard lock(mutex_);  // nothing is sealed or given back meanwhile
  if (closed_) throw Error(Code::Closed, "the region was given back");
  if (attachment_->foreign()) throw Error(Code::Detached, "this process was forked since it registered the region");
  for (size_t i = 0; i < blocks.size(); ++i)
    if (batch.item(i).state == ItemState::Exhausted) throw Error(Code::PinsExhausted, batch.attachment().exhausted());
  std::vector<Answer> out;
  Runs filled;
  for (size_t i = 0; i < blocks.size(); ++i) out.push_back(load_one(batch, i, first, blocks[i], filled));
  return out;
}

Region::Answer Region::load_one(BlockBatch& batch, size_t i, uint32_t first, const Buffers& layers, Runs& filled) {
  const BlockBatch::Item& item = batch.item(i);
  if (item.state != ItemState::Hit) return {Loaded::Missing, ""};
  if (std::string why = refusal_to_load(item, first, layers, filled); !why.empty()) return {Loaded::Refused, std::move(why)};
  try {
    batch.hold(i);
  } catch (const Error& error) {
    if (error.code != Code::BlockLost) throw;
    return {Loaded::Lost, error.what()};
  }
  struct Held {
    BlockBatch& batch;
    size_t i;
    ~Held() { batch.let_go(i); }
  } const held{batch, i};
  const uint32_t ready = batch.layers_ready(i);
  if (ready < first + layers.size()) {
    if (batch.lost(i)) return {Loaded::Lost, "the block's writer ended before it was whole"};
    return {Loaded::Pending, "of the followed block " + std::to_string(ready) + " layers are there"};
  }
  for (uint32_t layer = first; layer < first + layers.size(); ++layer) {
    const std::byte* from = batch.bytes(i) + item.layout->layer_offset(layer, item.at.shape.tokens);
    const std::optional<uint32_t> expected = batch.checksum(i, layer);
    uint32_t sum = 0;
    for (const Extent& at : layers[layer - first]) {
      if (expected)
        sum = copy_and_sum(data() + at.offset, from, at.length, sum);
      else
        copy_stream(data() + at.offset, from, at.length);
      from += at.length;
    }
    if (expected && sum != *expected) return {Loaded::Corrupt, "layer " + std::to_string(layer) + " has a wrong checksum"};
  }
  return {Loaded::Yes, ""};
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
        if (out[i] == Back::Taken) runs_.erase(at->second.offset);
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
