// The connections of the threads that fetch, one for each: made, looked after, given up.
#include <algorithm>
#include <chrono>

#include "core/base/error.h"
#include "core/base/polling.h"
#include "core/peer/tier.h"

namespace kv::peer {
namespace {

constexpr uint64_t kPingMs = 5000;
constexpr uint64_t kFirstPauseMs = 250, kLongestPauseMs = 8000;  // before a peer that failed is tried again
constexpr int kConnectMs = 1000;
constexpr size_t kFairShare = 4;                 // streams that share what waits
constexpr size_t kFewKeys = 16;                  // of one request in any case: a prompt's blocks are followed together
constexpr uint64_t kSmallBlockBytes = 16 << 10;  // of such ones all that wait go in one request: a stream is not the limit
constexpr uint64_t kHeldUpMs =
    20;  // until who waits for less to be on its way looks again: how large blocks are is known by then

}  // namespace

// Waits. True if there are keys to fetch, or it is time for the first stream to see how the peer is.
bool Tier::work_or_care(Lock& lock, Peer& peer, size_t s) {
  const bool first = s == 0;
  if (peer.left) {
    peer.streams[s].receiver.reset(), peer.streams[s].channel.reset();
    peer.work.wait(lock, [&] { return stop_ || !peer.left; });
    return false;
  }
  if (peer.state == State::New && first) return true;
  const bool held_up = peer.state == State::Up && !peer.queue.empty() && !room_for(peer);
  if (((!peer.queue.empty() && !held_up) || !peer.halves.empty()) && peer.state == State::Up) return true;
  held_up_ |= held_up;
  const uint64_t wait_ms = peer.state == State::Down ? std::max(peer.retry_ms, monotonic_ms() + 1) - monotonic_ms()
                           : held_up                 ? kHeldUpMs
                                                     : kPingMs;
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(wait_ms);
  peer.idle += 1;
  const bool timeout = peer.work.wait_until(lock, until) == std::cv_status::timeout;
  peer.idle -= 1;
  return timeout && first && !held_up && !stop_;
}

// Of blocks that may be asked of it now. How large they will be is known of those that are coming, or came last; else they are
// taken for such as a whole request may be of.
uint64_t Tier::room_for(const Peer& peer) const {
  const auto each = [](const Peer& from) {
    if (const uint64_t blocks = from.memory.blocks()) return from.memory.bytes() / blocks;
    return from.block_bytes ? from.block_bytes.load() : from.memory.most() / kMaxKeysPerFetch;
  };
  const auto expected = [&](const Peer& from) { return std::max(from.memory.bytes(), from.in_flight * each(from)); };
  uint64_t of_all = 0;
  for (const auto& other : peers_) of_all += expected(*other);
  return std::min(peer.memory.room_for(each(peer), expected(peer)), memory_.room_for(each(peer), of_all));
}

// Something has come, or will not.
void Tier::wake_held_up() {
  if (!std::exchange(held_up_, false)) return;
  for (const auto& peer : peers_)
    if (!peer->queue.empty()) peer->work.notify_one();
}

// What waits, or of much a fair part, so that the other streams have work too. Of blocks that have begun to come those of which
// as much is here: who is asked is told so.
std::vector<Key> Tier::take_batch(Peer& peer) {
  const bool small = peer.block_bytes && peer.block_bytes <= kSmallBlockBytes;
  const size_t fair = small ? peer.queue.size()
                            : std::max((peer.queue.size() + kFairShare - 1) / kFairShare, std::min(kFewKeys, peer.queue.size()));
  const size_t most = std::min<uint64_t>({fair, kMaxKeysPerFetch, room_for(peer)});
  std::vector<Key> keys;
  keys.reserve(most);
  const bool begun = !parked_.empty();
  uint32_t layers = 0;
  for (auto next = peer.queue.begin(); next != peer.queue.end() && keys.size() < most; next = peer.queue.erase(next)) {
    const uint32_t here = begun ? parked_.layers(next->second) : 0;
    if (!here && !flights_.at(next->second).is_wanted()) {  // of which nothing is read either
      peer.cancelled += 1;
      end_flight(next->second, false);
      continue;
    }
    if (keys.empty()) layers = here;
    if (here != layers) break;
    keys.push_back(next->second);
  }
  return keys;
}

bool Tier::of_no_use(const Peer& peer, const Stream& stream) const {
  return peer.state == State::Down || stream.identity != peer.identity || stream.channel->hung_up() ||
         (tls_ && !peer.places && stream.channel->generation() != tls_->generation());  // the certificates are others now
}

void Tier::open(Lock& lock, size_t p, Stream& stream) {
  Peer& peer = *peers_[p];
  connect(lock, peer, stream);
  Quarantine* loans = peer.places ? &loans_ : nullptr;
  stream.receiver =
      std::make_unique<BlockReceiver>(store_, window_, *stream.channel, owner_, &parked_, loans, stream.epoch, &peer.memory);
  peer.failures = 0, peer.may_return = false;
  become(p, State::Up);
  peer.work.notify_all();
}

// Lets go of the lock meanwhile.
void Tier::connect(Lock& lock, Peer& peer, Stream& stream) {
  const Address at = peer.at;
  stream.identity = peer.identity;
  lock.unlock();
  stream.epoch = loans_.epoch();
  auto made = std::make_unique<Channel>(Channel::connect(at.host, at.port, kConnectMs));
  lock.lock();
  if (stop_ || stream.identity != peer.identity) throw Broken(Broken::Why::Gone, "it is there no more");
  Channel& channel = *(stream.channel = std::move(made));  // from here on it can be cut
  lock.unlock();
  if (tls_ && !peer.places) channel.secure(*tls_, at.node, kHandshakeMs);  // that one is beside us, on loopback
  stream.version = introduce(channel, node_, store_.name(), salt_, at.node);
  lock.lock();
  if (stream.identity != peer.identity) throw Broken(Broken::Why::Gone, "it is there no more");
  peer.connects += 1;
}

void Tier::fetch_batch(size_t p, Stream& stream, Batch& batch, bool again) {
  Peer& peer = *peers_[p];
  std::vector<Key> open;
  std::vector<size_t> numbers;  // theirs, in the batch
  open.reserve(batch.keys.size()), numbers.reserve(batch.keys.size());
  for (size_t i = 0; i < batch.keys.size(); ++i)
    if (!(batch.ended >> i & 1)) open.push_back(batch.keys[i]), numbers.push_back(i);
  const uint64_t began_ns = monotonic_ns();
  const auto end = [&](size_t i, Outcome outcome) {
    Lock inner(mutex_);
    batch.ended |= uint64_t{1} << numbers[i];
    ended(p, open[i], outcome, stream.receiver->instead());
  };
  const auto unwanted = [&] {
    Lock inner(mutex_);
    for (size_t i = 0; i < open.size(); ++i)
      if (!(batch.ended >> numbers[i] & 1) && flights_.at(open[i]).is_wanted()) return false;
    return true;
  };
  const BlockReceiver::Received received =
      stream.receiver->fetch(++requests_, open, end, again, unwanted, offer_beside(peer, stream));
  const uint64_t took_us = (monotonic_ns() - began_ns) / 1000;
  Lock lock(mutex_);
  peer.placed += received.placed, peer.corrupt += received.corrupt, peer.halved += received.halves;
  if (!received.bytes || !took_us) return;
  peer.fetch_bytes += received.bytes, peer.block_bytes = received.bytes / open.size();
  const uint64_t rate = received.bytes * 1'000'000 / took_us, before = peer.bytes_per_s;
  peer.bytes_per_s = before ? (7 * before + rate) / 8 : rate;
  tell_speed();
}

// To those that may bring the second half of a block which this one fetches; nothing where there is none.
Offer Tier::offer_beside(Peer& peer, const Stream& stream) {
  if (stream.version < kHalvesVersion || peer.places) return nullptr;
  if (Lock lock(mutex_); !peer.idle) return nullptr;
  return [this, &peer, of = stream.identity](const std::shared_ptr<SecondHalf>& half) {
    Lock lock(mutex_);
    if (of != peer.identity) return;  // it is somebody else by now
    peer.halves.push_back(half);
    peer.work.notify_one();
  };
}

// The second half of a block that another stream fetches. False: there is none. `again`: the connection had served before; if it
// is gone, that is no reason to call the peer down: who fetches the block asks for the rest. Lets go of the lock meanwhile.
bool Tier::bring_half(Lock& lock, Peer& peer, Stream& stream, bool again) {
  if (stream.version < kHalvesVersion) peer.halves.clear();  // it was started anew, and is older: who offered them asks itself
  std::shared_ptr<SecondHalf> half;
  while (!half && !peer.halves.empty()) {
    half = std::move(peer.halves.back());
    peer.halves.pop_back();
    if (!half->begin(*stream.channel)) half.reset();
  }
  if (!half) return false;
  lock.unlock();
  try {
    stream.receiver->bring(++requests_, *half);
    half->ended();
    lock.lock();
  } catch (const Broken& error) {
    const bool unwanted = half->ended();
    lock.lock();
    peer.taken_over += unwanted && half->slow;
    if (!unwanted && !(again && error.why == Broken::Why::Gone)) throw;
    peer.gone += !unwanted;
    stream.receiver.reset(), stream.channel.reset();
  }
  return true;
}

void Tier::ping(Peer& peer, Stream& stream) {
  const uint64_t began_ns = monotonic_ns();
  const uint32_t request = ++requests_;
  stream.channel->put({.kind = static_cast<uint16_t>(Kind::Ping), .request = request}, {});
  stream.channel->flush();
  Frame pong = stream.channel->take_head();
  if (peer.places && pong.kind == static_cast<uint16_t>(Kind::Over)) {
    take_over(*stream.channel, pong, loans_);
    pong = stream.channel->take_head();
  }
  Channel::expect(pong, Kind::Pong, 0);
  if (pong.request != request) malformed("another ping's answer");
  peer.rtt_us = (monotonic_ns() - began_ns) / 1000;
}

// Of the fastest that can be asked: what a client weighs against computing, and this daemon against its disk.
void Tier::tell_speed() {
  const Peer* best = nullptr;
  for (const auto& peer : peers_)
    if (peer->state == State::Up && (!best || peer->bytes_per_s > best->bytes_per_s)) best = peer.get();
  if (!best) return;
  best_bytes_per_s_ = best->bytes_per_s.load(), best_rtt_us_ = best->rtt_us.load();
  store_.tell_peer_speed(best->bytes_per_s, best->rtt_us);
}

void Tier::become(size_t p, State state) {
  Peer& peer = *peers_[p];
  store_.tell_peers((state == State::Up) - (peer.state == State::Up));
  peer.state = state;
  const Directory::Mask bit = Directory::Mask{1} << p;
  if (state == State::Down)
    usable_ &= ~bit;
  else
    usable_ |= bit;
  if (state == State::Up) peer.up.notify_all();
}

// It is left alone until a connection stands again; what waited for it is asked of others.
void Tier::went_wrong(size_t p, Stream& stream, const Broken& error) {
  Peer& peer = *peers_[p];
  stream.receiver.reset(), stream.channel.reset();
  if (stop_ || stream.identity != peer.identity || error.why == Broken::Why::Unwanted) return;
  switch (error.why) {
    case Broken::Why::Unwanted: break;
    case Broken::Why::Gone: peer.gone += 1; break;
    case Broken::Why::Stalled: peer.stalled += 1; break;
    case Broken::Why::Malformed: peer.malformed += 1; break;
    case Broken::Why::Corrupt: peer.corrupt += 1; break;
    case Broken::Why::Refused: peer.refused += 1; break;
  }
  const uint64_t pause_ms = std::min(kFirstPauseMs << std::min(peer.failures, 5u), kLongestPauseMs);
  const bool of_the_way = error.why == Broken::Why::Gone || error.why == Broken::Why::Corrupt;
  peer.may_return = peer.failures == 0 && of_the_way;
  peer.failures += 1, peer.retry_ms = monotonic_ms() + pause_ms;
  become(p, State::Down);
  peer.why = error.what();
  peer.halves.clear();
  for (const auto& [place, key] : std::exchange(peer.queue, {}))
    if (!send_on(key, flights_.at(key))) end_flight(key, true);
  peer.work.notify_all();
}

}  // namespace kv::peer
