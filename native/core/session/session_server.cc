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

constexpr int kEventsAtOnce = 64;
constexpr int kAcceptsAtOnce = 8;
constexpr int kNoDescriptorMs = 10;

SessionServer::Options one_tenant_each(SessionServer::Options options, size_t stores) {
  options.tenants.resize(stores);
  return options;
}

void ring(const Fd& event) {
  const uint64_t wakeup = 1;
  if (event) KV_INVARIANT(::write(event.get(), &wakeup, sizeof wakeup) == sizeof wakeup);
}

}  // namespace

SessionServer::SessionServer(Options options, std::vector<Store*> stores)
    : options_(one_tenant_each(std::move(options), stores.size())),
      stores_(std::move(stores)),
      seats_(options_.max_sessions),
      buffer_(protocol::kMaxMessage + 1) {
  for (Store* store : stores_)
    threads_.push_back(std::make_unique<SessionThread>(SessionThread::Shared{stores_, seats_, tokens_, refused_}, *store));
}

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
  wake_ = Fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  spare_ = Fd(::eventfd(0, EFD_CLOEXEC));
  watch(epoll_.get(), listener_.get());
  watch(epoll_.get(), wake_.get());
  stopping_.store(false);
  for (size_t i = 0; i < threads_.size(); ++i) threads_[i]->start(options_.tenants[i]);
  thread_ = std::thread([this] { run(); });
}

void SessionServer::stop() {
  if (thread_.joinable()) {
    stopping_.store(true);
    ring(wake_);
    thread_.join();
    listener_.reset();
    ::unlink(options_.socket_path.c_str());
    process_sockets_.clear();
    connections_.clear();
  }
  for (auto& thread : threads_) thread->stop();
}

std::vector<std::pair<std::string, SessionInfo>> SessionServer::sessions() const {
  std::vector<std::pair<std::string, SessionInfo>> out;
  for (Store* store : stores_)
    for (const auto& session : store->sessions()) out.emplace_back(store->name(), session);
  return out;
}

uint64_t SessionServer::steps_aside() const {
  uint64_t out = 0;
  for (const auto& thread : threads_) out += thread->steps_aside();
  return out;
}

double SessionServer::thread_cpu_s() const {
  double out = cpu_of(thread_);
  for (const auto& thread : threads_) out += thread->cpu_s();
  return out;
}

std::vector<SessionServer::Latency> SessionServer::latencies() const {
  std::vector<Latency> out;
  for (const auto& thread : threads_)
    for (size_t i = 0; i < static_cast<size_t>(protocol::Op::kLast); ++i)
      out.push_back({thread->store().name(), protocol::kOpNames[i], thread->latency(i)});
  return out;
}

void SessionServer::run() {
  ::pthread_setname_np(::pthread_self(), "kv-door");
  for (;;) {
    epoll_event events[kEventsAtOnce];
    const int count = ::epoll_wait(epoll_.get(), events, kEventsAtOnce, connections_.empty() ? -1 : 1000);
    bool knock = false;
    for (int i = 0; i < count; ++i) {
      const int fd = events[i].data.fd;
      if (fd == wake_.get()) {
        if (stopping_.load()) return;
        take_news();
      } else if (fd == listener_.get()) {
        knock = true;
      } else if (auto process = process_sockets_.find(fd); process != process_sockets_.end()) {
        close(process->second);
      } else if (auto connection = connections_.find(fd); connection != connections_.end()) {
        serve(*connection->second);
      }
    }
    drop_silent_connections();
    // Last: a new connection may get the number of one that was closed above, and with it an event of this batch that was meant
    // for the other.
    if (knock) accept_some();
  }
}

// The answer to an attach that was not read: it is there before the peer asks, and the peer's request is not waited for.
void SessionServer::turn_away(Fd socket, Code code, const std::string& text) {
  refused_.fetch_add(1);
  const Error error(code, text);
  const auto op = static_cast<uint16_t>(protocol::Op::Attach);
  send_reply(socket.get(), {protocol::kMagic, op, status_of(error), 0, 0}, text_of(error));  // whoever is gone needs no answer
}

// A few: whoever is turned away knocks again at once, perhaps, and others wait to be served.
void SessionServer::accept_some() {
  if (!spare_) spare_ = Fd(::eventfd(0, EFD_CLOEXEC));  // another thread was sooner when it was given up
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
    if (!socket) {  // without a spare one: whoever knocks waits, and the listener is not to wake us at once
      if ((errno == EMFILE || errno == ENFILE) && !spare_) ::poll(nullptr, 0, kNoDescriptorMs);
      return;
    }
    auto connection = std::make_unique<Connection>();
    auto who = credentials_of(socket.get());
    if (!who) {  // never taken for anybody: the daemon itself may be the unmapped user
      turn_away(std::move(socket), Code::NotPermitted, "the kernel does not say who connects");
      continue;
    }
    connection->who = std::move(*who);
    const std::string user = "user " + std::to_string(connection->who.uid);
    if (best_right(connection->who) == Right::None) {  // the same words whatever namespaces there are
      turn_away(
          std::move(socket), Code::NotPermitted,
          user + " is in no namespace's `readers` or `writers`, nor is a group of it: the daemon's operator can name it there");
      continue;
    }
    if (!seats_.room_for(connection->who.uid)) {
      turn_away(std::move(socket), Code::Unavailable,
                user + " finds no room: the daemon takes " + std::to_string(seats_.most_of(connection->who.uid)) +
                    " sessions of one user like this and " + std::to_string(options_.max_sessions) + " in all");
      continue;
    }
    connection->since_ms = monotonic_ms();
    // A process that is gone before we ask leaves EOF behind; one whose pid was taken meanwhile cannot hold this socket.
    connection->process = Fd(static_cast<int>(::syscall(SYS_pidfd_open, connection->who.pid, 0)));
    if (connection->process) {
      watch(epoll_.get(), connection->process.get());
      process_sockets_[connection->process.get()] = socket.get();
    }
    watch(epoll_.get(), socket.get());
    const int fd = socket.get();
    connection->seat = seats_.take({connection->who.uid, fd, connection->process.get()});
    connection->socket = std::move(socket);
    connections_.emplace(fd, std::move(connection));
  }
}

