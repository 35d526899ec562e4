#include "core/peer/tier.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>

#include "core/base/error.h"
#include "core/base/polling.h"

namespace kv::peer {
namespace {

constexpr size_t kStreams = 4;                    // to each peer
constexpr size_t kFewKeys = 16;                   // of one request in any case: a prompt's blocks are followed together
constexpr uint64_t kSmallBlockBytes = 16 << 10;   // of such ones all that wait go in one request: a stream is not the limit
constexpr std::chrono::microseconds kLinger{50};  // who asks for one key asks for more: they go in one request
constexpr size_t kMaxPeers = 64;                  // a bit each in Flight::asked
constexpr size_t kMaxFlights = 4096;
constexpr size_t kMaxInVain = 4096;
constexpr uint64_t kInVainMs = 100;  // nobody has it: not asked again at once
constexpr uint64_t kPingMs = 5000;
constexpr uint64_t kFirstPauseMs = 250, kLongestPauseMs = 8000;  // before a peer that failed is tried again
constexpr int kConnectMs = 1000;

uint64_t now_ms() { return monotonic_ns() / 1'000'000; }

}  // namespace

Tier::Tier(Store& store, std::string node, const Secret& salt, const std::vector<Address>& peers,
           std::shared_ptr<TlsIdentity> tls)
    : store_(store), node_(std::move(node)), salt_(salt), tls_(std::move(tls)), window_(store, true) {
  if (peers.size() > kMaxPeers)
    throw Error(Code::InvalidArgument, std::to_string(peers.size()) + " peers, the limit is " + std::to_string(kMaxPeers));
  for (const Address& at : peers) {
    peers_.push_back(std::make_unique<Peer>());
    peers_.back()->at = at;
    peers_.back()->streams.resize(kStreams);
  }
}

void Tier::start() {
  owner_ = store_.open_owner();
  for (size_t p = 0; p < peers_.size(); ++p)
    for (size_t s = 0; s < kStreams; ++s) peers_[p]->streams[s].thread = std::thread([this, p, s] { run(p, s); });
  store_.attach_peers(this);
}

void Tier::stop() {
  if (!owner_ || stop_.exchange(true)) return;
  store_.attach_peers(nullptr);
  {
    Lock lock(mutex_);
    for (auto& peer : peers_) {
      become(*peer, State::Down);
      for (Stream& stream : peer->streams)
        if (stream.channel) stream.channel->cut();
      peer->work.notify_all();
    }
  }
  for (auto& peer : peers_)
    for (Stream& stream : peer->streams) stream.thread.join();
  store_.end_session(owner_);
}

// ---------------------------------------------------------------- what the doors call

Presence Tier::fetch(const Key& key, uint32_t priority) {
  Lock lock(mutex_);
  if (stop_) return Presence::Missing;
  if (const auto flight = flights_.find(key); flight != flights_.end()) {
    Flight& f = flight->second;
    auto& queue = peers_[f.peer]->queue;
    if (~priority < f.place.first) {  // wanted again, and sooner
      auto node = queue.extract(f.place);
      f.place.first = ~priority;
      if (node) node.key() = f.place, queue.insert(std::move(node));
    }
    return Presence::Pending;
  }
  if (const auto vain = in_vain_.find(key); vain != in_vain_.end()) {
    if (now_ms() < vain->second) return Presence::Missing;
    in_vain_.erase(vain);
  }
  if (flights_.size() >= kMaxFlights || !next_peer(key, 0)) return Presence::Missing;
  Flight& flight = flights_[key];
  flight.place = {~priority, ++arrivals_};
  send_on(key, flight);
  return Presence::Pending;
}

// Of the peers that were not asked and can be, the first in the key's own order.
std::optional<size_t> Tier::next_peer(const Key& key, uint64_t asked) const {
  std::optional<size_t> best;
  uint64_t best_rank = 0;
  for (size_t p = 0; p < peers_.size(); ++p) {
    if (asked >> p & 1 || peers_[p]->state == State::Down) continue;
    uint64_t rank = (key.words[1] ^ (p + 1) * 0x9e3779b97f4a7c15ull) * 0xff51afd7ed558ccdull;
    rank ^= rank >> 33;
    if (!best || rank > best_rank) best = p, best_rank = rank;
  }
  return best;
}

// To the next peer's queue. False if there is none.
bool Tier::send_on(const Key& key, Flight& flight) {
  const std::optional<size_t> next = next_peer(key, flight.asked);
  if (!next) return false;
  flight.peer = *next;
  flight.asked |= uint64_t{1} << *next;
  peers_[*next]->queue.emplace(flight.place, key);
  peers_[*next]->work.notify_one();
  return true;
}

void Tier::end_flight(const Key& key, bool in_vain) {
  flights_.erase(key);
  if (!in_vain) return;
  if (in_vain_.size() >= kMaxInVain) in_vain_.clear();
  in_vain_[key] = now_ms() + kInVainMs;
}

// ---------------------------------------------------------------- a stream's thread

void Tier::run(size_t p, size_t s) {
  ::pthread_setname_np(::pthread_self(), "kv-fetch");
  Peer& peer = *peers_[p];
  Stream& stream = peer.streams[s];
  Lock lock(mutex_);
  while (!stop_) {
    if (!work_or_care(lock, peer, s)) continue;
    try {
      if (stream.channel && of_no_use(peer, stream)) stream.receiver.reset(), stream.channel.reset();
      if (!stream.channel) connect(lock, peer, stream);
      if (!peer.queue.empty()) {
        lock.unlock();
        std::this_thread::sleep_for(kLinger);
        lock.lock();
      }
      const std::vector<Key> keys = take_batch(peer);
      if (!keys.empty()) {
        peer.in_flight += keys.size();
        fetch_batch(lock, peer, stream, keys);
      } else if (s == 0) {
        lock.unlock();
        ping(peer, stream);
        lock.lock();
      }
    } catch (const Broken& error) {
      if (!lock.owns_lock()) lock.lock();
      went_wrong(peer, stream, error);
      lock.unlock();
      store_.load_ended();
      lock.lock();
    }
  }
}

// Waits. True if there are keys to fetch, or it is time for the first stream to see how the peer is.
bool Tier::work_or_care(Lock& lock, Peer& peer, size_t s) {
  const bool first = s == 0;
  if (peer.state == State::New && first) return true;
  if (!peer.queue.empty() && peer.state == State::Up) return true;
  const uint64_t wait_ms = peer.state == State::Down ? std::max(peer.retry_ms, now_ms() + 1) - now_ms() : kPingMs;
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(wait_ms);
  return peer.work.wait_until(lock, until) == std::cv_status::timeout && first && !stop_;
}

bool Tier::of_no_use(const Peer& peer, const Stream& stream) const {
  return peer.state == State::Down || stream.channel->hung_up() ||
         (tls_ && stream.channel->generation() != tls_->generation());  // the certificates are others now
}

// Lets go of the lock meanwhile.
void Tier::connect(Lock& lock, Peer& peer, Stream& stream) {
  lock.unlock();
  auto made = std::make_unique<Channel>(Channel::connect(peer.at.host, peer.at.port, kConnectMs));
  lock.lock();
  if (stop_) throw Broken(Broken::Why::Gone, "stopping");
  Channel& channel = *(stream.channel = std::move(made));  // from here on stop() can cut it
  lock.unlock();
  if (tls_) channel.secure(*tls_, peer.at.node, kHandshakeMs);
  introduce(channel, node_, store_.name(), salt_, peer.at.node);
  stream.receiver = std::make_unique<BlockReceiver>(store_, window_, channel, owner_);
  lock.lock();
  peer.connects += 1, peer.failures = 0;
  become(peer, State::Up);
  peer.work.notify_all();
}

void Tier::ping(Peer& peer, Stream& stream) {
  const uint64_t began_ns = monotonic_ns();
  const uint32_t request = ++requests_;
  stream.channel->put({.kind = static_cast<uint16_t>(Kind::Ping), .request = request}, {});
  stream.channel->flush();
  const Frame pong = stream.channel->take_head();
  Channel::expect(pong, Kind::Pong, 0);
  if (pong.request != request) throw Broken(Broken::Why::Malformed, "another ping's answer");
  peer.rtt_us = (monotonic_ns() - began_ns) / 1000;
}

// What waits, or of much a fair part, so that the other streams have work too.
std::vector<Key> Tier::take_batch(Peer& peer) const {
  const bool small = peer.block_bytes && peer.block_bytes <= kSmallBlockBytes;
  const size_t fair =
      small ? peer.queue.size() : std::max((peer.queue.size() + kStreams - 1) / kStreams, std::min(kFewKeys, peer.queue.size()));
  const size_t most = std::min<size_t>(fair, kMaxKeysPerFetch);
  std::vector<Key> keys;
  while (keys.size() < most) {
    keys.push_back(peer.queue.begin()->second);
    peer.queue.erase(peer.queue.begin());
  }
  return keys;
}

void Tier::fetch_batch(Lock& lock, Peer& peer, Stream& stream, const std::vector<Key>& keys) {
  lock.unlock();
  const uint64_t began_ns = monotonic_ns();
  const BlockReceiver::Received received = stream.receiver->fetch(++requests_, keys, [&](size_t i, Outcome outcome) {
    Lock inner(mutex_);
    ended(peer, keys[i], outcome);
  });
  if (const uint64_t took_us = (monotonic_ns() - began_ns) / 1000; received.bytes && took_us) {
    peer.fetch_bytes += received.bytes, peer.block_bytes = received.bytes / keys.size();
    const uint64_t rate = received.bytes * 1'000'000 / took_us, before = peer.bytes_per_s;
    peer.bytes_per_s = before ? (7 * before + rate) / 8 : rate;
    if (!store_.lower()) store_.tell_load_speed(peer.bytes_per_s, 0, peer.rtt_us);
  }
  lock.lock();
}

void Tier::ended(Peer& peer, const Key& key, Outcome outcome) {
  peer.in_flight -= 1;
  switch (outcome) {
    case Outcome::Fetched: peer.fetched += 1; break;
    case Outcome::Missing: peer.missing += 1; break;
    case Outcome::Lost: peer.lost += 1; break;
    case Outcome::NoSpace: peer.no_space += 1; break;
    case Outcome::Needless: peer.needless += 1; break;
    default: peer.failed += 1; break;
  }
  const bool here = outcome == Outcome::Fetched || outcome == Outcome::Needless;
  if (here || outcome == Outcome::NoSpace) return end_flight(key, !here);
  if (stop_ || !send_on(key, flights_.at(key))) end_flight(key, true);
}

void Tier::become(Peer& peer, State state) {
  store_.tell_peers((state == State::Up) - (peer.state == State::Up));
  peer.state = state;
}

// It is left alone until a connection stands again; what waited for it is asked of others.
void Tier::went_wrong(Peer& peer, Stream& stream, const Broken& error) {
  stream.receiver.reset(), stream.channel.reset();
  if (stop_) return;
  switch (error.why) {
    case Broken::Why::Gone: peer.gone += 1; break;
    case Broken::Why::Stalled: peer.stalled += 1; break;
    case Broken::Why::Malformed: peer.malformed += 1; break;
    case Broken::Why::Corrupt: peer.corrupt += 1; break;
    case Broken::Why::Refused: peer.refused += 1; break;
  }
  const uint64_t pause_ms = std::min(kFirstPauseMs << std::min(peer.failures, 5u), kLongestPauseMs);
  peer.failures += 1, peer.retry_ms = now_ms() + pause_ms;
  become(peer, State::Down);
  peer.why = error.what();
  for (const auto& [place, key] : std::exchange(peer.queue, {}))
    if (!send_on(key, flights_.at(key))) end_flight(key, true);
  peer.work.notify_all();
}

std::vector<Tier::PeerStats> Tier::stats() {
  Lock lock(mutex_);
  std::vector<PeerStats> out;
  for (const auto& peer : peers_) {
    static constexpr const char* kStates[] = {"new", "up", "down"};
    PeerStats one{};
    one.node = peer->at.node, one.address = peer->at.host + ":" + std::to_string(peer->at.port);
    one.state = kStates[static_cast<int>(peer->state)], one.why = peer->why;
    one.queued = peer->queue.size(), one.in_flight = peer->in_flight;
    one.rtt_us = peer->rtt_us, one.bytes_per_s = peer->bytes_per_s, one.connects = peer->connects;
#define X(name) one.name = peer->name;
    KV_PEER_COUNTERS(X)
#undef X
    out.push_back(std::move(one));
  }
  return out;
}

}  // namespace kv::peer
