// Goal: the session socket serves many, believes none and waits for none. Method: a SessionServer and Clients in one process, raw
// sockets for what no client would send, and forked processes for deaths.
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <random>
#include <thread>

#include "core/client.h"
#include "core/protocol.h"
#include "core/session_server.h"
#include "tests/check.h"
#include "tests/store_fixture.h"

using namespace kv;
using namespace kv::test;
using protocol::Op;

namespace {

constexpr uint64_t kMiB = 1 << 20;

struct Daemon {
  explicit Daemon(uint64_t capacity = 16 * kMiB, uint32_t blocks = 256, uint32_t max_sessions = 16)
      : rig(capacity, blocks), sessions(max_sessions) {
    path = rig.segments.directory + "/socket";
    start();
  }
  ~Daemon() { stop(); }
  void start() {
    server =
        std::make_unique<SessionServer>(SessionServer::Options{path, sessions, 4096, {}}, std::vector<Store*>{rig.store.get()});
    server->start();
  }
  void stop() { server.reset(); }
  void restart() {
    stop();
    rig.restart();
    start();
  }
  std::unique_ptr<Client> client(uint32_t max_pins = 256) {
    return std::make_unique<Client>(AttachOptions{.socket_path = path, .name = "test", .max_pins = max_pins},
                                    Client::Door::SharedMemory);
  }
  Stats stats() { return rig.store->stats(); }

  Rig rig;
  uint32_t sessions;
  std::string path;
  std::unique_ptr<SessionServer> server;
};

std::shared_ptr<Grants> create(Client& client, std::span<const Key> keys, uint32_t tokens = 1) {
  const std::vector<uint32_t> counts(keys.size(), tokens);
  return client.create({.keys = keys, .token_counts = counts, .layout = 0});
}
void put(Client& client, const Key& k, uint8_t stamp, uint32_t tokens = 1) {
  auto grants = create(client, {&k, 1}, tokens);
  if (!CHECK(grants->item(0).open)) return;
  std::memset(grants->bytes(0), stamp, tokens * kPageBytes);
  const size_t all[] = {0};
  grants->seal(all);
}
std::shared_ptr<Batch> get(Client& client, const Key& k, bool follow = false) { return client.get({&k, 1}, follow); }

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
    std::strncpy(wanted.name, name, sizeof wanted.name);
    std::vector<uint8_t> body;
    protocol::append(body, wanted);
    return ask(Op::Attach, 1, body);
  }
  Fd fd;
};

constexpr uint16_t status(Code code) { return static_cast<uint16_t>(1 + static_cast<int>(code)); }

}  // namespace

TEST(a_block_goes_from_one_client_to_another) {
  Daemon daemon;
  auto writer = daemon.client(), reader = daemon.client();
  const Key keys[] = {key(1), key(2), key(3)};
  auto grants = create(*writer, keys, 2);
  CHECK(reader->lookup(keys) == std::vector<uint8_t>(3, static_cast<uint8_t>(Presence::Pending)));
  CHECK_EQ(get(*reader, keys[0])->hits(), 0u);  // unsealed: found by nobody but a follower
  CHECK_EQ(get(*reader, keys[0], true)->hits(), 1u);
  for (size_t i = 0; i < 3; ++i) std::memset(grants->bytes(i), static_cast<int>(i + 1), 2 * kPageBytes);
  const size_t two[] = {0, 1};
  grants->seal(two);
  CHECK(reader->lookup(keys) == (std::vector<uint8_t>{2, 2, 1}));  // at once, through every door
  auto batch = reader->get(keys, false);
  CHECK_EQ(batch->hits(), 2u);
  for (size_t i = 0; i < 2; ++i) CHECK_EQ(static_cast<int>(batch->bytes(i)[2 * kPageBytes - 1]), static_cast<int>(i + 1));
  CHECK_EQ(daemon.stats().pins, 2u);
  CHECK_EQ(writer->remove(keys), 2u);
  CHECK_EQ(daemon.stats().zombies, 2u);  // pinned
  CHECK_EQ(static_cast<int>(batch->bytes(1)[0]), 2);
  batch->close();
  CHECK(eventually([&] { return daemon.stats().zombies == 0; }));
  grants.reset();  // dropped without a word: aborted
  CHECK_EQ(daemon.stats().created, 0u);
  daemon.rig.store->check_integrity();
}

