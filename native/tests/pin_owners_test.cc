// Goal: pins have owners and terms. What is asked back says BlockLost, and its memory is not reused before it was let go, and is
// after; the daemon's own reads stay within their bytes; memory that a device may write outlives the last mapping of it. Method:
// real clients of a SessionServer; a process that lives as long as the test wants; the ages of pins without a clock.
//
// Rules proven by removal (each in its turn, failed checks of one run): hold() without check_held(): 5; get() without
// let_go_of_asked(): 4; reap_sessions() without process_lives(): 5; adoption without the page's `device`: 3; look() without
// `too_much`: 4; begin_read() without may_take(): 3, without is_held_for(): 1. tick() that looks after terms only where nothing
// else waits: 6.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/base/process.h"
#include "tests/session_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {

constexpr uint64_t kMs = 1'000'000;

std::unique_ptr<Client> on_terms(Daemon& daemon, PinTerms terms) {
  return std::make_unique<Client>(AttachOptions{.socket_path = daemon.path, .name = "test", .max_pins = 256, .terms = terms},
                                  Client::Door::SharedMemory);
}

std::shared_ptr<BlockBatch> watched(Client& client, uint64_t number) {
  auto batch = get(client, key(number));
  client.attachment()->watch(batch);
  return batch;
}

PinsHeld held(Daemon& daemon, PinOwner owner) { return daemon.stats().held[static_cast<size_t>(owner)]; }

// A process that does nothing until it is ended.
struct Idle {
  Idle() : pid(::fork()) {
    if (pid == 0)
      for (;;) ::pause();
  }
  ~Idle() { end(); }
  void end() {
    if (pid <= 0) return;
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
    pid = 0;
  }
  pid_t pid;
};

// A session of that process with a block being written, and a pin of another; its end, and that of every mapping.
struct Left {
  Left(Rig& rig, const Idle& process, bool to_device, bool acknowledged) {
    Fd locked;
    std::tie(id, locked) = rig.store->open_session(64, static_cast<uint32_t>(process.pid), ::geteuid());
    written = rig.create(1, 4, id);
    CHECK(rig.put(2, 4) == Grant::Granted);
    {
      PinBoard board(Mapping(locked.get(), rig.store->session_page_bytes(id), true));
      const Handle read = rig.handle(2);
      const uint64_t word = pin_word(read.record, read.generation);
      uint32_t slot;
      CHECK_EQ(board.take({&word, 1}, &slot), 1u);
      if (to_device) rig.store->give_to_device(id, true);
      if (acknowledged) rig.store->give_to_device(id, false);
    }
    locked = Fd();
    rig.store->end_session(id);
    rig.store->remove(key(2));
    rig.store->tick();
  }
  uint32_t id = 0;
  Granted written;
};

}  // namespace

// ---------------------------------------------------------------- how old pins are

TEST(a_round_is_asked_back_when_all_of_it_is_older_than_the_deadline) {
  PinAge age;
  const PinTerms terms{.deadline_ms = 80};
  age.look(terms, 1000 * kMs, false);  // begins
  const uint32_t round = age.rounds().now;
  for (uint64_t at = 1001; at < 1080; ++at) {
    age.look(terms, at * kMs, false);
    CHECK(age.rounds().asked_back <= round);  // what was pinned at 1000 is not 80 ms old
  }
  for (uint64_t at = 1080; at < 1100; ++at) age.look(terms, at * kMs, false);
  CHECK(age.rounds().asked_back > round);
  CHECK(age.rounds().asked_back < age.rounds().now);  // what is younger stays
}

TEST(too_much_asks_the_oldest_round_back_first) {
  PinAge age;
  const PinTerms terms{.bytes = 1};
  for (uint64_t s = 1; s <= 4; ++s) age.look(terms, s * 1000 * kMs, false);
  const PinRounds before = age.rounds();
  CHECK_EQ(before.asked_back, 1u);
  age.look(terms, 4001 * kMs, true);
  CHECK_EQ(age.rounds().asked_back, before.asked_back + 1);
  for (int i = 0; i < 10; ++i) age.look(terms, 4002 * kMs, true);
  CHECK_EQ(age.rounds().asked_back, age.rounds().now);  // all but what is pinned now
}

