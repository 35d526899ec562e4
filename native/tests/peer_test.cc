// Goal: blocks go from one store to another while both are used, and no thread of the tier or the server outlives it or touches
// what another owns. Method: two stores, a server and a tier in one process, so that the sanitizers see both ends (`make asan`).
#include <arpa/inet.h>
#include <pthread.h>
#include <sys/socket.h>

#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "core/peer/server.h"
#include "core/peer/tier.h"
#include "tests/check.h"
#include "tests/store_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {

constexpr uint64_t kBytes = 16 << 20;
constexpr uint32_t kPages = 3;
constexpr uint64_t kWanted = 150;  // fetched by several threads, in different orders

const peer::Secret kSalt{7, 7, 7};

// A store whose blocks hold bytes that follow from their numbers.
struct Host : Rig {
  Host() : Rig(kBytes, 4096), pool(segments.pool.get(), kBytes, true) {}
  Grant fill(uint64_t number) {
    const Granted granted = create(number, kPages);
    if (granted.status != Grant::Granted) return granted.status;
    std::memset(pool.data() + granted.extent.offset, static_cast<int>(number % 251), (kPages - 1) * kPageBytes);
    CHECK(seal(granted.handle) == Done::Ok);
    return Grant::Granted;
  }
  // As it was filled: read under a pin of the daemon's own.
  bool right(uint64_t number) {
    const auto job = store->begin_read(key(number));
    if (!job || !job->sealed) return false;
    const auto* at = reinterpret_cast<const uint8_t*>(pool.data() + job->extent.offset);
    bool same = true;
    for (uint64_t i = 0; i < (kPages - 1) * kPageBytes; ++i) same &= at[i] == number % 251;
    store->end_read(job->handle);
    return same;
  }
  Mapping pool;
};

std::unique_ptr<peer::Server> serve(Host& host, uint16_t port = 0) {
  auto server =
      std::make_unique<peer::Server>(peer::Server::Options{.node = "a", .address = "127.0.0.1", .port = port, .peers = {"b"}});
  server->share(*host.store, kSalt);
  server->start();
  return server;
}

std::unique_ptr<peer::Tier> tier_of(Host& host, uint16_t port, const peer::Secret& salt = kSalt) {
  auto tier = std::make_unique<peer::Tier>(*host.store, "b", salt, std::vector<peer::Tier::Address>{{"a", "127.0.0.1", port}});
  tier->start();
  return tier;
}

Presence promote(Host& host, uint64_t number) {
  const Key wanted = key(number);
  return host.store->promote({&wanted, 1}, kDefaultPriority)[0];
}

}  // namespace

