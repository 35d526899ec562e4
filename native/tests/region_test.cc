// Goal: a region's pages belong to one record each, whatever is published out of it, given back, pinned, deleted, evicted or
// adopted; nobody else gets them while its client has not let go of them, and none is lost for good.
//
// Method: a model of the pages beside the store, random steps, and check_integrity() after each.
#include <map>
#include <random>
#include <set>

#include "tests/check.h"
#include "tests/store_fixture.h"

using namespace kv;
using namespace kv::test;

namespace {

constexpr uint64_t kMiB = 1 << 20;
constexpr uint64_t kRegion = 77;

// As clients register it.
uint32_t region_layout(Rig& rig) { return rig.store->register_layout(layout_blob(1, 1, 1)); }

Granted make_region(Rig& rig, uint64_t number, uint32_t pages, uint32_t by, uint64_t region = kRegion) {
  const CreateItem item{.key = key(1'000'000 + number), .fingerprint = region, .tokens = 1, .region_pages = pages};
  return rig.store->create({.owner = by, .layout = region_layout(rig), .items = {&item, 1}})[0];
}

struct Keys {  // of parts, each once
  uint64_t next = 2'000'000;
  Key operator()() { return key(next++); }
};

RegionChange publish(Rig& rig, uint32_t by, uint64_t number, uint64_t offset, uint32_t pages, const Key& rest) {
  const Publish item{{.key = key(number), .tokens = pages - 1}, offset, rest, true};
  return rig.store->publish({.owner = by, .layout = rig.layout, .items = {}}, {&item, 1})[0];
}

RegionChange take_back(Rig& rig, uint32_t by, Handle block, const Key& part, uint64_t region = kRegion) {
  const TakeBack item{block, part, region};
  return rig.store->take_back(by, region_layout(rig), {&item, 1})[0];
}

bool is(const RegionChange& change, Grant grant) { return change.status == static_cast<uint8_t>(grant); }
bool is(const RegionChange& change, Back back) { return change.status == static_cast<uint8_t>(back); }

}  // namespace

TEST(a_block_in_the_middle_leaves_two_parts_and_gives_them_back) {
  Rig rig(16 * kMiB, 64);
  Page client(*rig.store);
  Keys part;
  const Granted region = make_region(rig, 0, 40, client.id);
  CHECK(region.status == Grant::Granted && region.extent.length == 40 * kPageBytes);
  const uint64_t used = rig.store->stats().used_bytes, at = region.extent.offset;
  const RegionChange middle = publish(rig, client.id, 1, at + 10 * kPageBytes, 5, part());
  CHECK(is(middle, Grant::Granted) && middle.opened.size() == 1 && middle.ended.empty());
  CHECK(rig.resident(1) && rig.store->lookup(key(1)).snapshot.extent.offset == at + 10 * kPageBytes);
  rig.store->check_integrity();
  CHECK(is(publish(rig, client.id, 2, at + 8 * kPageBytes, 5, part()), Grant::NoSpace));   // reaches into it
  CHECK(is(publish(rig, client.id, 2, at + 36 * kPageBytes, 5, part()), Grant::NoSpace));  // reaches out of the region
  CHECK(is(publish(rig, client.id, 1, at, 5, part()), Grant::Exists));
  CHECK(is(publish(rig, rig.owner, 2, at, 5, part()), Grant::NoSpace));  // another session's memory
  CHECK_EQ(thrown([&] { publish(rig, client.id, 2, at + 1, 5, part()); }), Code::InvalidArgument);
  CHECK_EQ(thrown([&] { publish(rig, client.id, 2, at, 1, part()); }), Code::InvalidArgument);
  CHECK(is(publish(rig, client.id, 3, at, 10, part()), Grant::Granted));                    // all of the left part
  CHECK(is(publish(rig, client.id, 4, at + 15 * kPageBytes, 25, part()), Grant::Granted));  // and of the right
  CHECK_EQ(rig.store->stats().created, 0u);
  rig.store->check_integrity();
  const Handle block = rig.handle(1);
  const uint32_t place = client.pin(block);
  Page reader(*rig.store);
  const uint32_t theirs = reader.pin(block);
  CHECK(is(take_back(rig, client.id, block, part()), Back::Held));
  CHECK(!rig.resident(1));  // nobody finds it any more
  rig.store->tick();
  rig.store->check_integrity();
  CHECK_EQ(rig.store->stats().used_bytes, used);  // and nobody else gets it
  reader.clear(theirs);
  const uint32_t twice = client.pin({block.record, block.generation});
  CHECK(is(take_back(rig, client.id, block, part()), Back::Held));
  client.clear(twice);
  CHECK(is(take_back(rig, reader.id, block, part()), Back::Gone));
  CHECK(is(take_back(rig, client.id, block, part()), Back::Taken));
  client.clear(place);
  CHECK(is(take_back(rig, client.id, block, part()), Back::Gone));
  rig.store->check_integrity();
  CHECK(is(take_back(rig, client.id, rig.handle(3), part()), Back::Taken));
  CHECK(is(take_back(rig, client.id, rig.handle(4), part()), Back::Taken));
  rig.store->check_integrity();
  CHECK_EQ(rig.store->stats().created, 1u);  // in one piece again
  CHECK(is(publish(rig, client.id, 5, at, 40, part()), Grant::Granted));
  CHECK_EQ(rig.store->stats().used_bytes, used);
  client.unmap();
  rig.store->end_session(client.id);
  rig.store->tick();
  CHECK(rig.resident(5));  // it outlives its owner
  CHECK(rig.store->remove(key(5)));
  rig.store->settle();
  CHECK_EQ(rig.store->stats().used_bytes, 0u);
  rig.store->check_integrity();
}

