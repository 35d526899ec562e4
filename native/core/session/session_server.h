// The session socket: its door, and a thread for each namespace behind it. The door accepts clients, checks who they are, reads
// their request to attach and hands them to the namespace's thread (session_thread.h), which serves them from then on. So what
// one namespace's sessions do holds up no other's. Never waits for a client, nor for a namespace.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/session/connection.h"
#include "core/session/session_thread.h"

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

  void start();  // throws Unavailable if the socket cannot be made, InvalidArgument if its path is too long
  void stop();   // ends the threads; sessions stay as they are, for the next daemon
  std::vector<std::pair<std::string, SessionInfo>> sessions() const;  // with their namespace's name
  // Other lists from now on, from any thread. A session whose user may no longer do what it attached for ends.
  void set_tenants(std::vector<Tenant> tenants);
  // What a gRPC call that shows this token may do; nothing if no living session has it.
  std::optional<Tokens::Grant> token(std::span<const uint8_t> shown) const { return tokens_.check(shown); }
  uint64_t refused() const { return refused_.load(); }
  uint64_t steps_aside() const;  // of all threads, as SessionThread has them
  double thread_cpu_s() const;   // of all threads
  struct Latency {
    std::string name, operation;
    LatencyCounts counts;
  };
  std::vector<Latency> latencies() const;  // per namespace and operation: from a request's arrival to its reply

 private:
  void run();
  void accept_some();
  void turn_away(Fd socket, Code code, const std::string& text);
  void serve(Connection& connection);
  void attach(Connection& connection, const protocol::Request& request, protocol::Reader body);
  size_t visible_store(const Connection& connection, const std::string& name) const;
  Right best_right(const Credentials& who) const;
  void take_news();
  void close(int socket);
  std::unique_ptr<Connection> let_go(int socket);
  void drop_silent_connections();

  Options options_;  // whose tenants are the door's own
  const std::vector<Store*> stores_;
  Fd listener_, epoll_, wake_;
  Fd spare_;  // given up for a moment when no descriptor is left for a connection
  Tokens tokens_;
  Seats seats_;
  std::atomic<uint64_t> refused_{0};
  std::map<int, std::unique_ptr<Connection>> connections_;  // that have not attached, by socket; the door's own
  std::map<int, int> process_sockets_;                      // pidfd -> socket
  std::vector<uint8_t> buffer_;
  std::mutex news_mutex_;  // guards what others leave for the door
  std::optional<std::vector<Tenant>> new_tenants_;
  std::atomic<bool> stopping_{false};
  std::vector<std::unique_ptr<SessionThread>> threads_;  // as the stores
  std::thread thread_;
};

}  // namespace kv
