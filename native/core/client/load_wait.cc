// Waiting for blocks that lie below memory: asking the daemon to load them, and sleeping until it has.

#include <time.h>

#include <algorithm>
#include <utility>

#include "core/base/error.h"
#include "core/base/futex.h"
#include "core/client/client.h"

namespace kv {
std::vector<protocol::PromiseItem> Client::promote(std::span<const Key> keys, uint32_t priority, uint32_t wanted_ms) {
  const std::shared_ptr<Attachment> at = usable();
  std::vector<protocol::PromiseItem> out;
  for (size_t first = 0; first < keys.size(); first += kMaxKeysPerMessage) {
    const auto part = keys.subspan(first, std::min<size_t>(kMaxKeysPerMessage, keys.size() - first));
    std::vector<uint8_t> body;
    protocol::append(body, protocol::PromoteHead{priority, wanted_ms});
    body.insert(body.end(), reinterpret_cast<const uint8_t*>(part.data()),
                reinterpret_cast<const uint8_t*>(part.data()) + part.size_bytes());
    const std::vector<uint8_t> answer = at->ask(protocol::Op::Promote, static_cast<uint32_t>(part.size()), body);
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

}  // namespace kv