// Only what is published is new: not the region, nor the parts that are left of it.
// Whoever reads a block goes by its layout. So a run, whose length is its client's word, is never one.
TEST(no_run_of_a_region_becomes_a_block_longer_than_it_is) {
  Rig rig(16 * kMiB, 64);
  Page client(*rig.store);
  const uint32_t large = rig.store->register_layout(layout_blob(1, 4096 * kPageBytes, 4096));
  const CreateItem item{.key = key(1), .fingerprint = kRegion, .tokens = 4096, .region_pages = 1};
  CHECK_EQ(thrown([&] { rig.store->create({.owner = client.id, .layout = large, .items = {&item, 1}}); }), Code::InvalidArgument);
  const Granted region = make_region(rig, 0, 40, client.id);
  const Seal seal{region.handle, true};
  CHECK(rig.store->seal(client.id, {&seal, 1})[0] == Done::Stale);
  const TakeBack block{region.handle, key(2), kRegion};
  CHECK_EQ(thrown([&] { rig.store->take_back(client.id, large, {&block, 1}); }), Code::InvalidArgument);
  CHECK(!rig.resident(1'000'000));
  rig.store->check_integrity();
}

// A slot may be longer than the block in it: 33 pages lie in one of 34.
TEST(nothing_is_published_beyond_the_end_of_an_open_block) {
  Rig rig(16 * kMiB, 64);
  Page client(*rig.store);
  Keys part;
  const CreateItem item{.key = key(1), .tokens = 32};
  const Granted open = rig.store->create({.owner = client.id, .layout = rig.layout, .items = {&item, 1}})[0];
  CHECK_EQ(open.extent.length, 33 * kPageBytes);
  CHECK(is(publish(rig, client.id, 2, open.extent.offset, 34, part()), Grant::NoSpace));
  rig.store->check_integrity();
}

TEST(parts_of_a_region_are_no_time_for_the_others_uses) {
  Rig rig(16 * kMiB, 1024);
  Page client(*rig.store);
  Keys part;
  const auto half_lives = [&] {
    return touch(*rig.store, key(1)), static_cast<double>(rig.store->header().score_ns.load()) / 3.6e12;
  };
  CHECK(rig.put(1, 4) == Grant::Granted);
  const double before = half_lives();
  const Granted region = make_region(rig, 0, 2048, client.id);
  CHECK(region.status == Grant::Granted);
  for (uint64_t i = 0; i < 20; ++i)
    CHECK(is(publish(rig, client.id, 10 + i, region.extent.offset + (100 * i + 50) * kPageBytes, 3, part()), Grant::Granted));
  CHECK(half_lives() - before < 0.2);
}

TEST(two_regions_that_touch_stay_two) {
  Rig rig(16 * kMiB, 64);
  Page client(*rig.store);
  Keys part;
  const auto unit = static_cast<uint32_t>(StoreTest::arena(*rig.store).unit_bytes() / kPageBytes);
  const Granted first = make_region(rig, 0, unit, client.id, 1), second = make_region(rig, 1, unit, client.id, 2);
  CHECK_EQ(first.extent.end(), second.extent.offset);
  CHECK(is(publish(rig, client.id, 1, first.extent.end() - 2 * kPageBytes, 4, part()), Grant::NoSpace));
  CHECK(is(publish(rig, client.id, 1, first.extent.offset, unit, part()), Grant::Granted));
  CHECK(is(take_back(rig, client.id, rig.handle(1), part(), 1), Back::Taken));
  CHECK_EQ(rig.store->stats().created, 2u);
  rig.store->check_integrity();
}

