// The other hosts as a tier of one namespace: which blocks are asked of which peer, how often, and when one is left alone. Each
// peer has a few connections with a thread each; a key is asked for once at a time, of one peer after another, in an order of
// its own, so that a block that all want is not asked of the same host by all. Nobody waits for these threads: who asks is told
// that it is on its way, and the block appears.
//
// Invariants: a key has one flight at most; flights, the queue and the bytes of a message are bounded; a peer that failed is not
// asked again before a connection to it stands.
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
#include "core/peer/window.h"
#include "core/store/store.h"

namespace kv::peer {

#define KV_PEER_COUNTERS(X) \
  X(fetched)                \
  X(fetch_bytes) X(missing) X(lost) X(no_space) X(needless) X(failed) X(corrupt) X(malformed) X(stalled) X(gone) X(refused)

class Tier final : public Fetcher {
 public:
  struct Address {
    std::string node, host;  // numeric
    uint16_t port = 0;
  };
  struct PeerStats {
    std::string node, address, state, why;  // state: "new", "up", "down"
    uint64_t queued, in_flight, rtt_us, bytes_per_s, connects;
#define X(name) uint64_t name;
    KV_PEER_COUNTERS(X)
#undef X
  };

  // `tls`: none for plain connections.
  Tier(Store& store, std::string node, const Secret& salt, const std::vector<Address>& peers,
       std::shared_ptr<TlsIdentity> tls = nullptr);
  ~Tier() override { stop(); }
  void start();
  void stop();

  Presence fetch(const Key& key, uint32_t priority) override;
  std::vector<PeerStats> stats();

 private:
  using Place = std::pair<uint32_t, uint64_t>;  // highest priority first, then order of arrival
  enum class State { New, Up, Down };
  struct Stream {
    std::unique_ptr<Channel> channel;  // guarded by mutex_; used without it by its thread alone
    std::unique_ptr<BlockReceiver> receiver;
    std::thread thread;
  };
  struct Peer {
    Address at;
    std::vector<Stream> streams;
    std::map<Place, Key> queue;
    std::condition_variable work;
    State state = State::New;
    std::string why;  // it was down last
    uint32_t failures = 0;
    uint64_t retry_ms = 0, in_flight = 0;
    std::atomic<uint64_t> rtt_us{0}, bytes_per_s{0}, connects{0}, block_bytes{0};  // the last: of a block, lately
#define X(name) std::atomic<uint64_t> name{0};
    KV_PEER_COUNTERS(X)
#undef X
  };
  struct Flight {
    Place place;
    uint64_t asked = 0;  // peers that were asked: a bit each
    size_t peer = 0;
  };
  using Lock = std::unique_lock<std::mutex>;

  void run(size_t peer, size_t stream);
  bool work_or_care(Lock& lock, Peer& peer, size_t stream);
  bool of_no_use(const Peer& peer, const Stream& stream) const;
  void connect(Lock& lock, Peer& peer, Stream& stream);
  void ping(Peer& peer, Stream& stream);
  void fetch_batch(Lock& lock, Peer& peer, Stream& stream, const std::vector<Key>& keys);
  std::vector<Key> take_batch(Peer& peer) const;
  void become(Peer& peer, State state);
  void went_wrong(Peer& peer, Stream& stream, const Broken& error);
  void ended(Peer& peer, const Key& key, Outcome outcome);
  bool send_on(const Key& key, Flight& flight);
  std::optional<size_t> next_peer(const Key& key, uint64_t asked) const;
  void end_flight(const Key& key, bool in_vain);

  Store& store_;
  const std::string node_;
  const Secret salt_;
  const std::shared_ptr<TlsIdentity> tls_;
  Window window_;
  uint32_t owner_ = 0;
  std::atomic<bool> stop_{false};
  std::atomic<uint32_t> requests_{0};

  std::mutex
      mutex_;  // guards what follows, and the peers' fields that are no atomics; never held over I/O or a call of the store
  std::vector<std::unique_ptr<Peer>> peers_;
  std::unordered_map<Key, Flight, KeyHash> flights_;
  std::unordered_map<Key, uint64_t, KeyHash> in_vain_;  // key -> until when asking again asks no peer (ms)
  uint64_t arrivals_ = 0;
};

}  // namespace kv::peer
