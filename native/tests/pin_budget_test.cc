// Goal: one user's pins stop nobody else, and no pin that was given is broken. Method: pages written as a hostile reader writes
// them, of a user that is not the daemon's own; allowances given, taken back, and adopted by the next daemon. That a reader never
// holds what is taken back is in race_test.
//
// Rules proven by removal (failed checks of one run): every user is taken for the daemon's own: 17; an adopted page is
// believed: 2; the length of a pin's block is not compared: 1; nothing is taken back: 102; the reader does not look at its
// allowance behind its fence: 1; the daemon has no fence between an allowance and the words: 1.
#include <sys/stat.h>

#include <filesystem>
#include <thread>
#include <vector>

#include "core/base/atomics.h"
#include "core/base/polling.h"
#include "tests/check.h"
#include "tests/store_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {

constexpr uint64_t kBlocks = 4096;  // of two pages: a pool of 8192 pages
const uint32_t kStranger = ::geteuid() + 1, kOther = ::geteuid() + 2;

struct Full : Rig {
  Full() : Rig(kBlocks * 2 * kPageBytes, 2 * kBlocks) {
    for (uint64_t i = 0; i < kBlocks; ++i) CHECK(put(i, 2) == Grant::Granted);
  }
  std::atomic<uint64_t>* words(Page& page) { return StoreTest::page(*store, page.id).at<std::atomic<uint64_t>>(kPinsOffset); }
  SessionPage* head(Page& page) { return StoreTest::page(*store, page.id).at<SessionPage>(0); }
  // As somebody writes who keeps no rule: into each word, whatever it was allowed.
  void fill(Page& page, uint32_t count) {
    for (uint32_t i = 0; i < count; ++i) {
      const Handle pinned = handle(i % kBlocks);
      words(page)[i].store(pin_word(pinned.record, pinned.generation));
    }
    head(page)->pins_high.store(~0ull), head(page)->allowance.store(PinAllowance{~0u, ~0u}.pack());
  }
  int refused(int puts) {
    int out = 0;
    for (int i = 0; i < puts; ++i) out += put(100'000 + static_cast<uint64_t>(next++), 2) != Grant::Granted;
    return out;
  }
  int next = 0;
};

// As a client does: what it is allowed, and it asks for more.
std::vector<uint32_t> pin(Rig& rig, Page& page, uint64_t from, uint64_t to, uint32_t pages = 2) {
  std::vector<uint32_t> slots;
  for (uint64_t i = from; i < to; ++i) {
    const Handle pinned = rig.handle(i);
    const uint64_t word = pin_word(pinned.record, pinned.generation);
    uint32_t slot;
    for (int tries = 0; tries < 2; ++tries) {
      if (page.board->take({&word, 1}, &slot, {&pages, 1}) == 1) {
        fence_full();
        if (page.board->allowance().covers(slot, pages)) slots.push_back(slot);
        break;
      }
      rig.store->allow_pins(page.id, static_cast<uint32_t>(page.board->taken() + 1), pages);
    }
  }
  return slots;
}

}  // namespace

TEST(a_stranger_that_writes_every_word_of_a_hundred_pages_refuses_nobody_a_create) {
  Full rig;
  std::vector<std::unique_ptr<Page>> pages;
  for (int i = 0; i < 100; ++i) {
    pages.push_back(std::make_unique<Page>(*rig.store, 8192, kStranger, true));
    rig.store->allow_pins(pages.back()->id, 8192, 2);
    rig.fill(*pages.back(), 8192);
  }
  CHECK_EQ(rig.refused(600), 0);
  const uint64_t before = StoreTest::pins_read(*rig.store);
  CHECK_EQ(rig.refused(100), 0);
  CHECK((StoreTest::pins_read(*rig.store) - before) / 100 < 1024);  // words that a create reads, of 819,200
  CHECK(rig.store->stats().pins <= kBlocks / 4);
  rig.store->check_integrity();
}

