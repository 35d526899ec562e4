// Goal: a block whose buffers lie apart in a region is a block as any other: its bytes are read in the order of its layers, and
// all of its memory and its list go as one; nobody makes one of memory that is not its own region's.
//
// Method: blocks of pages in an order that is not the memory's (pieces_fixture.h), check_integrity() after each step, which
// counts the memory and the records of lists.
#include "core/base/checksum.h"
#include "tests/pieces_fixture.h"

using namespace kv;
using namespace kv::test;

TEST(bytes_come_in_the_order_of_the_pieces) {
  PiecesRig world;
  for (uint32_t i = 0; i < 4; ++i) world.fill(10 + 3 * i, static_cast<char>('a' + i));
  const uint64_t before = world.used();
  std::string all;
  for (const char letter : std::string("dcba")) all += std::string(kPageBytes, letter);
  const Publish item = world.wanted(1, apart(10, 4), {crc32c(all.data(), all.size())});
  CHECK_EQ(world.publish(item).status, static_cast<uint8_t>(Grant::Granted));
  world.rig.store->check_integrity();
  CHECK_EQ(world.used(), before + kPageBytes);  // what stands behind the layers
  const auto bytes = world.rig.store->read(key(1), 0, 100 * kPageBytes);
  CHECK(bytes && std::equal(bytes->begin(), bytes->end(), all.begin(), all.end()));
  const auto middle = world.rig.store->read(key(1), kPageBytes - 1, kPageBytes + 2);
  CHECK(middle && middle->front() == 'd' && (*middle)[1] == 'c' && middle->back() == 'b');
  const ScrubResult scrubbed = world.rig.store->scrub(0, ~0ull);
  CHECK_EQ(scrubbed.verified, 1u);
  CHECK_EQ(scrubbed.corrupt, 0u);
  world.fill(13, '!');
  CHECK_EQ(world.rig.store->scrub(0, ~0ull).corrupt, 1u);
  CHECK(!world.rig.resident(1));
  world.end();
  world.nothing_is_left();
}

// Its writer left none.
TEST(checksums_are_computed_for_a_block_in_pieces) {
  PiecesRig world;
  CHECK(world.put(1, apart(10, 9)) == Grant::Granted);
  CHECK_EQ(world.rig.store->scrub(0, ~0ull).computed, 1u);
  CHECK_EQ(world.rig.store->scrub(0, ~0ull).verified, 1u);
}

TEST(given_back_it_is_the_regions_again_and_its_list_is_free) {
  PiecesRig world;
  const uint64_t before = world.used();
  for (int round = 0; round < 100; ++round) {  // more lists than the table has records
    CHECK(world.put(1, apart(10, 40)) == Grant::Granted);
    const Handle block = world.rig.handle(1);
    const uint32_t place = world.client.pin(block);
    Page reader(*world.rig.store);
    const uint32_t theirs = reader.pin(block);
    CHECK(world.take_back(block) == Back::Held);
    CHECK(!world.rig.resident(1));
    world.rig.store->tick();
    CHECK_EQ(world.used(), before + kPageBytes);
    reader.clear(theirs);
    CHECK(world.take_back(block, kRegion + 1) == Back::Gone);  // no such region: it waits for its owner's pin
    CHECK(world.take_back(block) == Back::Taken);
    world.client.clear(place);
    CHECK(world.take_back(block) == Back::Gone);
    CHECK_EQ(world.used(), before);
    reader.unmap();
    world.rig.store->end_session(reader.id);
  }
  CHECK(world.put(2, apart(0, 100)) == Grant::Granted);
  CHECK(world.rig.store->remove(key(2)));  // its pages are nobody's, and the region does without them
  world.rig.store->settle();
  CHECK_EQ(world.used(), before - 100 * kPageBytes);
  CHECK(world.put(3, {3}) == Grant::NoSpace);
  CHECK(world.put(3, {4}) == Grant::Granted);
  world.end();
  CHECK(world.rig.resident(3));
  world.nothing_is_left();
}

