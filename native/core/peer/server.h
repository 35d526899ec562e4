// The port that other daemons read blocks from. One thread accepts, one serves each connection; both numbers are bounded, and who
// does not prove in a second that it is a configured peer of a shared namespace is gone. Reads the stores; changes nothing.
#pragma once

#include <atomic>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/peer/handshake.h"
#include "core/peer/send_blocks.h"
#include "core/placement/policy.h"
#include "core/store/pool_window.h"

namespace kv::peer {

class Server {
 public:
  struct Options {
    std::string node, address;  // numeric
    uint16_t port = 0;          // 0: any
    std::vector<std::string> peers;
    uint32_t network = 0, mask = 0;      // who may connect beside loopback: host byte order; mask 0: nobody
    std::shared_ptr<TlsIdentity> tls{};  // then anybody may who has a certificate
  };
  struct Stats {
    uint64_t connections, accepted, refused, served_blocks, served_bytes, turned_away;
  };

  explicit Server(Options options);
  ~Server() { stop(); }

  void share(Store& store, const Secret& salt);  // before start()
  void start();                                  // throws InvalidArgument: no IPv4 address; Unavailable: cannot listen there
  void stop();                                   // ends all connections and their threads
  // Beside the configured peers, instead of those that were welcomed before: who is neither now is cut off.
  void welcome(std::vector<std::string> nodes);
  void renew();  // connections that were made with an earlier identity end, those that are busy when they have answered
  uint16_t port() const { return port_; }
  Stats stats() const;  // since start()

 private:
  struct Space {
    Store* store;
    Secret salt;
    Window window;
    Admission admission{};
    ServedSums sums{};
  };
  struct Visit {
    explicit Visit(Fd socket) : channel(std::move(socket)) {}
    Channel channel;
    std::thread thread;
    std::string node;  // once it is known
    std::atomic<bool> known{false}, over{false}, idle{false}, outdated{false};
  };

  void accept_loop();
  void accept_one();
  void reap(bool all);
  void wake_watchers();
  void serve(Visit& visit);
  bool answer(Visit& visit, const Frame& head, Space& space, BlockSender& sender);
  bool allowed(uint32_t address) const;
  bool is_peer(const std::string& node) const;
  bool is_welcome(const std::string& node) const;  // the lock is held

  const Options options_;
  std::map<std::string, std::unique_ptr<Space>> spaces_;
  Fd listener_, wake_;
  uint16_t port_ = 0;
  std::atomic<bool> stop_{false};
  std::thread thread_;
  mutable std::mutex mutex_;  // guards what follows
  std::vector<std::string> welcome_;
  std::list<Visit> visits_;
  std::atomic<uint64_t> accepted_{0}, refused_{0}, served_blocks_{0}, served_bytes_{0};
};

}  // namespace kv::peer
