#include "core/session/session_thread.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "core/base/error.h"
#include "core/base/polling.h"

namespace kv {
namespace {

constexpr int kMessagesAtOnce = 64;
constexpr size_t kArrivalsAtOnce = 2;  // as long as many puts, and whoever knocks knocks with all it may have

}  // namespace

SessionThread::SessionThread(Shared shared, Store& store)
    : shared_(std::move(shared)), store_(store), buffer_(protocol::kMaxMessage + 1) {}

SessionThread::~SessionThread() { stop(); }

void SessionThread::start(const Tenant& tenant) {
  tenant_ = tenant;
  epoll_ = Fd(::epoll_create1(EPOLL_CLOEXEC));
  wake_ = Fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_ || !wake_) throw Error(Code::Unavailable, errno_text("a thread for the sessions of " + store_.name()));
  watch(epoll_.get(), wake_.get());
  stopping_ = false;
  thread_ = std::thread([this] { run(); });
}

void SessionThread::stop() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard lock(news_mutex_);
    stopping_ = true;
  }
  wake();
  thread_.join();
  process_sockets_.clear();
  for (auto& [fd, connection] : connections_)
    if (connection->token) shared_.tokens.end(*connection->token);
  for (int socket : attended_) connections_.at(socket)->mailbox->attend(false);
  attended_.clear();
  connections_.clear();
  std::lock_guard lock(news_mutex_);
  arrivals_.clear();
}

void SessionThread::wake() {
  const uint64_t wakeup = 1;
  if (wake_) KV_INVARIANT(::write(wake_.get(), &wakeup, sizeof wakeup) == sizeof wakeup);
}

void SessionThread::take(Arrival arrival) {
  {
    std::lock_guard lock(news_mutex_);
    arrivals_.push_back(std::move(arrival));
  }
  wake();
}

void SessionThread::set_tenant(const Tenant& tenant) {
  {
    std::lock_guard lock(news_mutex_);
    new_tenant_ = tenant;
  }
  wake();
}

void SessionThread::run() {
  ::pthread_setname_np(::pthread_self(), "kv-sessions");
  uint64_t next_tick = 0;
  // While messages stream, the next is looked for before the thread sleeps: a processor that fell asleep takes tens of
  // microseconds to wake (docs/design.md, "Decisions that differ"). A lone message costs no polling.
  Stream messages(2'000'000);  // a create comes before filling a block, its seal after: 2 ms where it has 16 MiB
  Polling pace;
  for (;;) {
    const uint64_t now = monotonic_ms();
    if (now >= next_tick) next_tick = now + static_cast<uint64_t>(std::min(1000, store_.tick()));
    epoll_event events[kMessagesAtOnce];
    const uint64_t looked_ns = monotonic_ns();
    const bool polling = messages.runs(looked_ns) && pace.worthwhile(looked_ns);
    const size_t connected = connections_.size();
    const bool served = polling ? serve_last() : leave_all();
    if (served) messages.note(monotonic_ns());
    if (connections_.size() < connected) next_tick = 0;  // a session ended: what it held may be free at once
    const int count =
        ::epoll_wait(epoll_.get(), events, kMessagesAtOnce, polling ? 0 : static_cast<int>(next_tick - std::min(now, next_tick)));
    if (count > 0)
      messages.note(monotonic_ns());
    else if (polling && !served && !step_aside())
      pace.give_way();
    bool woken = false;
    for (int i = 0; i < count; ++i) {
      const int fd = events[i].data.fd;
      if (fd == wake_.get()) {
        woken = true;
      } else if (auto process = process_sockets_.find(fd); process != process_sockets_.end()) {
        close(process->second);
      } else if (auto connection = connections_.find(fd); connection != connections_.end()) {
        last_served_ = fd;
        serve(*connection->second);
      }
    }
    if (connections_.size() < connected) next_tick = 0;
    // Last: a new connection may get the number of one that was closed above, and with it an event of this batch that was meant
    // for the other. And who hung up before it came back has left by then.
    const News told = woken ? news() : News::More;
    if (told == News::Stop) return;
    if (told == News::Some) next_tick = 0;
  }
}