TEST(the_next_daemon_goes_on_where_this_one_stopped) {
  PinAge age;
  age.resume({7, 3}, 1000 * kMs);
  CHECK(age.rounds().now == 7 && age.rounds().asked_back == 3);
  age.resume({5, 9}, 1000 * kMs);  // a page's owner may have written anything there
  CHECK(age.rounds().now == 5 && age.rounds().asked_back == 5);
  age.resume({~0u, 0}, 1000 * kMs);
  CHECK(age.rounds().asked_back > ~0u - 100);  // and costs nobody memory
  age.resume({0, 0}, 1000 * kMs);              // of a daemon before
  CHECK(age.rounds().now == 1 && age.rounds().asked_back == 1);
}

// ---------------------------------------------------------------- asked back

TEST(what_is_older_than_its_deadline_says_that_it_is_lost) {
  Daemon daemon;
  auto writer = daemon.client();
  put(*writer, key(1), 7);
  auto client = on_terms(daemon, {.owner = PinOwner::Engine, .deadline_ms = 40});
  auto batch = watched(*client, 1), exported = watched(*client, 1);
  exported->hold(0);
  CHECK_EQ(held(daemon, PinOwner::Engine).count, 2u);
  CHECK_EQ(held(daemon, PinOwner::Engine).bytes, 4 * kPageBytes);
  const Extent extent = batch->item(0).at.extent;
  CHECK(writer->remove(std::vector<Key>{key(1)}) == 1);
  CHECK(eventually([&] { return batch->asked_back(); }));
  CHECK(thrown([&] { batch->hold(0); }) == Code::BlockLost);
  CHECK(thrown([&] { exported->hold(0); }) == Code::BlockLost);
  CHECK(batch->closed());
  CHECK_EQ(exported->bytes(0)[0], std::byte{7});  // what was exported is there until it is let go
  for (uint64_t i = 100; i < 200; ++i) {
    const Granted other = daemon.rig.create(i, 2);
    if (other.status != Grant::Granted) break;
    CHECK(other.extent.end() <= extent.offset || extent.end() <= other.extent.offset);
    daemon.rig.seal(other.handle);
  }
  CHECK_EQ(daemon.stats().zombies, 1u);
  exported->let_go(0);
  CHECK(eventually([&] { return daemon.stats().zombies == 0; }));
  CHECK(daemon.stats().asked_back >= 1);
}

// Who has long forgotten the batch has the pin all the same, until its client's next get.
TEST(an_idle_batch_lets_go_at_the_clients_next_get) {
  Daemon daemon;
  auto client = on_terms(daemon, {.deadline_ms = 40});
  put(*client, key(1), 7);
  put(*client, key(2), 8);
  auto idle = watched(*client, 1);
  CHECK(eventually([&] { return idle->asked_back(); }));
  CHECK_EQ(held(daemon, PinOwner::Client).count, 1u);
  auto fresh = watched(*client, 2);
  CHECK_EQ(fresh->hits(), 1u);
  CHECK_EQ(held(daemon, PinOwner::Client).count, 1u);
  CHECK(idle->closed() && !fresh->closed());
}

TEST(the_oldest_of_more_than_its_bytes_is_asked_back) {
  Daemon daemon;
  auto client = on_terms(daemon, {.bytes = 3 * kPageBytes});  // a block has two
  put(*client, key(1), 7);
  put(*client, key(2), 8);
  auto first = watched(*client, 1);
  daemon.rig.store->tick();
  const uint32_t session = client->attachment()->session();
  CHECK(daemon.rig.store->ask_pins_back(session));  // a round, so that the two differ
  CHECK(first->asked_back());
  auto again = watched(*client, 1);
  CHECK(!again->asked_back());
  CHECK_EQ(held(daemon, PinOwner::Client).count, 1u);
  auto second = watched(*client, 2);
  CHECK(eventually([&] { return again->asked_back(); }));
  CHECK(eventually([&] {
    watched(*client, 1);
    return held(daemon, PinOwner::Client).bytes <= 3 * kPageBytes;
  }));
}

