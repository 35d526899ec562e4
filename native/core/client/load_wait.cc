// Blocks that come: asking the daemon to load those that lie below memory, and sleeping until it has; and copying what is there
// out to a region's buffers.

#include <time.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "core/base/copy.h"
#include "core/base/error.h"
#include "core/base/futex.h"
#include "core/client/region.h"
#include "core/format/meta.h"

namespace kv {
std::vector<protocol::PromiseItem> Client::promote(std::span<const Key> keys, uint32_t priority, uint32_t wanted_ms,
                                                   const std::string& node) {
  protocol::PushHead named{};
  if (node.size() >= sizeof named.node)
    throw Error(Code::InvalidArgument, "a host's name has at most " + std::to_string(sizeof named.node - 1) +
                                           " bytes, this one " + std::to_string(node.size()));
  std::memcpy(named.node, node.data(), node.size());
  const protocol::Op op = node.empty() ? protocol::Op::Promote : protocol::Op::PromoteFrom;
  const std::shared_ptr<Attachment> at = usable();
  std::vector<protocol::PromiseItem> out;
  for (size_t first = 0; first < keys.size(); first += kMaxKeysPerMessage) {
    const auto part = keys.subspan(first, std::min<size_t>(kMaxKeysPerMessage, keys.size() - first));
    std::vector<uint8_t> body;
    protocol::append(body, protocol::PromoteHead{priority, wanted_ms});
    if (!node.empty()) protocol::append(body, named);
    body.insert(body.end(), reinterpret_cast<const uint8_t*>(part.data()),
                reinterpret_cast<const uint8_t*>(part.data()) + part.size_bytes());
    std::vector<uint8_t> answer;
    try {
      answer = at->ask(op, static_cast<uint32_t>(part.size()), body);
    } catch (const Error& error) {
      if (node.empty() || error.code != Code::InvalidArgument) throw;
      return promote(keys, priority, wanted_ms);  // a daemon that does not know the operation
    }
    protocol::Reader reader(answer);
    for (const auto& item : reader.take<protocol::PromiseItem>(part.size())) out.push_back(item);
    if (!reader.at_end()) throw Error(Code::Detached, "the daemon's answer to a promotion cannot be read");
  }
  return out;
}

namespace {
// Of so many keys the last is waited for first, as they come in order: who waits is woken once for all of them, and not for each.
// No more, so that what came first is pinned before it could be evicted again.
constexpr size_t kWaitedTogether = 32;
constexpr long kUnaskedNs = 100'000'000;

// What a writer of this host begins, seals or gives up ends no load: it is asked about all the same, after a moment.
timespec sooner(const timespec& deadline) {
  timespec then;
  ::clock_gettime(CLOCK_MONOTONIC, &then);
  then.tv_nsec += kUnaskedNs;
  if (then.tv_nsec >= 1'000'000'000) then.tv_sec += 1, then.tv_nsec -= 1'000'000'000;
  return std::pair(then.tv_sec, then.tv_nsec) < std::pair(deadline.tv_sec, deadline.tv_nsec) ? then : deadline;
}

// At least one: none would say that it waits for ever.
uint32_t left_ms(const timespec& deadline) {
  timespec now;
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  const double left =
      static_cast<double>(deadline.tv_sec - now.tv_sec) * 1e3 + static_cast<double>(deadline.tv_nsec - now.tv_nsec) / 1e6;
  return static_cast<uint32_t>(std::clamp(left + 1, 1.0, static_cast<double>(UINT32_MAX)));
}
}  // namespace

// A load that ends in vain leaves no record; then the daemon is asked again, and says so. When the time is over, what is there is
// taken.
bool Client::await(BlockBatch& batch, std::span<const Key> keys, bool follow, const timespec& deadline) {
  std::vector<Key> wanted;
  std::vector<size_t> places;
  for (size_t i = 0; i < keys.size(); ++i)
    if (batch.item(i).state == ItemState::Miss) wanted.push_back(keys[i]), places.push_back(i);
  if (wanted.empty()) return true;
  const std::atomic<uint64_t>& ended = batch.attachment().progress(batch.attachment().index.max_blocks());
  const uint64_t promised_at = ended.load(std::memory_order_acquire);  // what ends from here on changes it
  const std::vector<protocol::PromiseItem> promises = promote(wanted, kDefaultPriority, left_ms(deadline));
  const std::shared_ptr<Attachment> at = usable();
  if (at.get() != &batch.attachment()) throw Error(Code::Detached, "attached anew while a batch of before was waited for");
  const auto pending = static_cast<uint32_t>(Presence::Pending);
  const auto ask_again = [&](const Key& key) { return promote({&key, 1}, kDefaultPriority, left_ms(deadline))[0].presence; };
  bool over = false;
  for (size_t first = 0; first < wanted.size(); first += kWaitedTogether) {
    for (size_t k = std::min(wanted.size(), first + kWaitedTogether); k-- > first;) {
      bool hopeful = promises[k].presence != static_cast<uint32_t>(Presence::Missing), asked = false;
      while (hopeful) {
        const uint64_t seen = ended.load(std::memory_order_acquire);
        Snapshot there;
        const Find found = pin_one(at, batch, keys, places[k], follow, there);
        if (batch.item(places[k]).state == ItemState::Hit) at->board->touched({&there.record, 1}), at->board->count(1, 0);
        if (batch.item(places[k]).state != ItemState::Miss) break;
        over = over || passed(deadline);
        if (over) break;
        if (found == Find::Hit && there.control.state() == State::Created) {
          asked = true;
          const PinBoard::Waiting waiting(*at->board);
          const std::atomic<uint64_t>& word = at->progress(there.record);
          const uint64_t progress = word.load(std::memory_order_acquire);
          if (at->index.control(there.record).word == there.control.word)
            futex_wait(word, static_cast<uint32_t>(progress), deadline);
          continue;
        }
        const bool still = promises[k].presence == pending && seen == promised_at && !asked;  // nothing has ended since
        const uint32_t said = still ? pending : ask_again(wanted[k]);
        const auto presence = static_cast<Presence>(said);
        hopeful = presence != Presence::Missing, asked = true;
        if (hopeful && presence != Presence::Resident) futex_wait(ended, static_cast<uint32_t>(seen), sooner(deadline));
      }
    }
  }
  return !over;
}

// Compares blocks with their checksums; one that does not match is a miss, and the daemon is told to look at it itself.
void Client::verify(BlockBatch& batch, std::span<const Key> keys) {
  std::vector<Key> suspects;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (batch.item(i).state != ItemState::Hit || !batch.sealed(i) || batch.verify(i)) continue;
    suspects.push_back(keys[i]);
    batch.give_up(i);
  }
  if (!suspects.empty()) count_over(protocol::Op::Suspect, suspects);
}

double Client::load_estimate_s(uint64_t bytes) const {
  const TableHeader& header = usable()->index.header();
  const auto speed = static_cast<double>(header.load_bytes_per_s.load(std::memory_order_relaxed));
  const auto waiting = static_cast<double>(header.load_waiting_bytes.load(std::memory_order_relaxed) + bytes);
  if (speed == 0) return -1;
  return static_cast<double>(header.load_latency_us.load(std::memory_order_relaxed)) * 1e-6 + waiting / speed;
}

double Client::peer_estimate_s(uint64_t bytes) const {
  const TableHeader& header = usable()->index.header();
  const auto speed = static_cast<double>(header.peer_bytes_per_s.load(std::memory_order_relaxed));
  if (speed == 0) return -1;
  return static_cast<double>(header.peer_latency_us.load(std::memory_order_relaxed)) * 1e-6 + static_cast<double>(bytes) / speed;
}

void Client::look_elsewhere(std::span<const Key> keys, std::vector<uint8_t>& states) {
  const std::shared_ptr<Attachment> at = usable();
  if (at->index.header().peers_up.load(std::memory_order_relaxed) == 0) return;
  std::vector<uint32_t> missing;
  for (size_t i = 0; i < keys.size(); ++i)
    if (states[i] == static_cast<uint8_t>(Presence::Missing)) missing.push_back(static_cast<uint32_t>(i));
  for (size_t first = 0; first < missing.size(); first += kMaxKeysPerMessage) {
    const auto part = std::span(missing).subspan(first, std::min<size_t>(kMaxKeysPerMessage, missing.size() - first));
    std::vector<uint8_t> body;
    for (const uint32_t i : part) protocol::append(body, keys[i]);
    std::vector<uint8_t> answer;
    try {
      answer = at->ask(protocol::Op::Elsewhere, static_cast<uint32_t>(part.size()), body);
    } catch (const Error&) {
      return;  // a daemon that does not know the question, or does not answer: what this host has stays found
    }
    if (answer.size() != part.size()) throw Error(Code::Detached, "the daemon's answer to a look-up cannot be read");
    for (size_t k = 0; k < part.size(); ++k)
      if (answer[k]) states[part[k]] = static_cast<uint8_t>(Presence::OnPeer);
  }
}

uint64_t Client::peers_up() const { return usable()->index.header().peers_up.load(std::memory_order_relaxed); }

// ---------------------------------------------------------------- out to a region

bool Region::touches(const Runs& runs, uint64_t offset, uint64_t length) {
  const auto next = runs.upper_bound(offset);
  return (next != runs.end() && next->first < offset + length) || (next != runs.begin() && std::prev(next)->second > offset);
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
  const std::vector<Extent> pieces = batch.pieces(i);
  if (item.at.extent.in_pieces())
    for (const Extent& piece : pieces) batch.attachment().tables->used(piece);
  for (uint32_t layer = first; layer < first + layers.size(); ++layer) {
    uint64_t from = item.layout->layer_offset(layer, item.at.shape.tokens);
    const std::optional<uint32_t> expected = batch.checksum(i, layer);
    bool whole = true;
    uint32_t sum = 0;
    for (const Extent& at : layers[layer - first]) {
      std::byte* to = data() + at.offset;
      whole = whole && each_stretch(pieces, from, at.length, [&](uint64_t there, uint64_t bytes) {
                const std::byte* source = batch.attachment().readable(there);
                if (expected)
                  sum = copy_and_sum(to, source, bytes, sum);
                else
                  copy_stream(to, source, bytes);
                return to += bytes, true;
              });
      from += at.length;
    }
    if (!whole) return {Loaded::Lost, "its memory cannot be read"};
    if (expected && sum != *expected) return {Loaded::Corrupt, "layer " + std::to_string(layer) + " has a wrong checksum"};
  }
  return {Loaded::Yes, ""};
}

}  // namespace kv