SessionThread::News SessionThread::news() {
  uint64_t count;
  if (::read(wake_.get(), &count, sizeof count) < 0) KV_INVARIANT(errno == EAGAIN);
  std::vector<Arrival> arrivals;
  std::optional<Tenant> tenant;
  bool more;
  {
    std::lock_guard lock(news_mutex_);
    if (stopping_) return News::Stop;
    for (; !arrivals_.empty() && arrivals.size() < kArrivalsAtOnce; arrivals_.pop_front())
      arrivals.push_back(std::move(arrivals_.front()));
    tenant.swap(new_tenant_), more = !arrivals_.empty();
  }
  if (more) wake();
  if (tenant) {
    tenant_ = *std::move(tenant);
    std::vector<int> leaving;
    for (auto& [fd, connection] : connections_)
      if (!may_stay(*connection)) leaving.push_back(fd);
    for (int fd : leaving) close(fd);
  }
  for (Arrival& arrival : arrivals) admit(std::move(arrival));
  return more ? News::More : News::Some;
}

// If it has the right that it attached with.
bool SessionThread::may_stay(const Connection& connection) const {
  return right_of(connection.who, tenant_, ::geteuid()) >= (connection.read_only ? Right::Read : Right::Write);
}

void SessionThread::close(int socket) {
  const auto found = connections_.find(socket);
  if (found == connections_.end()) return;
  Connection& connection = *found->second;
  std::erase(attended_, socket);
  if (connection.mailbox) connection.mailbox->attend(false);
  if (connection.token) shared_.tokens.end(*connection.token);
  if (connection.attached) store_.end_session(connection.session);
  unwatch(epoll_.get(), connection);
  process_sockets_.erase(connection.process.get());
  connections_.erase(found);
}

bool SessionThread::serve(Connection& connection) {
  const int fd = connection.socket.get();
  const auto received = receive(fd, buffer_);
  if (!received) return false;
  if (received->empty())
    close(fd);
  else
    handle(connection, *received);
  return true;
}

// Malformed beyond reading: the connection ends. Anything else gets a typed answer.
void SessionThread::handle(Connection& connection, std::span<const uint8_t> message) {
  const int fd = connection.socket.get();
  if (protocol::is_knock(message) && connection.mailbox && !asked_by_mailbox_)
    return static_cast<void>(serve_mailbox(connection));
  protocol::Reader body(message);
  const auto request = body.take<protocol::Request>();
  if (!body.ok() || request.magic != protocol::kMagic) return close(fd);
  const uint64_t began_ns = monotonic_ns();
  try {
    need_few(request);
    const auto op = static_cast<protocol::Op>(request.op);
    if (op == protocol::Op::Attach) throw Error(Code::FailedPrecondition, "attached already");
    const std::vector<uint8_t> reply = answer(connection, request, body);
    if (op == protocol::Op::Create || op == protocol::Op::Seal) store_.note_put(began_ns);
    if (!send(connection, request, protocol::kOk, request.count, reply)) close(fd);
    if (op == protocol::Op::Create) store_.finish_claims();
    if (op == protocol::Op::Seal) store_.make_room_ahead();
  } catch (const Error& error) {
    if (static_cast<protocol::Op>(request.op) == protocol::Op::Attach) shared_.refused.fetch_add(1);
    if (!send(connection, request, status_of(error), 0, text_of(error))) close(fd);
  }
  measure(request.op, began_ns);
}

void SessionThread::measure(uint16_t op, uint64_t began_ns) {
  if (op >= 1 && op <= static_cast<uint16_t>(protocol::Op::kLast)) latencies_[op - 1u].add(monotonic_ns() - began_ns);
}

bool SessionThread::send(Connection& connection, const protocol::Request& request, uint16_t status, uint32_t count,
                         std::span<const uint8_t> body) {
  const protocol::Reply reply{protocol::kMagic, request.op, status, count, request.tag};
  const bool by_mailbox = asked_by_mailbox_ == &connection;
  if (by_mailbox && connection.mailbox->answer(request.tag, {reinterpret_cast<const uint8_t*>(&reply), sizeof reply}, body)) {
    if (!connection.mailbox->asleep(request.tag)) return true;
    const protocol::Knock knock;
    // Where there is no room, earlier messages lie unread, and those wake it as well.
    return ::send(connection.socket.get(), &knock, sizeof knock, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0 || errno == EAGAIN;
  }
  const bool sent = send_reply(connection.socket.get(), reply, body);
  if (by_mailbox) connection.mailbox->answered_by_socket(request.tag);
  return sent;
}

}  // namespace kv