TEST(a_client_without_terms_is_asked_nothing_back) {
  Daemon daemon;
  auto client = daemon.client();
  put(*client, key(1), 7);
  auto batch = watched(*client, 1);
  for (int i = 0; i < 5; ++i) daemon.rig.store->tick();
  CHECK(!batch->asked_back());
  batch->hold(0);
  batch->let_go(0);
  CHECK(daemon.rig.store->ask_pins_back(client->attachment()->session()));  // but by somebody's word
  CHECK(thrown([&] { batch->hold(0); }) == Code::BlockLost);
  CHECK(!daemon.rig.store->ask_pins_back(12345));
}

TEST(terms_outlive_the_daemon) {
  Daemon daemon;
  auto client = on_terms(daemon, {.owner = PinOwner::Engine, .deadline_ms = 40});
  put(*client, key(1), 7);
  auto batch = watched(*client, 1);
  daemon.restart();
  client->reattach();
  CHECK(eventually([&] { return batch->asked_back(); }));
  CHECK_EQ(held(daemon, PinOwner::Engine).count, 1u);
}

// ---------------------------------------------------------------- the daemon's own

TEST(other_hosts_hold_a_quarter_of_the_memory_at_most) {
  Rig rig(16 * kMiB, 64);
  std::vector<Handle> reads;
  for (uint64_t i = 0; i < 12; ++i) CHECK(rig.put(i, kMiB / kPageBytes) == Grant::Granted);
  for (uint64_t i = 0; i < 12; ++i)
    if (const auto job = rig.store->begin_read(key(i))) reads.push_back(job->handle);
  CHECK_EQ(reads.size(), 4u);
  const PinsHeld peers = rig.store->stats().held[static_cast<size_t>(PinOwner::Peer)];
  CHECK(peers.count == 4 && peers.bytes == 4 * kMiB);
  rig.store->end_read(reads.back());
  CHECK(rig.store->begin_read(key(9)).has_value());
}

// Fails if a block that goes out by halves, or to two hosts, counts as often as it is read: its memory is held once.
TEST(a_block_counts_once_however_many_read_it) {
  Rig rig(16 * kMiB, 64);
  for (uint64_t i = 0; i < 3; ++i) CHECK(rig.put(i, (i ? 1 : 3) * kMiB / kPageBytes) == Grant::Granted);
  const auto held = [&] { return rig.store->stats().held[static_cast<size_t>(PinOwner::Peer)]; };
  const auto first = rig.store->begin_read(key(0)), second = rig.store->begin_read(key(0));
  CHECK(first && second);
  if (!first || !second) return;
  CHECK(held().count == 2 && held().bytes == 3 * kMiB);
  const auto beside = rig.store->begin_read(key(1));
  CHECK(beside && !rig.store->begin_read(key(2)));
  CHECK(rig.store->read(key(0), 0, 1).has_value());  // a client's own is no other host's
  rig.store->end_read(first->handle);
  CHECK(held().count == 2 && held().bytes == 4 * kMiB);
  CHECK(StoreTest::is_read(*rig.store, second->handle.record));
  rig.store->end_read(second->handle);
  CHECK(held().count == 1 && held().bytes == kMiB);
  CHECK(!StoreTest::is_read(*rig.store, second->handle.record));
  CHECK(rig.store->begin_read(key(2)).has_value());
}

// One that is larger than the owner's part goes alone, or it would never go.
TEST(a_block_larger_than_an_owners_part_goes_alone) {
  Rig rig(16 * kMiB, 64);
  CHECK(rig.put(1, 6 * kMiB / kPageBytes) == Grant::Granted);
  CHECK(rig.put(2, 2) == Grant::Granted);
  const auto job = rig.store->begin_read(key(1));
  CHECK(job.has_value());
  CHECK(!rig.store->begin_read(key(2)));
  rig.store->end_read(job->handle);
  CHECK(rig.store->begin_read(key(2)).has_value());
}

