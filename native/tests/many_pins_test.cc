// Goal: nobody waits for a pass over very many pins, and none that was there is missed. Method: a clock that goes on by a third
// of a slice at each look, because time is no measure on a shared machine; how often the lock was given away is counted; and
// others use the store meanwhile.
//
// Rules proven by removal (failed checks of one run): a pass over pins gives way: 2; what became a zombie during a scan waits for
// the next: 1; what another scan found held stays there: 1; an array that shrinks says what it gave back: 1, and gives it back:
// 1; ends that outlived their blocks are swept a few at a time: 1.
#include <sys/mman.h>

#include <atomic>
#include <thread>

#include "core/store/expiry_heap.h"
#include "core/store/steady_array.h"
#include "tests/check.h"
#include "tests/store_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {

constexpr uint32_t kPins = 40'000;  // of each of two sessions: more than one hold may read

std::atomic<uint64_t> looks{0};
struct SteadyClock {
  SteadyClock() {
    SlicedMutex::clock = [] { return looks.fetch_add(1) * 33'000; };
  }
  ~SteadyClock() { SlicedMutex::clock = &monotonic_ns; }
};

// A full pool of blocks of two pages, and two sessions whose words all name the block 0.
struct Crowd {
  Crowd() : rig(64 * 2 * kPageBytes, 128) {
    for (uint64_t i = 0; i < 64; ++i) CHECK(rig.put(i, 2) == Grant::Granted);
    held = rig.handle(0);
    for (int i = 0; i < 2; ++i) {
      pages.push_back(std::make_unique<Page>(*rig.store, kPins));
      rig.store->allow_pins(pages.back()->id, kPins, PinAllowance::kAnyPages);
      for (uint32_t pin = 0; pin < kPins; ++pin) CHECK(pages.back()->pin(held) != PinBoard::kNoSlot);
    }
  }
  void leave() {
    for (auto& page : pages) page->unmap(), rig.store->end_session(page->id);
    rig.store->tick();
    CHECK_EQ(rig.store->stats().zombies, 0u);
    rig.store->check_integrity();
  }
  Rig rig;
  Handle held;
  std::vector<std::unique_ptr<Page>> pages;
};

}  // namespace

TEST(a_scan_for_memory_gives_the_lock_away_and_misses_no_pin) {
  const SteadyClock clock;
  Crowd crowd;
  CHECK(crowd.rig.store->remove(key(0)) && crowd.rig.store->remove(key(1)));
  const uint64_t before = StoreTest::gave_way(*crowd.rig.store);
  crowd.rig.store->settle();
  CHECK(StoreTest::gave_way(*crowd.rig.store) - before >= 2 * kPins / 4096 / 4);
  CHECK(crowd.rig.control(crowd.held.record).state() == State::Zombie);
  CHECK_EQ(crowd.rig.store->stats().zombies, 1u);
  crowd.leave();
}

TEST(the_choice_of_victims_gives_the_lock_away_and_takes_none_that_is_pinned) {
  const SteadyClock clock;
  Crowd crowd;
  const uint64_t before = StoreTest::gave_way(*crowd.rig.store);
  CHECK(crowd.rig.put(100, 2) == Grant::Granted);
  CHECK(StoreTest::gave_way(*crowd.rig.store) - before >= 2 * kPins / 4096 / 4);
  CHECK(crowd.rig.resident(0));
  crowd.leave();
}

// Scans that overlap: what one of them freed, and became a zombie again, is none of the other's.
TEST(scans_that_overlap_free_each_block_once) {
  const SteadyClock clock;
  Crowd crowd;
  std::atomic<uint64_t> puts{0};
  std::vector<std::thread> others;
  for (uint64_t t = 0; t < 3; ++t)
    others.emplace_back([&, t] {
      for (uint64_t i = 0; i < 60; ++i) {
        puts += crowd.rig.put(1000 + 10 * t + i % 10, 2) == Grant::Granted;
        crowd.rig.store->remove(key(1000 + 10 * ((t + 1) % 3) + i % 10));
        crowd.rig.store->settle();
      }
    });
  for (auto& other : others) other.join();
  CHECK(puts.load() > 0);
  CHECK(crowd.rig.control(crowd.held.record).generation() == crowd.held.generation);
  crowd.rig.store->check_integrity();
  crowd.leave();
}

// The same on purpose: a scan stands still where it has read the first words, until the other thread has freed a block that it
// asks for, put another one there, pinned that with the first word, and deleted it.
Store* paused = nullptr;
std::atomic<bool> scan_has_begun{false}, other_is_done{false};
std::thread::id scanner;

uint64_t wait_for_the_other() {
  if (std::this_thread::get_id() == scanner && scan_has_begun.exchange(true))
    while (!other_is_done.load() && StoreTest::waiting(*paused) == 0) std::this_thread::yield();
  return looks.fetch_add(1) * 330'000;
}

