// Goal: blocks in pieces come back after a restart as they were, whatever was done with them before; what a damaged table says of
// one is not believed, and no memory has two owners.
//
// Method: random steps against a model of the region's pages, and damage written into the table, each before another daemon
// adopts it; check_integrity() after each step.
#include <algorithm>
#include <functional>
#include <random>
#include <set>

#include "tests/pieces_fixture.h"

using namespace kv;
using namespace kv::test;

TEST(adopted_as_it_lay) {
  PiecesRig world;
  for (uint32_t i = 0; i < 4; ++i) world.fill(10 + 3 * i, static_cast<char>('a' + i));
  CHECK(world.put(1, apart(10, 4)) == Grant::Granted);
  CHECK(world.put(2, apart(60, 50)) == Grant::Granted);
  CHECK(world.put(3, {399, 0}) == Grant::Granted);
  const Handle block = world.rig.handle(2);
  const uint32_t place = world.client.pin(block);
  const uint64_t used = world.used(), capacity = world.rig.segments.capacity;
  CHECK_EQ(world.rig.store->header().capacity_bytes, capacity | kTableHasPieces);  // an older daemon does not adopt it
  world.rig.restart();
  Store& store = *world.rig.store;
  store.check_integrity();
  CHECK_EQ(world.used(), used);
  CHECK_EQ(store.stats().blocks, 3u);
  const auto bytes = store.read(key(1), 0, 1);
  CHECK(bytes && bytes->front() == 'd');
  CHECK_EQ(store.header().capacity_bytes, capacity | kTableHasPieces);
  CHECK(store.resume_session(world.client.id, world.client.token(), 1, ::geteuid()));
  CHECK(world.put(4, {200, 202}) == Grant::NoSpace);  // its runs are quarantined, as every region's
  world.client.clear(place);
  world.end();
  CHECK(world.rig.resident(1) && world.rig.resident(2) && world.rig.resident(3));
  CHECK_EQ(world.used(), (5 + 51 + 3) * kPageBytes);
  world.nothing_is_left();
  world.rig.restart();
  CHECK_EQ(world.rig.store->header().capacity_bytes, capacity);
}

// What was evicted, and still read, stays as long as its reader.
TEST(a_zombie_in_pieces_waits_for_its_reader_over_a_restart) {
  PiecesRig world;
  CHECK(world.put(1, apart(10, 30)) == Grant::Granted);
  Page reader(*world.rig.store);
  const uint32_t place = reader.pin(world.rig.handle(1));
  CHECK(world.rig.store->remove(key(1)));
  world.end();
  CHECK_EQ(world.used(), 31 * kPageBytes);
  world.rig.restart();
  world.rig.store->check_integrity();
  CHECK_EQ(world.used(), 31 * kPageBytes);
  reader.clear(place);
  world.rig.store->tick();
  CHECK_EQ(world.used(), 0u);
  world.nothing_is_left();
}

// A daemon killed between the first piece and the block: the writer may still write to what was cut out of its runs.
TEST(pieces_without_a_block_wait_for_their_writer) {
  PiecesRig world;
  CHECK(world.put(1, apart(10, 20)) == Grant::Granted);
  const Extent extent = world.extent(1);
  const uint64_t used = world.used();
  Index& index = StoreTest::index(*world.rig.store);
  const Handle block = world.rig.handle(1);
  index.record(block.record).control.store(Control::make(block.generation, State::Free).word);
  CHECK(extent.in_pieces());
  world.rig.restart();
  world.rig.store->check_integrity();
  CHECK_EQ(world.used(), used);
  CHECK_EQ(world.rig.store->header().capacity_bytes, world.rig.segments.capacity);
  world.end();
  world.nothing_is_left();
}