TEST(a_user_holds_its_share_and_what_it_holds_stays) {
  Full rig;
  Page reader(*rig.store, 8192, kStranger, true), again(*rig.store, 8192, kStranger, true), writer(*rig.store, 8192, kOther);
  const size_t held = pin(rig, reader, 0, kBlocks).size();
  CHECK_EQ(held, kBlocks / 4);
  CHECK_EQ(pin(rig, again, 0, 8).size(), 0u);  // of the same user
  CHECK_EQ(pin(rig, writer, 1024, kBlocks).size(), kBlocks * 7 / 8 - held);
  CHECK_EQ(rig.refused(3000), 0);
  for (uint64_t i = 0; i < kBlocks * 7 / 8; ++i) CHECK(rig.resident(i));
  Page page(*rig.store, 8192);
  CHECK_EQ(pin(rig, page, 0, kBlocks).size(), kBlocks);  // no bound for the own user
  rig.store->check_integrity();
}

TEST(what_one_session_does_not_use_another_of_its_user_gets) {
  Full rig;
  Page first(*rig.store, 8192, kStranger, true), second(*rig.store, 8192, kStranger, true);
  const std::vector<uint32_t> slots = pin(rig, first, 0, kBlocks / 4);
  CHECK_EQ(slots.size(), kBlocks / 4);
  CHECK_EQ(pin(rig, second, 2000, 2100).size(), 0u);
  first.board->clear(std::span(slots).subspan(500));
  CHECK_EQ(pin(rig, second, 2000, 2100).size(), 100u);
  CHECK(first.board->allowance().covers(slots[499], 2) && !first.board->allowance().covers(slots[1000], 2));
  CHECK_EQ(rig.refused(3000), 0);
  for (uint64_t i = 0; i < 500; ++i) CHECK(rig.resident(i));
  for (uint64_t i = 2000; i < 2100; ++i) CHECK(rig.resident(i));
  CHECK(!rig.resident(600));
  CHECK_EQ(pin(rig, first, 2000, 2100).size(), 100u);  // and takes some again
}

