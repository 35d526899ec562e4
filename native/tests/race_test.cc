// Goal: readers that use nothing but shared memory never see a byte of another block, while one writer fills, seals, deletes and
// evicts underneath them; and no access of either side is a data race. Method: the real store and the real reading protocol over
// ONE mapping of table, session page and pool, because ThreadSanitizer compares addresses. Every 64-bit word of a block is the
// block's stamp.
//
// Rules proven by removal: a scan that reads the pins without acquire is a data race at once under ThreadSanitizer (a reader's
// last look at a block against the next writer's first byte). The fences are proven in pins_test: here the one of the scan can be
// taken out without a failure on x86-64, where a hundred instructions stand between the change of a generation and the reading of
// a pin.
#include <cstring>
#include <thread>

#include "core/base/atomics.h"
#include "tests/check.h"
#include "tests/store_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {

#ifdef KV_TSAN
constexpr uint64_t kBlocksMade = 20'000;
#else
constexpr uint64_t kBlocksMade = 200'000;
#endif
constexpr uint64_t kNumbers = 96;  // more than the pool holds
constexpr uint32_t kPages = 2;
constexpr uint64_t kWords = 512;  // of the one layer

// A session whose page is the store's own mapping. Never destroyed, because the mapping is not its own.
PinBoard& board_over(Store& store, uint32_t session) {
  Mapping alias;
  std::memcpy(static_cast<void*>(&alias), &StoreTest::page(store, session), sizeof alias);
  static auto* kept = new std::vector<PinBoard*>();  // reachable, so that no leak is seen
  kept->push_back(new PinBoard(std::move(alias)));
  return *kept->back();
}

struct Race {
  Race() : rig(256 << 10, 64), pool(rig.segments.pool.get(), 256 << 10, true), index(StoreTest::index(*rig.store)) {}

  uint64_t* words(Extent extent) { return pool.at<uint64_t>(extent.offset); }

  // Pin, fence, look again; then every word must be the stamp of this key and generation.
  bool read(PinBoard& board, uint32_t session, uint64_t number) {
    Snapshot at;
    const Find answer = index.find(key(number), at);
    if (answer == Find::Torn) torn.fetch_add(1, std::memory_order_relaxed);
    if (answer != Find::Hit || at.control.state() != State::Sealed) return false;
    const uint64_t word = pin_word(at.record, at.control.generation());
    const uint32_t pages = kPages;
    uint32_t slot;
    if (board.take({&word, 1}, &slot, {&pages, 1}) == 0) {  // another session of its user has all that it may have
      refused.fetch_add(1, std::memory_order_relaxed);
      rig.store->allow_pins(session, 1, pages);
      return false;
    }
    fence_full();
    const bool held = index.control(at.record).generation() == at.control.generation() && board.allowance().covers(slot, pages);
    if (held) {
      const uint64_t stamp = mixed(number) + at.control.generation();
      const uint64_t* block = words(at.extent);
      for (uint64_t i = 0; i < kWords; ++i)
        if (block[i] != stamp) {
          wrong.fetch_add(1, std::memory_order_relaxed);
          break;
        }
      board.touched({&at.record, 1});
    }
    board.clear({&slot, 1});
    return held;
  }

  void make(uint64_t number) {
    const Granted granted = rig.create(number, kPages);
    if (granted.status != Grant::Granted) return;
    uint64_t* block = words(granted.extent);
    for (uint64_t i = 0; i < kWords; ++i) block[i] = mixed(number) + granted.handle.generation;
    CHECK(rig.seal(granted.handle) == Done::Ok);
  }

  Rig rig;
  Mapping pool;
  Index index;
  std::atomic<uint64_t> wrong{0}, torn{0}, refused{0};
};

