// What does not come over this connection in order. Blocks that the other end brings to their place itself, the fabric beside
// this daemon: it is lent the memory of the block, and what lies there then is verified as what came over a stream is. And the
// second half of a large block, which another connection brings in order meanwhile: where that breaks, who asked for the block
// goes on behind what came, as behind a connection of its own that broke. What broke waits here until the rest comes otherwise.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "core/base/checksum.h"
#include "core/base/polling.h"
#include "core/peer/receive_blocks.h"

namespace kv::peer {
namespace {
constexpr int kSliceMs = 50;                   // between two looks whether the block is wanted, and its second half comes
constexpr int kSlowMs = 200, kMuchSlower = 4;  // as SecondPace judges
constexpr uint64_t kPaceBytes = 256 << 10;
constexpr size_t kMostParked = 1024;
// A peer that is frozen while the second half comes is found out on the first connection.
static_assert(kSliceMs + kSlowMs + kSliceMs + kStallMs < 2000);
}  // namespace

void take_over(Channel& channel, const Frame& head, Quarantine& loans) {
  if (head.bytes > kMaxControlBytes || head.bytes % sizeof(uint64_t)) malformed("numbers of loans that are none");
  std::vector<uint64_t> over(head.bytes / sizeof(uint64_t));
  channel.take_checked(head, reinterpret_cast<std::byte*>(over.data()));
  for (const uint64_t loan : over) loans.over(loan);
}

void BlockReceiver::answer(Kind kind, const Item& landing, uint32_t layer, std::span<const std::byte> payload) {
  channel_.put({.kind = static_cast<uint16_t>(kind), .item = landing.number, .request = request_, .layer = layer}, payload);
  channel_.flush();
}

void BlockReceiver::take_offer(const Frame& head, Item& landing) {
  if (!loans_ || !landing.headed || landing.meta || !landing.offered.empty()) malformed("an offer that does not belong here");
  if (head.bytes != sizeof(uint32_t) * (1 + landing.sums.size())) malformed("an offer of another length");
  landing.offered.resize(1 + landing.sums.size());
  channel_.take_checked(head, reinterpret_cast<std::byte*>(landing.offered.data()));
  Room room{landing.extent.offset, landing.layout->extent_bytes(landing.tokens), 0};
  if (!landing.created) {
    room = {};
  } else if (landing.layers == 0) {  // of what has begun to come otherwise the rest comes so
    room.loan = landing.loan = loans_->lend(landing.key, landing.handle, epoch_);
  }
  answer(Kind::Room, landing, 0, bytes_of(room));
  if (!landing.created) give_up(landing, landing.unwanted);
}

void BlockReceiver::take_placed(Item& landing) {
  if (!landing.loan) malformed("a block that was placed nowhere");
  loans_->over(std::exchange(landing.loan, 0));
  const bool good = !window_.truncated() && is_as_offered(landing);
  if (good) {
    std::memcpy(landing.sums.data(), landing.offered.data() + 1, sizeof(uint32_t) * landing.sums.size());
    landing.next = landing.layers = landing.head.layers, landing.meta = true;
    received_.bytes += landing.layout->extent_bytes(landing.tokens);
    take_whole(landing);
  }
  (good ? received_.placed : received_.corrupt) += 1;
  answer(Kind::Checked, landing, good, {});
}

// What readers see is what was offered, and behind it is nothing.
bool BlockReceiver::is_as_offered(const Item& landing) const {
  const Layout& layout = *landing.layout;
  std::byte* const block = window_.at(landing.extent.offset);
  const auto piece = [&](uint64_t offset, uint64_t bytes, uint64_t end, uint32_t sum) {
    std::memset(block + offset + bytes, 0, end - offset - bytes);
    return crc32c(block + offset, bytes) == sum;
  };
  for (uint32_t layer = 0; layer < landing.head.layers; ++layer) {
    const uint64_t bytes = layout.layer_bytes(layer, landing.tokens), end = layout.layer_offset(layer + 1, landing.tokens);
    if (!piece(layout.layer_offset(layer, landing.tokens), bytes, end, landing.offered[1 + layer])) return false;
  }
  return piece(layout.meta_offset(landing.tokens), layout.meta_bytes(landing.tokens), layout.extent_bytes(landing.tokens),
               landing.offered[0]);
}

// ---------------------------------------------------------------- halves, as who has the block

void BlockReceiver::take_half(Item& landing) {
  if (!landing.headed || !landing.meta || !landing.middle || landing.next != landing.middle) malformed("a half that is none");
  if (!landing.created) return give_up(landing, landing.unwanted);
  landing.half = true;
}

// The only block of this answer, of which all is here that this connection was to bring.
void BlockReceiver::go_on(std::span<const Key> keys, std::vector<Item>& landings, const std::function<bool()>& unwanted) {
  Item& landing = landings.front();
  if (!gather(landings, unwanted)) return ask(keys, landings);
  landing.half = false, landing.next = landing.head.layers;
  take_whole(landing);
}

// Publishes what the other connection brings, as it comes. False: it brought less, and the rest is to be asked for.
bool BlockReceiver::gather(std::vector<Item>& landings, const std::function<bool()>& unwanted) {
  Item& landing = landings.front();
  const std::shared_ptr<SecondHalf> half = second_;
  const uint64_t now_ns = monotonic_ns();
  SecondPace pace(received_.bytes, now_ns - asked_ns_, half->bytes, now_ns);
  mark();
  for (bool more = true; more && !(half->slow = pace.too_slow(half->bytes, monotonic_ns()));) {
    if (to_tell_) tell();
    more = half->wait_for_more(landing.layers);
    take_second(landing, *half);
    if (more && unwanted) look_whether_wanted(landings, unwanted);
  }
  stop_second();
  take_second(landing, *half);
  const bool whole = landing.layers == half->end;
  received_.halves += whole;
  return whole;
}

void BlockReceiver::take_second(Item& landing, const SecondHalf& half) {
  const uint32_t here = half.here();
  if (here > landing.layers && half.copy != landing.copy) differs(landing);
  for (; landing.layers < here; ++landing.layers) {
    landing.sums[landing.layers] = half.sums[landing.layers - half.first];
    received_.bytes += landing.layout->layer_bytes(landing.layers, landing.tokens);
  }
  to_mark_ = &landing;
  mark();
}

void BlockReceiver::stop_second() {
  if (const auto half = std::exchange(second_, nullptr)) half->stop();
}

// ---------------------------------------------------------------- halves, as who brings the second

void BlockReceiver::bring(uint32_t request, SecondHalf& half) {
  channel_.put({.kind = static_cast<uint16_t>(Kind::Fetch), .item = 1, .request = request, .layer = half.first},
               bytes_of(half.key));
  channel_.flush();
  uint32_t next = half.first;
  for (bool headed = false, meta = false;;) {
    const Frame head = channel_.take_head();
    if (head.request != request || head.item) malformed("an answer that nobody asked for");
    const auto kind = static_cast<Kind>(head.kind);
    if (kind == Kind::Layout && !headed) {
      take_layout(head);
    } else if (kind == Kind::Head && !std::exchange(headed, true)) {
      take_second_head(head, half);
    } else if (kind == Kind::Meta && headed && !std::exchange(meta, true)) {
      if (head.bytes != half.known->layout.meta_bytes(half.tokens)) malformed("bytes that the layout does not have");
      channel_.skip(head.bytes);
      half.copy = head.layer;
    } else if (kind == Kind::Layer && meta && head.layer == next && next < half.end) {
      take_second_layer(head, half);
      next += 1;
    } else {
      const bool over = headed ? kind == Kind::Lost || (kind == Kind::Whole && next == half.end) : kind == Kind::Missing;
      if (!over || head.bytes) malformed("a frame that does not belong here");
      return;
    }
  }
}

void BlockReceiver::take_second_head(const Frame& frame, const SecondHalf& half) {
  Channel::expect(frame, Kind::Head, sizeof(BlockHead));
  BlockHead head;
  channel_.take_checked(frame, reinterpret_cast<std::byte*>(&head));
  unheaded_ = 0;
  const bool same = head.key == half.key && head.layout == half.known->digest && head.tokens == half.tokens;
  if (!same || head.layers != half.end || frame.layer) malformed("another half than was asked for");
}

void BlockReceiver::take_second_layer(const Frame& head, SecondHalf& half) {
  const Layout& layout = half.known->layout;
  if (head.bytes != layout.layer_bytes(head.layer, half.tokens)) malformed("bytes that the layout does not have");
  const uint64_t at = layout.layer_offset(head.layer, half.tokens), end = layout.layer_offset(head.layer + 1, half.tokens);
  std::byte* to = window_.at(half.extent.offset + at);
  uint32_t crc = 0;
  for (uint64_t done = 0; done < head.bytes;) {
    const uint64_t piece = std::min(kPaceBytes, head.bytes - done);
    crc = channel_.take_summed(to + done, piece, crc);
    done += piece, half.bytes += piece;
  }
  if (crc != head.payload_crc) throw Broken(Broken::Why::Corrupt, "a layer's checksum differs");
  std::memset(to + head.bytes, 0, end - at - head.bytes);
  half.sums[head.layer - half.first] = head.payload_crc;
  if (!half.came()) throw Broken(Broken::Why::Unwanted, "nobody waits for it");
}

// ---------------------------------------------------------------- what both know

SecondHalf::SecondHalf(const Landing& landing)
    : key(landing.key),
      known(landing.known),
      extent(landing.extent),
      tokens(landing.tokens),
      first(middle_of(known->layout.num_layers())),
      end(known->layout.num_layers()),
      sums(end - first),
      here_(first) {}

bool SecondHalf::begin(const Channel& channel) {
  const std::lock_guard lock(mutex_);
  if (state_ != State::Offered) return false;
  state_ = State::Begun, channel_ = &channel;
  return true;
}

bool SecondHalf::came() {
  const std::lock_guard lock(mutex_);
  here_ += 1;
  changed_.notify_all();
  return !unwanted_;
}

bool SecondHalf::ended() {
  const std::lock_guard lock(mutex_);
  state_ = State::Over, channel_ = nullptr;
  changed_.notify_all();
  return unwanted_;
}

void SecondHalf::stop() {
  std::unique_lock lock(mutex_);
  unwanted_ = true;
  if (state_ == State::Offered) state_ = State::Over;
  if (channel_) channel_->cut();
  changed_.wait(lock, [&] { return state_ == State::Over; });
}

bool SecondHalf::wait_for_more(uint32_t layers) {
  std::unique_lock lock(mutex_);
  if (state_ == State::Offered) state_ = State::Over;
  changed_.wait_for(lock, std::chrono::milliseconds(kSliceMs), [&] { return state_ == State::Over || here_ > layers; });
  return state_ != State::Over;
}

uint32_t SecondHalf::here() const {
  const std::lock_guard lock(mutex_);
  return here_;
}

SecondPace::SecondPace(uint64_t first_bytes, uint64_t first_ns, uint64_t bytes, uint64_t now_ns)
    : least_(first_bytes * kSlowMs / kMuchSlower / (first_ns / kNsPerMs + 1) + 1), bytes_(bytes), since_ns_(now_ns) {}

bool SecondPace::too_slow(uint64_t bytes, uint64_t now_ns) {
  if (bytes - bytes_ >= least_) bytes_ = bytes, since_ns_ = now_ns;
  return now_ns - since_ns_ >= kSlowMs * kNsPerMs;
}

// ---------------------------------------------------------------- what broke, until the rest comes otherwise

bool Landing::count(InFlight& by) {
  const uint64_t bytes = layout->extent_bytes(tokens);
  if (!by.take(bytes)) return false;
  counted_by = &by, counted = bytes;
  return true;
}

void Landing::uncount() {
  if (InFlight* by = std::exchange(counted_by, nullptr)) by->give(counted);
}

bool Parked::put(Landing&& landing) {
  std::lock_guard lock(mutex_);
  if (landings_.size() >= kMostParked) return false;
  const Key key = landing.key;
  return landings_.emplace(key, std::move(landing)).second;
}

std::optional<Landing> Parked::take(const Key& key) {
  std::lock_guard lock(mutex_);
  auto node = landings_.extract(key);
  return node ? std::optional(std::move(node.mapped())) : std::nullopt;
}

bool Parked::empty() const {
  std::lock_guard lock(mutex_);
  return landings_.empty();
}

uint32_t Parked::layers(const Key& key) const {
  std::lock_guard lock(mutex_);
  const auto found = landings_.find(key);
  return found == landings_.end() ? 0 : found->second.layers;
}

}  // namespace kv::peer
