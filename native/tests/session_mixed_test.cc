// Goal: what belongs to one attachment is never done with another, and nobody is harmed by how a client ends. Method: a client
// that attaches anew, closes or dies in the middle of something.
//
// Proven by removal (in a copy of the tree): await() without the comparison: the first test has a pin in the wrong pool; close()
// without shutdown(): the fourth sees sessions that stay attached. A close() that waits for no copy fails the third only with
// luck: 6 of 20 rounds with blocks of 64 MiB.
#include <signal.h>
#include <sys/wait.h>

#include <atomic>
#include <thread>

#include "tests/session_fixture.h"

using namespace kv;
using namespace kv::test;

TEST(a_batch_is_not_waited_for_in_another_pool) {
  Daemon before;
  auto client = before.client();
  const Key filler = key(9), wanted = key(1);
  put(*client, filler, 0xAA);
  auto batch = get(*client, wanted);
  before.stop();
  Store::retire(before.rig.store->options().table_fd);
  Daemon empty;
  empty.stop();
  empty.path = before.path;
  empty.start();
  client->reattach();
  put(*client, wanted, 0x55);
  CHECK(thrown([&] { client->await(*batch, {&wanted, 1}, false, deadline_in(1)); }) == Code::Detached);
  CHECK_EQ(batch->hits(), 0u);
  CHECK_EQ(empty.stats().pins, 0u);
}

// Fails if who waits for a block of this host waits for the end of a load only: here none ever ends.
TEST(a_wait_ends_when_the_writer_gives_up) {
  Daemon daemon;
  auto writer = daemon.client(), reader = daemon.client();
  for (uint64_t i = 0; i < 20; ++i) {
    const Key k = key(i);
    auto grants = create(*writer, {&k, 1});
    auto batch = get(*reader, k);
    std::atomic<bool> began{false}, over{false};
    std::thread waits([&] {
      began = true;
      reader->await(*batch, {&k, 1}, false, deadline_in(600));
      over = true;
    });
    while (!began) std::this_thread::yield();
    for (int n = 0; n < 200; ++n) std::this_thread::yield();  // most times it waits by now
    const size_t all[] = {0};
    grants->abort(all);
    const bool woken = eventually([&] { return over.load(); });
    CHECK(woken);
    if (!woken) daemon.rig.store->load_ended();
    waits.join();
    CHECK_EQ(batch->hits(), 0u);
    if (!woken) break;
  }
}

TEST(a_block_that_goes_is_still_verified) {
  Daemon daemon;
  auto client = daemon.client();
  const Key k = key(1);
  auto grants = create(*client, {&k, 1});
  const std::vector<uint8_t> source(kPageBytes, 7);
  grants->copy_layer(0, 0, source.data());
  const size_t all[] = {0};
  grants->seal(all);
  auto batch = get(*client, k);
  grants->bytes(0)[5] = std::byte{99};
  CHECK(!batch->verify(0));
  CHECK(daemon.rig.store->remove(k));
  CHECK(!batch->verify(0));
  client->verify(*batch, {&k, 1});
  CHECK_EQ(batch->hits(), 0u);
}

TEST(close_waits_for_a_copy_under_way) {
  constexpr uint32_t kTokens = 1024;
  constexpr size_t kBytes = size_t{kTokens} * 4 * kPageBytes;  // 16 MiB
  Daemon daemon(24 * kMiB, 64);
  const uint32_t big = daemon.rig.store->register_layout(layout_blob(1, 4 * kPageBytes, kTokens));
  const std::vector<uint32_t> tokens{kTokens};
  const std::vector<uint8_t> source(kBytes, 0x11);
  auto other = daemon.client();
  for (uint64_t round = 0; round < 20; ++round) {
    auto writer = daemon.client();
    const Key mine = key(2 * round), others = key(2 * round + 1);
    auto grants = writer->create({.keys = {&mine, 1}, .token_counts = tokens, .layout = big});
    if (!CHECK(grants->item(0).open)) return;
    const auto copy = [&] {
      const auto held = grants->copying();
      grants->copy_layer(0, 0, source.data());
    };
    std::atomic<bool> begun{false};
    std::thread copying([&] {
      begun.store(true);
      (void)thrown(copy);  // Closed, if it comes too late
    });
    while (!begun.load()) {
    }
    writer->close();
    auto created = other->create({.keys = {&others, 1}, .token_counts = tokens, .layout = big});
    if (created->item(0).open) {
      std::memset(created->bytes(0), 0x33, kBytes);
      const size_t all[] = {0};
      created->seal(all);
    }
    copying.join();
    if (!created->item(0).open && created->item(0).status == Grant::Granted) {
      auto batch = get(*other, others);
      size_t wrong = 0;
      for (size_t i = 0; i < kBytes; i += 64) wrong += batch->bytes(0)[i] != std::byte{0x33};
      CHECK_EQ(wrong, 0u);
    }
    CHECK(thrown(copy) == Code::Closed);
    daemon.rig.store->remove(others);
    daemon.rig.store->settle();
  }
}

