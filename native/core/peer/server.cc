#include "core/peer/server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <system_error>

#include "core/base/error.h"
#include "core/peer/announce.h"
#include "core/peer/send_blocks.h"

namespace kv::peer {
namespace {
constexpr size_t kMaxVisits = 2048;   // of a peer: its streams, and one that is told what there is, for each namespace
constexpr size_t kMaxStrangers = 32;  // that have not proved who they are
constexpr uint32_t kLoopback = 127u << 24, kLoopbackMask = 0xff000000u;
}  // namespace

Server::Server(Options options) : options_(std::move(options)), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

void Server::share(Store& store, const Secret& salt) {
  spaces_.emplace(store.name(), new Space{&store, salt, Window(store, false)});
}

void Server::start() {
  listener_ = Fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int yes = 1;
  ::setsockopt(listener_.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_port = htons(options_.port);
  socklen_t size = sizeof at;
  const std::string where = options_.address + ":" + std::to_string(options_.port);
  if (::inet_pton(AF_INET, options_.address.c_str(), &at.sin_addr) != 1)
    throw Error(Code::InvalidArgument, "listen: " + options_.address + " is no IPv4 address");
  if (::bind(listener_.get(), reinterpret_cast<sockaddr*>(&at), sizeof at) < 0 || ::listen(listener_.get(), 64) < 0 ||
      ::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&at), &size) < 0)
    throw Error(Code::Unavailable, errno_text("listen: " + where));
  port_ = ntohs(at.sin_port);
  thread_ = std::thread([this] { accept_loop(); });
}

void Server::stop() {
  if (stop_.exchange(true) || !thread_.joinable()) return;
  ::eventfd_write(wake_.get(), 1);
  thread_.join();
  listener_.reset();
  reap(true);
}

void Server::renew() {
  std::lock_guard lock(mutex_);
  for (Visit& visit : visits_) {
    visit.outdated = true;
    if (visit.idle) visit.channel.hear_no_more();  // a request that has come is answered
  }
  wake_watchers();
}

void Server::welcome(std::vector<std::string> nodes) {
  std::lock_guard lock(mutex_);
  welcome_ = std::move(nodes);
  for (Visit& visit : visits_)
    if (visit.known && !is_welcome(visit.node)) visit.outdated = true, visit.channel.cut();
  wake_watchers();
}

bool Server::is_welcome(const std::string& node) const {
  return std::ranges::count(options_.peers, node) || std::ranges::count(welcome_, node);
}

bool Server::is_peer(const std::string& node) const {
  std::lock_guard lock(mutex_);
  return is_welcome(node);
}

void Server::wake_watchers() {
  for (auto& [name, space] : spaces_) space->store->journal().wake();
}

Server::Stats Server::stats() const {
  std::lock_guard lock(mutex_);
  const auto open =
      static_cast<uint64_t>(std::count_if(visits_.begin(), visits_.end(), [](const Visit& visit) { return !visit.over; }));
  uint64_t turned_away = 0;
  for (const auto& [name, space] : spaces_) turned_away += space->admission.turned_away();
  return {open, accepted_.load(), refused_.load(), served_blocks_.load(), served_bytes_.load(), turned_away};
}

