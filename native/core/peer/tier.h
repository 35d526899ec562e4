// The other hosts as a tier of one namespace: which blocks are asked of which peer, how often, and when one is left alone. Peers
// tell what they have (core/placement/directory.h), so a block is asked of one that has it (core/placement/policy.h), and one
// that nobody has costs no message. Each peer has a few connections with a thread each, and one more on which it tells. Nobody
// waits for these threads: who asks is told that it is on its way, and the block appears.
//
// Invariants: a key has one flight at most; flights, the queue and the bytes of a message are bounded; a peer that failed is not
// asked again before a connection to it stands.
//
// tier.cc: what the doors call, where a key goes, and what waits. tier_streams.cc: the threads that fetch. tier_watch.cc: those
// that hear what peers have. tier_members.cc: peers that join and leave, and those who wait.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "core/peer/handshake.h"
#include "core/peer/receive_blocks.h"
#include "core/placement/directory.h"
#include "core/placement/in_flight.h"
#include "core/placement/policy.h"
#include "core/store/pool_window.h"
#include "core/store/store.h"

namespace kv::peer {

#define KV_PEER_COUNTERS(X) \
  X(fetched)                \
  X(fetch_bytes)            \
  X(pushed)                 \
  X(cancelled)              \
  X(halved)                 \
  X(taken_over)             \
  X(deferred)               \
  X(placed) X(missing) X(lost) X(no_space) X(needless) X(failed) X(corrupt) X(malformed) X(stalled) X(gone) X(refused) X(busy)

class Tier final : public Fetcher {
 public:
  struct Address {
    std::string node, host;  // numeric
    uint16_t port = 0;
    bool tells = true;    // what it has; who does not is asked
    bool places = false;  // blocks into this host's pool itself: the fabric's process beside this one
  };
  struct PeerStats {
    std::string node, address, state, why;  // state: "new", "up", "down"
    uint64_t queued, in_flight, bytes_in_flight, rtt_us, bytes_per_s, connects, streams, held, complete, lent;
#define X(name) uint64_t name;
    KV_PEER_COUNTERS(X)
#undef X
  };

  // `tls`: none for plain connections. `takes`: what a peer pushes is fetched; its word costs this host memory then.
  Tier(Store& store, std::string node, const Secret& salt, const std::vector<Address>& peers,
       std::shared_ptr<TlsIdentity> tls = nullptr, bool takes = false);
  ~Tier() override { stop(); }
  void start();  // its threads, one that listens to news and one a stream
  void stop();   // ends them; what was asked for is a miss
  // While it runs. A name that is known gets the address; false: there are as many peers as there may be. Throws system_error
  // where no thread is to be had: it has not joined, and may again.
  bool join(const Address& at);
  void leave(const std::string& node);  // it is asked no more, and what was asked of it goes elsewhere

  Presence fetch(const Key& key, uint32_t priority, Wanting wanting) override;
  void also_wanted(const Key& key, Wanting wanting) override;
  void let_go_of_all(Waiter waiter) override;
  void go() override;
  bool known(const Key& key) const override { return (directory_.holders(key) & usable_.load()) != 0; }
  double estimate_s(uint64_t bytes) const override;
  uint64_t named(const std::string& node) const override;
  const std::string& node() const override { return node_; }
  void placer_ended() { loans_.process_ended(); }  // the process that places blocks: nothing of it writes any more
  std::vector<PeerStats> stats();                  // one a peer, in the order of their addresses

 private:
  using Place = std::pair<uint32_t, uint64_t>;  // highest priority first, then order of arrival
  enum class State { New, Up, Down };
  struct Stream {
    std::unique_ptr<Channel> channel;  // guarded by mutex_; used without it by its thread alone
    std::unique_ptr<BlockReceiver> receiver;
    uint64_t epoch = 0, identity = 0;  // of who places blocks, and of the peer, when the channel was made
    uint32_t version = 0;              // that is spoken on it
    std::thread thread;
  };
  struct Peer {
    Peer(const Address& at, InFlight& all) : at(at), places(at.places), memory(all.most() / 3 * 2, &all) {}
    Address at;
    const bool places;      // as its first address said
    InFlight memory;        // of what comes from it
    bool left = false;      // nobody is here: the next that joins may have the slot
    uint64_t identity = 0;  // changes with the address
    std::vector<Stream> streams;
    size_t started = 0, idle = 0;  // streams that have a thread, and that wait for work
    bool crowded = false;          // it is looked at again whether it needs one more
    Stream watch;
    std::map<Place, Key> queue;
    std::vector<std::shared_ptr<SecondHalf>> halves;  // of large blocks, for streams that have nothing to do
    std::condition_variable work, up;
    State state = State::New;
    std::string why;  // it was down last
    uint32_t failures = 0;
    bool may_return = false;  // its connection broke, and it has not been tried since
    uint64_t retry_ms = 0, in_flight = 0;
    std::atomic<uint64_t> rtt_us{0}, bytes_per_s{0}, connects{0}, block_bytes{0};  // the last: of a block, lately
#define X(name) std::atomic<uint64_t> name{0};
    KV_PEER_COUNTERS(X)
#undef X
  };
  struct Batch {  // what a stream asks for at a time; nothing: how the peer is
    std::vector<Key> keys;
    uint64_t ended = 0;  // a bit a key
  };
  struct Flight {
    Place place;
    Route route{};
    size_t peer = 0;
    Step waits = Step::Ask;  // Ask: it is in a queue, or was asked for
    uint64_t until_ms = 0;
    uint32_t resumes = 0, layers = 0;  // waits for somebody who has the rest of it, since so many were here
    bool kept = false;                 // it is brought whoever waits
    std::vector<Wanting> waiters{};
    void wanted_by(Wanting wanting);
    bool is_wanted() const;
  };
  struct Vain {             // nobody had it
    uint64_t until_ms = 0;  // asking again asks none of those that were
    Directory::Mask asked = 0;
  };
  using Lock = std::unique_lock<std::mutex>;

