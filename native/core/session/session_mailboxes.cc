// Where a namespace's session thread looks while messages stream: the mailboxes of those that asked lately (mailbox.h), and
// the socket of the one that asked last.

#include <algorithm>

#include "core/base/polling.h"
#include "core/session/session_thread.h"

namespace kv {
namespace {

constexpr int kLooks = 8;            // at the connection that asked last, before all are asked after
constexpr int kMailboxLooks = 16;    // before each of these, at the mailboxes
constexpr size_t kMostAttended = 4;  // mailboxes at a time

}  // namespace

// Who asked last will probably ask next. Looking there first, without epoll or giving way, halves a round trip; the others have
// their turn after each message.
bool SessionThread::serve_last() {
  if (attend(last_served_)) return true;
  const auto last = connections_.find(last_served_);
  for (int look = 0; look < kLooks; ++look) {
    for (int at_mailboxes = 0; at_mailboxes < kMailboxLooks; ++at_mailboxes, relax())
      if (serve_mailboxes()) return true;
    if (last != connections_.end() && serve(*last->second)) return true;
  }
  return false;
}

bool SessionThread::serve_mailboxes() {
  for (size_t i = 0; i < attended_.size(); ++i) {
    const size_t at = (next_mailbox_ + i) % attended_.size();
    if (!serve_mailbox(*connections_.at(attended_[at]))) continue;
    next_mailbox_ = at + 1;
    return true;
  }
  return false;
}

bool SessionThread::serve_mailbox(Connection& connection) {
  if (!connection.mailbox) return false;
  const auto message = connection.mailbox->take(buffer_);
  if (connection.mailbox->cut()) return close(connection.socket.get()), true;
  if (message.empty()) return false;
  last_served_ = connection.socket.get();
  asked_by_mailbox_ = &connection;
  handle(connection, message);  // may end the connection
  asked_by_mailbox_ = nullptr;
  return true;
}

bool SessionThread::attend(int socket) {
  const auto found = connections_.find(socket);
  if (found == connections_.end() || !found->second->mailbox || std::ranges::count(attended_, socket)) return false;
  found->second->mailbox->attend(true);
  attended_.push_back(socket);
  return attended_.size() > kMostAttended && leave(attended_.front());
}

bool SessionThread::leave(int socket) {
  std::erase(attended_, socket);
  Connection& connection = *connections_.at(socket);
  connection.mailbox->attend(false);
  return serve_mailbox(connection);
}

bool SessionThread::step_aside() {
  const auto last = connections_.find(last_served_);
  if (last == connections_.end() || !last->second->mailbox) return false;
  if (!own_processor_.leave_to(last->second->mailbox->asked_from(), monotonic_ns())) return false;
  steps_aside_.fetch_add(1, std::memory_order_relaxed);
  return true;
}

bool SessionThread::leave_all() {
  bool served = false;
  while (!attended_.empty()) served |= leave(attended_.back());
  return served;
}

}  // namespace kv
