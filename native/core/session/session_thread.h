// The thread that serves the sessions of one namespace: it attaches whom the door (session_server.h) sends, carries requests,
// which come through a socket or lie in a mailbox, to the namespace's store, and ticks it. A session ends at EOF or when its
// process ends, whichever is first. Never waits for a client: one that does not read its replies is dropped. Never touches
// another namespace's store, but for counting a user's sessions that are left once there seem to be too many.
//
// session_requests.cc: what requests mean. session_mailboxes.cc: mailboxes and polling.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/base/latency.h"
#include "core/base/processor.h"
#include "core/format/protocol.h"
#include "core/session/connection.h"
#include "core/store/store.h"

namespace kv {

class SessionThread {
 public:
  // What all threads and the door have in common.
  struct Shared {
    std::vector<Store*> stores;
    Seats& seats;
    Tokens& tokens;
    std::atomic<uint64_t>& refused;
  };
  struct Arrival {
    std::unique_ptr<Connection> connection;  // in no epoll
    protocol::Request request;
    protocol::Attach wanted;  // checked by the door
  };

  SessionThread(Shared shared, Store& store);
  ~SessionThread();

  void start(const Tenant& tenant);  // whom it serves. Throws Unavailable
  void stop();                       // the session stays as it is, for the next daemon
  // From any thread.
  void take(Arrival arrival);
  void set_tenant(const Tenant& tenant);  // a session whose user may no longer do what it attached for ends
  // How often it left its processor to a client that waits in its mailbox.
  uint64_t steps_aside() const { return steps_aside_.load(std::memory_order_relaxed); }
  double cpu_s() const { return cpu_of(thread_); }  // processor time since start()
  const Store& store() const { return store_; }
  // How long requests of this operation took, since start().
  LatencyCounts latency(size_t operation) const { return latencies_[operation].read(); }

 private:
  void run();
  void wake();
  enum class News { Stop, Some, More };
  News news();                         // More: there are others, for which it rings again
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
  void admit(Arrival arrival);
  void attach(Connection& connection, const protocol::Request& request, const protocol::Attach& wanted);
  void bound_left_sessions(uint32_t uid);
  bool send(Connection& connection, const protocol::Request& request, uint16_t status, uint32_t count,
            std::span<const uint8_t> body);
  bool may_stay(const Connection& connection) const;
  std::vector<uint8_t> keep(Connection& connection, const protocol::Request& request, protocol::Reader body);
  std::vector<uint8_t> token_of(Connection& connection);
  void measure(uint16_t op, uint64_t began_ns);

  const Shared shared_;
  Store& store_;
  Fd epoll_, wake_;
  Tenant tenant_;                                           // the thread's own, as all that follows
  std::map<int, std::unique_ptr<Connection>> connections_;  // by socket
  std::map<int, int> process_sockets_;                      // pidfd -> socket
  std::vector<uint8_t> buffer_;
  int last_served_ = -1;       // looked at first while messages stream
  std::vector<int> attended_;  // whose mailboxes are looked into: those that asked lately, the longest there first
  size_t next_mailbox_ = 0;    // of attended_: the first to be looked into, so that each has its turn
  OwnProcessor own_processor_;
  const Connection* asked_by_mailbox_ = nullptr;  // while such a request is handled
  std::atomic<uint64_t> steps_aside_{0};
  std::array<LatencyHistogram, static_cast<size_t>(protocol::Op::kLast)> latencies_;
  std::mutex news_mutex_;  // guards what others leave for the thread
  std::deque<Arrival> arrivals_;
  std::optional<Tenant> new_tenant_;
  bool stopping_ = false;
  std::thread thread_;
};

std::string stats_json(Store& store);

}  // namespace kv
