// Goal: a block that all want never makes a queue of all at one host, a look-up costs no more messages the more hosts there are,
// and one of a block that nobody has costs none. Method: the real policy in a simulation (hosts_simulation.h), and the parts of
// it by themselves.
#include "core/placement/policy.h"

#include <set>

#include "tests/check.h"
#include "tests/hosts_simulation.h"

using namespace kv;
using namespace kv::test;

namespace {

Key key(uint64_t number) {
  Key out{};
  for (auto& word : out.words) word = (number = (number + 1) * 0x9e3779b97f4a7c15ull);
  return out;
}

}  // namespace

TEST(a_prompt_that_all_want_makes_no_stampede) {
  for (const uint32_t hosts : {10u, 100u}) {
    const Outcome seen = Simulation({.hosts = hosts, .prompts_per_s = 0.5}).run();
    CHECK(seen.hot_copies > hosts * 0.99);
    CHECK(seen.most_copies_at_once <= peer::kMostCopiesAtOnce);
    CHECK(seen.worst_queue <= 32);  // 8 blocks, two copies of each, and other prompts
    CHECK(seen.hot_spread_s < seen.hot_alone_s * 16);
  }
}

// Fails if the bound above would hold without what keeps it.
TEST(without_admission_there_is_one) {
  const Outcome seen = Simulation({.hosts = 64, .prompts_per_s = 0, .admission = false}).run();
  CHECK(seen.worst_queue > 200);
}

TEST(a_look_up_costs_the_same_among_ten_hosts_and_a_hundred) {
  for (const uint32_t hosts : {10u, 100u}) {
    const Outcome seen = Simulation({.hosts = hosts, .hot = false}).run();
    CHECK(seen.of_nobody > 0);
    CHECK_EQ(seen.blind_asks, 0u);
    CHECK(seen.asks_per_lookup() < 1.5);
  }
}

TEST(hosts_that_come_and_go_and_slow_links_cost_no_more_than_time) {
  const Outcome seen = Simulation({.hosts = 50, .churn_per_s = 0.1, .slow_links = 0.2}).run();
  CHECK(seen.most_copies_at_once <= peer::kMostCopiesAtOnce);
  CHECK(seen.lost > 0);
  CHECK(seen.asks_per_lookup() < 4);
}

// Fails if a table that is as large as it may be is full for ever as soon as half of it was used, whatever has gone since: of
// three hosts with 240,000 blocks each nobody's silence proved anything any more, and each word went through a whole shard.
TEST(a_directory_that_cannot_grow_has_room_for_others_where_blocks_went) {
  constexpr uint64_t kMany = 720'000, kPeers = 3;
  peer::Directory directory;
  for (size_t peer = 0; peer < kPeers; ++peer) directory.completed(peer);
  for (uint64_t i = 0; i < kMany && directory.complete() == 7; ++i) {
    directory.tell(i % kPeers, mark_of(key(i), true));
    for (uint64_t gone = 1; gone <= 3; ++gone)
      for (const bool there : {true, false}) directory.tell(i % kPeers, mark_of(key(gone * kMany + i), there));
  }
  CHECK_EQ(directory.complete(), 7u);
  for (size_t peer = 0; peer < kPeers; ++peer) CHECK_EQ(directory.held(peer), kMany / kPeers);
  for (uint64_t i = 0; i < kMany; i += 1000) CHECK_EQ(directory.holders(key(i)), uint64_t{1} << i % kPeers);
  directory.forget(0);
  for (uint64_t i = 0; i < kMany; i += 1000) CHECK_EQ(directory.holders(key(i)), i % kPeers ? uint64_t{1} << i % kPeers : 0u);
}

TEST(a_directory_knows_what_it_was_told_and_forgets_one_peer) {
  peer::Directory directory;
  constexpr uint64_t kMany = 20'000;
  for (uint64_t i = 0; i < kMany; ++i) directory.tell(i % 3, mark_of(key(i), true));
  for (uint64_t i = 0; i < kMany; ++i) CHECK_EQ(directory.holders(key(i)), uint64_t{1} << i % 3);
  CHECK_EQ(directory.holders(key(kMany)), 0u);
  directory.completed(1);
  CHECK_EQ(directory.complete(), 2u);
  directory.tell(1, mark_of(key(0), true));
  CHECK_EQ(directory.holders(key(0)), 3u);
  directory.tell(0, mark_of(key(0), false));
  directory.tell(0, mark_of(key(0), false));  // twice: nothing more
  CHECK_EQ(directory.holders(key(0)), 2u);
  directory.forget(1);
  for (uint64_t i = 0; i < kMany; ++i) CHECK_EQ(directory.holders(key(i)), i % 3 == 1 || i == 0 ? 0u : uint64_t{1} << i % 3);
  CHECK_EQ(directory.held(1), 0u);
  CHECK_EQ(directory.complete(), 0u);
}

TEST(a_peer_that_tells_without_end_is_bounded_and_not_believed_to_be_silent_of_the_rest) {
  peer::Directory directory;
  for (uint64_t i = 0; i < peer::kMostHeld + 1000; ++i) directory.tell(7, mark_of(key(i), true));
  directory.completed(7);
  CHECK_EQ(directory.held(7), peer::kMostHeld);
  CHECK_EQ(directory.complete(), 0u);
  for (uint64_t i = 0; i < peer::kMostHeld; ++i) directory.tell(7, mark_of(key(i), false));
  for (uint64_t round = 0; round < 20; ++round)  // what comes and goes takes no room for ever
    for (uint64_t i = 0; i < 10'000; ++i) {
      directory.tell(8, mark_of(key(1'000'000 + round * 10'000 + i), true));
      directory.tell(8, mark_of(key(1'000'000 + round * 10'000 + i), false));
    }
  CHECK_EQ(directory.held(8), 0u);
}

TEST(the_less_loaded_of_those_that_have_it_is_asked_and_each_now_and_then) {
  std::set<size_t> asked;
  for (uint64_t turn = 1; turn < 500; ++turn)
    asked.insert(*peer::choose(0b10110, turn, [](size_t p) { return p == 1 ? 5.0 : 1.0; }));
  CHECK_EQ(asked.size(), 2u);
  CHECK(!asked.count(1));
  CHECK(!peer::choose(0, 1, [](size_t) { return 0.0; }));
}

TEST(who_is_turned_away_is_told_whom_it_was_sent_to) {
  peer::Admission admission;
  std::vector<std::string> instead;
  for (uint32_t i = 0; i < peer::kMostCopiesAtOnce; ++i) CHECK(admission.begin(key(1), std::to_string(i), instead));
  CHECK(instead.empty());
  CHECK(!admission.begin(key(1), "late", instead));
  CHECK_EQ(instead.size(), size_t{peer::kMostCopiesAtOnce});
  CHECK(admission.begin(key(2), "late", instead));
  admission.end(key(1));
  CHECK(admission.begin(key(1), "late", instead));
}