// Of readers of this user. `greedy`: a session of the same user asks for all that it may hold, and so for what they do not use.
uint64_t eviction_underneath(uint32_t uid, bool greedy) {
  Race race;
  constexpr uint64_t kAlways = 1'000'000;
  race.make(kAlways);
  Page keeper(*race.rig.store);
  keeper.pin(race.rig.handle(kAlways));
  std::vector<std::unique_ptr<Page>> pages;
  for (int i = 0; i < 2; ++i) pages.push_back(std::make_unique<Page>(*race.rig.store, 64, uid, true));
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> held{0}, missed{0};
  std::vector<std::thread> readers;
  Page all(*race.rig.store, 64, uid, true);
  if (greedy)
    readers.emplace_back([&] {
      while (!stop.load(std::memory_order_relaxed)) race.rig.store->allow_pins(all.id, 64, kPages), std::this_thread::yield();
    });
  for (auto& page : pages)
    readers.emplace_back([&race, &stop, &held, &missed, id = page->id, &board = board_over(*race.rig.store, page->id)] {
      for (uint64_t i = 0; !stop.load(std::memory_order_relaxed); ++i) {
        held += race.read(board, id, mixed(i) % kNumbers);
        if (i % 4) continue;
        Snapshot at;  // pinned by another: always there, however its neighbours move
        missed += race.index.find(key(kAlways), at) == Find::Miss;
      }
    });
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(15);
  for (uint64_t i = 0; (i < kBlocksMade || held < 1000) && std::chrono::steady_clock::now() < end; ++i) {
    race.make(mixed(i ^ 77) % kNumbers);
    if (i % 3 == 0) race.rig.store->remove(key(mixed(i ^ 78) % kNumbers));
    if (i % 64 == 0) race.rig.store->settle();
  }
  stop = true;
  for (auto& reader : readers) reader.join();
  CHECK_EQ(race.wrong.load(), 0u);
  CHECK_EQ(missed.load(), 0u);
  CHECK(held.load() > 0);
  race.rig.store->check_integrity();
  const Stats s = race.rig.store->stats();
  CHECK(s.evictions > 1000);
  std::printf("     %lu blocks held, %lu torn looks, %lu evictions, %lu without a pin\n", held.load(), race.torn.load(),
              s.evictions, race.refused.load());
  return race.refused.load();
}

}  // namespace

TEST(readers_and_a_writer_with_eviction_underneath) { CHECK_EQ(eviction_underneath(::geteuid(), false), 0u); }

TEST(readers_whose_pins_are_bounded_and_taken_back) { CHECK(eviction_underneath(::geteuid() + 1, true) > 0); }

// Sessions come and go, sleepers are woken, statistics are read: all doors of the store at once.
TEST(all_doors_of_the_store_at_once) {
  Race race;
  std::atomic<bool> stop{false};
  std::vector<std::thread> others;
  others.emplace_back([&] {
    while (!stop.load()) {
      Page page(*race.rig.store, 16);
      const Granted granted = race.rig.create(5'000'000 + page.id, kPages, page.id);
      if (granted.status == Grant::Granted && page.id % 2) race.rig.seal(granted.handle, page.id);
      race.rig.store->end_session(page.id);
    }
  });
  others.emplace_back([&] {
    while (!stop.load()) {
      race.rig.store->tick();
      race.rig.store->stats();
      uint32_t from = 0;
      race.rig.store->list(from, 1000, {}, 0);
      race.rig.store->sessions();
    }
  });
  others.emplace_back([&] {
    for (uint64_t i = 0; !stop.load(); ++i) {
      race.rig.store->read(key(i % kNumbers), 0, 100);
      touch(*race.rig.store, key(i % kNumbers));
      race.rig.store->lookup(key(i % kNumbers));
    }
  });
  for (uint64_t i = 0; i < kBlocksMade / 20; ++i) {
    race.make(mixed(i ^ 77) % kNumbers);
    if (i % 5 == 0) race.rig.store->remove(key(mixed(i ^ 78) % kNumbers));
  }
  stop = true;
  for (auto& other : others) other.join();
  race.rig.store->tick();
  race.rig.store->check_integrity();
  CHECK_EQ(race.rig.store->stats().quarantined, 0u);
}
