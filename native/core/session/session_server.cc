#include "core/session/session_server.h"

#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "core/base/error.h"
#include "core/base/polling.h"

namespace kv {
namespace {

constexpr uint64_t kSilentMs = 5000;  // a connection that has not attached by then is dropped
constexpr int kBacklog = 128;

constexpr int kBatch = 64;
constexpr int kAcceptsAtOnce = 8;

uint64_t now_ms() { return monotonic_ns() / 1'000'000; }

bool is_own(uint32_t uid) { return uid == 0 || uid == ::geteuid(); }

void watch(int epoll, int fd) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = fd;
  KV_INVARIANT(::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0);
}

SessionServer::Options one_tenant_each(SessionServer::Options options, size_t stores) {
  options.tenants.resize(stores);
  return options;
}

}  // namespace

SessionServer::SessionServer(Options options, std::vector<Store*> stores)
    : options_(one_tenant_each(std::move(options), stores.size())),
      stores_(std::move(stores)),
      buffer_(protocol::kMaxMessage + 1) {}

SessionServer::~SessionServer() { stop(); }

void SessionServer::start() {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (options_.socket_path.size() >= sizeof address.sun_path)
    throw Error(Code::InvalidArgument, "the socket's path has " + std::to_string(options_.socket_path.size()) +
                                           " bytes, the limit is " + std::to_string(sizeof address.sun_path - 1) + ": " +
                                           options_.socket_path);
  std::copy(options_.socket_path.begin(), options_.socket_path.end(), address.sun_path);
  listener_ = Fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  ::unlink(options_.socket_path.c_str());  // left by a daemon that is gone: the runtime directory's lock is ours
  // Nobody can connect before listen. Not by umask: that is the process's, and other threads make files meanwhile.
  if (::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 ||
      ::chmod(options_.socket_path.c_str(), 0600) != 0 || ::listen(listener_.get(), kBacklog) != 0)
    throw Error(Code::Unavailable, errno_text("listening on " + options_.socket_path));
  epoll_ = Fd(::epoll_create1(EPOLL_CLOEXEC));
  stop_event_ = Fd(::eventfd(0, EFD_CLOEXEC));
  tenants_event_ = Fd(::eventfd(0, EFD_CLOEXEC));
  spare_ = Fd(::eventfd(0, EFD_CLOEXEC));
  watch(epoll_.get(), listener_.get());
  watch(epoll_.get(), stop_event_.get());
  watch(epoll_.get(), tenants_event_.get());
  for (const Store* store : stores_) latencies_[store];  // before the thread: from here on the map itself never changes
  thread_ = std::thread([this] { run(); });
}

void SessionServer::stop() {
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  KV_INVARIANT(::write(stop_event_.get(), &one, sizeof one) == sizeof one);
  thread_.join();
  listener_.reset();
  ::unlink(options_.socket_path.c_str());
  process_sockets_.clear();
  for (auto& [fd, connection] : connections_)
    if (connection->token) tokens_.end(*connection->token);
  for (int socket : attended_) connections_.at(socket)->mailbox->attend(false);
  attended_.clear();
  connections_.clear();
}

std::vector<std::pair<std::string, Store::SessionInfo>> SessionServer::sessions() const {
  std::vector<std::pair<std::string, Store::SessionInfo>> out;
  for (Store* store : stores_)
    for (const auto& session : store->sessions()) out.emplace_back(store->name(), session);
  return out;
}

