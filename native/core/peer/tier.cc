#include "core/peer/tier.h"

#include <pthread.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <system_error>
#include <utility>

#include "core/base/error.h"
#include "core/base/polling.h"

namespace kv::peer {
namespace {

constexpr size_t kStreams = 4, kMostStreams = 16;  // to each peer: at first, and where prompts that are followed hold all of them
constexpr uint64_t kCrowdedMs = 20;                // for which a key waits while no stream is free, until there is one more
constexpr size_t kMaxFlights = 4096;
constexpr size_t kMaxInVain = 4096;
constexpr uint64_t kInVainMs = 100;   // nobody had it: not asked again at once
constexpr uint64_t kNoWordMs = 1000;  // nobody said that he has it, and who gets it says so
constexpr uint64_t kResumeMs = 50;    // until a block that came in part is asked for again, of whoever can be asked then
constexpr uint32_t kMostResumes = 40;
constexpr double kUnmeasuredS = 1e-3;  // of a block, for a peer that has sent none yet

}  // namespace

Tier::Tier(Store& store, std::string node, const Secret& salt, const std::vector<Address>& peers,
           std::shared_ptr<TlsIdentity> tls, bool takes)
    : store_(store),
      node_(std::move(node)),
      salt_(salt),
      tls_(std::move(tls)),
      takes_(takes),
      window_(store, true),
      loans_(store),
      memory_(store.options().capacity_bytes / 4 * 3) {
  if (peers.size() > kMaxPeers)
    throw Error(Code::InvalidArgument, std::to_string(peers.size()) + " peers, the limit is " + std::to_string(kMaxPeers));
  peers_.reserve(kMaxPeers);  // their threads read it while others join
  for (const Address& at : peers) add_peer(at);
}

void Tier::add_peer(const Address& at) {
  usable_ |= Directory::Mask{1} << peers_.size();
  numbers_[at.node] = peers_.size();
  peers_.push_back(std::make_unique<Peer>(at, memory_));
  peers_.back()->streams.resize(kMostStreams);
}

void Tier::start() {
  owner_ = store_.open_owner();
  store_.fetches_as(owner_);
  Lock lock(mutex_);
  for (size_t p = 0; p < peers_.size(); ++p) start_threads(p);
  care_thread_ = std::thread([this] { care(); });
  store_.attach_peers(this);
}

void Tier::start_threads(size_t p) {
  Peer& peer = *peers_[p];
  while (peer.started < kStreams) start_stream(p);
  if (peer.at.tells && !peer.watch.thread.joinable()) peer.watch.thread = std::thread([this, p] { watch(p); });
}

void Tier::start_stream(size_t p) {
  const size_t s = peers_[p]->started;
  peers_[p]->streams[s].thread = std::thread([this, p, s] { run(p, s); });
  peers_[p]->started += 1;
}

void Tier::stop() {
  if (!owner_ || stop_.exchange(true)) return;
  store_.attach_peers(nullptr), store_.fetches_as(0);
  {
    Lock lock(mutex_);
    for (size_t p = 0; p < peers_.size(); ++p) {
      Peer& peer = *peers_[p];
      become(p, State::Down);
      drop_channels(peer);
    }
    care_.notify_all();
  }
  for (auto& peer : peers_) {
    for (Stream& stream : peer->streams)
      if (stream.thread.joinable()) stream.thread.join();
    if (peer->watch.thread.joinable()) peer->watch.thread.join();
  }
  if (care_thread_.joinable()) care_thread_.join();  // else it never began
  store_.end_session(owner_);
}

// ---------------------------------------------------------------- what the doors call

Presence Tier::fetch(const Key& key, uint32_t priority, Wanting wanting) {
  Lock lock(mutex_);
  if (stop_) return Presence::Missing;
  if (const auto flight = flights_.find(key); flight != flights_.end()) {
    Flight& f = flight->second;
    f.wanted_by(wanting);
    prefer(key, f, wanting.first);
    auto& queue = peers_[f.peer]->queue;
    if (~priority < f.place.first) {  // wanted again, and sooner
      auto node = queue.extract(f.place);
      f.place.first = ~priority;
      if (node) node.key() = f.place, queue.insert(std::move(node));
    }
    return Presence::Pending;
  }
  if (const auto vain = in_vain_.find(mark_of(key, false)); vain != in_vain_.end()) {
    const Directory::Mask others = wanting.first & usable_.load() & ~vain->second.asked;
    if (monotonic_ms() < vain->second.until_ms && !others) return Presence::Missing;
    in_vain_.erase(vain);
  }
  if (flights_.size() >= kMaxFlights || !usable_.load()) return Presence::Missing;
  Flight& flight = flights_[key];
  flight.place = {~priority, ++arrivals_};
  flight.wanted_by(wanting);
  flight.route.first = wanting.first;
  if (place(key, flight)) return Presence::Pending;
  flights_.erase(key);
  return Presence::Missing;
}

// One that waits for anybody's word need not: somebody was named. What is in a queue, or was asked for, stays there.
void Tier::prefer(const Key& key, Flight& flight, Directory::Mask first) {
  flight.route.first |= first;
  if (flight.waits != Step::WaitForWord || !(first & usable_.load() & ~flight.route.asked)) return;
  hoped_for_.erase(mark_of(key, false));
  place(key, flight);
}

void Tier::go() {
  Lock lock(mutex_);
  wake_streams();
}

double Tier::estimate_s(uint64_t bytes) const {
  const uint64_t rate = best_bytes_per_s_.load(std::memory_order_relaxed);
  if (rate == 0) return -1;
  return static_cast<double>(best_rtt_us_.load(std::memory_order_relaxed)) * 1e-6 +
         static_cast<double>(bytes) / static_cast<double>(rate);
}

// ---------------------------------------------------------------- the threads that fetch: one for each connection

void Tier::run(size_t p, size_t s) {
  ::pthread_setname_np(::pthread_self(), "kv-fetch");
  Peer& peer = *peers_[p];
  Stream& stream = peer.streams[s];
  Lock lock(mutex_);
  while (!stop_) {
    if (!work_or_care(lock, peer, s)) continue;
    try {
      if (stream.channel && of_no_use(peer, stream)) stream.receiver.reset(), stream.channel.reset();
      const bool stood = stream.channel != nullptr;
      if (!stood) open(lock, p, stream);
      if (bring_half(lock, peer, stream, stood)) continue;
      Batch batch{take_batch(peer)};
      if (!peer.queue.empty()) peer.work.notify_one();
      peer.in_flight += batch.keys.size();
      if (!batch.keys.empty() || s == 0) work_on(lock, p, stream, batch, stood);
    } catch (const Broken& error) {
      if (!lock.owns_lock()) lock.lock();
      went_wrong(p, stream, error);
      lock.unlock();
      store_.load_ended();
      lock.lock();
    }
  }
}

// Asks. `again`: the connection had served before. If it is gone meanwhile (over there certificates were renewed or the daemon
// was started anew, or a firewall forgot it), that is no reason to call the peer down, and asking twice is as good as asking
// once: what is open is asked for once more, on a new one. Lets go of the lock meanwhile.
void Tier::work_on(Lock& lock, size_t p, Stream& stream, Batch& batch, bool again) {
  Peer& peer = *peers_[p];
  const auto all = batch.keys.size();
  const auto ask = [&](bool once_more) {
    lock.unlock();
    all ? fetch_batch(p, stream, batch, once_more) : ping(peer, stream);
    lock.lock();
  };
  try {
    return ask(again);
  } catch (const Broken& error) {
    const bool over = all && static_cast<size_t>(std::popcount(batch.ended)) == all;
    if (!again || over || error.why != Broken::Why::Gone) throw;
  }
  lock.lock();
  stream.receiver.reset(), stream.channel.reset();
  peer.gone += 1;
  try {
    if (stop_ || peer.state != State::Up || stream.identity != peer.identity)
      throw Broken(Broken::Why::Gone, "it is there no more");
    open(lock, p, stream);
  } catch (const Broken&) {
    if (!lock.owns_lock()) lock.lock();
    for (size_t i = 0; i < all; ++i)
      if (!(batch.ended >> i & 1)) ended(p, batch.keys[i], Outcome::Failed, {});
    throw;
  }
  ask(false);
}

// ---------------------------------------------------------------- where a key goes

// Seconds until a peer would have sent it, by what is known here.
double Tier::cost_s(size_t p) const {
  const Peer& peer = *peers_[p];
  const auto blocks = static_cast<double>(peer.queue.size() + peer.in_flight);
  const uint64_t rate = peer.bytes_per_s, bytes = peer.block_bytes;
  const double each_s = rate ? static_cast<double>(bytes) / static_cast<double>(rate) : kUnmeasuredS;
  return static_cast<double>(peer.rtt_us) * 1e-6 + blocks * each_s;
}

// place(), and the streams that it is for are woken at once.
bool Tier::send_on(const Key& key, Flight& flight) {
  const bool hope = place(key, flight);
  wake_streams();
  return hope;
}

// To the next peer's queue, where wake_streams() makes it seen, or where it waits for one. False if there is nothing to hope for.
bool Tier::place(const Key& key, Flight& flight) {
  const uint64_t turn = key.words[1] ^ ++turns_ * 0xff51afd7ed558ccdull;
  const Next next = next_step(directory_, usable_.load(), key, flight.route, turn, [this](size_t p) { return cost_s(p); });
  flight.waits = next.step;
  const auto may_return = [](const auto& peer) { return peer->may_return; };
  const bool nobody = next.step == Step::GiveUp || next.step == Step::WaitForWord;
  const auto hope = [&] { return std::ranges::any_of(peers_, may_return) || directory_.holders(key) & usable_.load(); };
  const uint32_t layers = nobody && hope() ? parked_.layers(key) : 0;
  if (layers > flight.layers) {  // more came: it is worth as long a wait again, and as many questions
    flight.layers = layers, flight.resumes = 0;
    flight.route.blind = 0, flight.route.tries = 0;
  }
  if (layers && flight.resumes < kMostResumes) {
    flight.resumes += 1, flight.waits = Step::WaitForTurn;
    wait_for(key, flight, kResumeMs);
    return true;
  }
  if (next.step == Step::WaitForTurn || next.step == Step::WaitForWord) wait_for(key, flight, next.wait_ms);
  if (next.step != Step::Ask) return next.step != Step::GiveUp;
  Peer& peer = *peers_[flight.peer = next.peer];
  peer.queue.emplace(flight.place, key);
  to_wake_ |= Directory::Mask{1} << next.peer;
  if (!peer.idle && peer.started < kMostStreams && !std::exchange(peer.crowded, true)) {
    crowded_.emplace(monotonic_ms() + kCrowdedMs, next.peer);
    care_.notify_one();
  }
  return true;
}

// One of each peer's: what it leaves in the queue it wakes another for.
void Tier::wake_streams() {
  for (Directory::Mask left = std::exchange(to_wake_, 0); left; left &= left - 1)
    peers_[static_cast<size_t>(std::countr_zero(left))]->work.notify_one();
}

void Tier::wait_for(const Key& key, Flight& flight, uint64_t for_ms) {
  flight.until_ms = monotonic_ms() + for_ms;
  waits_.emplace(flight.until_ms, key);
  if (flight.waits == Step::WaitForWord) hoped_for_[mark_of(key, false)] = key;
  care_.notify_one();
}

void Tier::end_flight(const Key& key, bool in_vain) {
  const auto flight = flights_.find(key);
  const Directory::Mask asked = flight->second.route.asked;
  if (flight->second.waits == Step::WaitForWord) hoped_for_.erase(mark_of(key, false));
  flights_.erase(flight);
  if (parked_.layers(key)) abandoned_.push_back(key), care_.notify_one();
  if (!in_vain) return;
  if (in_vain_.size() >= kMaxInVain) in_vain_.clear();
  in_vain_[mark_of(key, false)] = {monotonic_ms() + (asked ? kInVainMs : kNoWordMs), asked};
}

void Tier::ended(size_t p, const Key& key, Outcome outcome, const std::vector<std::string>& instead) {
  Peer& peer = *peers_[p];
  Flight& flight = flights_.at(key);
  peer.in_flight -= 1;
  wake_held_up();
  switch (outcome) {
    case Outcome::Fetched: peer.fetched += 1; break;
    case Outcome::Missing: peer.missing += 1; break;
    case Outcome::Lost: peer.lost += 1; break;
    case Outcome::NoSpace: peer.no_space += 1; break;
    case Outcome::Needless: peer.needless += 1; break;
    case Outcome::Unwanted:
      peer.cancelled += 1;
      if (!flight.is_wanted()) return end_flight(key, false);
      ask_again(flight.route);  // since then somebody is there
      break;
    case Outcome::Busy:
      peer.busy += 1, flight.route.busy = true;
      for (const std::string& node : instead)
        if (const auto other = numbers_.find(node); other != numbers_.end())
          flight.route.referred |= Directory::Mask{1} << other->second;
      break;
    case Outcome::Later: peer.deferred += 1, flight.route.busy = true; break;
    default: peer.failed += 1, peer.may_return = true; break;  // went_wrong() knows more
  }
  const bool here = outcome == Outcome::Fetched || outcome == Outcome::Needless;
  if (here || outcome == Outcome::NoSpace) return end_flight(key, !here);
  const bool over = !flight.is_wanted() && !parked_.layers(key);  // what is here of it may be read already
  if (stop_ || over || !send_on(key, flight)) end_flight(key, !over);
}

// ---------------------------------------------------------------- what waits for a time

// A flight's wait, and what is crowded. Ends with the tier.
void Tier::care() {
  Lock lock(mutex_);
  while (!stop_) {
    if (!abandoned_.empty()) abandon(lock);
    uint64_t next = ~uint64_t{0};
    if (!waits_.empty()) next = waits_.begin()->first;
    if (!crowded_.empty()) next = std::min(next, crowded_.begin()->first);
    const uint64_t now = monotonic_ms();
    if (next > now) {
      if (next == ~uint64_t{0})
        care_.wait(lock);
      else
        care_.wait_for(lock, std::chrono::milliseconds(next - now));
      continue;
    }
    bool in_vain = false;
    while (!waits_.empty() && waits_.begin()->first <= now) {
      const auto [until_ms, key] = *waits_.begin();
      waits_.erase(waits_.begin());
      const auto flight = flights_.find(key);
      if (flight != flights_.end() && flight->second.waits != Step::Ask && flight->second.until_ms == until_ms)
        in_vain |= !goes_on(key, flight->second);
    }
    while (!crowded_.empty() && crowded_.begin()->first <= now) {
      const size_t p = crowded_.begin()->second;
      crowded_.erase(crowded_.begin());
      Peer& peer = *peers_[p];
      peer.crowded = false;
      if (peer.queue.empty() || peer.idle || peer.started >= kMostStreams || peer.state != State::Up) continue;
      try {
        start_stream(p);
      } catch (const std::system_error&) {
        // No thread is to be had: those that there are do it, and it is looked at again.
      }
      crowded_.emplace(now + kCrowdedMs, p), peer.crowded = true;
    }
    if (!in_vain) continue;
    lock.unlock();
    store_.load_ended();
    lock.lock();
  }
}

// Gives back the memory of blocks that came in part; who follows them is told.
void Tier::abandon(Lock& lock) {
  const std::vector<Key> keys = std::exchange(abandoned_, {});
  lock.unlock();
  for (const Key& key : keys) {
    std::optional<Landing> landing = parked_.take(key);
    if (!landing) continue;  // somebody wanted it again meanwhile
    try {
      store_.abort(owner_, landing->handle);
    } catch (const Error&) {
      // Fenced: nobody reads it.
    }
    landing->uncount();
  }
  store_.settle();
  store_.load_ended();
  lock.lock();
  wake_held_up();
}

bool Tier::goes_on(const Key& key, Flight& flight) {
  if (flight.waits == Step::WaitForTurn) {
    ask_again(flight.route);
    if (send_on(key, flight)) return true;
  }
  end_flight(key, true);
  return false;
}

}  // namespace kv::peer
