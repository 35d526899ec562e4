#include "core/peer/receive_blocks.h"

#include <algorithm>
#include <cstring>

#include "core/base/error.h"
#include "core/base/polling.h"
#include "core/files/block_file.h"
#include "core/placement/policy.h"

namespace kv::peer {
namespace {

constexpr uint32_t kFirstLayouts = 64;            // before a block of any has come: who only names layouts fills no table
constexpr uint64_t kLongestNs = 150'000'000'000;  // until the next layer: one that is followed may take any time
constexpr uint32_t kFramesPerLook = 64;           // at the clock
constexpr uint64_t kMarkBytes = 64 << 10;
constexpr uint32_t kMostBeside = 1024;  // frames between two layers: signs of life, layouts, meta areas

}  // namespace

BlockReceiver::Received BlockReceiver::fetch(uint32_t request, std::span<const Key> keys,
                                             const std::function<void(size_t, Outcome)>& ended, bool again,
                                             const std::function<bool()>& unwanted, const Offer& offer) {
  request_ = request, received_ = {}, to_mark_ = nullptr, offer_ = &offer, headed_.clear(), whole_.clear();
  std::vector<Item> landings = begin(keys);
  size_t open = landings.size();
  const auto seal = [&] {
    seal_whole();
    for (const Item* landing : whole_) {
      ended(landing->number, landing->outcome), --open;
      brought_ += landing->outcome == Outcome::Fetched;
    }
    to_tell_ |= !whole_.empty();
    whole_.clear();
  };
  const auto fail_all = [&](void (BlockReceiver::*end)(Item&, Outcome), Outcome outcome, bool open_still = false) {
    seal();
    for (size_t i = 0; i < landings.size(); ++i) {
      if (landings[i].outcome != Outcome::Open) continue;
      (this->*end)(landings[i], outcome);
      if (!open_still) ended(i, outcome);
    }
    store_.settle();
    tell();
  };
  try {
    ask(keys, landings);
    for (uint32_t frames = 0;; ++frames) {
      if (!channel_.buffered() || open == whole_.size()) {
        create_headed();
        seal();
        mark();
        if (to_tell_) tell();
        if (!open) return received_;
      }
      if (frames % kFramesPerLook == 0) look_at_the_clock();
      const Frame head = channel_.take_head();
      if (head.request != request || head.item >= landings.size()) malformed("an answer that nobody asked for");
      if (unwanted && (frames % kFramesPerLook == kFramesPerLook - 1 || head.kind == static_cast<uint16_t>(Kind::Waiting)))
        look_whether_wanted(landings, unwanted);
      Item& landing = landings[head.item];
      if (landing.outcome != Outcome::Open || landing.whole) malformed("more of a block that had ended");
      take_frame(head, landing);
      if (landing.half) go_on(keys, landings, unwanted);
      if (landing.outcome != Outcome::Open) ended(head.item, landing.outcome), --open, to_tell_ = true;
    }
  } catch (const Broken& error) {
    if (error.why == Broken::Why::Unwanted)
      fail_all(&BlockReceiver::give_up, Outcome::Unwanted);
    else
      fail_all(&BlockReceiver::leave, Outcome::Failed, again && error.why == Broken::Why::Gone);
    throw;
  } catch (const Error& error) {  // of the store: fenced
    fail_all(&BlockReceiver::give_up, Outcome::Failed);
    throw Broken(Broken::Why::Gone, error.what());
  }
}

std::vector<BlockReceiver::Item> BlockReceiver::begin(std::span<const Key> keys) {
  std::vector<Item> landings;
  landings.reserve(keys.size());
  for (const Key& key : keys) {
    std::optional<Landing> begun = parked_ ? parked_->take(key) : std::nullopt;
    landings.push_back({begun ? *std::move(begun) : Landing{.key = key}, Outcome::Open});
    landings.back().number = static_cast<uint16_t>(landings.size() - 1);
  }
  return landings;
}

// For what is not here of them.
void BlockReceiver::ask(std::span<const Key> keys, std::vector<Item>& landings) {
  uint32_t from = ~0u;  // where the tier took them together it is the same of all
  for (Item& landing : landings) {
    landing.next = landing.middle = 0, landing.headed = landing.meta = landing.half = false, landing.offered.clear();
    from = std::min(from, landing.layers);
  }
  by_halves_ = *offer_ && keys.size() == 1 && !from;
  beside_ = 0, asked_ns_ = monotonic_ns(), end_ns_ = asked_ns_ + kLongestNs;
  channel_.put({.kind = static_cast<uint16_t>(Kind::Fetch), .item = by_halves_, .request = request_, .layer = from},
               std::as_bytes(keys));
  channel_.flush();
}

// Not at each layer: of many small ones it was an eighth of the thread's time.
void BlockReceiver::look_at_the_clock() {
  const uint64_t now_ns = monotonic_ns();
  if (std::exchange(moved_, false)) end_ns_ = now_ns + kLongestNs;
  if (now_ns > end_ns_) throw Broken(Broken::Why::Stalled, "a block that nobody finishes");
}

void BlockReceiver::look_whether_wanted(const std::vector<Item>& landings, const std::function<bool()>& unwanted) {
  if (!unwanted()) return;
  std::vector<Handle> begun;
  for (const Item& landing : landings)
    if (landing.outcome == Outcome::Open && landing.created) begun.push_back(landing.handle);
  if (!store_.is_held(begun)) throw Broken(Broken::Why::Unwanted, "nobody waits for it");
}

void BlockReceiver::tell() {
  to_tell_ = false;
  store_.load_ended();
}

void BlockReceiver::take_frame(const Frame& head, Item& landing) {
  const auto kind = static_cast<Kind>(head.kind);
  if (kind == Kind::Waiting || kind == Kind::Layout || kind == Kind::Meta)
    if (++beside_ > kMostBeside) malformed("an answer without an end");
  if (kind != Kind::Head) create_headed();
  switch (kind) {
    case Kind::Layout: return take_layout(head);
    case Kind::Head: return take_head(head, landing);
    case Kind::Meta: return take_meta(head, landing);
    case Kind::Layer: return take_layer(head, landing);
    case Kind::Busy: return take_busy(head, landing);
    case Kind::Offer: return take_offer(head, landing);
    case Kind::Over: return loans_ ? take_over(channel_, head, *loans_) : malformed("a frame that does not belong here");
    default: break;
  }
  if (head.bytes) malformed("a frame that does not belong here");
  switch (kind) {
    case Kind::Whole: return take_whole(landing);
    case Kind::Placed: return take_placed(landing);
    case Kind::Half: return take_half(landing);
    case Kind::Waiting: return;
    case Kind::Missing:
      return landing.headed ? malformed("a block that is not there after all") : leave(landing, Outcome::Missing);
    case Kind::Lost: return give_up(landing, Outcome::Lost);
    default: malformed("a frame that does not belong here");
  }
}

// The digest is computed here, so the name cannot lie. What is none of ours is forgotten: a head that names it is malformed.
void BlockReceiver::take_layout(const Frame& head) {
  if (head.bytes > kLayoutSlotBytes) malformed("a layout too long");
  if (++unheaded_ > kMostLayoutsTold) malformed("layouts that no block has");
  std::vector<uint8_t> blob(head.bytes);
  channel_.take_checked(head, reinterpret_cast<std::byte*>(blob.data()));
  std::shared_ptr<const KnownLayout> known;
  try {
    Layout layout = Layout::parse(blob);
    const Key digest = layout_digest(layout);
    known = std::make_shared<KnownLayout>(KnownLayout{0, digest, std::move(layout)});
  } catch (const Error&) {
    return;
  }
  std::erase_if(told_, [&](const auto& told) { return told->digest == known->digest; });
  if (told_.size() == kMostLayoutsTold) told_.erase(told_.begin());
  told_.push_back(std::move(known));
}

// Registered if it is new: a reader may come before any writer. Where there is no room for it the block's bytes pass by, and the
// next block that has it asks again.
void BlockReceiver::find_layout(Item& landing) {
  const Key& digest = landing.head.layout;
  if ((landing.known = store_.find_layout(digest))) return;
  const auto told = std::ranges::find_if(told_, [&](const auto& layout) { return layout->digest == digest; });
  if (told == told_.end()) malformed("a layout that was not told");
  landing.known = *told, landing.unwanted = Outcome::NoSpace;
  if (learnt_ >= kFirstLayouts + brought_) return;
  try {
    store_.register_layout((*told)->layout.blob);
  } catch (const Error& error) {
    if (error.code == Code::NoSpace) return;
    throw;
  }
  learnt_ += 1;
  if (auto known = store_.find_layout(digest)) landing.known = std::move(known), landing.unwanted = Outcome::Needless;
}

void BlockReceiver::take_head(const Frame& frame, Item& landing) {
  Channel::expect(frame, Kind::Head, sizeof(BlockHead));
  if (landing.headed) malformed("a second head");
  BlockHead& head = landing.head;
  channel_.take_checked(frame, reinterpret_cast<std::byte*>(&head));
  landing.headed = true;
  if (!(head.key == landing.key)) malformed("another block than was asked for");
  const bool begun = landing.created;
  unheaded_ = 0;
  if (begun && (!(head.layout == landing.known->digest) || head.tokens != landing.tokens)) differs(landing);
  find_layout(landing);
  const auto& known = landing.known;
  landing.layout = &known->layout;
  if (head.layers != known->layout.num_layers() || head.tokens == 0 || head.tokens > known->layout.block_tokens ||
      head.base_position > kMaxBasePosition)
    malformed("a block that its layout does not allow");
  if (frame.layer && (!by_halves_ || frame.layer != middle_of(head.layers))) malformed("a half that nobody asked for");
  landing.middle = frame.layer;
  if (begun) return;
  landing.tokens = head.tokens;
  landing.sums.resize(head.layers);
  if (landing.unwanted != Outcome::NoSpace) headed_.push_back(&landing);
}

// Their memory, in as few calls as there are kinds of blocks among them.
void BlockReceiver::create_headed() {
  std::erase_if(headed_, [&](Item* landing) {
    const bool later = in_flight_ && !landing->count(*in_flight_);
    if (later) landing->unwanted = Outcome::Later;  // its bytes pass by
    return later;
  });
  for (size_t first = 0, last; first < headed_.size(); first = last) {
    const Item& begun = *headed_[first];
    std::vector<CreateItem> items;
    for (last = first; last < headed_.size(); ++last) {
      const Item& next = *headed_[last];
      const BlockHead& head = next.head;
      if (next.known->id != begun.known->id || head.priority != begun.head.priority || head.ttl_s != begun.head.ttl_s) break;
      items.push_back({head.key, head.fingerprint, head.tokens, head.base_position, head.parent});
    }
    try {
      const uint32_t priority = std::min(begun.head.priority, kMaxPriority);
      const std::vector<Granted> granted = store_.create({owner_, begun.known->id, priority, begun.head.ttl_s, items});
      for (size_t i = 0; i < items.size(); ++i) {
        Item& landing = *headed_[first + i];
        landing.created = granted[i].status == Grant::Granted;
        if (granted[i].status == Grant::NoSpace) landing.unwanted = Outcome::NoSpace;
        if (!landing.created) landing.uncount();
        landing.handle = granted[i].handle, landing.extent = granted[i].extent;
      }
    } catch (const Error&) {
      // Fenced, or draining: its bytes pass by.
      for (size_t i = first; i < last; ++i) headed_[i]->unwanted = Outcome::NoSpace, headed_[i]->uncount();
    }
  }
  headed_.clear();
}

// To its place in the block, with the padding behind it; or nowhere, if the block is somebody else's or has no memory.
void BlockReceiver::take_bytes(const Frame& head, Item& landing, uint64_t offset, uint64_t bytes, uint64_t padded) {
  if (!landing.headed || head.bytes != bytes) malformed("bytes that the layout does not have");
  received_.bytes += bytes;
  if (!landing.created) return channel_.skip(bytes);
  std::byte* to = window_.at(landing.extent.offset + offset);
  if (channel_.take_summed(to, bytes) != head.payload_crc) throw Broken(Broken::Why::Corrupt, "a layer's checksum differs");
  std::memset(to + bytes, 0, padded - bytes);
}

void BlockReceiver::take_busy(const Frame& head, Item& landing) {
  constexpr size_t kName = kMaxName + 1;
  if (landing.headed || head.bytes % kName || head.bytes > kMostReferrals * kName) malformed("a referral that is none");
  std::vector<std::byte> names(head.bytes);
  channel_.take_checked(head, names.data());
  instead_.clear();
  for (size_t at = 0; at < names.size(); at += kName) {
    const char* name = reinterpret_cast<const char*>(names.data() + at);
    instead_.emplace_back(name, ::strnlen(name, kMaxName));
  }
  leave(landing, Outcome::Busy);
}

void BlockReceiver::take_meta(const Frame& head, Item& landing) {
  if (!landing.headed) malformed("a meta area without a head");
  if (std::exchange(landing.loan, 0)) {  // who has it may write there still: the block gets other memory
    give_up(landing, Outcome::Open);
    headed_.push_back(&landing);
    create_headed();
  }
  const uint64_t at = landing.layout->meta_offset(landing.tokens);
  take_bytes(head, landing, at, landing.layout->meta_bytes(landing.tokens), landing.layout->extent_bytes(landing.tokens) - at);
  landing.meta = true, landing.copy = head.layer;
  if (landing.middle && landing.created && !second_) (*offer_)(second_ = std::make_shared<SecondHalf>(landing));
}

void BlockReceiver::take_layer(const Frame& head, Item& landing) {
  const size_t end = landing.middle ? landing.middle : landing.sums.size();
  if (!landing.headed || !landing.meta || head.layer != landing.next || head.layer >= end) malformed("a layer out of turn");
  landing.next += 1;
  const Layout& layout = *landing.layout;
  if (head.layer < landing.layers) {  // it is here: of another computation of the block it would not be the same
    if (head.bytes && head.bytes != layout.layer_bytes(head.layer, landing.tokens))
      malformed("bytes that the layout does not have");
    channel_.skip(head.bytes);
    if (head.payload_crc != landing.sums[head.layer]) differs(landing);
    return;
  }
  const uint64_t at = layout.layer_offset(head.layer, landing.tokens);
  take_bytes(head, landing, at, layout.layer_bytes(head.layer, landing.tokens),
             layout.layer_offset(head.layer + 1, landing.tokens) - at);
  landing.sums[landing.layers++] = head.payload_crc;
  moved_ = true, beside_ = 0;
  if (to_mark_ != &landing) mark();
  to_mark_ = &landing, unmarked_bytes_ += head.bytes;
  if (unmarked_bytes_ >= kMarkBytes) mark();
}

// The layers that came since the last time. A block that is gone meanwhile is found out when it is whole.
void BlockReceiver::mark() {
  Item* landing = std::exchange(to_mark_, nullptr);
  unmarked_bytes_ = 0;
  if (!landing || !landing->created || landing->outcome != Outcome::Open || landing->marked == landing->layers) return;
  to_tell_ |= landing->marked == 0;  // who waits for the block can follow it
  landing->marked = landing->layers;
  try {
    store_.mark_layer(landing->handle, landing->layers);
  } catch (const Error&) {
    // Taken from under us: its seal is refused.
  }
}

void BlockReceiver::take_whole(Item& landing) {
  if (!landing.headed || !landing.meta || landing.next != landing.sums.size()) malformed("a block that is not whole");
  if (to_mark_ == &landing) to_mark_ = nullptr;  // its seal says more
  if (!landing.created) return give_up(landing, landing.unwanted);
  const uint64_t at = landing.layout->checksums_offset(landing.tokens);
  std::byte* to = window_.at(landing.extent.offset + at);
  std::memset(to, 0, landing.layout->meta_offset(landing.tokens) - at);
  std::memcpy(to, landing.sums.data(), 4 * landing.sums.size());
  landing.whole = true;
  whole_.push_back(&landing);
}

void BlockReceiver::seal_whole() {
  if (whole_.empty()) return;
  std::vector<Seal> seals;
  for (const Item* landing : whole_) seals.push_back({landing->handle, true});
  std::vector<Done> sealed(seals.size(), Done::Stale);
  Outcome otherwise = Outcome::Failed;
  try {
    if (!window_.truncated()) {
      store_.keep_loaded(seals);
      sealed = store_.seal(owner_, seals);
      otherwise = Outcome::Lost;  // it was taken from under us
    }
  } catch (const Error&) {
    // Fenced: nothing is sealed.
  }
  for (size_t i = 0; i < whole_.size(); ++i) {
    Item& landing = *whole_[i];
    if (sealed[i] == Done::Ok)
      landing.outcome = Outcome::Fetched, landing.uncount();
    else
      give_up(landing, otherwise);
    landing.sums.clear();
  }
}

// What had come is of another block than what comes: nothing of either is kept.
void BlockReceiver::differs(Item& landing) {
  give_up(landing, Outcome::Lost);
  landing.outcome = Outcome::Open;  // it ends as all others do
  malformed("not the block that had begun to come");
}

// It has ended here, and may go on elsewhere.
void BlockReceiver::leave(Item& landing, Outcome outcome) {
  stop_second();
  if (to_mark_ == &landing) mark();
  const bool begun = parked_ && landing.created && landing.layers && !window_.truncated();
  if (!begun || !parked_->put(Landing(landing))) return give_up(landing, outcome);
  landing.outcome = outcome, landing.counted_by = nullptr;  // it is counted where it waits
}

void BlockReceiver::give_up(Item& landing, Outcome outcome) {
  landing.outcome = outcome;
  if (!std::exchange(landing.created, false)) return;
  stop_second();
  try {
    store_.abort(owner_, landing.handle);
  } catch (const Error&) {
    // Fenced: nobody reads it.
  }
  landing.uncount();
}

}  // namespace kv::peer
