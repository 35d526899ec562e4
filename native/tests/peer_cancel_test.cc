// Goal: what nobody waits for is not brought: it leaves the queue, its connection is given up, its memory given back, and the
// other end holds nothing for it; what somebody else waits for, reads already or wanted without waiting is brought all the same.
// What matters more leaves the queue first.
// Method: a server whose blocks are still being written, so that fetches of them do not end by themselves.
#include "core/peer/server.h"
#include "core/peer/tier.h"
#include "tests/check.h"
#include "tests/store_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {

constexpr Waiter kFirst = 7, kSecond = 8;
constexpr uint32_t kLongMs = 600'000;
const peer::Secret kSalt{7, 7, 7};

struct Hosts {
  Hosts() {
    server.share(*there.store, kSalt);
    server.start();
    tier.emplace(*here.store, "b", kSalt, std::vector<peer::Tier::Address>{{"a", "127.0.0.1", server.port()}});
    tier->start();
  }
  ~Hosts() {
    tier->stop();
    server.stop();
    here.store->check_integrity(), there.store->check_integrity();
  }
  Presence want(uint64_t number, Waiter waiter, uint32_t for_ms = kLongMs, uint32_t priority = kDefaultPriority) {
    const Key wanted = key(number);
    return here.store->promote({&wanted, 1}, priority, waiter == kNobody ? Wanting{} : Wanting::of(waiter, for_ms))[0];
  }
  void comes_here(uint64_t number, Waiter waiter) {  // word of it may have to come first
    CHECK(eventually([&] { return want(number, waiter) == Presence::Pending && here.presence(number) == Presence::Pending; }));
  }
  // It is open there, and comes here.
  Handle begun(uint64_t number, Waiter waiter) {
    const Handle writes = there.create(number, 3).handle;
    comes_here(number, waiter);
    return writes;
  }
  bool is_cancelled(uint64_t number, const Handle& writes, uint64_t cancelled = 1) {
    return eventually([&] {
      return tier->stats()[0].cancelled == cancelled && here.presence(number) == Presence::Missing &&
             !StoreTest::is_read(*there.store, writes.record);
    });
  }
  // What its writer seals comes.
  void comes(uint64_t number, const Handle& writes) {
    CHECK(there.seal(writes) == Done::Ok);
    CHECK(eventually([&] { return here.resident(number); }));
  }

  Rig here{8 << 20, 256}, there{8 << 20, 256};
  peer::Server server{{.node = "a", .address = "127.0.0.1", .peers = {"b"}}};
  std::optional<peer::Tier> tier;
};

}  // namespace

TEST(what_nobody_waits_for_any_more_is_given_up_and_comes_when_it_is_wanted_again) {
  Hosts hosts;
  const Handle writes = hosts.begun(1, kFirst);
  hosts.tier->let_go_of_all(kFirst);
  CHECK(hosts.is_cancelled(1, writes));
  CHECK(eventually([&] { return !hosts.tier->stats()[0].in_flight && !hosts.here.store->stats().created; }));
  CHECK_EQ(hosts.tier->stats()[0].gone + hosts.tier->stats()[0].failed, 0u);
  CHECK(hosts.tier->stats()[0].state == "up");
  hosts.comes_here(1, kFirst);
  hosts.comes(1, writes);
}

TEST(what_a_session_waited_for_is_given_up_with_it) {
  Hosts hosts;
  std::optional<Page> page(std::in_place, *hosts.here.store);
  const Handle writes = hosts.begun(1, page->id);
  const uint32_t session = page->id;
  page.reset();
  hosts.here.store->end_session(session);
  CHECK(hosts.is_cancelled(1, writes));
  hosts.there.store->abort(hosts.there.owner, writes);
}

TEST(what_is_wanted_otherwise_or_read_is_brought) {
  Hosts hosts;
  const Handle prefetched = hosts.begun(1, kFirst), shared = hosts.begun(2, kFirst), read = hosts.begun(3, kFirst);
  hosts.want(1, kNobody), hosts.want(2, kSecond);
  Page page(*hosts.here.store);
  const uint32_t pin = page.pin(hosts.here.handle(3));
  hosts.tier->let_go_of_all(kFirst);
  const Handle other = hosts.begun(4, kFirst);  // once it is given up, it was looked who waits for the others
  hosts.tier->let_go_of_all(kFirst);
  CHECK(hosts.is_cancelled(4, other));
  hosts.there.store->abort(hosts.there.owner, other);
  hosts.comes(1, prefetched), hosts.comes(2, shared), hosts.comes(3, read);
  page.clear(pin);
}

TEST(who_said_how_long_it_waits_waits_no_longer) {
  Hosts hosts;
  const Handle writes = hosts.there.create(1, 3).handle;
  CHECK(
      eventually([&] { return hosts.want(1, kFirst, 50) == Presence::Pending && hosts.here.presence(1) == Presence::Pending; }));
  CHECK(hosts.is_cancelled(1, writes));
  hosts.there.store->abort(hosts.there.owner, writes);
}

TEST(what_waits_in_a_queue_leaves_it) {
  constexpr uint64_t kStreams = 16;  // all that there may be
  Hosts hosts;
  std::vector<Handle> writes;
  for (uint64_t i = 0; i < kStreams; ++i) writes.push_back(hosts.begun(i, kSecond));
  const Handle late = hosts.there.create(kStreams, 3).handle;
  CHECK(eventually([&] { return hosts.want(kStreams, kFirst) == Presence::Pending && hosts.tier->stats()[0].queued; }));
  hosts.tier->let_go_of_all(kFirst);
  hosts.comes(0, writes[0]);  // a stream has time for it
  CHECK(hosts.is_cancelled(kStreams, late));
  CHECK_EQ(hosts.tier->stats()[0].queued, 0u);
  for (uint64_t i = 1; i < kStreams; ++i) hosts.comes(i, writes[i]);
  hosts.there.store->abort(hosts.there.owner, late);
}

TEST(what_matters_more_leaves_the_queue_first) {
  constexpr uint64_t kStreams = 16, kQueued = 80, kLast = kStreams + kQueued - 1, kSooner = kLast + 1;
  Hosts hosts;
  std::vector<Handle> writes;
  for (uint64_t i = 0; i < kStreams; ++i) writes.push_back(hosts.begun(i, kSecond));
  for (uint64_t i = kStreams; i <= kSooner; ++i) writes.push_back(hosts.there.create(i, 3).handle);
  const auto queues = [&](uint64_t number, uint32_t priority) {
    CHECK(eventually([&] {
      hosts.want(number, kSecond, kLongMs, priority);
      return hosts.tier->stats()[0].queued == number - kStreams + 1;
    }));
  };
  for (uint64_t i = kStreams; i <= kLast; ++i) queues(i, kDefaultPriority);
  queues(kSooner, kDefaultPriority + 1);                      // the last to come
  hosts.want(kLast, kSecond, kLongMs, kDefaultPriority + 1);  // and the last but one, wanted again
  hosts.comes(0, writes[0]);                                  // a stream has time for 64 of the 81
  for (const uint64_t first : {kSooner, kLast, kStreams})
    CHECK(eventually([&] { return hosts.here.presence(first) == Presence::Pending; }));
  CHECK(hosts.here.presence(kLast - 1) == Presence::Missing);
  CHECK(hosts.tier->stats()[0].queued > 0);
  for (uint64_t i = 1; i <= kSooner; ++i) hosts.there.store->abort(hosts.there.owner, writes[i]);
}