void Server::accept_loop() {
  ::pthread_setname_np(::pthread_self(), "kv-accept");
  pollfd waits[2] = {{listener_.get(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
  while (!stop_) {
    ::poll(waits, 2, 1000);
    reap(false);
    if (!stop_ && waits[0].revents) accept_one();
  }
}

bool Server::allowed(uint32_t address) const {
  return options_.tls || (address & kLoopbackMask) == kLoopback ||
         (options_.mask && (address & options_.mask) == options_.network);
}

void Server::accept_one() {
  sockaddr_in from{};
  socklen_t size = sizeof from;
  Fd socket(::accept4(listener_.get(), reinterpret_cast<sockaddr*>(&from), &size, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket) {
    if (errno == EMFILE || errno == ENFILE) ::poll(nullptr, 0, 50);  // what waits would be reported at once again
    return;
  }
  std::lock_guard lock(mutex_);
  size_t strangers = 0, leaving = 0;
  Visit* oldest = nullptr;
  for (Visit& visit : visits_) {
    if (visit.known) continue;
    if (!visit.outdated && !oldest) oldest = &visit;
    strangers += 1, leaving += visit.outdated;
  }
  if (!allowed(ntohl(from.sin_addr.s_addr)) || visits_.size() >= kMaxVisits || leaving >= kMaxStrangers) {
    refused_ += 1;
    return;
  }
  if (strangers - leaving >= kMaxStrangers) oldest->outdated = true, oldest->channel.cut();  // it says nothing; this one may
  Visit& visit = visits_.emplace_back(std::move(socket));
  try {
    visit.thread = std::thread([this, &visit] { serve(visit); });
  } catch (const std::system_error&) {
    visits_.pop_back();
    refused_ += 1;
  }
}

void Server::reap(bool all) {
  std::list<Visit> over;
  {
    std::lock_guard lock(mutex_);
    for (auto visit = visits_.begin(); visit != visits_.end();) {
      const auto next = std::next(visit);
      if (all) visit->channel.cut(), visit->outdated = true;
      if (all || visit->over) over.splice(over.end(), visits_, visit);
      visit = next;
    }
  }
  if (all) wake_watchers();
  for (Visit& visit : over) visit.thread.join();
}

// False: the connection has served its purpose.
bool Server::answer(Visit& visit, const Frame& head, Space& space, BlockSender& sender) {
  Channel& channel = visit.channel;
  if (head.kind == static_cast<uint16_t>(Kind::Ping)) {
    Channel::expect(head, Kind::Ping, 0);
    channel.put({.kind = static_cast<uint16_t>(Kind::Pong), .request = head.request}, {});
    channel.flush();
    return true;
  }
  if (head.kind == static_cast<uint16_t>(Kind::Watch)) {
    Channel::expect(head, Kind::Watch, 0);
    announce(*space.store, channel, head.request, head.layer == 1 ? visit.node : "", visit.outdated);
    return false;
  }
  std::vector<Key> keys(std::min<uint64_t>(head.bytes / sizeof(Key), kMaxKeysPerFetch));
  Channel::expect(head, Kind::Fetch, keys.size() * sizeof(Key));
  channel.take_checked(head, reinterpret_cast<std::byte*>(keys.data()));
  const bool half = head.item == 1 && keys.size() == 1;
  const BlockSender::Sent sent = sender.answer(head.request, keys, head.layer, half);
  served_blocks_ += sent.blocks, served_bytes_ += sent.bytes;
  return true;
}

void Server::serve(Visit& visit) {
  ::pthread_setname_np(::pthread_self(), "kv-serve");
  try {
    Channel& channel = visit.channel;
    if (options_.tls) channel.secure(*options_.tls, "", kHandshakeMs);
    std::string visitor;
    const std::string space = admit(channel, options_.node, [&](const std::string& name, const std::string& node) {
      visitor = node;
      const auto found = spaces_.find(name);
      const bool shared = found != spaces_.end() && channel.certified(node) && is_peer(node);
      return shared ? std::optional(found->second->salt) : std::nullopt;
    });
    {
      std::lock_guard lock(mutex_);
      visit.node = visitor, visit.known = true;
      if (!is_welcome(visitor)) visit.outdated = true;  // no longer, since it was asked
    }
    accepted_ += 1;
    Space& shared = *spaces_.at(space);
    BlockSender sender(*shared.store, shared.window, shared.admission, shared.sums, channel, visitor);
    for (;;) {
      visit.idle = true;
      if (visit.outdated) break;
      const Frame head = channel.take_head(-1);
      visit.idle = false;
      if (!answer(visit, head, shared, sender)) break;
    }
  } catch (const Broken&) {
    if (!visit.known) refused_ += 1;
  } catch (const Error&) {
    // The store is fenced; there is nothing to serve.
  }
  visit.channel.cut();
  visit.over = true;
}

}  // namespace kv::peer