void SessionServer::set_tenants(std::vector<Tenant> tenants) {
  tenants.resize(stores_.size());
  std::lock_guard lock(news_mutex_);
  for (size_t i = 0; i < threads_.size(); ++i) threads_[i]->set_tenant(tenants[i]);
  new_tenants_ = std::move(tenants);
  ring(wake_);
}

void SessionServer::take_news() {
  uint64_t count;
  if (::read(wake_.get(), &count, sizeof count) < 0) KV_INVARIANT(errno == EAGAIN);
  {
    std::lock_guard lock(news_mutex_);
    if (!new_tenants_) return;
    options_.tenants = *std::exchange(new_tenants_, std::nullopt);
  }
  std::vector<int> leaving;
  for (auto& [fd, connection] : connections_)
    if (best_right(connection->who) == Right::None) leaving.push_back(fd);
  for (int fd : leaving) close(fd);
}

// If there is anything for it here.
Right SessionServer::best_right(const Credentials& who) const {
  Right best = Right::None;
  for (const Tenant& tenant : options_.tenants) best = std::max(best, right_of(who, tenant, ::geteuid()));
  return best;
}

// Out of the door's hands.
std::unique_ptr<Connection> SessionServer::let_go(int socket) {
  const auto found = connections_.find(socket);
  if (found == connections_.end()) return nullptr;
  std::unique_ptr<Connection> connection = std::move(found->second);
  unwatch(epoll_.get(), *connection);
  process_sockets_.erase(connection->process.get());
  connections_.erase(found);
  return connection;
}

void SessionServer::close(int socket) { let_go(socket); }

void SessionServer::drop_silent_connections() {
  std::vector<int> silent;
  for (auto& [fd, connection] : connections_)
    if (monotonic_ms() - connection->since_ms > kSilentMs) silent.push_back(fd);
  for (int fd : silent) close(fd);
}

// Malformed beyond reading: the connection ends. Anything else gets a typed answer.
void SessionServer::serve(Connection& connection) {
  const int fd = connection.socket.get();
  const auto message = receive(fd, buffer_);
  if (!message) return;
  protocol::Reader body(*message);
  const auto request = body.take<protocol::Request>();
  if (!body.ok() || request.magic != protocol::kMagic) return close(fd);
  const bool attaches = static_cast<protocol::Op>(request.op) == protocol::Op::Attach;
  try {
    need_few(request);
    if (!attaches) throw Error(Code::FailedPrecondition, "attach first");
    attach(connection, request, body);
  } catch (const Error& error) {
    if (attaches) refused_.fetch_add(1);
    if (!send_reply(fd, {protocol::kMagic, request.op, status_of(error), 0, request.tag}, text_of(error))) close(fd);
  }
}

// The number of the store of that name, if this peer may see it. What it may not see takes the same way as what does not exist.
size_t SessionServer::visible_store(const Connection& connection, const std::string& name) const {
  size_t found = stores_.size();
  for (size_t i = 0; i < stores_.size(); ++i)
    if ((stores_[i]->name() == name) & (right_of(connection.who, options_.tenants[i], ::geteuid()) != Right::None)) found = i;
  if (found == stores_.size()) throw Error(Code::NotFound, "no namespace " + name);
  return found;
}

void SessionServer::attach(Connection& connection, const protocol::Request& request, protocol::Reader body) {
  const auto wanted = body.take<protocol::Attach>();
  if (!body.at_end()) throw Error(Code::InvalidArgument, "the message's length does not fit its count");
  if (wanted.version < protocol::kOldestVersion || wanted.version > protocol::kVersion)
    throw Error(Code::IncompatibleVersion,
                "the client speaks version " + std::to_string(wanted.version) + " of the session protocol, the daemon " +
                    std::to_string(protocol::kOldestVersion) + " to " + std::to_string(protocol::kVersion));
  if (wanted.max_pins == 0 || wanted.max_pins > options_.max_pins)
    throw Error(Code::InvalidArgument,
                "max_pins is " + std::to_string(wanted.max_pins) + ", the limit is " + std::to_string(options_.max_pins));
  const std::string name(wanted.name, ::strnlen(wanted.name, sizeof wanted.name));
  const size_t number = visible_store(connection, name);
  if (!wanted.read_only && right_of(connection.who, options_.tenants[number], ::geteuid()) != Right::Write)
    throw Error(Code::NotPermitted, "this user may read namespace " + name + " and not write it: attach read-only");
  stores_[number]->check_reader(wanted.version, connection.who.uid);  // here, where it may ask again as another version
  threads_[number]->take({let_go(connection.socket.get()), request, wanted});
}

}  // namespace kv