double SessionServer::thread_cpu_s() const {
  clockid_t clock;
  timespec t{};
  if (thread_.joinable() && ::pthread_getcpuclockid(const_cast<std::thread&>(thread_).native_handle(), &clock) == 0)
    ::clock_gettime(clock, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

void SessionServer::run() {
  ::pthread_setname_np(::pthread_self(), "kv-sessions");
  uint64_t next_tick = 0;
  // While messages stream, the next is looked for before the thread sleeps: a processor that fell asleep takes tens of
  // microseconds to wake (docs/design.md, "Decisions that differ"). A lone message costs no polling.
  Stream messages(2'000'000);  // a create comes before filling a block, its seal after: 2 ms where it has 16 MiB
  Polling pace;
  for (;;) {
    const uint64_t now = now_ms();
    if (now >= next_tick) {
      int wait = 1000;
      for (Store* store : stores_) wait = std::min(wait, store->tick());
      next_tick = now + static_cast<uint64_t>(wait);
      drop_silent_connections();
    }
    epoll_event events[kBatch];
    const uint64_t looked_ns = monotonic_ns();
    const bool polling = messages.runs(looked_ns) && pace.worthwhile(looked_ns);
    const size_t connected = connections_.size();
    const bool served = polling ? serve_last() : leave_all();
    if (served) messages.note(monotonic_ns());
    if (connections_.size() < connected) next_tick = 0;  // a session ended: what it held may be free at once
    const int count =
        ::epoll_wait(epoll_.get(), events, kBatch, polling ? 0 : static_cast<int>(next_tick - std::min(now, next_tick)));
    if (count > 0)
      messages.note(monotonic_ns());
    else if (polling && !served && !step_aside())
      pace.give_way();
    bool knock = false;
    for (int i = 0; i < count; ++i) {
      const int fd = events[i].data.fd;
      if (fd == stop_event_.get()) return;
      if (fd == listener_.get()) {
        knock = true;
      } else if (fd == tenants_event_.get()) {
        take_new_tenants();
        next_tick = 0;
      } else if (auto process = process_sockets_.find(fd); process != process_sockets_.end()) {
        close(process->second);
        next_tick = 0;
      } else if (auto connection = connections_.find(fd); connection != connections_.end()) {
        last_served_ = fd;
        serve(*connection->second);
        if (!connections_.count(fd)) next_tick = 0;  // a session ended: what it held may be free at once
      }
    }
    // Last: a new connection may get the number of one that was closed above, and with it an event of this batch that was meant
    // for the other.
    if (knock) accept_some();
  }
}

// The answer to an attach that was not read: it is there before the peer asks, and the peer's request is not waited for.
void SessionServer::turn_away(Fd socket, Code code, const std::string& text) {
  refused_.fetch_add(1);
  protocol::Reply reply{protocol::kMagic, static_cast<uint16_t>(protocol::Op::Attach),
                        static_cast<uint16_t>(1 + static_cast<int>(code)), 0, 0};
  iovec parts[2] = {{&reply, sizeof reply}, {const_cast<char*>(text.data()), text.size()}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  static_cast<void>(::sendmsg(socket.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL));  // whoever is gone needs no answer
}

// A few: whoever is turned away knocks again at once, perhaps, and others wait to be served.
void SessionServer::accept_some() {
  for (int accepted = 0; accepted < kAcceptsAtOnce; ++accepted) {
    Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket && (errno == EMFILE || errno == ENFILE) && spare_) {  // turned away, or the listener would wake us for ever
      spare_.reset();
      Fd last(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      const bool waited = static_cast<bool>(last);
      if (waited) turn_away(std::move(last), Code::Unavailable, "the daemon has no descriptor left for another session");
      spare_ = Fd(::eventfd(0, EFD_CLOEXEC));
      if (!waited) return;
      continue;
    }
    if (!socket) return;
    auto connection = std::make_unique<Connection>();
    auto who = credentials_of(socket.get());
    if (!who) {  // never taken for anybody: the daemon itself may be the unmapped user
      turn_away(std::move(socket), Code::NotPermitted, "the kernel does not say who connects");
      continue;
    }
    connection->who = std::move(*who);
    admit(*connection);
    const std::string user = "user " + std::to_string(connection->who.uid);
    if (!may_stay(*connection)) {  // the same words whatever namespaces there are
      turn_away(
          std::move(socket), Code::NotPermitted,
          user + " is in no namespace's `readers` or `writers`, nor is a group of it: the daemon's operator can name it there");
      continue;
    }
    if (!room_for(connection->who)) {
      turn_away(std::move(socket), Code::Unavailable,
                user + " finds no room: the daemon takes " + std::to_string(most_sessions(connection->who.uid)) +
                    " sessions of one user like this and " + std::to_string(options_.max_sessions) + " in all");
      continue;
    }
    connection->since_ms = now_ms();
    // A process that is gone before we ask leaves EOF behind; one whose pid was taken meanwhile cannot hold this socket.
    connection->process = Fd(static_cast<int>(::syscall(SYS_pidfd_open, connection->who.pid, 0)));
    if (connection->process) {
      watch(epoll_.get(), connection->process.get());
      process_sockets_[connection->process.get()] = socket.get();
    }
    watch(epoll_.get(), socket.get());
    const int fd = socket.get();
    connection->socket = std::move(socket);
    connections_.emplace(fd, std::move(connection));
  }
}

void SessionServer::set_tenants(std::vector<Tenant> tenants) {
  tenants.resize(stores_.size());
  std::lock_guard lock(tenants_mutex_);
  new_tenants_ = std::move(tenants);
  const uint64_t one = 1;
  if (tenants_event_) KV_INVARIANT(::write(tenants_event_.get(), &one, sizeof one) == sizeof one);
}

void SessionServer::take_new_tenants() {
  {
    std::lock_guard lock(tenants_mutex_);
    uint64_t count;
    KV_INVARIANT(::read(tenants_event_.get(), &count, sizeof count) == sizeof count);
    options_.tenants = new_tenants_;
  }
  std::vector<int> leaving;
  for (auto& [fd, connection] : connections_) {
    admit(*connection);
    if (!may_stay(*connection)) leaving.push_back(fd);
  }
  for (int fd : leaving) close(fd);
}

void SessionServer::admit(Connection& connection) const {
  connection.rights.clear();
  for (const Tenant& tenant : options_.tenants) connection.rights.push_back(right_of(connection.who, tenant, ::geteuid()));
}

// Attached: if it has the right that it attached with. Before: if there is anything for it here.
bool SessionServer::may_stay(const Connection& connection) const {
  const Right needed = connection.store && !connection.read_only ? Right::Write : Right::Read;
  for (size_t i = 0; i < stores_.size(); ++i)
    if ((!connection.store || connection.store == stores_[i]) && connection.rights[i] >= needed) return true;
  return false;
}

// One other user holds half of the sessions at most: the rest, and the owner, are still served.
size_t SessionServer::most_sessions(uint32_t uid) const {
  return is_own(uid) ? options_.max_sessions : std::max<size_t>(1, options_.max_sessions / 2);
}

// An eighth is the owner's: who may come as one of a group may have many user ids.
bool SessionServer::room_for(const Credentials& who) const {
  const size_t most = options_.max_sessions, own = most > 1 ? std::max<size_t>(1, most / 8) : 0;
  if (connections_.size() >= most) return false;
  if (is_own(who.uid)) return true;
  size_t theirs = 0, others = 0;
  for (const auto& [fd, one] : connections_) theirs += one->who.uid == who.uid, others += !is_own(one->who.uid);
  return theirs < most_sessions(who.uid) && others < most - own;
}

void SessionServer::close(int socket) {
  const auto found = connections_.find(socket);
  if (found == connections_.end()) return;
  Connection& connection = *found->second;
  std::erase(attended_, socket);
  if (connection.mailbox) connection.mailbox->attend(false);
  if (connection.token) tokens_.end(*connection.token);
  if (connection.store) connection.store->end_session(connection.session);
  // By hand: a descriptor that a forked child still holds would go on waking us under a number that is another's by then.
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, socket, nullptr);
  if (connection.process) {
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connection.process.get(), nullptr);
    process_sockets_.erase(connection.process.get());
  }
  connections_.erase(found);
}

void SessionServer::drop_silent_connections() {
  std::vector<int> silent;
  for (auto& [fd, connection] : connections_)
    if (!connection->store && now_ms() - connection->since_ms > kSilentMs) silent.push_back(fd);
  for (int fd : silent) close(fd);
}

bool SessionServer::serve(Connection& connection) {
  const int fd = connection.socket.get();
  iovec data{buffer_.data(), buffer_.size()};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;  // no control buffer: descriptors a client sends are discarded by the kernel
  const ssize_t received = ::recvmsg(fd, &message, MSG_DONTWAIT);
  if (received < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (received <= 0 || message.msg_flags & MSG_TRUNC)
    close(fd);
  else
    handle(connection, {buffer_.data(), static_cast<size_t>(received)});
  return true;
}

// Malformed beyond reading: the connection ends. Anything else gets a typed answer.
void SessionServer::handle(Connection& connection, std::span<const uint8_t> message) {
  const int fd = connection.socket.get();
  if (protocol::is_knock(message) && connection.mailbox && !asked_by_mailbox_)
    return static_cast<void>(serve_mailbox(connection));
  protocol::Reader body(message);
  const auto request = body.take<protocol::Request>();
  if (!body.ok() || request.magic != protocol::kMagic) return close(fd);
  const uint64_t began_ns = monotonic_ns();
  const Store* store = connection.store;  // of before: closing ends the connection
  try {
    if (request.count > kMaxKeysPerMessage)
      throw Error(Code::InvalidArgument, "the message announces " + std::to_string(request.count) + " items, the limit is " +
                                             std::to_string(kMaxKeysPerMessage));
    if (static_cast<protocol::Op>(request.op) == protocol::Op::Attach) return attach(connection, request, body);
    if (!connection.store) throw Error(Code::FailedPrecondition, "attach first");
    const std::vector<uint8_t> reply = answer(connection, request, body);
    Store& used = *connection.store;
    const auto op = static_cast<protocol::Op>(request.op);
    if (op == protocol::Op::Create || op == protocol::Op::Seal) used.note_put(began_ns);
    if (!send(connection, request, protocol::kOk, request.count, reply)) close(fd);
    if (op == protocol::Op::Create) used.finish_claims();
    if (op == protocol::Op::Seal) used.make_room_ahead();
  } catch (const Error& error) {
    if (static_cast<protocol::Op>(request.op) == protocol::Op::Attach) refused_.fetch_add(1);
    const auto* text = reinterpret_cast<const uint8_t*>(error.what());
    const std::span<const uint8_t> bytes(text, std::min<size_t>(std::strlen(error.what()), 1024));
    if (!send(connection, request, static_cast<uint16_t>(1 + static_cast<int>(error.code)), 0, bytes)) close(fd);
  }
  measure(store, request.op, began_ns);
}

void SessionServer::measure(const Store* store, uint16_t op, uint64_t began_ns) {
  if (!store || op < 1 || op > static_cast<uint16_t>(protocol::Op::kLast)) return;
  latencies_.at(store)[op - 1u].add(monotonic_ns() - began_ns);
}

std::vector<SessionServer::Latency> SessionServer::latencies() const {
  std::vector<Latency> out;
  for (const auto& [store, operations] : latencies_)
    for (size_t i = 0; i < operations.size(); ++i) out.push_back({store->name(), protocol::kOpNames[i], operations[i].read()});
  return out;
}

bool SessionServer::send(Connection& connection, const protocol::Request& request, uint16_t status, uint32_t count,
                         std::span<const uint8_t> body, std::span<const int> descriptors) {
  protocol::Reply reply{protocol::kMagic, request.op, status, count, request.tag};
  const bool by_mailbox = asked_by_mailbox_ == &connection;
  if (by_mailbox && connection.mailbox->answer(request.tag, {reinterpret_cast<const uint8_t*>(&reply), sizeof reply}, body)) {
    if (!connection.mailbox->asleep(request.tag)) return true;
    const protocol::Knock knock;
    // Where there is no room, earlier messages lie unread, and those wake it as well.
    return ::send(connection.socket.get(), &knock, sizeof knock, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0 || errno == EAGAIN;
  }
  iovec parts[2] = {{&reply, sizeof reply}, {const_cast<uint8_t*>(body.data()), body.size()}};
  alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  if (!descriptors.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size_bytes());
  }
  const bool sent = ::sendmsg(connection.socket.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0;
  if (by_mailbox) connection.mailbox->answered_by_socket(request.tag);
  return sent;
}

}  // namespace kv