// Sealed ones survive the daemon, the rest waits for its owner's end; a pool that was adopted is cut as before.
TEST(adopted_with_a_region_in_it) {
  Rig rig(16 * kMiB, 256);
  Page client(*rig.store);
  Keys part;
  const Granted region = make_region(rig, 0, 600, client.id);
  for (uint64_t i = 0; i < 60; i += 2)
    CHECK(is(publish(rig, client.id, i, region.extent.offset + i * 10 * kPageBytes, 9, part()), Grant::Granted));
  const Handle block = rig.handle(4);
  const uint32_t place = client.pin(block);
  const uint64_t used = rig.store->stats().used_bytes;
  rig.restart();
  rig.store->check_integrity();
  CHECK_EQ(rig.store->stats().used_bytes, used);
  for (uint64_t i = 0; i < 60; ++i) CHECK_EQ(rig.resident(i), i % 2 == 0);
  CHECK(rig.store->resume_session(client.id, client.token(), 1, ::geteuid()));
  CHECK(is(publish(rig, client.id, 100, region.extent.offset + 10 * kPageBytes, 9, part()), Grant::NoSpace));
  CHECK(is(take_back(rig, client.id, block, part()), Back::Taken));
  client.clear(place);
  rig.store->check_integrity();
  CHECK(is(publish(rig, client.id, 101, region.extent.offset + 40 * kPageBytes, 9, part()), Grant::Granted));
  rig.store->check_integrity();
  client.unmap();
  rig.store->end_session(client.id);
  rig.store->tick();
  rig.store->check_integrity();
  CHECK_EQ(rig.store->stats().used_bytes, 30 * 9 * kPageBytes);
  rig.store->flush();
  rig.store->tick();
  CHECK_EQ(rig.store->stats().used_bytes, 0u);
  rig.store->check_integrity();
}

// A region, what was published out of it, and who reads it.
struct World {
  static constexpr uint32_t kPages = 400;
  struct Block {
    Handle handle;
    uint32_t first, pages, pin;
    std::vector<uint32_t> readers;
  };
  explicit World(uint64_t seed) : rig(8 * kMiB, 96, seed % 2), random(seed) {
    region = make_region(rig, 0, kPages, client.id);
    CHECK(region.status == Grant::Granted);
  }
  bool overlaps(uint32_t first, uint32_t pages) const {
    for (const auto& [number, block] : mine)
      if (first < block.first + block.pages && block.first < first + pages) return true;
    return false;
  }
  auto some() { return std::next(mine.begin(), static_cast<ptrdiff_t>(random() % mine.size())); }

  void publish_any() {
    const auto pages = static_cast<uint32_t>(2 + random() % 30), first = static_cast<uint32_t>(random() % kPages);
    const uint64_t number = next++;
    const RegionChange said = publish(rig, client.id, number, region.extent.offset + first * kPageBytes, pages, part());
    const bool fits = first + pages <= kPages && !overlaps(first, pages);
    if (is(said, Grant::Granted)) {
      CHECK(fits);
      mine[number] = {said.block, first, pages, client.pin(said.block), {}};
    } else {
      CHECK(!fits || rig.store->stats().blocks + rig.store->stats().created + 4 >= 90);  // or records are short
    }
  }
  void take_any() {
    const auto at = some();
    const RegionChange said = take_back(rig, client.id, at->second.handle, part());
    CHECK(!rig.resident(at->first));
    hidden.insert(at->first);
    if (!is(said, Back::Taken)) {
      CHECK(is(said, Back::Held));
      return;
    }
    CHECK(at->second.readers.empty());
    client.clear(at->second.pin);
    mine.erase(at);
  }
  void delete_any() {
    const auto at = some();
    CHECK_EQ(rig.store->remove(key(at->first)), !hidden.contains(at->first));
    hidden.insert(at->first);
    rig.store->settle();
  }
  void read_any() {
    const auto at = some();
    if (!hidden.contains(at->first)) at->second.readers.push_back(reader.pin(at->second.handle));
  }
  void let_any_go() {
    auto& readers = some()->second.readers;
    if (!readers.empty()) reader.clear(readers.back()), readers.pop_back();
  }
  void step() {
    const uint64_t dice = random() % 10;
    if (dice < 4) return publish_any();
    if (dice == 4) {  // others evict each other
      rig.put(500'000 + random() % 1000, static_cast<uint32_t>(2 + random() % 60));
      rig.store->tick();
    }
    if (mine.empty() || dice == 4) return;
    dice < 7 ? take_any() : dice == 7 ? read_any() : dice == 8 ? let_any_go() : delete_any();
  }
  void check() {
    rig.store->check_integrity();
    for (const auto& [number, block] : mine) {
      CHECK_EQ(rig.resident(number), !hidden.contains(number));
      const Extent there = Extent::unpack(StoreTest::index(*rig.store).record(block.handle.record).extent.load());
      CHECK_EQ(there.offset, region.extent.offset + block.first * kPageBytes);
    }
  }

  Rig rig;
  Page client{*rig.store, 256}, reader{*rig.store, 256};
  Keys part;
  std::mt19937_64 random;
  Granted region;
  std::map<uint64_t, Block> mine;
  std::set<uint64_t> hidden;  // no longer found
  uint64_t next = 0;
};

// Beside a pool that is always full.
TEST(random_steps_against_a_model) {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    World world(seed);
    for (int step = 0; step < 300; ++step) world.step(), world.check();
    Store& store = *world.rig.store;
    world.client.unmap(), world.reader.unmap();
    store.end_session(world.client.id), store.end_session(world.reader.id);
    store.tick();
    store.flush();
    store.tick();
    store.check_integrity();
    CHECK_EQ(store.stats().used_bytes, 0u);
  }
}
