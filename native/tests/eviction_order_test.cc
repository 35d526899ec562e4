// Goal: prompts used once leave in the order they came, the last block of each first, whatever the order they were sealed in.
// Method: victims are counted one by one, each against the list of all that should have gone before it.
//
// Rules proven by removal (tests of four that fail): a first use counted when the block is sealed: 4; each key of a touch, or
// each entry of a ring, as a use of its own: 1; a use of an open block passed over: 1; a place in the prompt that counts for as
// much as five seconds: 4; a clock put back that is believed: 1.
#include <numeric>

#include "tests/check.h"
#include "tests/store_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {

constexpr uint64_t kMiB = 1 << 20;
constexpr uint32_t kPages = 4, kTokens = kPages - 1;

// A pool of whole prompts: block b of prompt p has the number p * blocks + b.
struct Prompts {
  explicit Prompts(uint64_t blocks) : blocks(blocks), rig(4 * kMiB, 4096) {}

  std::vector<Handle> claim(uint64_t prompt) {
    std::vector<CreateItem> items;
    for (uint64_t b = 0; b < blocks; ++b)
      items.push_back({.key = key(prompt * blocks + b), .tokens = kTokens, .base_position = static_cast<uint32_t>(b * kTokens)});
    std::vector<Handle> out;
    for (const Granted& granted : rig.store->create({.owner = rig.owner, .layout = rig.layout, .items = items})) {
      CHECK(granted.status == Grant::Granted);
      out.push_back(granted.handle);
    }
    return out;
  }
  void put(uint64_t prompt) {
    for (const Handle handle : claim(prompt)) CHECK(rig.seal(handle) == Done::Ok);
  }
  std::vector<Key> keys(uint64_t prompt) const {
    std::vector<Key> out;
    for (uint64_t b = 0; b < blocks; ++b) out.push_back(key(prompt * blocks + b));
    return out;
  }
  // How many went in the order of these prompts before one was out of turn, as blocks worth more take their room one by one.
  uint64_t gone_in_turn(const std::vector<uint64_t>& prompts) {
    uint64_t turn = 0;
    for (const uint64_t prompt : prompts)
      for (uint64_t b = blocks; b-- > 0; ++turn) {
        while (rig.store->stats().evictions == turn) CHECK(rig.put(filler++, kPages, 0, 100) == Grant::Granted);
        if (rig.resident(prompt * blocks + b)) return turn;
      }
    return turn;
  }

  const uint64_t blocks;
  Rig rig;
  uint64_t filler = 1'000'000;
};

}  // namespace

TEST(prompts_leave_in_the_order_they_came_the_last_block_first) {
  Prompts pool(8);
  std::vector<uint64_t> order(5);
  std::iota(order.begin(), order.end(), 0);
  for (uint64_t prompt : order) pool.put(prompt);
  CHECK_EQ(pool.gone_in_turn(order), 40u);
  pool.rig.store->check_integrity();
}

TEST(a_block_sealed_later_does_not_outlive_the_ones_before_it) {
  Prompts pool(8);
  const std::vector<Handle> first = pool.claim(0), second = pool.claim(1);
  for (const Handle handle : second) CHECK(pool.rig.seal(handle) == Done::Ok);
  for (const Handle handle : first) CHECK(pool.rig.seal(handle) == Done::Ok);  // in order, each in a request of its own
  CHECK_EQ(pool.gone_in_turn({0, 1}), 16u);
}

TEST(a_prompt_touched_or_got_as_a_whole_still_loses_its_last_block_first) {
  Prompts pool(8);
  for (uint64_t prompt = 0; prompt < 4; ++prompt) pool.put(prompt);
  pool.rig.store->touch(pool.keys(0));
  {  // got
    Page page(*pool.rig.store);
    std::vector<uint32_t> got;
    for (uint64_t b = 0; b < pool.blocks; ++b) got.push_back(pool.rig.handle(2 * pool.blocks + b).record);
    page.board->touched(got);
    pool.rig.store->tick();
  }
  CHECK_EQ(pool.gone_in_turn({1, 3, 0, 2}), 32u);
}

TEST(who_followed_a_block_has_used_it_though_it_was_open_when_that_was_counted) {
  Prompts pool(8);
  const std::vector<Handle> followed = pool.claim(0);
  pool.put(1);
  Page page(*pool.rig.store);
  std::vector<uint32_t> got;
  for (const Handle handle : followed) got.push_back(handle.record);
  page.board->touched(got);
  pool.rig.store->tick();
  for (const Handle handle : followed) CHECK(pool.rig.seal(handle) == Done::Ok);
  CHECK_EQ(pool.gone_in_turn({1, 0}), 16u);
}

// Conversations that come and go in a pool full of others' blocks, each of which was used five times and is not asked for again.
TEST(what_is_new_finds_its_place_among_what_was_used_often) {
  constexpr uint64_t kTurns = 8, kAtOnce = 4, kConversations = 64, kFirst = 500'000;
  Prompts pool(8);
  for (uint64_t prompt = 0; prompt < 32; ++prompt) {
    pool.put(prompt);
    for (int use = 0; use < 4; ++use) pool.rig.store->touch(pool.keys(prompt));
  }
  uint64_t asked = 0, found = 0;
  for (uint64_t from = 0; from < kConversations; from += kAtOnce)
    for (uint64_t turn = 0; turn < kTurns; ++turn)
      for (uint64_t c = from; c < from + kAtOnce; ++c) {
        std::vector<Key> before;
        for (uint64_t b = 0; b < turn; ++b) before.push_back(key(kFirst + c * kTurns + b));
        for (const bool there : pool.rig.store->touch(before))
          if (from >= kConversations / 2) asked += 1, found += there;
        pool.rig.put(kFirst + c * kTurns + turn, kPages);
      }
  CHECK(asked > 800 && found == asked);
  pool.rig.store->check_integrity();
}

TEST(a_clock_put_back_changes_no_order) {
  Prompts pool(8);
  StoreTest::index(*pool.rig.store).header().score_ns.store(1'000'000'000'000'000);
  pool.put(0);
  auto& clock = StoreTest::index(*pool.rig.store).header().score_ns;
  clock.store(1);  // as if the clock were that much earlier
  pool.put(1);
  pool.put(2);
  CHECK_EQ(pool.gone_in_turn({0, 1, 2}), 24u);
}
