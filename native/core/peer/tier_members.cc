// Peers that join and leave while the tier runs. Who left keeps its slot and threads, which wait; a slot is given to another name
// when all of them are taken and nothing of who had it is left. Those who wait for blocks. And what is told of all.
#include <algorithm>

#include "core/peer/tier.h"

namespace kv::peer {
namespace {
constexpr size_t kMostWaiters = 64;  // of one block; what more wait for is brought all the same
}  // namespace

bool Tier::join(const Address& at) {
  Lock lock(mutex_);
  if (stop_) return false;
  const size_t p = slot_for(at.node);
  if (p == kMaxPeers) return false;
  if (p == peers_.size()) {
    add_peer(at);
    make_threads(p);
    return true;
  }
  Peer& peer = *peers_[p];
  if (!peer.left && peer.at.host == at.host && peer.at.port == at.port) return true;
  drop_channels(peer);  // to where it was
  numbers_.erase(peer.at.node);
  numbers_[at.node] = p;
  peer.at = at, peer.identity += 1, peer.halves.clear(), peer.left = false, peer.failures = 0, peer.may_return = false;
  peer.rtt_us = 0, peer.bytes_per_s = 0, peer.block_bytes = 0;
  become(p, State::New);
  make_threads(p);
  peer.work.notify_all();
  return true;
}

// Where none is to be had it is as one that left, or what is asked of it would wait for ever. Throws system_error.
void Tier::make_threads(size_t p) {
  try {
    if (owner_) start_threads(p);
  } catch (...) {
    become(p, State::Down);
    peers_[p]->left = true;
    throw;
  }
}

void Tier::leave(const std::string& node) {
  {
    Lock lock(mutex_);
    const auto number = numbers_.find(node);
    if (number == numbers_.end() || peers_[number->second]->left) return;
    Peer& peer = *peers_[number->second];
    become(number->second, State::Down);
    peer.left = true, peer.identity += 1, peer.may_return = false, peer.halves.clear();
    drop_channels(peer);
    for (const auto& [place, key] : std::exchange(peer.queue, {}))
      if (!send_on(key, flights_.at(key))) end_flight(key, true);
  }
  store_.load_ended();
}

// ---------------------------------------------------------------- those who wait

void Tier::Flight::wanted_by(Wanting wanting) {
  const auto known = std::ranges::find(waiters, wanting.who, &Wanting::who);
  if (known != waiters.end())
    known->until_ms = std::max(known->until_ms, wanting.until_ms);
  else if (wanting.who == kNobody || waiters.size() >= kMostWaiters)
    kept = true;
  else
    waiters.push_back(wanting);
}

bool Tier::Flight::is_wanted() const {
  return kept || std::ranges::any_of(waiters, [now = monotonic_ms()](const Wanting& its) { return its.until_ms > now; });
}

void Tier::also_wanted(const Key& key, Wanting wanting) {
  Lock lock(mutex_);
  if (const auto flight = flights_.find(key); flight != flights_.end()) flight->second.wanted_by(wanting);
}

// What waits in a queue then goes when its turn comes (take_batch()); what was asked for, the stream that hears the answer gives
// up (fetch_batch()).
void Tier::let_go_of_all(Waiter waiter) {
  Lock lock(mutex_);
  for (auto& [key, flight] : flights_) std::erase_if(flight.waiters, [&](const Wanting& its) { return its.who == waiter; });
}

// ---------------------------------------------------------------- the peers

uint64_t Tier::named(const std::string& node) const {
  Lock lock(mutex_);
  const auto number = numbers_.find(node);
  if (number == numbers_.end() || peers_[number->second]->left) return 0;
  return Directory::Mask{1} << number->second;
}

// Where a name is or may be; kMaxPeers: nowhere.
size_t Tier::slot_for(const std::string& node) const {
  if (const auto known = numbers_.find(node); known != numbers_.end()) return known->second;
  if (peers_.size() < kMaxPeers) return peers_.size();
  const auto is_free = [](const std::unique_ptr<Peer>& peer) {
    const bool idle = std::ranges::none_of(peer->streams, [](const Stream& stream) { return stream.channel != nullptr; });
    return peer->left && idle && !peer->watch.channel && peer->queue.empty() && !peer->in_flight && !peer->places;
  };
  return static_cast<size_t>(std::ranges::find_if(peers_, is_free) - peers_.begin());
}

// Whoever waits on one is told, and whoever waits for work looks.
void Tier::drop_channels(Peer& peer) {
  for (Stream& stream : peer.streams)
    if (stream.channel) stream.channel->cut();
  if (peer.watch.channel) peer.watch.channel->cut();
  peer.work.notify_all(), peer.up.notify_all();
}

std::vector<Tier::PeerStats> Tier::stats() {
  Lock lock(mutex_);
  std::vector<PeerStats> out;
  for (size_t p = 0; p < peers_.size(); ++p) {
    static constexpr const char* kStates[] = {"new", "up", "down"};
    const Peer& peer = *peers_[p];
    if (peer.left) continue;
    PeerStats about{};
    about.node = peer.at.node, about.address = peer.at.host + ":" + std::to_string(peer.at.port);
    about.state = kStates[static_cast<int>(peer.state)], about.why = peer.why;
    about.queued = peer.queue.size(), about.in_flight = peer.in_flight, about.bytes_in_flight = peer.memory.bytes();
    about.rtt_us = peer.rtt_us, about.bytes_per_s = peer.bytes_per_s, about.connects = peer.connects;
    about.streams = peer.started, about.held = directory_.held(p), about.complete = directory_.complete() >> p & 1;
    about.lent = peer.places ? loans_.lent() : 0;
#define X(name) about.name = peer.name;
    KV_PEER_COUNTERS(X)
#undef X
    out.push_back(std::move(about));
  }
  return out;
}

}  // namespace kv::peer
