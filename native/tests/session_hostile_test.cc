// Goal: the session socket believes no peer and waits for none. Method: raw sockets that send what no client would, and an honest
// client beside them that must notice nothing.
#include <fcntl.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <random>
#include <thread>

#include "core/format/protocol.h"
#include "tests/session_fixture.h"

using namespace kv;
using namespace kv::test;
using protocol::Op;

namespace {
std::atomic<bool> no_eventfd{false};  // another thread takes the last descriptor first
}

extern "C" int eventfd(unsigned count, int flags) noexcept {
  if (no_eventfd.load()) return errno = EMFILE, -1;
  return static_cast<int>(::syscall(SYS_eventfd2, count, flags));
}

namespace {

// A peer that is no client.
class Raw {
 public:
  explicit Raw(const std::string& path) : fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::copy(path.begin(), path.end(), address.sun_path);
    CHECK(::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    const timeval limit{10, 0};
    ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  }
  bool send(std::span<const uint8_t> bytes) { return ::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) >= 0; }
  // The status of the answer; nothing if the daemon closed.
  std::optional<uint16_t> answer() {
    std::vector<uint8_t> in(protocol::kMaxMessage);
    const ssize_t got = ::recv(fd.get(), in.data(), in.size(), 0);
    CHECK(got >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK));  // silence is no end
    if (got < static_cast<ssize_t>(sizeof(protocol::Reply))) return std::nullopt;
    protocol::Reply reply;
    std::memcpy(&reply, in.data(), sizeof reply);
    return reply.status;
  }
  std::optional<uint16_t> ask(Op op, uint32_t count, std::span<const uint8_t> body = {}) {
    std::vector<uint8_t> message;
    protocol::append(message, protocol::Request{protocol::kMagic, static_cast<uint16_t>(op), 0, count, 1});
    message.insert(message.end(), body.begin(), body.end());
    if (!send(message)) return std::nullopt;
    return answer();
  }
  std::optional<uint16_t> attach(uint32_t max_pins = 64, uint32_t version = protocol::kVersion, const char* name = "test",
                                 bool read_only = false) {
    protocol::Attach wanted{};
    wanted.version = version, wanted.max_pins = max_pins, wanted.read_only = read_only;
    std::memcpy(wanted.name, name, std::strlen(name));
    std::vector<uint8_t> body;
    protocol::append(body, wanted);
    return ask(Op::Attach, 1, body);
  }
  Fd fd;
};

// What the server's thread does while strangers knock.
std::atomic<bool> held_up{false}, sessions_held_up{false};
std::atomic<int> accepted_in_turn{0}, most_in_a_turn{0}, most_attached_in_a_turn{0}, passed_on{0};
thread_local int attached_in_turn = 0;

bool serves_sessions() {
  char name[16] = {};
  return ::pthread_getname_np(::pthread_self(), name, sizeof name) == 0 && std::strcmp(name, "kv-sessions") == 0;
}

constexpr uint16_t status(Code code) { return static_cast<uint16_t>(1 + static_cast<int>(code)); }

}  // namespace

#ifndef KV_TSAN  // whose runtime has these names itself
// In libc's place: the server's turns are counted, and a turn does not begin before all have knocked.
extern "C" int epoll_wait(int epoll, epoll_event* events, int most, int timeout_ms) {
  while (held_up.load() || (sessions_held_up.load() && serves_sessions())) std::this_thread::yield();
  accepted_in_turn.store(0), attached_in_turn = 0;
  return static_cast<int>(::syscall(SYS_epoll_pwait, epoll, events, most, timeout_ms, nullptr, 8));
}
extern "C" int accept4(int listener, sockaddr* address, socklen_t* length, int flags) {
  const auto fd = static_cast<int>(::syscall(SYS_accept4, listener, address, length, flags));
  if (fd >= 0) most_in_a_turn.store(std::max(most_in_a_turn.load(), ++accepted_in_turn));
  return fd;
}

extern "C" int epoll_ctl(int epoll, int operation, int fd, epoll_event* event) noexcept {
  passed_on += operation == EPOLL_CTL_DEL;
  return static_cast<int>(::syscall(SYS_epoll_ctl, epoll, operation, fd, event));
}
extern "C" int flock(int fd, int operation) noexcept {  // of a new session's page, once
  if (serves_sessions()) most_attached_in_a_turn.store(std::max(most_attached_in_a_turn.load(), ++attached_in_turn));
  return static_cast<int>(::syscall(SYS_flock, fd, operation));
}