TEST(blocks_are_fetched_by_many_threads_while_both_stores_are_used) {
  Host here, there;
  for (uint64_t i = 0; i < kWanted; ++i) CHECK(there.fill(i) == Grant::Granted);
  auto server = serve(there);
  auto tier = tier_of(here, server->port());
  here.store->attach_peers(tier.get());
  std::atomic<bool> over{false};
  std::vector<std::thread> others;
  for (Host* host : {&here, &there})
    others.emplace_back([&, host] {  // puts, removals and figures beside it, never enough to evict
      for (uint64_t i = 10'000; !over.load(); ++i) {
        host->fill(10'000 + i % 100);
        host->store->remove(key(10'000 + (i + 50) % 100));
        host->store->settle();
        CHECK(server->stats().connections <= 8);
        CHECK(tier->stats().size() == 1);
      }
    });
  std::vector<std::thread> askers;
  for (uint64_t number = 0; number < 3; ++number)
    askers.emplace_back([&, number] {
      for (uint64_t i = 0; i < kWanted; ++i) promote(here, (i * 7 + number * 50) % kWanted);
    });
  for (auto& asker : askers) asker.join();
  for (uint64_t i = 0; i < kWanted; ++i) CHECK(eventually([&] { return here.resident(i); }));
  over = true;
  for (auto& other : others) other.join();
  for (uint64_t i = 0; i < kWanted; ++i) CHECK(here.right(i));
  CHECK(tier->stats()[0].fetched >= kWanted);
  here.store->attach_peers(nullptr);
  tier->stop();
  server->stop();
  here.store->check_integrity();
  there.store->check_integrity();
}

// Fails if a connection's thread, a flight or a half filled block is left behind.
TEST(either_end_may_stop_in_the_middle_and_another_server_is_found_again) {
  Host here, there;
  for (uint64_t i = 0; i < kWanted; ++i) CHECK(there.fill(i) == Grant::Granted);
  auto server = serve(there);
  const uint16_t port = server->port();
  auto tier = tier_of(here, port);
  here.store->attach_peers(tier.get());
  for (int round = 0; round < 3; ++round) {
    for (uint64_t i = 0; i < kWanted; ++i) promote(here, i);
    server->stop();
    server.reset();
    CHECK(eventually([&] { return tier->stats()[0].in_flight == 0 && tier->stats()[0].queued == 0; }));
    server = serve(there, port);
    CHECK(eventually([&] { return tier->stats()[0].state == "up"; }));
  }
  for (uint64_t i = 0; i < kWanted; ++i) promote(here, i);
  here.store->attach_peers(nullptr);
  tier->stop();
  for (uint64_t i = 0; i < kWanted; ++i) CHECK(!here.resident(i) || here.right(i));
  CHECK_EQ(here.store->stats().created, 0u);
  here.store->check_integrity();
}

TEST(another_salt_gets_nothing) {
  Host here, there;
  CHECK(there.fill(1) == Grant::Granted);
  auto server = serve(there);
  auto tier = tier_of(here, server->port(), peer::Secret{8});
  here.store->attach_peers(tier.get());
  promote(here, 1);
  CHECK(eventually([&] { return server->stats().refused > 0; }));
  CHECK(!here.resident(1));
  here.store->attach_peers(nullptr);
}

// Fails if what a peer tells of while it is hoped for lies in a queue that nobody was woken for: the streams look by themselves
// every five seconds only, and find one in five within one. Word that comes too late is no fault, so half of them is enough.
TEST(a_block_that_is_told_of_while_it_is_hoped_for_is_fetched_at_once) {
  constexpr uint64_t kHoped = 30;
  Host here, there;
  auto server = serve(there);
  auto tier = tier_of(here, server->port());
  here.store->attach_peers(tier.get());
  CHECK(eventually([&] { return tier->stats()[0].complete != 0; }));
  uint64_t fetched = 0;
  for (uint64_t i = 0; i < kHoped; ++i) {
    CHECK(promote(here, i) == Presence::Pending);
    CHECK(there.fill(i) == Grant::Granted);
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    while (!here.resident(i) && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    fetched += here.resident(i);
  }
  CHECK(fetched >= kHoped / 2);
  here.store->attach_peers(nullptr);
  tier->stop();
}

// Fails if one that serves many models is taken for one that fills the table of layouts: its connection broke at the ninth.
TEST(a_peer_that_has_many_layouts_is_no_liar) {
  constexpr uint64_t kLayouts = 40;  // more than eight for one of its streams at least
  Host here, there;
  for (uint64_t i = 0; i < kLayouts; ++i) {
    const uint32_t id = there.store->register_layout(layout_blob(1, static_cast<uint32_t>(512 * (i + 1)), 4, 64));
    const CreateItem item{.key = key(i), .tokens = 1};
    const Granted granted = there.store->create({.owner = there.owner, .layout = id, .items = {&item, 1}})[0];
    CHECK(granted.status == Grant::Granted && there.seal(granted.handle) == Done::Ok);
  }
  auto server = serve(there);
  auto tier = tier_of(here, server->port());
  here.store->attach_peers(tier.get());
  for (uint64_t i = 0; i < kLayouts; ++i) CHECK(eventually([&] { return promote(here, i) == Presence::Resident; }));
  CHECK_EQ(tier->stats()[0].malformed, 0u);
  here.store->attach_peers(nullptr);
  tier->stop();
}

// Fails if who waits for a block that somebody had for a moment is not told that there is none: it would sleep as long as it may.
TEST(a_block_that_is_told_of_and_gone_at_once_is_waited_for_no_more) {
  constexpr uint64_t kHoped = 10;
  Host here;
  const Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in at{.sin_family = AF_INET, .sin_port = 0, .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
  socklen_t size = sizeof at;
  KV_INVARIANT(::bind(listener.get(), reinterpret_cast<sockaddr*>(&at), size) == 0 && ::listen(listener.get(), 16) == 0 &&
               ::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&at), &size) == 0);
  std::mutex mutex;
  std::optional<std::pair<peer::Channel*, uint32_t>> told;  // the connection on which it tells
  std::vector<std::jthread> visits;
  const auto holds = [](peer::Channel& channel, uint32_t request, std::vector<uint64_t> marks) {
    channel.put({.kind = static_cast<uint16_t>(peer::Kind::Holds), .request = request, .layer = 1},
                std::as_bytes(std::span(marks)));
    channel.flush();
  };
  std::jthread accepting([&] {
    for (int visit = 0; visit < 5; ++visit)  // four streams, and one that is told
      visits.emplace_back([&, socket = ::accept(listener.get(), nullptr, nullptr)] {
        try {
          peer::Channel channel{Fd(socket)};
          const std::shared_ptr<void> gone(nullptr, [&](void*) {
            std::lock_guard lock(mutex);
            if (told && told->first == &channel) told.reset();
          });
          peer::admit(channel, "a", [](const std::string&, const std::string&) { return std::optional(kSalt); });
          for (;;) {
            const peer::Frame head = channel.take_head(-1);
            channel.skip(head.bytes);
            if (head.kind == static_cast<uint16_t>(peer::Kind::Watch)) {
              holds(channel, head.request, {});
              std::lock_guard lock(mutex);
              told.emplace(&channel, head.request);
            } else {
              std::lock_guard lock(mutex);
              channel.put({.kind = static_cast<uint16_t>(peer::Kind::Pong), .request = head.request}, {});
              channel.flush();
            }
          }
        } catch (const peer::Broken&) {
          // The tier has ended.
        }
      });
  });
  auto tier = tier_of(here, ntohs(at.sin_port));
  here.store->attach_peers(tier.get());
  CHECK(eventually([&] { return tier->stats()[0].complete != 0; }));
  CHECK(eventually([&] { return std::lock_guard(mutex), told.has_value(); }));
  const std::atomic<uint64_t>& ended = StoreTest::progress(*here.store, here.store->options().max_blocks);
  for (uint64_t i = 0; i < kHoped; ++i) {
    const uint64_t before = ended.load();
    CHECK(promote(here, i) == Presence::Pending);
    {
      std::lock_guard lock(mutex);  // it ends with the tier, not before
      if (!CHECK(told.has_value())) break;
      holds(*told->first, told->second, {mark_of(key(i), true), mark_of(key(i), false)});
    }
    CHECK(eventually([&] { return promote(here, i) == Presence::Missing; }));
    const bool is_told = eventually([&] { return ended.load() != before; });
    CHECK(is_told);
    if (!is_told) break;  // the connection goes meanwhile
  }
  here.store->attach_peers(nullptr);
  tier->stop();
  ::shutdown(listener.get(), SHUT_RDWR);
  accepting.join();
}

namespace {
// While it lives no thread can be had, for no memory is as large as its stack would be.
struct NoThreads {
  NoThreads() {
    pthread_attr_t none;
    KV_INVARIANT(::pthread_getattr_default_np(&usual) == 0 && ::pthread_attr_init(&none) == 0);
    KV_INVARIANT(::pthread_attr_setstacksize(&none, size_t{1} << 46) == 0 && ::pthread_setattr_default_np(&none) == 0);
  }
  ~NoThreads() { KV_INVARIANT(::pthread_setattr_default_np(&usual) == 0); }
  pthread_attr_t usual;
};
}  // namespace

// Fails if a start that found no thread cannot be taken back: the daemon ended by a signal, or with its pool still held.
TEST(a_tier_that_found_no_thread_at_its_start_ends) {
  Host here;
  auto tier = std::make_unique<peer::Tier>(*here.store, "b", kSalt, std::vector<peer::Tier::Address>{{"a", "127.0.0.1", 1}});
  bool refused = false, ended = true;
  try {
    const NoThreads none;
    tier->start();
  } catch (const std::system_error&) {
    refused = true;
  }
  CHECK(refused);
  try {
    tier->stop();
  } catch (const std::system_error&) {
    ended = false;
  }
  CHECK(ended);
  CHECK(promote(here, 1) == Presence::Missing);
}

// Fails if a block for which there is no memory is asked for again by each look: all of it came, to nowhere, over and over.
TEST(what_finds_no_memory_here_is_a_miss_and_not_fetched_again_at_once) {
  Host here, there;
  CHECK(there.fill(1) == Grant::Granted);
  auto server = serve(there);
  auto tier = tier_of(here, server->port());
  here.store->attach_peers(tier.get());
  CHECK(eventually([&] { return tier->stats()[0].held == 1; }));
  for (uint64_t i = 10; here.create(i, kPages).status == Grant::Granted; ++i) continue;
  CHECK(promote(here, 1) == Presence::Pending);
  CHECK(eventually([&] { return tier->stats()[0].in_flight + tier->stats()[0].queued == 0; }));
  CHECK_EQ(tier->stats()[0].no_space, 1u);
  CHECK_EQ(tier->stats()[0].needless, 0u);
  here.store->attach_peers(nullptr);
  tier->stop();
}

// Fails if one for which there was no thread is asked all the same: what waits in its queue waits for ever.
TEST(who_joins_while_no_thread_is_to_be_had_joins_with_the_next_word) {
  Host here, there;
  CHECK(there.fill(1) == Grant::Granted);
  auto server = serve(there);
  auto tier = std::make_unique<peer::Tier>(*here.store, "b", kSalt, std::vector<peer::Tier::Address>{});
  tier->start();
  here.store->attach_peers(tier.get());
  const peer::Tier::Address at{"a", "127.0.0.1", server->port()};
  bool refused = false;
  try {
    const NoThreads none;
    tier->join(at);
  } catch (const std::system_error&) {
    refused = true;
  }
  CHECK(refused);
  CHECK(promote(here, 1) == Presence::Missing);
  CHECK(tier->join(at));
  CHECK(eventually([&] { return promote(here, 1) == Presence::Resident; }));
  here.store->attach_peers(nullptr);
  tier->stop();
}

// Fails if what was asked of one that left is in a queue that nobody reads, or a slot that is given away keeps a word of who had
// it.
TEST(peers_join_and_leave_while_blocks_are_fetched) {
  Host here, there;
  for (uint64_t i = 0; i < kWanted; ++i) CHECK(there.fill(i) == Grant::Granted);
  auto server = serve(there);
  auto tier = std::make_unique<peer::Tier>(*here.store, "b", kSalt, std::vector<peer::Tier::Address>{});
  tier->start();
  here.store->attach_peers(tier.get());
  CHECK(promote(here, 0) == Presence::Missing);
  for (int round = 0; round < 5; ++round) {
    CHECK(tier->join({"a", "127.0.0.1", server->port()}));
    CHECK(eventually([&] { return tier->stats()[0].state == "up" && tier->stats()[0].complete; }));
    for (uint64_t i = 0; i < kWanted; ++i) promote(here, i);
    tier->leave("a");
    CHECK(tier->stats().empty());
    CHECK(eventually([&] { return here.store->stats().created == 0; }));
    CHECK(eventually([&] { return server->stats().connections == 0; }));
    CHECK(promote(here, 10'000) == Presence::Missing);
    for (uint64_t i = 0; i < kWanted; ++i) CHECK(!here.resident(i) || here.right(i));
    for (uint64_t i = 0; i < kWanted; ++i) here.store->remove(key(i));
    here.store->settle();
  }
  here.store->attach_peers(nullptr);
  tier->stop();
  here.store->check_integrity();
}

TEST(the_slot_of_one_that_left_is_given_to_the_next_and_there_are_no_more_than_there_may_be) {
  Host here, there;
  for (uint64_t i = 0; i < kWanted; ++i) CHECK(there.fill(i) == Grant::Granted);
  auto server = serve(there);
  auto tier = std::make_unique<peer::Tier>(*here.store, "b", kSalt, std::vector<peer::Tier::Address>{});
  tier->start();
  here.store->attach_peers(tier.get());
  for (size_t i = 0; i < peer::kMaxPeers; ++i) CHECK(tier->join({std::string(1, 'x').append(std::to_string(i)), "127.0.0.1", 1}));
  CHECK(!tier->join({"a", "127.0.0.1", server->port()}));
  tier->leave("x7");
  CHECK(eventually([&] { return tier->join({"a", "127.0.0.1", server->port()}); }));
  CHECK_EQ(tier->stats().size(), peer::kMaxPeers);
  CHECK(eventually([&] { return tier->stats()[7].node == "a" && tier->stats()[7].state == "up" && tier->stats()[7].complete; }));
  for (uint64_t i = 0; i < kWanted; ++i) {
    promote(here, i);
    CHECK(eventually([&] { return here.resident(i); }));
  }
  CHECK(tier->join({"x3", "127.0.0.1", server->port()}));  // at another address, where somebody else answers
  CHECK(eventually([&] { return tier->stats()[3].refused > 0; }));
  here.store->attach_peers(nullptr);
  tier->stop();
}

TEST(who_is_welcome_may_read_and_nobody_else) {
  Host here, there;
  CHECK(there.fill(1) == Grant::Granted && there.fill(2) == Grant::Granted);
  auto server = serve(there);
  auto tier =
      std::make_unique<peer::Tier>(*here.store, "c", kSalt, std::vector<peer::Tier::Address>{{"a", "127.0.0.1", server->port()}});
  tier->start();
  here.store->attach_peers(tier.get());
  CHECK(eventually([&] { return server->stats().refused > 0; }));
  server->welcome({"c"});
  CHECK(eventually([&] { return tier->stats()[0].state == "up"; }));
  promote(here, 1);
  CHECK(eventually([&] { return here.resident(1); }));
  const uint64_t refused = server->stats().refused;
  server->welcome({});
  CHECK(eventually([&] { return server->stats().refused > refused; }));  // the open connection ends, and no other comes
  CHECK(eventually([&] { return tier->stats()[0].state != "up"; }));
  here.store->attach_peers(nullptr);
  tier->stop();
}
