// The threads that hear what peers have: one for each peer that tells, on a connection of its own.
#include <pthread.h>

#include <chrono>

#include "core/base/error.h"
#include "core/peer/announce.h"
#include "core/peer/tier.h"
#include "core/store/journal.h"

namespace kv::peer {
namespace {

constexpr std::chrono::milliseconds kPause{250};  // before a peer that stopped telling is asked again
constexpr int kSilenceMs = kHoldsMs + 2500;

}  // namespace

void Tier::watch(size_t p) {
  ::pthread_setname_np(::pthread_self(), "kv-watch");
  Peer& peer = *peers_[p];
  Lock lock(mutex_);
  while (!stop_) {
    peer.up.wait(lock, [&] { return stop_ || peer.state == State::Up; });
    if (stop_) return;
    try {
      connect(lock, peer, peer.watch);
      lock.unlock();
      directory_.forget(p);
      listen(p, *peer.watch.channel);
    } catch (const Broken& error) {  // its streams say whether it is gone
      if (error.why == Broken::Why::Corrupt) peer.corrupt += 1;
      if (error.why == Broken::Why::Malformed) peer.malformed += 1;
    }
    if (lock.owns_lock()) lock.unlock();
    directory_.forget(p);
    lock.lock();
    peer.watch.channel.reset();
    peer.up.wait_for(lock, kPause, [&] { return stop_.load(); });
  }
}

// Until the connection breaks.
void Tier::listen(size_t p, Channel& channel) {
  const uint32_t request = ++requests_;
  channel.put({.kind = static_cast<uint16_t>(Kind::Watch), .request = request, .layer = takes_}, {});
  channel.flush();
  std::vector<uint64_t> marks;
  for (;;) {
    const Frame head = channel.take_head(kSilenceMs);
    if (tls_ && channel.generation() != tls_->generation()) throw Broken(Broken::Why::Gone, "the certificates are others now");
    if (takes_ && head.kind == static_cast<uint16_t>(Kind::Pushed) && head.request == request) {
      take_pushed(p, channel, head);
      continue;
    }
    if (head.bytes > kMaxControlBytes || head.bytes % sizeof(uint64_t) || head.request != request || head.layer > 1)
      malformed("a frame that does not belong here");
    Channel::expect(head, Kind::Holds, head.bytes);
    marks.resize(head.bytes / sizeof(uint64_t));
    channel.take_checked(head, reinterpret_cast<std::byte*>(marks.data()));
    for (const uint64_t mark : marks) directory_.tell(p, mark);
    if (head.layer) directory_.completed(p);
    hear(marks);
  }
}

// As if a client here had asked for it, and nobody waits. What there is no room for among the flights is left out.
void Tier::take_pushed(size_t p, Channel& channel, const Frame& head) {
  std::vector<Key> keys(std::min<uint64_t>(head.bytes / sizeof(Key), kMaxKeysPerFetch));
  Channel::expect(head, Kind::Pushed, keys.size() * sizeof(Key));
  channel.take_checked(head, reinterpret_cast<std::byte*>(keys.data()));
  peers_[p]->pushed += keys.size();
  try {
    store_.promote(keys, kDefaultPriority);
  } catch (const Error&) {
    // Fenced: another daemon has the pool.
  }
}

// What somebody hoped for is asked of who has it now.
void Tier::hear(const std::vector<uint64_t>& marks) {
  bool in_vain = false;
  Lock lock(mutex_);
  if (hoped_for_.empty() && in_vain_.empty()) return;
  for (uint64_t mark : marks) {
    if (!(mark & 1)) continue;
    mark &= ~uint64_t{1};
    in_vain_.erase(mark);
    const auto hope = hoped_for_.find(mark);
    if (hope == hoped_for_.end()) continue;
    const Key key = hope->second;
    hoped_for_.erase(hope);
    const auto flight = flights_.find(key);
    if (flight == flights_.end()) continue;
    ask_again(flight->second.route);  // one that was named may have been asked before it had it
    if (!send_on(key, flight->second)) end_flight(key, true), in_vain = true;  // it went again at once
  }
  lock.unlock();
  if (in_vain) store_.load_ended();
}

}  // namespace kv::peer