TEST(what_became_a_zombie_during_a_scan_waits_for_the_next) {
  Crowd crowd;
  Rig& rig = crowd.rig;
  const Handle first = rig.handle(1);
  CHECK(rig.store->remove(key(1)));
  paused = rig.store.get(), scanner = std::this_thread::get_id(), scan_has_begun = other_is_done = false;
  SlicedMutex::clock = wait_for_the_other;
  Handle second;
  std::thread other([&] {
    while (!scan_has_begun.load()) std::this_thread::yield();
    rig.store->settle();
    CHECK(rig.put(200, 2) == Grant::Granted);
    second = rig.handle(200);
    crowd.pages[0]->clear(0);
    CHECK_EQ(crowd.pages[0]->pin(second), 0u);
    CHECK(rig.store->remove(key(200)));
    other_is_done = true;
  });
  rig.store->settle();
  other.join();
  SlicedMutex::clock = &monotonic_ns;
  CHECK_EQ(second.record, first.record);
  CHECK(second.generation != first.generation);
  CHECK(rig.control(second.record).state() == State::Zombie);
  CHECK_EQ(rig.control(second.record).generation(), second.generation + 1);
  crowd.leave();
}

// And found more held than stood there when the first one began.
TEST(scans_that_overlap_agree_on_what_is_held) {
  Crowd crowd;
  Rig& rig = crowd.rig;
  CHECK(rig.store->remove(key(0)));
  rig.store->settle();
  for (uint32_t i = 0; i < 2; ++i) {
    crowd.pages[i]->clear(0);
    CHECK_EQ(crowd.pages[i]->pin(rig.handle(1 + i)), 0u);
    CHECK(rig.store->remove(key(1 + i)));
  }
  paused = rig.store.get(), scanner = std::this_thread::get_id(), scan_has_begun = other_is_done = false;
  SlicedMutex::clock = wait_for_the_other;
  std::thread other([&] {
    while (!scan_has_begun.load()) std::this_thread::yield();
    rig.store->settle();
    other_is_done = true;
  });
  StoreTest::scan_zombies(*rig.store);
  other.join();
  SlicedMutex::clock = &monotonic_ns;
  CHECK_EQ(rig.store->stats().zombies, 3u);
  rig.store->check_integrity();
  crowd.leave();
}

TEST(an_array_grows_without_moving_and_gives_its_memory_back) {
  SteadyArray<uint64_t> array(1 << 20);
  array.push_back(0);
  const uint64_t* const first = &array.front();
  for (uint64_t i = 1; i < 1 << 20; ++i) array.push_back(i);
  CHECK(&array.front() == first);
  CHECK(array.used_bytes() >= size_t{8} << 20);
  while (array.size() > 1) array.pop_back();
  CHECK(array.used_bytes() <= 2 * SteadyArray<uint64_t>::kPiece);
  unsigned char has_memory = 1;
  CHECK_EQ(::mincore(array.begin() + 3 * SteadyArray<uint64_t>::kPiece / sizeof(uint64_t), kPageBytes, &has_memory), 0);
  CHECK_EQ(has_memory & 1, 0);
  CHECK_EQ(array.back(), 0u);
}

// Records used again and again: what no longer is about a block is swept out a few at a time, never all at once.
TEST(ends_that_outlived_their_blocks_go_a_few_at_a_time) {
  constexpr uint32_t kRecords = 4096;
  ExpiryHeap heap(kRecords);
  std::vector<uint32_t> ends(kRecords);
  size_t most_looks = 0, most = 0;
  for (uint64_t i = 0; i < 20 * kRecords; ++i) {
    const auto record = static_cast<uint32_t>(mixed(i) % kRecords);
    ends[record] = 1000 + static_cast<uint32_t>(mixed(i + 1) % 1'000'000), heap.changed(record);
    size_t looked = 0;
    heap.add({ends[record], record}, [&](const Expiry& entry) { return ++looked, ends[entry.record] == entry.second; });
    heap.add({ends[record], record}, [&](const Expiry& entry) { return ++looked, ends[entry.record] == entry.second; });
    most_looks = std::max(most_looks, looked), most = std::max(most, heap.size());
  }
  CHECK(most_looks <= 2 * ExpiryHeap::kSwept);
  CHECK(most <= kRecords + kRecords / 4);
  uint32_t last = 0;
  size_t current = 0;
  for (; !heap.empty();) {
    const Expiry entry = heap.pop();
    CHECK(entry.second >= last);
    last = entry.second, current += ends[entry.record] == entry.second;
  }
  size_t used = 0;
  for (const uint32_t end : ends) used += end != 0;
  CHECK_EQ(current, used);
}