TEST(what_is_not_its_regions_own_is_no_piece) {
  PiecesRig world;
  Store& store = *world.rig.store;
  Page other(store);
  const Granted theirs = world.make(40, other.id, 78), second = world.make(40, world.client.id, 79);
  CHECK(world.rig.put(500, 4) == Grant::Granted);
  const CreateItem open{.key = key(501), .tokens = 3};
  const Granted writing = store.create({.owner = world.client.id, .layout = world.rig.layout, .items = {&open, 1}})[0];
  CHECK(world.put(1, apart(10, 10)) == Grant::Granted);
  const uint64_t used = world.used(), blocks = store.stats().blocks;
  const uint64_t at = world.region.extent.offset;
  auto with = [&](Extent piece) {  // among some that are good
    Publish item = world.wanted(2, {100, 102, 104, 106});
    item.wanted.tokens += static_cast<uint32_t>(piece.length / kPageBytes);
    item.pieces.insert(item.pieces.begin() + 2, piece);
    return item;
  };
  const std::vector<Extent> strange = {
      {theirs.extent.offset, kPageBytes},                     // another session's region
      {second.extent.offset, kPageBytes},                     // another of its own
      {world.extent(500).offset, kPageBytes},                 // a sealed block
      {writing.extent.offset, kPageBytes},                    // one of its own that is written
      {at + 13 * kPageBytes, kPageBytes},                     // sealed in place
      {at + 102 * kPageBytes, kPageBytes},                    // twice
      {at + 103 * kPageBytes, 2 * kPageBytes},                // overlapping
      {at + 399 * kPageBytes, 2 * kPageBytes},                // over the region's end
      {world.rig.segments.capacity - kPageBytes, kPageBytes}  // nobody's
  };
  for (const Extent& piece : strange) {
    CHECK_EQ(world.publish(with(piece)).status, static_cast<uint8_t>(Grant::NoSpace));
    store.check_integrity();
    CHECK_EQ(world.used(), used);
    CHECK_EQ(store.stats().blocks, blocks);
  }
  CHECK_EQ(world.publish(with({at + 200 * kPageBytes, kPageBytes}), other.id).status, static_cast<uint8_t>(Grant::NoSpace));
  const std::vector<Extent> malformed = {{at + 200 * kPageBytes + 1, kPageBytes},
                                         {at + 200 * kPageBytes, kPageBytes + 64},
                                         {at + 200 * kPageBytes, 0},
                                         {world.rig.segments.capacity + kPageBytes, kPageBytes},
                                         {at, world.rig.segments.capacity + kPageBytes}};
  for (const Extent& piece : malformed) CHECK_EQ(thrown([&] { world.publish(with(piece)); }), Code::InvalidArgument);
  Publish item = world.wanted(2, {100, 102});
  item.wanted.tokens = 1;
  CHECK_EQ(thrown([&] { world.publish(item); }), Code::InvalidArgument);
  item.wanted.tokens = 3;
  CHECK_EQ(thrown([&] { world.publish(item); }), Code::InvalidArgument);
  item.wanted.tokens = 2, item.sums = {1, 2};
  CHECK_EQ(thrown([&] { world.publish(item); }), Code::InvalidArgument);
  item.sums.clear();
  const uint32_t odd = store.register_layout(layout_blob(2, kPageBytes / 2, 64));  // layers end within a page
  item.wanted.tokens = 1;
  item.pieces.pop_back();
  CHECK_EQ(thrown([&] { store.publish({.owner = world.client.id, .layout = odd, .items = {}}, {&item, 1}); }),
           Code::InvalidArgument);
  const uint32_t long_meta = store.register_layout(layout_blob(1, kPageBytes, 64, 65'000));  // its daemon would write it
  CHECK_EQ(thrown([&] { store.publish({.owner = world.client.id, .layout = long_meta, .items = {}}, {&item, 1}); }),
           Code::InvalidArgument);
  CHECK(world.put(2, {100, 102, 104, 106}) == Grant::Granted);
}

TEST(more_pieces_than_a_block_may_have) {
  PiecesRig world(32 * kMiB, 1024, 4200);
  std::vector<uint32_t> most = apart(0, kMaxPieces, 2);
  CHECK(world.put(1, most) == Grant::Granted);
  most.push_back(4199);
  CHECK_EQ(thrown([&] { world.publish(world.wanted(2, most)); }), Code::InvalidArgument);
}

TEST(without_records_for_its_list_nothing_is_published) {
  PiecesRig world(16 * kMiB, 16);
  CHECK(world.put(1, apart(0, 60)) == Grant::Granted);  // 11 records and its own, of 15
  CHECK(world.put(2, apart(200, 30)) == Grant::NoSpace);
  CHECK(world.put(3, apart(200, 11)) == Grant::Granted);  // two and its own
  CHECK(world.rig.store->remove(key(1)));
  world.rig.store->settle();
  for (uint64_t i = 10; i < 22; ++i) CHECK(world.rig.put(i, 2) == Grant::Granted);
  world.end();
  world.nothing_is_left();
}

// What stands behind the layers needs memory that the region has not: others go for it.
TEST(in_a_full_pool_others_go_for_what_stands_behind) {
  PiecesRig world(16 * kMiB, 4096, 2048);
  uint64_t number = 1000;
  while (world.rig.store->stats().evictions == 0) CHECK(world.rig.put(number++, 2) == Grant::Granted);
  for (uint32_t i = 0; i < 20; ++i) CHECK(world.put(i, {i * 10, i * 10 + 5}) == Grant::Granted);
  for (uint32_t i = 0; i < 20; ++i) CHECK(world.rig.resident(i));
}

TEST(evicted_for_others_all_of_its_memory_is_theirs) {
  PiecesRig world(8 * kMiB, 512, 1024);
  CHECK(world.put(1, apart(0, 300)) == Grant::Granted);
  CHECK(world.put(2, apart(1, 300)) == Grant::Granted);
  world.end();
  for (uint64_t i = 0; i < 40 && (world.rig.resident(1) || world.rig.resident(2)); ++i) {
    CHECK(world.rig.put(100 + i, static_cast<uint32_t>(100 + 50 * (i % 7))) == Grant::Granted);
    world.rig.store->tick();
    world.rig.store->check_integrity();
  }
  CHECK(!world.rig.resident(1) && !world.rig.resident(2));
  world.nothing_is_left();
}

TEST(a_region_closed_or_gone_takes_nothing_back) {
  PiecesRig world;
  CHECK(world.put(1, apart(10, 20)) == Grant::Granted);
  const Handle block = world.rig.handle(1);
  const uint32_t place = world.client.pin(block);
  CHECK(world.rig.store->abort(world.client.id, world.region.handle) == Done::Ok);
  world.rig.store->settle();
  CHECK_EQ(world.used(), 21 * kPageBytes);
  CHECK(world.take_back(block) == Back::Gone);
  world.client.clear(place);
  world.rig.store->tick();
  CHECK_EQ(world.used(), 0u);
  world.rig.store->check_integrity();
}

// Larger than what is freed at once: in between others have the lock.
TEST(a_large_region_goes_a_part_at_a_time) {
  PiecesRig world(128 * kMiB, 256, 24'000);
  CHECK(world.put(1, {0, 12'000, 23'999}) == Grant::Granted);
  world.end();
  CHECK_EQ(world.used(), 4 * kPageBytes);
  world.nothing_is_left();
}