// A daemon killed while it cuts pieces out of a run, or gives them back: of the memory that two records name none is anybody's
// while its writer lives. Method: what the table says between two steps is put back by hand.
TEST(killed_between_two_steps_no_memory_of_a_region_is_lost) {
  using Step = std::function<void(Index&, PiecesRig&, Handle block, Extent before)>;
  const auto free_block = [](Index& index, Handle block) {
    index.record(block.record).control.store(Control::make(block.generation, State::Free).word);
  };
  const std::vector<Step> steps = {
      [&](Index& index, PiecesRig& world, Handle block, Extent before) {  // what is left was entered, the run not yet shortened
        free_block(index, block);
        index.record(world.region.handle.record).extent.store(before.pack());
      },
      [&](Index& index, PiecesRig& world, Handle block, Extent) {  // a run that became a piece altogether, and has just ended
        free_block(index, block);
        const uint32_t piece = static_cast<uint32_t>(world.extent(1).first_piece());
        const uint32_t run = 1000;  // nobody's
        KV_INVARIANT(index.control(run).state() == State::Free);
        Record& r = index.record(run);
        r.extent.store(index.record(piece).extent.load()), r.shape.store(index.record(piece).shape.load());
        index.upkeep(run).owner.store(world.client.id);
        r.control.store(Control::make(5, State::Zombie).word);
      }};
  for (const Step& step : steps) {
    PiecesRig world;
    const Extent before = world.region.extent;
    CHECK(world.put(1, apart(10, 20)) == Grant::Granted);
    const uint64_t used = world.used();
    Index& index = StoreTest::index(*world.rig.store);
    const Handle block = world.rig.handle(1);
    step(index, world, block, before);
    world.rig.restart();
    world.rig.store->check_integrity();
    CHECK_EQ(world.used(), used);
    CHECK(!world.rig.resident(1));
    world.end();
    world.nothing_is_left();
  }
}

// What the table says after some bit of it went wrong: that block is gone, the others stay, no memory has two owners.
TEST(a_damaged_chain_is_no_block) {
  const auto first = [](Extent its) { return static_cast<uint32_t>(its.first_piece()); };
  using Damage = std::function<void(Index&, Extent of_damaged, Extent of_other)>;
  const std::vector<Damage> damages = {
      [&](Index& index, Extent its, Extent other) {  // the other's first piece
        index.record(first(its)).extent.store(index.record(first(other)).extent.load());
      },
      [&](Index& index, Extent its, Extent) { index.record(first(its)).extent.store(0); },
      [&](Index& index, Extent its, Extent) { index.record(first(its)).extent.store(~0ull); },
      [&](Index& index, Extent its, Extent) {
        index.record(first(its)).extent.store(Extent{index.header().frontier.load(), kPageBytes}.pack());
      },
      [&](Index& index, Extent its, Extent) {  // a piece too long
        const Extent piece = Extent::unpack(index.record(first(its)).extent.load());
        index.record(first(its)).extent.store(Extent{piece.offset, 2 * kPageBytes}.pack());
      },
      [&](Index& index, Extent its, Extent) { index.record(first(its)).key[0].store(~0ull); },
      [&](Index& index, Extent its, Extent) { index.record(first(its)).key[0].store(first(its)); },
      [&](Index& index, Extent its, Extent other) { index.record(first(its)).key[0].store(first(other)); },
      [&](Index& index, Extent its, Extent) { index.record(first(its)).key[1].store(~0ull); },
      [&](Index& index, Extent its, Extent) { index.record(first(its)).shape.store(0); },
      [&](Index& index, Extent its, Extent) { index.record(first(its)).control.store(Control::make(7, State::Free).word); },
      [&](Index& index, Extent its, Extent) { index.record(first(its)).control.store(Control::make(7, State::Disk).word); }};
  for (const Damage& damage : damages) {
    PiecesRig world;
    CHECK(world.put(1, apart(10, 20)) == Grant::Granted);
    CHECK(world.put(2, apart(100, 20)) == Grant::Granted);
    CHECK(world.rig.put(3, 4) == Grant::Granted);
    const Extent whole = world.extent(1), second = world.extent(2);
    damage(StoreTest::index(*world.rig.store), second, whole);
    world.rig.restart();
    world.rig.store->check_integrity();
    // Which of the two has a page of both is all the same.
    CHECK_EQ(world.rig.resident(1) + world.rig.resident(2), 1);
    CHECK(world.rig.resident(3));
    world.end();
    world.nothing_is_left();
  }
}

