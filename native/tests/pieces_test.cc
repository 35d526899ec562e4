// Goal: a block whose buffers lie apart in a region is a block as any other: its bytes are read in the order of its pieces, and
// all of its memory goes as one; nobody makes one of memory that is not of a region of its own.
//
// Method: blocks of pages in an order that is not the memory's (pieces_fixture.h), check_integrity() after each step, which
// looks at each piece. The fixture follows what the store says of the parts that are left.
#include "core/base/checksum.h"
#include "tests/pieces_fixture.h"

using namespace kv;
using namespace kv::test;

TEST(bytes_come_in_the_order_of_the_pieces) {
  PiecesRig world;
  std::string all;
  for (uint32_t i = 0; i < 4; ++i) world.fill(10 + 3 * i, static_cast<char>('a' + i));
  for (const char letter : std::string("dcba")) all += std::string(kPageBytes, letter);
  const uint64_t before = world.used();
  const Publish item = world.wanted(1, apart(10, 4), true);
  const uint32_t sum = crc32c(all.data(), all.size());
  world.fill(item.pieces.back().offset, std::string(reinterpret_cast<const char*>(&sum), sizeof sum));
  CHECK_EQ(world.publish(item).status, static_cast<uint8_t>(Grant::Granted));
  world.rig.store->check_integrity();
  CHECK_EQ(world.used(), before);
  CHECK_EQ(world.rig.store->stats().blocks, 1u);
  const auto bytes = world.rig.store->read(key(1), 0, 100 * kPageBytes);
  CHECK(bytes && bytes->size() == all.size() && std::equal(bytes->begin(), bytes->end(), all.begin()));
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

TEST(given_back_it_is_the_regions_again) {
  PiecesRig world;
  const uint64_t before = world.used();
  for (int round = 0; round < 100; ++round) {  // more pieces than the table has records
    CHECK(world.put(1, apart(10, 40)) == Grant::Granted);
    const Handle block = world.rig.handle(1);
    const uint32_t place = world.client.pin(block);
    Page reader(*world.rig.store);
    const uint32_t theirs = reader.pin(block);
    CHECK(world.take_back(block) == Back::Held);
    CHECK(!world.rig.resident(1));
    world.rig.store->tick();
    CHECK_EQ(world.used(), before);
    reader.clear(theirs);
    CHECK(world.take_back(block) == Back::Taken);
    world.client.clear(place);
    CHECK(world.take_back(block) == Back::Gone);
    CHECK_EQ(world.used(), before);
    CHECK(world.rig.store->stats().created <= 2);  // its runs are whole again, and where they touch are one
    reader.unmap();
    world.rig.store->end_session(reader.id);
  }
  CHECK(world.put(2, apart(0, 100)) == Grant::Granted);
  CHECK(world.rig.store->remove(key(2)));  // its pages are nobody's, and the region does without them
  world.rig.store->settle();
  CHECK_EQ(world.used(), before - 101 * kPageBytes);
  CHECK(world.put(3, {3, 7}) == Grant::NoSpace);
  CHECK(world.put(3, {4, 8}) == Grant::Granted);
  world.end();
  CHECK(world.rig.resident(3));
  world.nothing_is_left();
}

TEST(what_is_no_regions_of_its_own_is_no_piece) {
  PiecesRig world;
  Store& store = *world.rig.store;
  Page other(store);
  const Granted theirs = world.make(40, other.id, 78);
  CHECK(world.rig.put(500, 4) == Grant::Granted);
  const CreateItem item{.key = key(501), .tokens = 3};
  const Granted writing = store.create({.owner = world.client.id, .layout = world.rig.layout, .items = {&item, 1}})[0];
  CHECK(world.rig.store->abort(other.id, theirs.handle) == Done::Ok);
  const Granted again = world.make(40, other.id, 78);
  world.open.insert({writing.handle.record, again.handle.record});
  CHECK(world.put(1, apart(10, 10)) == Grant::Granted);
  const uint64_t used = world.used(), blocks = store.stats().blocks;
  auto with = [&](Extent piece) {  // among some that are good
    Publish out = world.wanted(2, {100, 102, 104, 106});
    out.wanted.tokens += static_cast<uint32_t>(piece.length / kPageBytes);
    out.pieces.insert(out.pieces.begin() + 2, piece);
    return out;
  };
  const std::vector<Extent> strange = {
      {again.extent.offset, kPageBytes},                      // another session's region
      {world.extent(500).offset, kPageBytes},                 // a sealed block
      {writing.extent.offset, kPageBytes},                    // a block of its own that is written
      world.page(13),                                         // sealed in place
      {world.page(399).offset, 2 * kPageBytes},               // over the region's end
      {world.rig.segments.capacity - kPageBytes, kPageBytes}  // nobody's
  };
  for (const Extent& piece : strange) {
    CHECK_EQ(world.publish(with(piece)).status, static_cast<uint8_t>(Grant::NoSpace));
    store.check_integrity();
    CHECK_EQ(world.used(), used);
    CHECK_EQ(store.stats().blocks, blocks);
  }
  CHECK_EQ(world.publish(with(world.page(200)), other.id).status, static_cast<uint8_t>(Grant::NoSpace));
  const std::vector<Extent> malformed = {world.page(102),                           // twice
                                         {world.page(103).offset, 2 * kPageBytes},  // overlapping
                                         {world.page(200).offset, 0},
                                         {world.rig.segments.capacity + kPageBytes, kPageBytes},
                                         {world.page(0).offset, world.rig.segments.capacity + kPageBytes}};
  for (const Extent& piece : malformed) CHECK_EQ(thrown([&] { world.publish(with(piece)); }), Code::InvalidArgument);
  Publish short_of = world.wanted(2, {100, 102});
  short_of.wanted.tokens = 1;
  CHECK_EQ(thrown([&] { world.publish(short_of); }), Code::InvalidArgument);
  short_of.wanted.tokens = 3;
  CHECK_EQ(thrown([&] { world.publish(short_of); }), Code::InvalidArgument);
  // What stands behind the layers is read at one place.
  const uint32_t long_meta = store.register_layout(layout_blob(1, kPageBytes, 64, 8000));
  Publish cut = world.wanted(2, {100});
  cut.pieces.back() = {world.behind.extent.offset + 20 * kPageBytes, kPageBytes};
  cut.pieces.push_back({world.behind.extent.offset + 30 * kPageBytes, kPageBytes});
  CHECK_EQ(thrown([&] { store.publish({.owner = world.client.id, .layout = long_meta, .items = {}}, {&cut, 1}); }),
           Code::InvalidArgument);
  CHECK(world.put(2, {100, 102, 104, 106}) == Grant::Granted);
}

TEST(more_pieces_than_a_block_may_have) {
  PiecesRig world(32 * kMiB, 8192, 4200);
  std::vector<uint32_t> most = apart(0, kMaxPieces - 1, 2);
  CHECK(world.put(1, most) == Grant::Granted);
  most.push_back(4199);
  CHECK_EQ(thrown([&] { world.publish(world.wanted(2, most)); }), Code::InvalidArgument);
}

// A part that is left has the key that its client named, which somebody may have by chance: then nothing has changed.
TEST(a_part_that_cannot_be_entered_leaves_the_region_whole) {
  PiecesRig world;
  Publish item = world.wanted(1, {100, 102, 104});
  const uint64_t before = world.used();
  for (uint64_t at = 1; at <= 3; ++at) {
    Key taken = item.rest;
    taken.words[0] += at * 0x9e3779b97f4a7c15;
    const CreateItem blocking{.key = taken, .tokens = 1};
    const Granted granted =
        world.rig.store->create({.owner = world.rig.owner, .layout = world.rig.layout, .items = {&blocking, 1}})[0];
    world.open.insert(granted.handle.record);
    const RegionChange said = world.publish(item);
    CHECK_EQ(said.status, static_cast<uint8_t>(Grant::NoSpace));
    world.rig.store->check_integrity();
    CHECK(world.rig.store->abort(world.rig.owner, granted.handle) == Done::Ok);
    world.open.erase(granted.handle.record);
    world.rig.store->settle();
    CHECK_EQ(world.used(), before);
  }
  item.wanted.key = item.rest, item.wanted.key.words[0] += 2 * 0x9e3779b97f4a7c15;  // its own
  CHECK_EQ(world.publish(item).status, static_cast<uint8_t>(Grant::NoSpace));
  world.rig.store->check_integrity();
  CHECK_EQ(world.used(), before);
  CHECK(world.put(1, {100, 102, 104}) == Grant::Granted);
}

TEST(without_records_for_all_pieces_nothing_is_published) {
  PiecesRig world(16 * kMiB, 64);
  CHECK(world.put(1, apart(0, 20)) == Grant::Granted);
  CHECK(world.put(2, apart(200, 30)) == Grant::NoSpace);
  CHECK(world.rig.store->remove(key(1)));
  world.rig.store->settle();
  world.end();
  CHECK_EQ(world.used(), 0u);
  for (uint64_t i = 10; i < 74; ++i) CHECK(world.rig.put(i, 2) == Grant::Granted);
  world.nothing_is_left();
}

// Its pages touch no run, so that each is one by itself, and no record is free for it.
TEST(taken_back_in_a_full_table) {
  PiecesRig world(16 * kMiB, 120);
  CHECK(world.put(1, {10, 20, 30, 40}) == Grant::Granted);
  CHECK(world.put(2, {9, 19, 29, 39}) == Grant::Granted);
  CHECK(world.put(3, {11, 21, 31, 41}) == Grant::Granted);
  for (uint64_t i = 1; i < 4; ++i) world.client.pin(world.rig.handle(i));
  for (uint64_t i = 100; world.rig.store->stats().evictions == 0; ++i) CHECK(world.rig.put(i, 2) == Grant::Granted);
  CHECK(world.take_back(world.rig.handle(1)) == Back::Taken);
  CHECK_EQ(world.rig.store->stats().quarantined, 0u);
}

TEST(what_cannot_be_published_costs_no_file_its_record) {
  PiecesRig world(16 * kMiB, 3000, 3000, true);
  const uint64_t used = world.rig.store->stats().created;
  for (uint64_t i = 0; i < 3000 - used; ++i) CHECK(world.rig.store->add_disk(key(50'000 + i), 0));
  const uint64_t files = world.rig.store->stats().on_disk;
  std::vector<uint32_t> pages = apart(0, 1000, 2);
  Publish item = world.wanted(1, pages);
  item.pieces[500].offset = world.rig.segments.capacity - kPageBytes;  // nobody's
  CHECK_EQ(world.publish(item).status, static_cast<uint8_t>(Grant::NoSpace));
  CHECK_EQ(world.rig.store->stats().on_disk, files);
  CHECK(world.put(1, pages) == Grant::Granted);
  CHECK(world.rig.store->stats().on_disk < files);
}

TEST(evicted_for_others_all_of_its_memory_is_theirs) {
  PiecesRig world(8 * kMiB, 4096, 1024);
  world.priority = 0;
  CHECK(world.put(1, apart(0, 300)) == Grant::Granted);
  CHECK(world.put(2, apart(1, 300)) == Grant::Granted);
  world.end();
  uint64_t number = 100;
  const auto another = [&] {  // what was just published is spared for a second
    CHECK(world.rig.put(number, static_cast<uint32_t>(100 + 50 * (number % 7))) == Grant::Granted);
    number += 1;
    world.rig.store->tick();
    world.rig.store->check_integrity();
    return !world.rig.resident(1) && !world.rig.resident(2);
  };
  CHECK(eventually(another));
  world.nothing_is_left();
}

// All memory lies in pieces: what is of another length finds room all the same.
TEST(a_pool_of_nothing_but_pieces_is_not_full) {
  PiecesRig world(8 * kMiB, 4096, 1984 - kBehind);
  for (uint32_t i = 0; i < 48; ++i) CHECK(world.put(i, apart(i, 40, 48)) == Grant::Granted);
  world.end();
  CHECK(world.rig.put(1000, 200) == Grant::Granted);
  for (uint64_t i = 1001; i < 1100; ++i) CHECK(world.rig.put(i, static_cast<uint32_t>(2 + i % 3)) == Grant::Granted);
  world.rig.store->check_integrity();
  world.nothing_is_left();
}

TEST(a_region_closed_or_gone_takes_nothing_back) {
  PiecesRig world;
  CHECK(world.put(1, apart(10, 20)) == Grant::Granted);
  const Handle block = world.rig.handle(1);
  const uint32_t place = world.client.pin(block);
  world.end();
  CHECK_EQ(world.used(), 21 * kPageBytes);
  CHECK(world.rig.resident(1));
  (void)place;
  world.nothing_is_left();
}

TEST(a_layout_that_is_wanted_elsewhere_takes_blocks_in_pieces_with_it) {
  PiecesRig world;
  CHECK(world.put(1, apart(10, 20)) == Grant::Granted);
  world.end();
  for (uint32_t i = 0; i < 2 * kMaxLayouts; ++i) {
    const CreateItem item{.key = key(100 + i), .tokens = 1};
    const uint32_t layout = world.rig.store->register_layout(layout_blob(1, 64 + i, 8));
    const Granted granted = world.rig.store->create({.owner = world.rig.owner, .layout = layout, .items = {&item, 1}})[0];
    CHECK(granted.status == Grant::Granted && world.rig.seal(granted.handle) == Done::Ok);
  }
  world.rig.store->check_integrity();
  CHECK(!world.rig.resident(1));
}