// Fails if all that have come are attached at once.
TEST(however_many_attach_others_are_served_between) {
  Daemon daemon(16 * kMiB, 256, 64);
  auto honest = daemon.client();
  honest->touch(std::vector<Key>{key(1)});
  most_attached_in_a_turn.store(0), passed_on.store(0), sessions_held_up.store(true);
  std::vector<uint8_t> message;
  protocol::Attach wanted{};
  wanted.version = protocol::kVersion, wanted.max_pins = 64;
  std::memcpy(wanted.name, "test", 4);
  protocol::append(message, protocol::Request{protocol::kMagic, static_cast<uint16_t>(Op::Attach), 0, 1, 1});
  protocol::append(message, wanted);
  std::vector<Raw> attaching;
  for (int i = 0; i < 30; ++i) CHECK(attaching.emplace_back(daemon.path).send(message));
  CHECK(eventually([&] { return passed_on.load() == 2 * 30; }));  // the sockets and the processes
  sessions_held_up.store(false);
  for (Raw& raw : attaching) CHECK(raw.answer() == protocol::kOk);
  CHECK(most_attached_in_a_turn.load() <= 2);
}

TEST(however_many_knock_others_are_served_between) {
  Daemon daemon;
  auto honest = daemon.client();
  held_up.store(true);
  std::vector<Raw> knocking;
  for (int i = 0; i < 30; ++i) knocking.emplace_back(daemon.path);
  held_up.store(false);
  for (Raw& raw : knocking) CHECK(raw.ask(Op::Stats, 0) != protocol::kOk);  // it was let in, and is told to attach first
  CHECK_EQ(most_in_a_turn.load(), 8);
  honest->touch(std::vector<Key>{key(1)});
}
#endif
TEST(malformed_messages_are_answered_or_end_their_own_session) {
  Daemon daemon;
  auto honest = daemon.client();
  put(*honest, key(1), 7);
  Raw raw(daemon.path);
  CHECK(raw.ask(Op::Stats, 0) == status(Code::FailedPrecondition));  // attach first
  const uint64_t refused = daemon.server->refused();
  CHECK(raw.attach(64, protocol::kVersion + 1) == status(Code::IncompatibleVersion));
  CHECK(raw.attach(0) == status(Code::InvalidArgument));
  CHECK(raw.attach(~0u) == status(Code::InvalidArgument));
  CHECK(raw.attach(64, protocol::kVersion, "another") == status(Code::NotFound));
  CHECK(raw.ask(Op::Attach, 1) == status(Code::InvalidArgument));
  CHECK(daemon.server->refused() == refused + 5);
  CHECK(raw.attach() == protocol::kOk);
  CHECK(raw.attach() == status(Code::FailedPrecondition));
  CHECK(raw.ask(Op::LookUp, 3) == status(Code::InvalidArgument));
  CHECK(raw.ask(Op::LookUp, ~0u) == status(Code::InvalidArgument));
  CHECK(raw.ask(static_cast<Op>(99), 0) == status(Code::InvalidArgument));
  std::vector<uint8_t> head;
  protocol::append(head, protocol::CreateHead{0, 35, 0, ~0u});
  CHECK(raw.ask(Op::Create, 0, head) == status(Code::InvalidArgument));
  head.clear();
  protocol::append(head, protocol::CreateHead{77, 35, 0, 0});
  CHECK(raw.ask(Op::Create, 0, head) == status(Code::InvalidArgument));
  std::vector<uint8_t> item;
  protocol::append(item, protocol::BlockItem{~0u, 1, ~0ull});
  CHECK(raw.ask(Op::Seal, 1, item) == protocol::kOk);  // an answer per item: stale
  CHECK(raw.ask(Op::Abort, 1, item) == protocol::kOk);
  CHECK(!raw.send({}) || !raw.answer());  // an empty message cannot be told from an end
  Raw magic(daemon.path), huge(daemon.path), shortened(daemon.path);
  CHECK(magic.send(std::vector<uint8_t>(64, 'x')) && !magic.answer());
  CHECK(huge.send(std::vector<uint8_t>(protocol::kMaxMessage + 1, 'x')) && !huge.answer());
  CHECK(shortened.send(std::vector<uint8_t>(3, 'x')) && !shortened.answer());
  Raw reader(daemon.path);
  CHECK(reader.attach(64, protocol::kVersion, "test", true) == protocol::kOk);
  head.clear();
  protocol::append(head, protocol::CreateHead{0, 35, 0, 0});
  CHECK(reader.ask(Op::Create, 0, head) == status(Code::NotPermitted));
  CHECK(reader.ask(Op::Delete, 0) == status(Code::NotPermitted));
  CHECK(reader.ask(Op::Stats, 0) == protocol::kOk);
  CHECK_EQ(get(*honest, key(1))->hits(), 1u);  // the others saw nothing of it
}

