// Goal: a block that lies on this host's disk is asked of another host exactly when that is known to have it and the disk is
// known to be much slower; whoever cannot give it, the other is asked. Method: a store with a disk and a peer that only count
// what is asked.
#include "tests/check.h"
#include "tests/store_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {

struct Disk final : LowerTier {
  Presence promote(const Key&, uint32_t) override { return asked += 1, answer; }
  Below forget(const Key&) override { return Below::Nothing; }
  void forget_all() override {}
  void remember_flush() override {}
  Figures figures() override { return {}; }
  Presence answer = Presence::Pending;
  uint32_t asked = 0;
};

struct Peer final : Fetcher {
  Presence fetch(const Key&, uint32_t, Wanting) override { return asked += 1, answer; }
  void also_wanted(const Key&, Wanting) override {}
  void let_go_of_all(Waiter) override {}
  void go() override {}
  bool known(const Key&) const override { return has; }
  double estimate_s(uint64_t) const override { return seconds; }
  uint64_t named(const std::string&) const override { return 0; }
  const std::string& node() const override { return name; }
  Presence answer = Presence::Pending;
  bool has = true;
  double seconds = 0.001;
  uint32_t asked = 0;
  std::string name;
};

}  // namespace

TEST(the_disk_is_passed_over_only_for_a_peer_that_is_much_sooner) {
  Rig rig(4 << 20, 64, true);
  Disk disk;
  Peer peer;
  rig.store->attach_disk(-1, &disk);
  rig.store->attach_peers(&peer);
  const Key wanted = key(1);
  CHECK(rig.store->add_disk(wanted, 0));
  TableHeader& figures = StoreTest::index(*rig.store).header();
  const auto asks = [&] {
    disk.asked = peer.asked = 0;
    const Presence there = rig.store->promote({&wanted, 1}, kDefaultPriority)[0];
    CHECK(there == Presence::Pending);
    return std::pair(disk.asked, peer.asked);
  };
  const auto disk_only = std::pair(1u, 0u), peer_only = std::pair(0u, 1u), both = std::pair(1u, 1u);
  CHECK(asks() == disk_only);            // nothing is known of the disk's speed
  figures.load_bytes_per_s = 100 << 20;  // 10 ms for what they are compared by
  CHECK(asks() == peer_only);
  peer.seconds = 0.004;  // sooner, and not by much
  CHECK(asks() == disk_only);
  figures.load_waiting_bytes = 100 << 20;  // a queue before the disk
  CHECK(asks() == peer_only);
  figures.load_waiting_bytes = 0, peer.seconds = 0.001;
  figures.load_bytes_per_s = 10ull << 30;
  CHECK(asks() == disk_only);
  figures.load_latency_us = 50'000;
  CHECK(asks() == peer_only);
  peer.answer = Presence::Missing;  // it has gone there
  CHECK(asks() == both);
  peer.answer = Presence::Pending, disk.answer = Presence::Missing;
  peer.has = false;
  CHECK(asks() == both);  // what the disk does not give is asked of others, known or not
  peer.has = true, peer.seconds = -1;
  disk.answer = Presence::Pending;
  CHECK(asks() == disk_only);  // nothing came from a peer yet
  rig.store->attach_peers(nullptr);
  rig.store->attach_disk(-1, nullptr);
}
