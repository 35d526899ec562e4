// Goal: the memory of blocks on their way here is bounded, of one peer and of all; what is beyond waits and comes, and none is
// a miss for it. Method: blocks that their writers hold open there, so that what is on its way stays so until the test says;
// a pool that they would not fit in.
#include "core/placement/in_flight.h"

#include "tests/peer_hosts.h"

using namespace kv;
using namespace kv::test;
using PeerStats = peer::Tier::PeerStats;

namespace {

constexpr uint64_t kPool = 8 << 20, kOfOne = kPool / 2, kOfAll = kPool / 4 * 3;
constexpr uint32_t kPages = 128;  // of a block
constexpr uint64_t kBlock = kPages * kPageBytes, kMost = kOfOne / kBlock;

// Blocks of these numbers are open there.
std::vector<Handle> begin(ServingHost& there, uint64_t first, uint64_t count) {
  std::vector<Handle> out;
  for (uint64_t i = 0; i < count; ++i) out.push_back(there.rig.create(first + i, kPages).handle);
  return out;
}

void seal(ServingHost& there, const std::vector<Handle>& handles) {
  for (const Handle& handle : handles) CHECK(there.rig.seal(handle) == Done::Ok);
}

void want_all(FetchingHost& hosts, uint64_t first, uint64_t count) {
  CHECK(eventually([&] {  // word of them may be on its way
    for (uint64_t i = 0; i < count; ++i)
      if (!hosts.tier->known(key(first + i))) return false;
    return true;
  }));
  std::vector<Key> keys;
  for (uint64_t i = 0; i < count; ++i) keys.push_back(key(first + i));
  for (const Presence there : hosts.here.store->promote(keys, kDefaultPriority)) CHECK(there == Presence::Pending);
}

void come_all(FetchingHost& hosts, uint64_t fetched) {
  CHECK(eventually([&] { return hosts.sum(&PeerStats::fetched) == fetched; }));
  CHECK_EQ(hosts.sum(&PeerStats::no_space) + hosts.sum(&PeerStats::failed), 0u);
  CHECK(eventually([&] { return hosts.sum(&PeerStats::bytes_in_flight) == 0; }));
}

// One sealed block of so many pages, so that it is known how large they are.
void measure(FetchingHost& hosts, size_t peer, uint64_t number, uint32_t pages) {
  hosts.there[peer]->fill(number, pages);
  want_all(hosts, number, 1);
  CHECK(eventually([&] { return hosts.here.resident(number) && !hosts.sum(&PeerStats::in_flight); }));
}

}  // namespace

TEST(what_is_taken_is_within_both_bounds_or_alone) {
  peer::InFlight all(100), first(60, &all), second(60, &all);
  CHECK(first.take(60) && !first.take(1));
  CHECK(second.take(40) && !second.take(1) && second.bytes() == 40 && all.bytes() == 100);
  first.give(60);
  CHECK(!first.take(61) && first.take(30) && second.take(20) && !second.take(20));
  first.give(30), second.give(40), second.give(20);
  CHECK_EQ(all.bytes() + all.blocks() + first.bytes() + second.blocks(), 0u);
  CHECK(first.take(1000) && !first.take(1) && !second.take(1));  // larger than either, and alone
  first.give(1000);
  CHECK(second.take(1));
  CHECK_EQ(first.room_for(7, 0), 8u);
  CHECK_EQ(first.room_for(7, 59), 0u);
  CHECK_EQ(first.room_for(700, 0), 1u);
  CHECK_EQ(first.room_for(0, 0), 60u);
}