// Blocks of one and of many pieces, given back, deleted, evicted and read, in a pool that is always full.
struct Model {
  struct Block {
    Handle handle;
    std::vector<uint32_t> pages;
    uint32_t pin;
    std::optional<uint32_t> read{};
  };
  explicit Model(uint64_t seed) : world(8 * kMiB, 2000, 600, seed % 2), random(seed) {}

  void publish_any(uint64_t number) {
    if (world.free_behind.empty()) return;
    std::set<uint32_t> pages;
    for (uint64_t count = 1 + random() % 40; pages.size() < count;) pages.insert(static_cast<uint32_t>(random() % 600));
    std::vector<uint32_t> order(pages.begin(), pages.end());
    std::shuffle(order.begin(), order.end(), random);
    const RegionChange said = world.publish(world.wanted(number, order));
    if (said.status != static_cast<uint8_t>(Grant::Granted)) return;
    for (const uint32_t page : order) CHECK(taken.insert(page).second);
    mine[number] = {said.block, order, world.client.pin(said.block)};
  }
  void change_any() {
    const auto at = std::next(mine.begin(), static_cast<ptrdiff_t>(random() % mine.size()));
    auto& [number, block] = *at;
    const uint64_t dice = random() % 5;
    if (dice == 0 && !block.read && world.rig.resident(number)) {
      block.read = reader.pin(block.handle);
    } else if (dice == 1 && block.read) {
      reader.clear(*block.read), block.read.reset();
    } else if (dice == 2) {
      world.rig.store->remove(key(number)), world.rig.store->settle();
    } else {
      const Back word = world.take_back(block.handle);
      CHECK(word == (block.read ? Back::Held : Back::Taken));
      if (word != Back::Taken) return;
      for (const uint32_t page : block.pages) taken.erase(page);
      world.client.clear(block.pin);
      mine.erase(at);
    }
  }
  void step(uint64_t number) {
    const uint64_t dice = random() % 12;
    if (dice < 5) return publish_any(number);
    if (dice >= 7 && !mine.empty()) return change_any();
    world.rig.put(500'000 + random() % 1000, static_cast<uint32_t>(2 + random() % 60));  // others evict each other
    world.rig.store->tick();
  }
  void check_places() {
    for (const auto& [number, block] : mine) {
      if (!world.rig.resident(number)) continue;
      const std::vector<Extent> pieces = world.pieces(number);
      CHECK_EQ(pieces.size(), block.pages.size() + 1);
      for (size_t i = 0; i < block.pages.size(); ++i) CHECK_EQ(pieces[i].offset, world.page(block.pages[i]).offset);
    }
  }

  PiecesRig world;
  Page reader{*world.rig.store, 256};
  std::mt19937_64 random;
  std::map<uint64_t, Block> mine;
  std::set<uint32_t> taken;
};

TEST(random_steps_against_a_model) {
  for (uint64_t seed = 0; seed < 8; ++seed) {
    Model model(seed);
    PiecesRig& world = model.world;
    for (uint64_t number = 0; number < 400; ++number) model.step(number), world.rig.store->check_integrity();
    model.check_places();
    const uint64_t used = world.used();
    world.rig.restart();
    world.rig.store->check_integrity();
    CHECK_EQ(world.used(), used);
    model.check_places();
    model.reader.unmap();
    world.end();
    world.rig.store->end_session(model.reader.id);
    world.rig.store->tick();
    world.nothing_is_left();
  }
}