  void run(size_t peer, size_t stream);
  bool work_or_care(Lock& lock, Peer& peer, size_t stream);
  bool of_no_use(const Peer& peer, const Stream& stream) const;
  void open(Lock& lock, size_t peer, Stream& stream);
  void connect(Lock& lock, Peer& peer, Stream& stream);
  void ping(Peer& peer, Stream& stream);
  void work_on(Lock& lock, size_t peer, Stream& stream, Batch& batch, bool again);
  void fetch_batch(size_t peer, Stream& stream, Batch& batch, bool again);
  Offer offer_beside(Peer& peer, const Stream& stream);
  bool bring_half(Lock& lock, Peer& peer, Stream& stream, bool again);
  std::vector<Key> take_batch(Peer& peer);
  uint64_t room_for(const Peer& peer) const;
  void wake_held_up();
  void tell_speed();
  void become(size_t peer, State state);
  void went_wrong(size_t peer, Stream& stream, const Broken& error);
  void ended(size_t peer, const Key& key, Outcome outcome, const std::vector<std::string>& instead);
  bool send_on(const Key& key, Flight& flight);
  bool place(const Key& key, Flight& flight);
  void prefer(const Key& key, Flight& flight, Directory::Mask first);
  void wake_streams();
  double cost_s(size_t peer) const;
  void wait_for(const Key& key, Flight& flight, uint64_t for_ms);
  void end_flight(const Key& key, bool in_vain);
  void add_peer(const Address& at);
  size_t slot_for(const std::string& node) const;
  void make_threads(size_t peer);
  void start_threads(size_t peer);
  void start_stream(size_t peer);
  void drop_channels(Peer& peer);
  void care();
  bool goes_on(const Key& key, Flight& flight);
  void abandon(Lock& lock);

  void watch(size_t peer);
  void listen(size_t peer, Channel& channel);
  void hear(const std::vector<uint64_t>& marks);
  void take_pushed(size_t peer, Channel& channel, const Frame& head);

  Store& store_;
  const std::string node_;
  const Secret salt_;
  const std::shared_ptr<TlsIdentity> tls_;
  const bool takes_;
  Window window_;
  uint32_t owner_ = 0;
  std::atomic<bool> stop_{false};
  std::atomic<uint32_t> requests_{0};
  std::atomic<uint64_t> best_bytes_per_s_{0}, best_rtt_us_{0};
  std::atomic<Directory::Mask> usable_{0};  // peers that are not down; changed under mutex_

  Directory directory_;  // has locks of its own
  Parked parked_;        // and these two
  Quarantine loans_;
  InFlight memory_;  // of blocks on their way from all peers

  // Guards what follows, and the peers' fields that are no atomics; never held over I/O or a call of the store.
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::unordered_map<Key, Flight, KeyHash> flights_;
  std::unordered_map<uint64_t, Vain> in_vain_;       // by mark
  std::unordered_map<uint64_t, Key> hoped_for_;      // mark -> a key that waits for a peer's word
  std::multimap<uint64_t, Key> waits_;               // when the wait of a flight ends (ms)
  std::multimap<uint64_t, size_t> crowded_;          // when a peer is looked at (ms)
  std::unordered_map<std::string, size_t> numbers_;  // of the peers, by node
  std::condition_variable care_;
  std::thread care_thread_;
  std::vector<Key> abandoned_;  // parked blocks that nobody brings the rest of
  uint64_t arrivals_ = 0, turns_ = 0;
  Directory::Mask to_wake_ = 0;  // peers whose queues have got keys since a stream of theirs was woken
  bool held_up_ = false;         // a stream waits until less is on its way
};

}  // namespace kv::peer