TEST(layers_are_followed_as_they_come) {
  Daemon daemon;
  const uint32_t layout = daemon.rig.store->register_layout(layout_blob(3, 512, 8));
  auto writer = daemon.client(), reader = daemon.client();
  const Key keys[] = {key(1), key(2)};
  const uint32_t counts[] = {8, 8};
  auto grants = writer->create({.keys = keys, .token_counts = counts, .layout = layout});
  auto batch = reader->get(keys, true);
  CHECK_EQ(batch->hits(), 2u);
  CHECK(thrown([&] { batch->wait_layer(0, 0, deadline_in(0.01)); }) == Code::DeadlineExceeded);
  CHECK(thrown([&] { batch->wait_layer(0, 3, deadline_in(0)); }) == Code::InvalidArgument);
  CHECK(thrown([&] { grants->mark_layer(0, 1); }) == Code::InvalidArgument);  // in order
  std::thread slow([&] {
    for (uint32_t layer = 0; layer < 3; ++layer) {
      std::memset(grants->bytes(0) + layer * 4096, static_cast<int>(layer + 1), 4096);
      grants->mark_layer(0, layer);
    }
    const size_t first[] = {0}, second[] = {1};
    grants->mark_layer(1, 0);
    grants->abort(second);
    grants->seal(first);
  });
  for (uint32_t layer = 0; layer < 3; ++layer) {
    batch->wait_layer(0, layer, deadline_in(60));
    CHECK_EQ(static_cast<int>(batch->bytes(0)[layer * 4096 + 4095]), static_cast<int>(layer + 1));
  }
  CHECK(thrown([&] { batch->wait_layer(1, 2, deadline_in(60)); }) == Code::BlockLost);  // at once, not after a minute
  slow.join();
  batch->wait_layer(0, 2, deadline_in(0));
  CHECK(batch->sealed(0));
}

TEST(who_waits_for_another_writer_is_told_its_end) {
  Daemon daemon;
  auto a = daemon.client(), b = daemon.client();
  const Key keys[] = {key(1), key(2)};
  auto mine = create(*a, keys), theirs = create(*b, keys);
  CHECK(theirs->item(0).status == Grant::Pending && theirs->item(1).status == Grant::Pending);
  CHECK(!theirs->wait_pending(deadline_in(0.01)));
  std::thread ender([&] {
    const size_t first[] = {0}, second[] = {1};
    mine->seal(first);
    mine->abort(second);
  });
  CHECK(theirs->wait_pending(deadline_in(60)));
  ender.join();
  CHECK(theirs->item(0).status == Grant::Exists);
  CHECK(theirs->item(1).status == Grant::Granted);  // the key is ours now
}

TEST(batches_over_a_message_and_a_seal_on_the_way) {
  Daemon daemon(64 * kMiB, 4096);
  auto client = daemon.client(4096);
  std::vector<Key> keys;
  for (uint64_t i = 0; i < 2500; ++i) keys.push_back(key(i));
  auto grants = create(*client, keys);
  std::vector<size_t> open = grants->open_items();
  CHECK_EQ(open.size(), keys.size());
  // One is lost in the first message: the others are sealed all the same.
  CHECK(daemon.rig.store->abort(client->attachment()->session(), grants->item(5).handle) == Done::Ok);
  CHECK(thrown([&] { grants->seal(open); }) == Code::BlockLost);
  const auto states = client->lookup(keys);
  for (size_t i = 0; i < keys.size(); ++i) CHECK_EQ(static_cast<int>(states[i]), i == 5 ? 0 : 2);
  CHECK_EQ(client->get(keys, false)->hits(), keys.size() - 1);
  CHECK_EQ(daemon.stats().created, 0u);
  const Key next = key(9999), more = key(10000);
  auto first = create(*client, {&next, 1});
  const uint32_t one[] = {1};
  auto second = client->create({.keys = {&more, 1}, .token_counts = one, .layout = 0, .sealing = first.get()});
  CHECK_EQ(static_cast<int>(client->lookup({&next, 1})[0]), 2);
  CHECK_EQ(client->remove(keys), keys.size() - 1);
}

