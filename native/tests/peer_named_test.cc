// Goal: the host that a client names for its blocks is asked before any other and without its word; a name that helps nobody
// costs nothing. Method: several servers and one tier in a process. Those that tell nothing are asked blindly, two of them at
// most, so a block that one of four has is found each time only where that one was named.
#include "core/peer/server.h"
#include "core/peer/tier.h"
#include "tests/check.h"
#include "tests/store_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {

constexpr uint32_t kPages = 3;
constexpr uint64_t kBlocks = 40;
const peer::Secret kSalt{7, 7, 7};

struct Host {
  explicit Host(const std::string& node) : server({.node = node, .address = "127.0.0.1", .peers = {"z"}}), at{node, "127.0.0.1"} {
    server.share(*rig.store, kSalt);
    server.start();
    at.port = server.port();
  }
  void fill(uint64_t number) { CHECK(rig.seal(rig.create(number, kPages).handle) == Done::Ok); }
  Rig rig{8 << 20, 256};
  peer::Server server;
  peer::Tier::Address at;
};

struct Hosts {
  explicit Hosts(size_t count, bool tell) {
    std::vector<peer::Tier::Address> addresses;
    for (size_t i = 0; i < count; ++i) {
      there.push_back(std::make_unique<Host>(std::string(1, static_cast<char>('a' + i))));
      there.back()->at.tells = tell;
      addresses.push_back(there.back()->at);
    }
    tier.emplace(*here.store, "z", kSalt, addresses);
    tier->start();
    CHECK(eventually([&] {
      for (const auto& peer : tier->stats())
        if (peer.state != "up" || (tell && !peer.complete)) return false;
      return true;
    }));
  }
  ~Hosts() {
    tier->stop();
    for (auto& host : there) host->server.stop();
    here.store->check_integrity();
  }
  Presence want(uint64_t number, const std::string& node = "") {
    const Key wanted = key(number);
    Wanting wanting;
    wanting.first = tier->named(node);
    return here.store->promote({&wanted, 1}, kDefaultPriority, wanting)[0];
  }
  uint64_t missing() {
    uint64_t out = 0;
    for (const auto& peer : tier->stats()) out += peer.missing;
    return out;
  }
  bool idle() {
    return eventually([&] {
      for (const auto& peer : tier->stats())
        if (peer.in_flight || peer.queued) return false;
      return true;
    });
  }

  Rig here{8 << 20, 256};
  std::vector<std::unique_ptr<Host>> there;
  std::optional<peer::Tier> tier;
};

}  // namespace

TEST(the_host_that_was_named_is_asked_first_and_nobody_else) {
  Hosts hosts(4, false);
  for (uint64_t i = 0; i < kBlocks; ++i) hosts.there[i % 4]->fill(i);
  for (uint64_t i = 0; i < kBlocks; ++i) hosts.want(i, hosts.there[i % 4]->at.node);
  for (uint64_t i = 0; i < kBlocks; ++i) CHECK(eventually([&] { return hosts.here.resident(i); }));
  CHECK_EQ(hosts.missing(), 0u);
  for (const auto& peer : hosts.tier->stats()) CHECK_EQ(peer.fetched, kBlocks / 4);
}

// Fails if a name is all that counts: what the named one has not, somebody else has.
TEST(others_are_asked_behind_it_and_where_it_is_none_or_down) {
  Hosts hosts(2, true);
  for (uint64_t i = 0; i < 3; ++i) hosts.there[0]->fill(i);
  CHECK(eventually([&] { return hosts.tier->stats()[0].held == 3; }));
  CHECK(hosts.want(0, "b") == Presence::Pending);
  CHECK(eventually([&] { return hosts.here.resident(0); }));
  CHECK_EQ(hosts.tier->stats()[1].missing, 1u);
  CHECK_EQ(hosts.tier->named("nobody"), 0u);
  CHECK(hosts.want(1, "nobody") == Presence::Pending);
  CHECK(eventually([&] { return hosts.here.resident(1); }));
  hosts.there[1]->server.stop();
  CHECK(eventually([&] { return hosts.tier->stats()[1].state == "down"; }));
  CHECK(hosts.want(2, "b") == Presence::Pending);
  CHECK(eventually([&] { return hosts.here.resident(2); }));
  CHECK_EQ(hosts.tier->stats()[1].missing, 1u);
}

// Fails if a key that somebody waits for already goes on waiting for anybody's word.
TEST(what_waits_for_a_word_is_asked_of_the_host_that_is_named_then) {
  Hosts hosts(2, true);
  for (uint64_t i = 0; i < kBlocks; ++i) {
    CHECK(hosts.want(i) == Presence::Pending);
    hosts.want(i, "a");
  }
  CHECK(eventually([&] { return hosts.tier->stats()[0].missing == kBlocks; }));
  CHECK_EQ(hosts.tier->stats()[1].missing, 0u);
}

// Fails if what nobody told of a moment ago is a miss for a second also where somebody says who has it; or if it is asked for
// again and again.
TEST(what_was_sought_in_vain_is_asked_of_the_host_that_is_named_then_and_once) {
  Hosts hosts(2, true);
  for (uint64_t i = 0; i < kBlocks; ++i) CHECK(hosts.want(i) == Presence::Pending);
  for (uint64_t i = 0; i < kBlocks; ++i) CHECK(eventually([&] { return hosts.want(i) == Presence::Missing; }));
  for (uint64_t i = 0; i < kBlocks; ++i) CHECK(hosts.want(i, "a") == Presence::Pending);
  CHECK(eventually([&] { return hosts.tier->stats()[0].missing == kBlocks; }));
  CHECK_EQ(hosts.tier->stats()[1].missing, 0u);
}

// Fails if one that was asked too soon is not asked again when it says that it has the block.
TEST(a_word_that_comes_behind_the_question_is_heard) {
  constexpr uint64_t kHoped = 20;
  Hosts hosts(1, true);
  uint64_t fetched = 0;
  for (uint64_t i = 0; i < kHoped; ++i) {
    hosts.want(i, "a");
    CHECK(eventually([&] { return hosts.missing() == i + 1; }));
    hosts.there[0]->fill(i);
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    while (!hosts.here.resident(i) && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    fetched += hosts.here.resident(i);
  }
  CHECK(fetched >= kHoped / 2);  // a word that comes later than it is waited for is no fault
}
