// Layouts come and go: a slot is given to another layout only when no block in memory has the one before, under another
// generation, so that an old id is refused and a reader never takes one layout for another.
//
// Method: many layouts through one store; readers' pins, sessions of older clients and files on disk in the way; restarts.
//
// Proven by removal (in a copy of the tree): take() under the generation before: "an old id ..." fails; take() not looking at
// blocks: "a block keeps ..." fails; older_readers() false: "an older client ..." fails; no forget_layout_on_disk():
// check_integrity throws.

#include <algorithm>

#include "tests/check.h"
#include "tests/store_fixture.h"

namespace {
using namespace kv;
using namespace kv::test;

constexpr uint64_t kMiB = 1 << 20;

std::vector<uint8_t> nth(uint32_t i) { return layout_blob(1 + i % 7, 64, 2 + i / 7); }

struct Layouts : Rig {
  Layouts(uint32_t blocks = 64, bool disk = false) : Rig(16 * kMiB, blocks, disk) {}
  Handle put(uint64_t number, uint32_t id) {
    const CreateItem item{.key = key(number), .tokens = 1};
    const Granted granted = store->create({.owner = owner, .layout = id, .items = {&item, 1}})[0];
    CHECK_EQ(static_cast<int>(granted.status), static_cast<int>(Grant::Granted));
    CHECK(seal(granted.handle) == Done::Ok);
    return granted.handle;
  }
  Code refusal(uint32_t id) {
    const CreateItem item{.key = key(1'000'000), .tokens = 1};
    return thrown([&] { store->create({.owner = owner, .layout = id, .items = {&item, 1}}); }).value();
  }
  uint64_t known() { return store->layouts().size(); }
};

TEST(two_thousand_layouts_come_and_go) {
  Layouts rig;
  std::vector<uint32_t> ids;
  for (uint32_t i = 0; i < 2000; ++i) {
    ids.push_back(rig.store->register_layout(nth(i)));
    rig.put(1 + i, ids.back());
    CHECK_EQ(rig.store->describe(key(1 + i))->snapshot.shape.layout, ids.back());
    if (i % 100 == 99) rig.store->check_integrity();
  }
  CHECK_EQ(rig.known(), kMaxLayouts);
  std::sort(ids.begin(), ids.end());
  CHECK(std::adjacent_find(ids.begin(), ids.end()) == ids.end());
  rig.restart();
  CHECK_EQ(rig.known(), kMaxLayouts);
  rig.store->check_integrity();
  for (uint32_t i = 0; i < 600; ++i) rig.store->register_layout(nth(3000 + i));
  rig.store->check_integrity();
}

TEST(an_old_id_is_refused_by_type_and_the_same_blob_has_a_new_one) {
  Layouts rig;
  const uint32_t old = rig.store->register_layout(nth(0));
  for (uint32_t i = 1; i < kMaxLayouts + 1; ++i) rig.store->register_layout(nth(i));
  CHECK(rig.refusal(old) == Code::LayoutLost);
  CHECK(rig.refusal(layout_id(kMaxLayouts, 0)) == Code::InvalidArgument);
  CHECK(rig.store->layout(old) == nullptr);
  const uint32_t now = rig.store->register_layout(nth(0));
  CHECK(now != old);
  rig.put(1, now);
  rig.restart();
  CHECK(rig.refusal(old) == Code::LayoutLost);
  CHECK_EQ(rig.store->register_layout(nth(0)), now);
  CHECK_EQ(rig.store->describe(key(1))->snapshot.shape.layout, now);
}

TEST(a_block_keeps_its_layout_as_long_as_anybody_reads_it) {
  Layouts rig(2 * kMaxLayouts);
  Page reader(*rig.store);
  const uint32_t id = rig.store->register_layout(nth(0));
  const uint32_t slot = reader.pin(rig.put(1, id));
  CHECK(rig.store->remove(key(1)));
  for (uint32_t i = 1; i < 3 * kMaxLayouts; ++i) rig.store->register_layout(nth(i));
  CHECK(rig.store->layout(id) != nullptr);
  reader.clear(slot);
  rig.store->settle();
  for (uint32_t i = 1; i < 3 * kMaxLayouts; ++i) rig.store->register_layout(nth(i));
  CHECK(rig.store->layout(id) == nullptr);
  rig.store->check_integrity();
}

// All have blocks: those of the layout used longest ago go, unless somebody reads them.
TEST(where_every_layout_has_blocks_the_one_used_longest_ago_goes) {
  Layouts rig(2 * kMaxLayouts);
  std::vector<uint32_t> ids;
  for (uint32_t i = 0; i < kMaxLayouts; ++i) {
    ids.push_back(rig.store->register_layout(nth(i)));
    rig.put(i, ids.back());
  }
  rig.put(10'000, ids[0]);  // used again
  const uint32_t next = rig.store->register_layout(nth(9999));
  CHECK_EQ(layout_slot(next), layout_slot(ids[1]));
  CHECK(!rig.resident(1) && rig.resident(0) && rig.resident(2));
  rig.put(1, next);
  rig.store->check_integrity();
  Page reader(*rig.store, 2 * kMaxLayouts);
  for (uint32_t i = 0; i < kMaxLayouts; ++i) reader.pin(rig.handle(i));
  CHECK(thrown([&] { rig.store->register_layout(nth(8888)); }) == Code::NoSpace);
  rig.store->check_integrity();
  rig.store->end_session(reader.id);
  reader.unmap();
  rig.store->tick();
  rig.store->register_layout(nth(8888));
  rig.store->flush();
  rig.store->settle();
  rig.restart();
  for (uint32_t i = 0; i < kMaxLayouts; ++i) rig.store->register_layout(nth(20'000 + i));
}

TEST(what_a_session_has_registered_goes_last) {
  Layouts rig;
  Page client(*rig.store);
  const uint32_t mine = rig.store->register_layout(nth(0), client.id);
  for (uint32_t i = 1; i < 3 * kMaxLayouts; ++i) rig.store->register_layout(nth(i));
  CHECK(rig.store->layout(mine) != nullptr);
  rig.store->end_session(client.id);
  client.unmap();
  rig.store->tick();
  for (uint32_t i = 1; i < kMaxLayouts + 1; ++i) rig.store->register_layout(nth(i));
  CHECK(rig.store->layout(mine) == nullptr);
}

TEST(an_older_client_keeps_the_table_as_it_knows_it_and_is_refused_what_it_would_misread) {
  Layouts rig;
  Page older(*rig.store, 64, ::geteuid(), false, false);
  const uint32_t base = rig.known() ? rig.known() : 0;
  for (uint32_t i = base; i < kFirstLayouts; ++i) CHECK_EQ(rig.store->register_layout(nth(i)), i);
  CHECK(thrown([&] { rig.store->register_layout(nth(9999)); }) == Code::NoSpace);
  rig.restart();  // its page says what it speaks
  CHECK(thrown([&] { rig.store->register_layout(nth(9999)); }) == Code::NoSpace);
  CHECK_EQ(rig.store->header().version, kOldestFormat);
  CHECK(rig.store->resume_session(older.id, older.token(), 1, ::geteuid(), protocol::kVersionAsks));
  rig.store->end_session(older.id);
  older.unmap();
  rig.store->tick();
  CHECK_EQ(rig.store->register_layout(nth(9999)), kFirstLayouts);
  CHECK_EQ(rig.store->header().version, kFormatVersion);
  CHECK(thrown([&] { Page(*rig.store, 64, ::geteuid(), false, false); }) == Code::IncompatibleVersion);
  Page newer(*rig.store);
  const_cast<SessionPage&>(newer.board->page()).protocol = protocol::kVersionAsks;  // a lie: it would not have been let in
  rig.restart();
  CHECK_EQ(rig.store->register_layout(nth(10'000)), kFirstLayouts + 1);
  CHECK(thrown([&] { rig.store->open_session(64, 1, 1, false, protocol::kVersionAsks); }) == Code::IncompatibleVersion);
}

TEST(blocks_on_disk_are_found_by_name_when_their_layout_went) {
  Layouts rig(2 * kMaxLayouts, true);
  const uint32_t id = rig.store->register_layout(nth(0));
  rig.put(1, id);
  CHECK(rig.store->add_disk(key(1), 0));
  StoreTest::evict(*rig.store, rig.store->describe(key(1))->record);
  rig.store->settle();
  CHECK(rig.store->describe(key(1))->state == State::Disk);
  CHECK_EQ(rig.store->describe(key(1))->snapshot.shape.layout, id);
  rig.restart();
  CHECK_EQ(rig.store->describe(key(1))->snapshot.shape.layout, id);
  for (uint32_t i = 1; i < kMaxLayouts + 1; ++i) rig.put(100 + i, rig.store->register_layout(nth(i)));
  CHECK(rig.store->layout(id) == nullptr);
  CHECK(rig.store->describe(key(1))->state == State::Disk);
  CHECK_EQ(rig.store->describe(key(1))->snapshot.shape.tokens, 0u);
  rig.store->check_integrity();
  CHECK(rig.store->remove(key(101)));
  rig.restart();
  rig.store->check_integrity();
}

TEST(an_older_table_is_adopted_with_the_slots_it_has) {
  Segments segments(16 * kMiB, 64);
  KV_INVARIANT(::ftruncate(segments.table.get(), static_cast<off_t>(Store::table_bytes(64, 16 * kMiB, kFirstLayouts))) == 0);
  auto store = segments.open();
  for (uint32_t i = 0; i < kFirstLayouts; ++i) CHECK_EQ(store->register_layout(nth(i)), i);
  const CreateItem item{.key = key(1), .tokens = 1};
  const uint32_t owner = store->open_owner();
  const Seal block{store->create({.owner = owner, .layout = 5, .items = {&item, 1}})[0].handle};
  CHECK(store->seal(owner, {&block, 1})[0] == Done::Ok);
  store.reset();
  store = segments.open(true);
  CHECK_EQ(store->describe(key(1))->snapshot.shape.layout, 5u);
  CHECK_EQ(store->register_layout(nth(1000)), layout_id(0, 1));
  for (uint32_t i = 0; i < 500; ++i) store->register_layout(nth(2000 + i));
  CHECK_EQ(store->layouts().size(), kFirstLayouts);
  CHECK_EQ(store->describe(key(1))->snapshot.shape.layout, 5u);
  store->check_integrity();
}

}  // namespace