TEST(random_messages_leave_the_daemon_as_it_was) {
  Daemon daemon(16 * kMiB, 256, 64);
  auto honest = daemon.client();
  put(*honest, key(1), 7);
  std::mt19937_64 random(5);
  std::optional<Raw> raw;
  for (int i = 0; i < 3000; ++i) {
    if (!raw || i % 50 == 0) {
      raw.emplace(daemon.path);
      CHECK(raw->attach() == protocol::kOk);
    }
    std::vector<uint8_t> message;
    auto op = static_cast<uint16_t>(1 + random() % static_cast<uint16_t>(Op::kLast));
    if (random() % 4 == 0) {
      constexpr Op kOfRegions[] = {Op::Publish, Op::TakeBack, Op::PublishPieces, Op::TakeBackPieces};
      op = static_cast<uint16_t>(kOfRegions[random() % 4]);
    }
    if (op == static_cast<uint16_t>(Op::Device))
      continue;  // a device may write until this process ends, which it would be right in
    const auto count = static_cast<uint32_t>(random() % 4 ? random() % 4 : random());
    protocol::append(message, protocol::Request{random() % 50 ? protocol::kMagic : 0, op, 0, count, 1});
    if (op == static_cast<uint16_t>(Op::Create) && random() % 2) {
      protocol::append(message, protocol::CreateHead{0, 35, static_cast<uint32_t>(random()), 0});
      for (uint32_t k = 0; k < std::min(count, 4u); ++k)
        protocol::append(message,
                         protocol::CreateItem{key(random() % 8 + 100), random() % 2, static_cast<uint32_t>(random() % 20), 0, 0,
                                              static_cast<uint32_t>(random() % 3 ? 0 : random() % 300)});
    } else if (op == static_cast<uint16_t>(Op::PublishPieces) && random() % 8) {
      protocol::append(message, protocol::RegionHead{0, 35, static_cast<uint32_t>(random() % 2), 0});
      std::vector<uint64_t> places;
      for (uint32_t k = 0; k < std::min(count, 4u); ++k) {
        const auto tokens = static_cast<uint32_t>(random() % 5),
                   pieces = static_cast<uint32_t>(random() % 8 ? tokens + 1 : random() % 4);
        protocol::append(message, protocol::PiecesItem{key(random() % 8 + 100), key(random() % 8 + 108), tokens, 0, pieces, 0});
        for (uint32_t p = 0; p < pieces; ++p) places.push_back(Extent{random() % 400 * kPageBytes, kPageBytes}.pack());
      }
      protocol::append(message, places);
    } else if ((op == static_cast<uint16_t>(Op::Publish) || op == static_cast<uint16_t>(Op::TakeBack) ||
                op == static_cast<uint16_t>(Op::TakeBackPieces)) &&
               random() % 8) {
      protocol::append(message, protocol::RegionHead{0, 35, static_cast<uint32_t>(random() % 2), 0});
      for (uint32_t k = 0; k < std::min(count, 4u); ++k) {
        if (op == static_cast<uint16_t>(Op::Publish))
          protocol::append(message, protocol::PublishItem{key(random() % 8 + 100), random() % 400 * kPageBytes,
                                                          static_cast<uint32_t>(random() % 10), 0, key(random() % 8 + 108)});
        else
          protocol::append(message, protocol::TakeBackItem{key(random() % 8 + 116), random() % 2,
                                                           static_cast<uint32_t>(random() % 40), 0, 1 + random() % 40});
      }
    } else {
      for (uint64_t k = random() % 64; k > 0; --k)
        protocol::append(message, static_cast<uint32_t>(random() % 3 ? random() % 4 : random()));
    }
    if (!raw->send(message) || !raw->answer()) raw.reset();
  }
  raw.reset();
  CHECK_EQ(get(*honest, key(1))->hits(), 1u);
  CHECK(eventually([&] { return daemon.stats().created + daemon.stats().quarantined == 0; }));
  daemon.rig.store->check_integrity();
}