// A block whose layout cannot be read any more is a miss, and no pin stays behind.
TEST(a_layout_that_was_damaged_leaves_no_pin) {
  Daemon daemon;
  auto before = daemon.client();
  put(*before, key(1), 7);
  const Mapping table(daemon.rig.segments.table.get(), Store::table_bytes(256, 16 * kMiB), true);
  LayoutSlot slot(table.data(), 0);
  slot.change(slot.generation(), std::vector<uint8_t>(64, 0xee));
  auto after = daemon.client();
  CHECK_EQ(get(*after, key(1))->hits(), 0u);
  CHECK_EQ(daemon.stats().pins, 0u);
  CHECK_EQ(get(*before, key(1))->hits(), 1u);  // which had read it
}

#ifndef KV_TSAN  // whose runtime knows no threads in a forked child
TEST(a_child_that_lives_on_keeps_no_session_of_its_parents) {
  Daemon daemon(16 * kMiB, 256, 3);
  std::vector<pid_t> children;
  for (int i = 0; i < 5; ++i) {
    auto client = daemon.client();
    const pid_t child = ::fork();
    if (child == 0) {
      ::pause();
      ::_exit(0);
    }
    children.push_back(child);
    client->close();
    CHECK(eventually([&] { return daemon.stats().sessions == 0; }));
    if (i == 2) {  // its pages are mapped by the children: these count as long as they live
      CHECK(thrown([&] { daemon.client(); }) == Code::NoSpace);
      for (pid_t child : children) ::kill(child, SIGKILL), ::waitpid(child, nullptr, 0);
      children.clear();
    }
  }
  for (pid_t child : children) ::kill(child, SIGKILL), ::waitpid(child, nullptr, 0);
}
#endif

TEST(a_reader_takes_no_writers_number) {
  Daemon daemon;
  auto writer = daemon.client();
  const Key k = key(1);
  auto grants = create(*writer, {&k, 1});
  {
    std::vector<std::unique_ptr<Client>> readers;
    for (int i = 0; i < 12; ++i) {
      readers.push_back(
          std::make_unique<Client>(AttachOptions{.socket_path = daemon.path, .name = "test", .read_only = true, .max_pins = 8},
                                   Client::Door::SharedMemory));
      const_cast<SessionPage&>(readers.back()->attachment()->board->page()).session = writer->attachment()->session();
    }
    daemon.stop();
  }
  daemon.restart();
  daemon.rig.store->tick();
  CHECK_EQ(daemon.stats().quarantined, 1u);  // the writer lives, and may be writing
}

TEST(a_follower_is_woken_by_an_adoption) {
  Daemon daemon;
  auto writer = daemon.client(), reader = daemon.client();
  const Key k = key(1);
  auto grants = create(*writer, {&k, 1});
  auto batch = get(*reader, k, true);
  std::optional<Code> told;
  std::thread following([&] { told = thrown([&] { batch->wait_layer(0, 0, deadline_in(60)); }); });
  CHECK(eventually([&] { return reader->attachment()->board->page().waiting.load() != 0; }));
  daemon.restart();
  following.join();
  CHECK(told == Code::BlockLost);
}