// ---------------------------------------------------------------- devices

TEST(a_process_is_told_from_a_later_one_of_its_number) {
  Idle process;
  const uint64_t identity = process_identity(static_cast<uint32_t>(process.pid));
  CHECK(identity && process_lives(identity));
  CHECK(!process_lives(identity + (uint64_t{1} << kPidBits)));  // the same number, begun later
  const auto number = static_cast<uint32_t>(process.pid);
  ::kill(process.pid, SIGKILL);
  siginfo_t ended;
  CHECK(::waitid(P_PID, number, &ended, WEXITED | WNOWAIT) == 0);
  CHECK(!process_lives(identity));  // ended, and nobody has waited for it: its memory is gone
  process.end();
  CHECK(!process_lives(identity) && !process_lives(0));
}

TEST(memory_that_a_device_may_write_waits_for_the_process) {
  Rig rig(16 * kMiB, 64);
  Idle process;
  const Left left(rig, process, true, false);
  CHECK_EQ(rig.store->stats().quarantined, 1u);
  CHECK_EQ(rig.store->stats().zombies, 1u);
  rig.restart();  // the next daemon knows it as well
  rig.store->tick();
  CHECK_EQ(rig.store->stats().quarantined, 1u);
  CHECK_EQ(rig.store->stats().zombies, 1u);
  for (uint64_t i = 100; i < 164; ++i) {
    const Granted other = rig.create(i, 4);
    if (other.status != Grant::Granted) break;
    CHECK(other.extent.end() <= left.written.extent.offset || left.written.extent.end() <= other.extent.offset);
  }
  process.end();
  rig.store->tick();
  CHECK_EQ(rig.store->stats().quarantined, 0u);
  CHECK_EQ(rig.segments.session_files(), 0u);
  rig.store->check_integrity();
}

// Fails if whoever can write its page keeps memory for ever by naming a process that never ends.
TEST(a_process_of_somebody_elses_holds_nothing_over_a_restart) {
  Rig rig(16 * kMiB, 64);
  auto [id, locked] = rig.store->open_session(64, static_cast<uint32_t>(::getpid()), ::geteuid() + 1);
  rig.create(1, 4, id);
  Mapping page(locked.get(), rig.store->session_page_bytes(id), true);
  page.at<SessionPage>(0)->device.store(process_identity(1));
  page = Mapping();
  locked = Fd();
  rig.restart();
  rig.store->tick();
  CHECK_EQ(rig.store->stats().quarantined, 0u);
  CHECK_EQ(rig.segments.session_files(), 0u);
}

TEST(a_device_that_is_done_holds_nothing) {
  Rig rig(16 * kMiB, 64);
  Idle process;
  const Left left(rig, process, true, true);
  CHECK_EQ(rig.store->stats().quarantined, 0u);
  CHECK_EQ(rig.store->stats().zombies, 0u);
}

TEST(a_process_that_cannot_be_seen_gets_no_device) {
  Rig rig(16 * kMiB, 64);
  Idle process;
  const auto pid = static_cast<uint32_t>(process.pid);
  process.end();
  auto [id, locked] = rig.store->open_session(64, pid, ::geteuid());
  CHECK(thrown([&, id = id] { rig.store->give_to_device(id, true); }) == Code::FailedPrecondition);
}

TEST(a_client_says_that_a_device_has_its_memory) {
  Daemon daemon;
  auto client = daemon.client();
  CHECK(client->attachment()->give_to_device(true));
  CHECK(daemon.rig.store->sessions()[0].device);
  CHECK_EQ(client->attachment()->board->page().device.load(), process_identity(static_cast<uint32_t>(::getpid())));
  CHECK(client->attachment()->give_to_device(false));
  CHECK(!daemon.rig.store->sessions()[0].device);
}