TEST(pins_run_out_as_an_error_of_the_item_and_not_as_a_miss) {
  Daemon daemon;
  auto client = daemon.client(4);
  std::vector<Key> keys;
  for (uint64_t i = 0; i < 6; ++i) put(*client, key(i), 1), keys.push_back(key(i));
  auto batch = client->get(keys, false);
  for (size_t i = 0; i < 6; ++i) CHECK(batch->item(i).state == (i < 4 ? ItemState::Hit : ItemState::Exhausted));
  batch->hold(0);  // an exported view
  batch->close();
  CHECK_EQ(daemon.stats().pins, 1u);
  batch->let_go(0);
  CHECK_EQ(daemon.stats().pins, 0u);
  CHECK(thrown([&] { batch->hold(1); }) == Code::Closed);
}

TEST(malformed_messages_are_answered_or_end_their_own_session) {
  Daemon daemon;
  auto honest = daemon.client();
  put(*honest, key(1), 7);
  Raw raw(daemon.path);
  CHECK(raw.ask(Op::Stats, 0) == status(Code::FailedPrecondition));  // attach first
  CHECK(raw.attach(64, protocol::kVersion + 1) == status(Code::IncompatibleVersion));
  CHECK(raw.attach(0) == status(Code::InvalidArgument));
  CHECK(raw.attach(~0u) == status(Code::InvalidArgument));
  CHECK(raw.attach(64, protocol::kVersion, "another") == status(Code::NotFound));
  CHECK(raw.ask(Op::Attach, 1) == status(Code::InvalidArgument));
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
    const auto op = static_cast<uint16_t>(1 + random() % 10);
    const auto count = static_cast<uint32_t>(random() % 4 ? random() % 4 : random());
    protocol::append(message, protocol::Request{random() % 50 ? protocol::kMagic : 0, op, 0, count, 1});
    if (op == static_cast<uint16_t>(Op::Create) && random() % 2) {
      protocol::append(message, protocol::CreateHead{0, 35, static_cast<uint32_t>(random()), 0});
      for (uint32_t k = 0; k < std::min(count, 4u); ++k)
        protocol::append(message,
                         protocol::CreateItem{key(random() % 8 + 100), random(), static_cast<uint32_t>(random() % 20), 0, 0, 0});
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

// A killed process: its socket ends and its pidfd is ready, in any order, and both for one session; the neighbour that connects
// at that moment must not be taken for it. (It was: a number freed and given anew within one batch of events.)
TEST(deaths_are_noticed_and_hit_nobody_else) {
  Daemon daemon(16 * kMiB, 256, 64);
  auto follower = daemon.client();
  for (uint64_t round = 0; round < 25; ++round) {
    int ready[2];
    CHECK(::pipe(ready) == 0);
    const pid_t child = ::fork();
    if (child == 0) {
      auto client = daemon.client();
      put(*client, key(1000 + round), 3);
      const Key unsealed = key(2000 + round);
      auto grants = create(*client, {&unsealed, 1});
      auto held = get(*client, key(1000 + round));
      CHECK(::write(ready[1], "x", 1) == 1);
      for (;;) ::pause();
    }
    char byte;
    CHECK(::read(ready[0], &byte, 1) == 1);
    ::close(ready[0]), ::close(ready[1]);
    auto batch = get(*follower, key(2000 + round), true);
    CHECK_EQ(batch->hits(), 1u);
    ::kill(child, SIGKILL);
    auto neighbour = daemon.client();
    CHECK(thrown([&] { batch->wait_layer(0, 0, deadline_in(60)); }) == Code::BlockLost);
    batch->close();
    ::waitpid(child, nullptr, 0);
    CHECK(eventually([&] { return daemon.stats().quarantined + daemon.stats().zombies + daemon.stats().pins == 0; }));
    CHECK_EQ(neighbour->touch(std::vector<Key>{key(1000 + round)}), 1u);
  }
  daemon.rig.store->check_integrity();
}

TEST(a_restarted_daemon_is_resumed_and_nothing_is_lost) {
  Daemon daemon;
  auto client = daemon.client();
  put(*client, key(1), 7);
  auto held = get(*client, key(1));
  const Key unsealed = key(2);
  auto grants = create(*client, {&unsealed, 1});
  const uint32_t session = client->attachment()->session();
  daemon.stop();
  CHECK_EQ(get(*client, key(1))->hits(), 1u);  // while the daemon is down, gets go on
  const size_t all[] = {0};
  CHECK(thrown([&] { grants->seal(all); }) == Code::Detached);
  CHECK(thrown([&] { client->reattach(); }) == Code::Unavailable);
  daemon.rig.restart();
  daemon.start();
  CHECK(thrown([&] { get(*client, key(1)); }) == Code::Detached);  // another epoch
  CHECK_EQ(daemon.stats().quarantined, 1u);
  client->reattach();
  CHECK_EQ(client->attachment()->session(), session);
  CHECK(eventually([&] { return daemon.stats().quarantined == 0; }));  // its writer said that it has stopped
  CHECK_EQ(static_cast<int>(held->bytes(0)[100]), 7);
  CHECK_EQ(get(*client, key(1))->hits(), 1u);
  CHECK_EQ(client->remove(std::vector<Key>{key(1)}), 1u);
  CHECK_EQ(daemon.stats().zombies, 1u);  // held from before the restart
  held->close();
  CHECK(eventually([&] { return daemon.stats().used_bytes == 0; }));
  daemon.rig.store->check_integrity();
}

// A handle inherited through fork does nothing in the child. Fails if let_go() clears the pin of a foreign page.
TEST(a_forked_child_clears_no_pin_of_its_parents) {
  Daemon daemon;
  auto client = daemon.client();
  put(*client, key(1), 7);
  auto batch = get(*client, key(1));
  const Key unsealed = key(2);
  auto grants = create(*client, {&unsealed, 1});
  const pid_t child = ::fork();
  if (child == 0) {
    const bool refused = thrown([&] { get(*client, key(1)); }) == Code::Detached &&
                         thrown([&] { client->touch(std::vector<Key>{key(1)}); }) == Code::Detached;
    batch->close();
    batch.reset(), grants.reset(), client.reset();
    auto own = daemon.client();  // the child attaches anew
    const bool served = get(*own, key(1))->hits() == 1;
    own.reset();
    ::_exit(refused && served ? 0 : 1);
  }
  int code = 0;
  ::waitpid(child, &code, 0);
  CHECK_EQ(code, 0);
  CHECK_EQ(daemon.stats().pins, 1u);
  CHECK_EQ(daemon.stats().created, 1u);
  const size_t all[] = {0};
  grants->seal(all);
  CHECK_EQ(client->touch(std::vector<Key>{key(2)}), 1u);
}

TEST(a_peer_that_never_attaches_is_dropped) {
  Daemon daemon(16 * kMiB, 64, 64);
  auto honest = daemon.client();
  Raw silent(daemon.path);
  CHECK(!silent.answer());  // the daemon closes what has not attached in time
  CHECK_EQ(honest->touch(std::vector<Key>{key(1)}), 0u);
}

TEST(a_closed_client_answers_closed_and_gives_up_its_writes) {
  Daemon daemon;
  auto client = daemon.client();
  put(*client, key(1), 7);
  auto batch = get(*client, key(1));
  client->close();
  client->close();
  CHECK(thrown([&] { get(*client, key(1)); }) == Code::Closed);
  CHECK_EQ(static_cast<int>(batch->bytes(0)[5]), 7);  // a view outlives the client
  CHECK_EQ(daemon.rig.store->remove(key(1)), true);
  daemon.rig.store->settle();
  CHECK_EQ(daemon.stats().zombies, 1u);
  batch.reset();
  CHECK(eventually([&] { return daemon.stats().used_bytes == 0; }));
}