TEST(a_client_that_does_not_read_is_dropped_and_delays_nobody) {
  Daemon daemon;
  auto honest = daemon.client();
  put(*honest, key(1), 7);
  Raw raw(daemon.path);
  CHECK(raw.attach() == protocol::kOk);
  std::vector<uint8_t> message, keys(kMaxKeysPerMessage * sizeof(Key), 1);
  protocol::append(message, protocol::Request{protocol::kMagic, static_cast<uint16_t>(Op::LookUp), 0, kMaxKeysPerMessage, 1});
  message.insert(message.end(), keys.begin(), keys.end());
  uint64_t sent = 0;
  while (sent < 10'000 && raw.send(message)) ++sent;  // until the daemon has had enough
  CHECK(sent < 10'000);
  CHECK_EQ(honest->touch(std::vector<Key>{key(1)}), 1u);
  CHECK(eventually([&] { return daemon.stats().sessions == 1; }));
}

// It cuts its page short and lets go of it, so that nothing is left of its session but the connection. A daemon that takes the
// session for granted there ends.
TEST(who_asks_on_behind_the_end_of_its_session_is_refused) {
  Daemon daemon;
  Raw raw(daemon.path);
  CHECK(raw.attach(64, protocol::kVersion, "test", true) ==
        protocol::kOk);  // its page goes with the descriptors it does not take
  for (const auto& entry : std::filesystem::directory_iterator(daemon.rig.segments.directory))
    if (entry.path().filename().string().starts_with("p.s.")) CHECK_EQ(::truncate(entry.path().c_str(), 0), 0);
  CHECK(eventually([&] { return daemon.rig.segments.session_files() == 1; }));  // the socket
  std::vector<uint8_t> terms, device, pins;
  protocol::append(terms, protocol::PinsOnTerms{0, 1000, 0});
  protocol::append(device, protocol::DeviceMemory{1, 0});
  protocol::append(pins, protocol::PinsWanted{8, 1});
  for (const auto& [op, body] : {std::pair(Op::PinTerms, terms), {Op::Device, device}, {Op::AllowPins, pins}}) {
    const auto answer = raw.ask(op, 1, body);
    CHECK(!answer || answer == protocol::kOk || answer == status(Code::FailedPrecondition));
  }
  daemon.client()->touch(std::vector<Key>{key(1)});
}

TEST(no_more_sessions_than_allowed_and_a_place_is_free_again) {
  Daemon daemon(16 * kMiB, 64, 3);
  auto a = daemon.client(), b = daemon.client();
  auto c = daemon.client();
  CHECK(thrown([&] { daemon.client(); }) == Code::Unavailable);
  CHECK(daemon.server->refused() > 0);
  c.reset();
  CHECK(eventually([&] { return !thrown([&] { daemon.client(); }); }));
  CHECK(thrown([&] {
          AttachOptions o{.socket_path = daemon.path + "x", .name = "test"};
          Attachment::make(o, nullptr);
        }) == Code::Unavailable);
}

TEST(a_peer_that_never_attaches_is_dropped) {
  Daemon daemon(16 * kMiB, 64, 64);
  auto honest = daemon.client();
  Raw silent(daemon.path);
  CHECK(!silent.answer());  // the daemon closes what has not attached in time
  CHECK_EQ(honest->touch(std::vector<Key>{key(1)}), 0u);
}

// Fails if who cannot be accepted is left in the queue: it would wait for ever, and the daemon would not sleep again.
TEST(a_daemon_without_descriptors_turns_clients_away_and_goes_on) {
  Daemon daemon;
  auto honest = daemon.client();
  CHECK_EQ(honest->touch(std::vector<Key>{key(1)}), 0u);  // the descriptors its attaching took for a moment are back
  rlimit before;
  CHECK(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  Fd unconnected(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  const rlimit low{128, before.rlim_max};
  CHECK(::setrlimit(RLIMIT_NOFILE, &low) == 0);
  std::vector<Fd> fill;
  for (int fd; (fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0;) fill.emplace_back(fd);
  CHECK(!fill.empty());
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::copy(daemon.path.begin(), daemon.path.end(), address.sun_path);
  const uint64_t refused = daemon.server->refused();
  CHECK(::connect(unconnected.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  CHECK(eventually([&] { return daemon.server->refused() == refused + 1; }));
  protocol::Reply said{};
  CHECK(::recv(unconnected.get(), &said, sizeof said, 0) == sizeof said && said.status == status(Code::Unavailable));
  CHECK(::recv(unconnected.get(), &said, sizeof said, 0) <= 0);
  CHECK_EQ(honest->touch(std::vector<Key>{key(1)}), 0u);  // served meanwhile
  fill.clear();
  CHECK(::setrlimit(RLIMIT_NOFILE, &before) == 0);
  CHECK(!thrown([&] { daemon.client(); }));
}

// Fails if the descriptor that is kept for turning clients away is not taken again, once another thread was sooner.
TEST(a_daemon_that_lost_its_spare_descriptor_takes_another) {
  Daemon daemon;
  auto honest = daemon.client();
  honest->touch(std::vector<Key>{key(1)});  // what its attach had open for a moment is closed by now
  rlimit before;
  CHECK(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  Fd first(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)), second(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  const rlimit low{128, before.rlim_max};
  CHECK(::setrlimit(RLIMIT_NOFILE, &low) == 0);
  std::vector<Fd> fill;
  for (int fd; (fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0;) fill.emplace_back(fd);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::copy(daemon.path.begin(), daemon.path.end(), address.sun_path);
  const auto turned_away = [&](const Fd& client) {
    const timeval limit{20, 0};
    ::setsockopt(client.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    CHECK(::connect(client.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    protocol::Reply said{};
    return ::recv(client.get(), &said, sizeof said, 0) == sizeof said && said.status == status(Code::Unavailable);
  };
  no_eventfd.store(true);
  CHECK(turned_away(first));
  no_eventfd.store(false);
  CHECK(turned_away(second));
  fill.clear();
  CHECK(::setrlimit(RLIMIT_NOFILE, &before) == 0);
  CHECK(!thrown([&] { daemon.client(); }));
}

// A late answer to another question, or none of this protocol: a client that took it for its own would write where it may not.
TEST(an_answer_that_fits_no_question_is_none) {
  Segments segments(kMiB, 16);
  const std::string path = segments.directory + "/socket";
  Fd listener(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  CHECK(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 && ::listen(listener.get(), 1) == 0);
  const auto refused = [&](auto&& change) {
    std::thread daemon([&] {
      const Fd peer(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      struct {
        protocol::Request request;
        protocol::Attach attach;
      } asked;
      CHECK(::recv(peer.get(), &asked, sizeof asked, 0) == sizeof asked);
      protocol::Reply reply{protocol::kMagic, asked.request.op, status(Code::NotPermitted), 0, asked.request.tag};
      const size_t length = change(reply);
      CHECK(::send(peer.get(), &reply, length, MSG_NOSIGNAL) == static_cast<ssize_t>(length));
    });
    const auto code = thrown([&] { Client({.socket_path = path, .name = "test"}, Client::Door::SharedMemory); });
    daemon.join();
    return code;
  };
  constexpr size_t kWhole = sizeof(protocol::Reply);
  CHECK(refused([](protocol::Reply&) { return kWhole; }) == Code::NotPermitted);  // as the daemon would
  CHECK(refused([](protocol::Reply& r) { return r.tag += 1, kWhole; }) == Code::Unavailable);
  CHECK(refused([](protocol::Reply& r) { return r.op += 1, kWhole; }) == Code::Unavailable);
  CHECK(refused([](protocol::Reply& r) { return r.magic ^= 1, kWhole; }) == Code::Unavailable);
  CHECK(refused([](protocol::Reply&) { return kWhole - 1; }) == Code::Unavailable);
}
