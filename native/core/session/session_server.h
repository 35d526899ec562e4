// The session socket: one thread that accepts clients, checks who they are, hands out memory and carries their requests, which
// come through it or lie in a mailbox, to the stores. A session ends at EOF or when its process ends, whichever is first. Never
// waits for a client: one that does not read its replies is dropped.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/base/error.h"
#include "core/base/latency.h"
#include "core/base/processor.h"
#include "core/format/protocol.h"
#include "core/format/segment.h"
#include "core/session/mailbox.h"
#include "core/session/session_access.h"
#include "core/session/session_tokens.h"
#include "core/store/store.h"

namespace kv {

class SessionServer {
 public:
  struct Options {
    std::string socket_path;
    uint32_t max_sessions;
    uint32_t max_pins;            // the most one session may ask for
    std::vector<Tenant> tenants;  // as the stores; without one only the daemon's own user and root attach
  };

  SessionServer(Options options, std::vector<Store*> stores);
  ~SessionServer();

  void start();  // throws Unavailable if the socket cannot be made
  void stop();   // ends the thread; sessions stay as they are, for the next daemon
  std::vector<std::pair<std::string, Store::SessionInfo>> sessions() const;  // with their namespace's name
  // Other lists from now on, from any thread. A session whose user may no longer do what it attached for ends.
  void set_tenants(std::vector<Tenant> tenants);
  // What a gRPC call that shows this token may do; nothing if no living session has it.
  std::optional<Tokens::Grant> token(std::span<const uint8_t> shown) const { return tokens_.check(shown); }
  uint64_t refused() const { return refused_.load(); }
  uint64_t steps_aside() const { return steps_aside_.load(std::memory_order_relaxed); }
  double thread_cpu_s() const;
  struct Latency {
    std::string name, operation;
    LatencyCounts counts;
  };
  std::vector<Latency> latencies() const;  // per namespace and operation: from a request's arrival to its reply

 private:
  struct Connection {
    Fd socket;
    Fd process;  // pidfd
    Store* store = nullptr;
    uint32_t session = 0;
    Credentials who;
    std::vector<Right> rights;  // by store
    bool read_only = false;
    std::optional<Tokens::Token> token;
    std::vector<Handle> kept;  // of a list that takes several messages
    uint64_t since_ms = 0;
    std::unique_ptr<DaemonMailbox> mailbox;
  };

  void run();
  void accept_some();
  void turn_away(Fd socket, Code code, const std::string& text);
  bool serve(Connection& connection);  // false: no message had come
  bool serve_mailbox(Connection& connection);
  bool serve_last();
  bool serve_mailboxes();
  // Begins and ends to look into that connection's mailbox. True if a request was served on the way.
  bool attend(int socket);
  bool leave(int socket);
  bool leave_all();
  bool step_aside();  // from who asked last; false: no need, or nowhere to go
  void close(int socket);
  void handle(Connection& connection, std::span<const uint8_t> message);
  std::vector<uint8_t> answer(Connection& connection, const protocol::Request& request, protocol::Reader body);
  std::vector<uint8_t> create(Connection& connection, const protocol::Request& request, protocol::Reader body);
  void attach(Connection& connection, const protocol::Request& request, protocol::Reader body);
  bool send(Connection& connection, const protocol::Request& request, uint16_t status, uint32_t count,
            std::span<const uint8_t> body, std::span<const int> descriptors = {});
  void take_new_tenants();
  void admit(Connection& connection) const;
  bool may_stay(const Connection& connection) const;
  size_t most_sessions(uint32_t uid) const;
  bool room_for(const Credentials& who) const;
  size_t visible_store(const Connection& connection, const std::string& name) const;
  std::vector<uint8_t> keep(Connection& connection, const protocol::Request& request, protocol::Reader body);
  std::vector<uint8_t> token_of(Connection& connection);
  void drop_silent_connections();
  void measure(const Store* store, uint16_t op, uint64_t began_ns);

  Options options_;
  const std::vector<Store*> stores_;
  Fd listener_, epoll_, stop_event_, tenants_event_;
  Fd spare_;                                                // given up for a moment when no descriptor is left for a connection
  std::map<int, std::unique_ptr<Connection>> connections_;  // by socket; the thread's own
  std::map<int, int> process_sockets_;                      // pidfd -> socket
  std::vector<uint8_t> buffer_;
  int last_served_ = -1;       // looked at first while messages stream
  std::vector<int> attended_;  // whose mailboxes are looked into: those that asked lately, the longest there first
  size_t next_mailbox_ = 0;    // of attended_: the first to be looked into, so that each has its turn
  OwnProcessor own_processor_;
  std::atomic<uint64_t> steps_aside_{0};
  const Connection* asked_by_mailbox_ = nullptr;  // while such a request is handled
  Tokens tokens_;
  std::mutex tenants_mutex_;
  std::vector<Tenant> new_tenants_;  // not yet taken over by the thread
  std::atomic<uint64_t> refused_{0};
  using OpLatencies = std::array<LatencyHistogram, static_cast<size_t>(protocol::Op::kLast)>;
  std::map<const Store*, OpLatencies> latencies_;  // an entry per store, made by start()
  std::thread thread_;
};

std::string stats_json(Store& store);

}  // namespace kv