TEST(a_block_longer_than_what_was_allowed_is_not_held) {
  Full rig;
  Page page(*rig.store, 64, kStranger, true);
  CHECK_EQ(rig.store->allow_pins(page.id, 8, 1).pages, 1u);  // of one page
  rig.fill(page, 64);
  CHECK(rig.put(100'000, 2) == Grant::Granted);
  CHECK(!rig.resident(0));
  const PinAllowance longer = rig.store->allow_pins(page.id, 8, 2);  // it holds some: not less than before
  CHECK(longer.slots >= 8 && longer.pages == 2);
  CHECK_EQ(rig.store->allow_pins(page.id, ~0u, ~0u).pages, 2u);  // longer than all it may hold
}

TEST(the_next_daemon_honours_what_was_given_and_no_more) {
  Full rig;
  Page honest(*rig.store, 8192, kOther, true), hostile(*rig.store, 8192, kStranger, true), trusted(*rig.store, 64);
  CHECK_EQ(pin(rig, honest, 0, 700).size(), 700u);
  CHECK_EQ(pin(rig, trusted, 700, 764).size(), 64u);
  rig.fill(hostile, 8192);
  rig.restart();
  CHECK_EQ(rig.refused(3000), 0);
  for (uint64_t i = 0; i < 764; ++i) CHECK(rig.resident(i));
  CHECK(rig.store->stats().pins <= kBlocks / 2);
  CHECK(honest.board->allowance().covers(699, 2));
  CHECK(rig.store->resume_session(honest.id, honest.token(), 1, kOther));
  CHECK_EQ(pin(rig, honest, 764, 800).size(), 36u);
  rig.store->check_integrity();
}

// It is in the file's name from then on, and the largest number there is would say "of any length".
TEST(who_asks_for_the_longest_there_can_be_gets_no_blocks_of_any_length) {
  Full rig;
  Page page(*rig.store, 8192, kStranger, true);
  CHECK(rig.store->allow_pins(page.id, 8, ~0u).pages != PinAllowance::kAnyPages);
  rig.head(page)->allowance.store(PinAllowance{8192, PinAllowance::kAnyPages}.pack());
  rig.restart();
  const PinAllowance has = StoreTest::allowance(*rig.store, page.id);
  CHECK(has.slots == 0 || uint64_t{has.slots} * has.pages <= 2 * kBlocks / 4);
}

// By a daemon that knows of no names between two that do, and says what it gives in the pages alone.
TEST(what_a_daemon_before_gave_and_took_back_meanwhile_is_honoured) {
  Full rig;
  Page first(*rig.store, 8192, kOther, true), second(*rig.store, 8192, kOther, true);
  CHECK_EQ(pin(rig, first, 0, 500).size(), 500u);
  CHECK_EQ(pin(rig, second, 500, 505).size(), 5u);
  CHECK(first.board->allowance().slots > 505);
  rig.head(first)->allowance.store(PinAllowance{500, 2}.pack());
  rig.head(second)->allowance.store(PinAllowance{kBlocks / 4 - 500, 2}.pack());
  for (uint32_t i = 5; i < 515; ++i) {
    const Handle pinned = rig.handle(500 + i);
    rig.words(second)[i].store(pin_word(pinned.record, pinned.generation));
  }
  rig.head(second)->pins_high.store(515);
  for (int restarts = 0; restarts < 2; ++restarts) {
    rig.restart();
    CHECK_EQ(rig.refused(3000), 0);
    uint64_t lost = 0;
    for (uint64_t i = 0; i < 1015; ++i) lost += !rig.resident(i);
    CHECK_EQ(lost, 0u);
  }
  rig.store->check_integrity();
}

TEST(nobody_foresees_the_next_name_of_a_page) {
  Full rig;
  Page page(*rig.store, 8192, kOther, true);
  const auto last = [&] {
    for (const auto& file : std::filesystem::directory_iterator(rig.segments.directory))
      if (SessionFile::number_in(file.path().filename().string().substr(4)) == page.id) return file.path().extension().string();
    return std::string();
  };
  const std::string before = last();
  CHECK(!before.empty() && pin(rig, page, 0, 5).size() == 5);
  CHECK(!last().empty() && last() != before);
}

// A page that says, before a restart, that all its user may hold was given to it, where others hold the rest.
TEST(a_page_that_lies_to_the_next_daemon_takes_nothing_from_others) {
  Full rig;
  Page hostile(*rig.store, 8192, kStranger, true), honest(*rig.store, 8192, kOther);
  CHECK_EQ(pin(rig, honest, 0, kBlocks * 6 / 8).size(), kBlocks * 6 / 8);
  rig.fill(hostile, kBlocks / 4);
  rig.head(hostile)->allowance.store(PinAllowance{kBlocks / 4, 2}.pack());
  for (int restarts = 0; restarts < 2; ++restarts) {
    rig.restart();
    CHECK_EQ(rig.refused(3000), 0);
    uint64_t lost = 0;
    for (uint64_t i = 0; i < kBlocks * 6 / 8; ++i) lost += !rig.resident(i);
    CHECK_EQ(lost, 0u);
  }
  rig.store->check_integrity();
}

// Of a reader that believes in its pin and a daemon that takes back what is not used one sees the other. Method: both at once,
// over one word. While the store says that the reader may hold nothing, it must not believe that it holds something.
TEST(no_pin_is_believed_in_that_was_taken_back) {
  Rig rig(64 * kPageBytes, 64);
  Page reader(*rig.store, 1, kStranger, true), greedy(*rig.store, 64, kStranger, true);
  std::atomic<bool> stop{false}, believes{false};
  uint64_t believed = 0, given_up = 0, taken_back = 0, wrong = 0;
  std::thread pinning([&] {
    while (!stop.load(std::memory_order_relaxed)) {
      const uint64_t word = pin_word(3, 1);
      const uint32_t pages = 1;
      uint32_t slot;
      if (reader.board->take({&word, 1}, &slot, {&pages, 1}) == 0) continue;
      fence_full();
      const bool covered = reader.board->allowance().covers(slot, pages);
      believed += covered, given_up += !covered;
      if (covered) {
        believes.store(true, std::memory_order_release);
        for (int i = 0; i < 50; ++i) relax();
        believes.store(false, std::memory_order_release);
      }
      reader.board->clear({&slot, 1});
    }
  });
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  for (int i = 0; i < 200'000 && wrong == 0 && std::chrono::steady_clock::now() < end; ++i) {
    rig.store->allow_pins(reader.id, 1, 1);
    for (uint64_t k = mixed(static_cast<uint64_t>(i)) % 64; k > 0; --k) relax();
    rig.store->allow_pins(greedy.id, 64, 1);
    if (StoreTest::allowance(*rig.store, reader.id).slots > 0) continue;
    taken_back += 1;
    for (int k = 0; k < 50 && wrong == 0; ++k, relax()) wrong += believes.load(std::memory_order_acquire);
  }
  stop = true;
  pinning.join();
  std::printf("     %lu believed in, %lu given up, %lu times taken back\n", believed, given_up, taken_back);
  CHECK_EQ(wrong, 0u);
}

// 32 KiB at rest, whatever it may hold; memory comes with the pins, and what the next daemon takes over goes on.
TEST(a_page_takes_the_memory_that_its_pins_need) {
  Full rig;
  const auto bytes = [&] {
    uint64_t sum = 0;
    for (const auto& entry : std::filesystem::directory_iterator(rig.segments.directory)) {
      struct stat about;
      CHECK_EQ(::stat(entry.path().c_str(), &about), 0);
      sum += static_cast<uint64_t>(about.st_blocks) * 512;
    }
    return sum;
  };
  Page page(*rig.store, 1u << 16), stranger(*rig.store, 1u << 16, kStranger, true);
  CHECK(bytes() <= 2 * 32768);
  for (uint64_t i = 0; i < 3000; ++i) CHECK(page.pin(rig.handle(i)) != PinBoard::kNoSlot);
  CHECK(bytes() <= 2 * 32768);
  for (uint64_t i = 0; i < 1000; ++i) CHECK(page.pin(rig.handle(3000 + i)) != PinBoard::kNoSlot);
  CHECK_EQ(pin(rig, stranger, 0, 1000).size(), 1000u);
  CHECK(bytes() <= 4 * 32768);
  rig.restart();
  CHECK_EQ(rig.refused(1000), 0);  // in the place of one another: the first of them, of those that nobody holds
  for (uint64_t i = 0; i < 4000; ++i) CHECK(rig.resident(i));
  rig.store->check_integrity();
}

// What it was given once would be of blocks of any length, also of longer ones than there are yet.
TEST(who_cannot_ask_is_no_other_user) {
  Rig rig(kBlocks * 2 * kPageBytes, 2 * kBlocks);
  std::optional<Page> old;
  CHECK(thrown([&] { old.emplace(*rig.store, 8192, kStranger, true, false); }) == Code::IncompatibleVersion);
  for (uint64_t i = 0; i < kBlocks / 32; ++i) CHECK(rig.put(i, 64) == Grant::Granted);
  for (uint64_t i = 0; i < kBlocks / 32 && old; ++i) old->pin(rig.handle(i));
  CHECK(rig.put(100'000, 64) == Grant::Granted);
  Page mine(*rig.store, 8192, ::geteuid(), false, false);  // which has no bound
  for (uint64_t i = 1; i < kBlocks / 32; ++i) CHECK(mine.pin(rig.handle(i)) != PinBoard::kNoSlot);
}
