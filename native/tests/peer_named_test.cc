// Goal: the host that a client names for its blocks is asked before any other and without its word; a name that helps nobody
// costs nothing. Method: several servers and one tier in a process. Those that tell nothing are asked blindly, two of them at
// most, so a block that one of four has is found each time only where that one was named.
#include "tests/peer_hosts.h"

using namespace kv;
using namespace kv::test;
using PeerStats = peer::Tier::PeerStats;

namespace {
constexpr uint32_t kPages = 3;
constexpr uint64_t kBlocks = 40;
}  // namespace

TEST(the_host_that_was_named_is_asked_first_and_nobody_else) {
  FetchingHost hosts(4, false);
  for (uint64_t i = 0; i < kBlocks; ++i) hosts.there[i % 4]->fill(i, kPages);
  for (uint64_t i = 0; i < kBlocks; ++i) hosts.want(i, hosts.there[i % 4]->at.node);
  for (uint64_t i = 0; i < kBlocks; ++i) CHECK(eventually([&] { return hosts.here.resident(i); }));
  CHECK_EQ(hosts.sum(&PeerStats::missing), 0u);
  for (const auto& peer : hosts.tier->stats()) CHECK_EQ(peer.fetched, kBlocks / 4);
}

// Fails if a name is all that counts: what the named one has not, somebody else has.
TEST(others_are_asked_behind_it_and_where_it_is_none_or_down) {
  FetchingHost hosts(2);
  for (uint64_t i = 0; i < 3; ++i) hosts.there[0]->fill(i, kPages);
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
  FetchingHost hosts(2);
  for (uint64_t i = 0; i < kBlocks; ++i) {
    CHECK(hosts.want(i) == Presence::Pending);
    hosts.want(i, "a");
  }
  CHECK(eventually([&] { return hosts.tier->stats()[0].missing == kBlocks; }));
  CHECK_EQ(hosts.tier->stats()[1].missing, 0u);
}

// Fails if what nobody told of a moment ago is a miss for a second also where somebody says who has it.
TEST(what_was_sought_in_vain_is_asked_of_the_host_that_is_named_then) {
  FetchingHost hosts(2);
  for (uint64_t i = 0; i < kBlocks; ++i) CHECK(hosts.want(i) == Presence::Pending);
  for (uint64_t i = 0; i < kBlocks; ++i) CHECK(eventually([&] { return hosts.want(i) == Presence::Missing; }));
  for (uint64_t i = 0; i < kBlocks; ++i) CHECK(hosts.want(i, "a") == Presence::Pending);
  CHECK(eventually([&] { return hosts.tier->stats()[0].missing == kBlocks; }));
  CHECK_EQ(hosts.tier->stats()[1].missing, 0u);
}

// Fails if one that was asked too soon is not asked again when it says that it has the block. Word that comes later than it is
// waited for is no fault, so half of them is enough.
TEST(a_word_that_comes_behind_the_question_is_heard) {
  constexpr uint64_t kHoped = 20;
  FetchingHost hosts(1);
  uint64_t fetched = 0;
  for (uint64_t i = 0; i < kHoped; ++i) {
    hosts.want(i, "a");
    CHECK(eventually([&] { return hosts.sum(&PeerStats::missing) == i + 1; }));
    hosts.there[0]->fill(i, kPages);
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    while (!hosts.here.resident(i) && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    fetched += hosts.here.resident(i);
  }
  CHECK(fetched >= kHoped / 2);
}