TEST(no_more_is_asked_of_one_peer_than_there_may_be_on_its_way) {
  constexpr uint64_t kWanted = 24;
  FetchingHost hosts(1, true, kPool);
  measure(hosts, 0, 1000, kPages);
  const std::vector<Handle> open = begin(*hosts.there[0], 0, kWanted);
  want_all(hosts, 0, kWanted);
  CHECK(eventually([&] { return hosts.tier->stats()[0].bytes_in_flight == kOfOne; }));
  CHECK_EQ(hosts.tier->stats()[0].in_flight, kMost);
  CHECK_EQ(hosts.tier->stats()[0].queued, kWanted - kMost);
  CHECK_EQ(hosts.here.store->stats().created, kMost);
  seal(*hosts.there[0], open);
  come_all(hosts, kWanted + 1);
  CHECK_EQ(hosts.tier->stats()[0].deferred, 0u);
}

TEST(nor_of_all_of_them) {
  constexpr uint64_t kWanted = 12;
  FetchingHost hosts(2, true, kPool);
  measure(hosts, 0, 1000, kPages), measure(hosts, 1, 1001, kPages);
  const std::vector<Handle> first = begin(*hosts.there[0], 0, kWanted), second = begin(*hosts.there[1], kWanted, kWanted);
  want_all(hosts, 0, 2 * kWanted);
  CHECK(eventually([&] { return hosts.sum(&PeerStats::bytes_in_flight) == kOfAll; }));
  CHECK_EQ(hosts.here.store->stats().created, kOfAll / kBlock);
  CHECK_EQ(hosts.sum(&PeerStats::queued), 2 * kWanted - kOfAll / kBlock);
  seal(*hosts.there[0], first);  // what waits for the other's is asked for when these are here
  CHECK(eventually([&] { return hosts.tier->stats()[0].fetched == kWanted + 1; }));
  seal(*hosts.there[1], second);
  come_all(hosts, 2 * kWanted + 2);
}

// Fails if it counts how large blocks were and not how large they are: a peer's word of small ones would open the pool to it.
TEST(blocks_that_are_larger_than_those_before_take_no_more_memory_and_come_in_their_turn) {
  constexpr uint64_t kWanted = 24;
  FetchingHost hosts(1, true, kPool);
  measure(hosts, 0, 1000, 2);
  const std::vector<Handle> open = begin(*hosts.there[0], 0, kWanted);
  want_all(hosts, 0, kWanted);
  CHECK(eventually([&] { return hosts.tier->stats()[0].bytes_in_flight == kOfOne; }));
  CHECK_EQ(hosts.tier->stats()[0].in_flight, kWanted);
  CHECK_EQ(hosts.here.store->stats().created, kMost);
  seal(*hosts.there[0], open);
  come_all(hosts, kWanted + 1);
  CHECK(hosts.tier->stats()[0].deferred >= kWanted - kMost);
}

TEST(a_block_that_is_larger_than_the_bound_comes_alone) {
  constexpr uint32_t kLarge = 5 * kMost * kPages / 4;
  FetchingHost hosts(1, true, kPool);
  hosts.there[0]->fill(1, kLarge), hosts.there[0]->fill(2, kPages);
  want_all(hosts, 1, 1);
  come_all(hosts, 1);
  want_all(hosts, 2, 1);  // as large, as far as is known now
  come_all(hosts, 2);
}

TEST(what_broke_off_is_on_its_way_no_more) {
  FetchingHost hosts(1, true, kPool);
  const std::vector<Handle> open = begin(*hosts.there[0], 0, kMost);
  want_all(hosts, 0, kMost);
  CHECK(eventually([&] { return hosts.tier->stats()[0].bytes_in_flight == kOfOne; }));
  const auto here = [&](uint64_t i) -> std::atomic<uint64_t>& {
    return StoreTest::progress(*hosts.here.store, hosts.here.handle(i).record);
  };
  for (uint64_t i = 0; i < kMost; i += 2) {  // of every second one a layer comes: it waits for the rest of it
    const uint64_t before = here(i).load();
    hosts.there[0]->rig.store->mark_layer(open[i], 1);
    CHECK(eventually([&] { return here(i).load() != before; }));
  }
  hosts.there[0]->server.stop();
  CHECK(eventually([&] { return hosts.tier->stats()[0].bytes_in_flight == 0 && !hosts.here.store->stats().created; }));
}
