// Goal: while the lock is given away between two pieces of a block, anybody may do anything: what the pieces hold is nobody
// else's, and a block is published whole or not at all.
//
// Method: a clock by which every slice is over at each look. At look n of an operation it waits for another thread, which has the
// lock at the next pause; n counts up until the operation ends before. What a daemon that is killed at that pause leaves is a
// copy of the table, put back and adopted by the next one.
//
// Rules proven by removal: a claim is looked for again behind the last pause; loose pieces are used bytes; nobody's loose piece
// is evicted; the owner, and a free record, are looked for behind each pause: each ends the test. Failed checks of one run: the
// lock is given away while memory goes: 2; what is runs again behind a lost claim has keys of its own: 101; of what others freed
// some of, nothing is taken back: 319; a layout that goes ends no session: 15; a deleted block's file goes whatever is left of
// it: 49.
#include "tests/pauses_fixture.h"

using namespace kv;
using namespace kv::test;

TEST(whoever_looks_in_between_finds_all_in_order) {
  uint64_t stops = 0;
  for (uint64_t at = 1;; ++at) {
    Stage stage;
    const auto look = [&] {
      stage.store().check_integrity();
      CHECK_EQ(stage.store().stats().used_bytes, stage.used);
      if (!stage.world.rig.resident(1)) CHECK_EQ(stage.store().flush(), 0u);
      stage.store().tick();
      CHECK(stage.world.rig.put(9000, 3) == Grant::Granted);
      CHECK(stage.store().remove(key(9000)));
      stage.store().settle();
    };
    bool any = at_look(at, stage.store(), look, [&] { stage.publish(); });
    CHECK(stage.is(Grant::Granted));
    stage.store().check_integrity();
    CHECK_EQ(stage.world.used(), stage.used);
    any |= at_look(at, stage.store(), look, [&] { stage.take_back(); });
    CHECK(stage.is(Back::Taken));
    stage.is_whole();
    stage.end();
    if (!any) break;
    ++stops;
  }
  CHECK(stops > 2 * kPieces);
  std::printf("     %lu places\n", stops);
}

TEST(whoever_claims_its_key_in_between_has_it) {
  for (const bool sealed : {false, true}) {
    uint64_t lost = 0;
    for (uint64_t at = 1;; ++at) {
      Stage stage;
      Granted theirs;
      const bool any = at_look(
          at, stage.store(),
          [&] {
            theirs = stage.world.rig.create(1, 5);
            if (sealed && theirs.status == Grant::Granted) CHECK(stage.world.rig.seal(theirs.handle) == Done::Ok);
          },
          [&] { stage.publish(); });
      stage.store().check_integrity();
      // It may be asked between its create and its seal.
      CHECK(stage.is(Grant::Granted) || stage.is(Grant::Pending) || (sealed && stage.is(Grant::Exists)));
      CHECK(stage.is(Grant::Granted) == (theirs.status != Grant::Granted));
      if (theirs.status == Grant::Granted) {
        lost += 1;
        sealed ? void(stage.store().remove(key(1))) : void(stage.store().abort(stage.world.rig.owner, theirs.handle));
        stage.store().settle();
        stage.is_whole();
      }
      stage.end();
      if (!any) break;
    }
    CHECK(lost > kPieces);
  }
}

// One of the last pieces goes to another block; records run out; a daemon drains.
TEST(what_it_needs_goes_in_between) {
  const auto another = [](Stage& stage) {
    Publish other{{.key = key(2), .tokens = 1}, 0, key(600'000), false};
    other.pieces = {stage.item.pieces[kPieces - 1], {stage.world.free_behind.front(), kPageBytes}};
    const RegionChange said =
        stage.store().publish({.owner = stage.world.client.id, .layout = stage.world.rig.layout, .items = {}}, {&other, 1})[0];
    return said.status == static_cast<uint8_t>(Grant::Granted);
  };
  const auto records = [](Stage& stage) {
    for (uint64_t i = 0; stage.world.rig.create(5000 + i, 2).status == Grant::Granted;) ++i;
    return true;
  };
  const auto drain = [](Stage& stage) { return stage.store().drain(true), true; };
  for (const std::function<bool(Stage&)>& other : std::vector<std::function<bool(Stage&)>>{another, records, drain}) {
    uint64_t refused = 0;
    for (uint64_t at = 1;; ++at) {
      Stage stage;
      bool took = false;
      const bool any = at_look(at, stage.store(), [&] { took = other(stage); }, [&] { stage.publish(); });
      stage.store().check_integrity();
      CHECK(stage.is(Grant::Granted) || stage.is(Grant::NoSpace));
      if (stage.is(Grant::NoSpace)) CHECK(took), ++refused;
      CHECK(!stage.world.rig.resident(1) || stage.is(Grant::Granted));
      stage.store().drain(false);
      stage.store().end_session(stage.world.rig.owner);
      stage.end();
      if (!any) break;
    }
    CHECK(refused > 0);
  }
}

// With its process or without: what it had is quarantined while that may write to it, and nobody's then.
TEST(a_session_that_ends_in_between) {
  for (const bool published : {false, true})
    for (const bool process : {true, false})
      for (uint64_t at = 1;; ++at) {
        Stage stage;
        if (published) stage.publish();
        const auto go = [&] {
          if (!process) stage.world.client.unmap();
          stage.store().end_session(stage.world.client.id);
          for (int i = 0; i < 3; ++i) stage.store().tick();
        };
        const bool any = at_look(at, stage.store(), go, [&] {
          try {
            published ? stage.take_back() : stage.publish();
          } catch (const Error& error) {
            CHECK_EQ(error.code, Code::FailedPrecondition);  // before its first step
          }
        });
        stage.store().check_integrity();
        const uint64_t open = stage.used - (published ? kPieces + 1 : 0) * kPageBytes;  // what was published is not its writer's
        if (any && process && !stage.world.rig.resident(1)) CHECK(stage.world.used() >= open && stage.world.used() <= stage.used);
        if (any && !process && !stage.world.rig.resident(1)) stage.store().tick(), CHECK_EQ(stage.world.used(), 0u);
        stage.end();
        if (!any) break;
      }
}

// Fails if who publishes has no session any more, as far as the store knows, because the blocks' layout went.
TEST(a_layout_that_goes_in_between) {
  uint64_t refused = 0;
  for (uint64_t at = 1;; at += 3) {
    Stage stage;
    const bool any = at_look(
        at, stage.store(),
        [&] {
          for (uint32_t i = 0; i < 2 * kMaxLayouts; ++i) stage.store().register_layout(layout_blob(1, 64, 100 + i));
        },
        [&] {
          try {
            stage.publish();
          } catch (const Error& error) {
            CHECK_EQ(error.code, Code::FailedPrecondition);  // before its first step
            stage.said.status = static_cast<uint8_t>(Grant::NoSpace);
          }
        });
    stage.store().check_integrity();
    CHECK(stage.is(Grant::Granted) || stage.is(Grant::NoSpace));
    if (stage.is(Grant::NoSpace)) {
      refused += 1;
      stage.world.rig.layout = stage.store().register_layout(layout_blob(1, kPageBytes, Rig::kMaxTokens));
      stage.is_whole();
    }
    stage.end();
    if (!any) break;
  }
  CHECK(refused > 0);
}

// By an owner that does not have it pinned: of what others freed some of, nothing is the region's again. The freed pages are at
// once those of many blocks.
TEST(what_is_being_freed_is_not_taken_back_as_a_whole) {
  uint64_t gone = 0;
  for (uint64_t at = 1;; ++at) {
    Stage stage(2 * kMiB);
    stage.publish();
    const Handle block = stage.said.block;
    std::vector<Extent> theirs;
    RegionChange back;
    const bool any = at_look(
        at, stage.store(),
        [&] {
          std::vector<CreateItem> items;
          for (uint64_t i = 0; i < 200; ++i) items.push_back({.key = key(30'000 + i), .tokens = 1});
          const uint32_t page = stage.world.region_layout();
          for (const Granted& granted : stage.store().create({.owner = stage.world.rig.owner, .layout = page, .items = items}))
            if (granted.status == Grant::Granted) theirs.push_back(granted.extent);
          const TakeBack asked{block, key(700'000), kRegion};
          back = stage.store().take_back(stage.world.client.id, page, {&asked, 1})[0];
        },
        [&] {
          CHECK(stage.store().remove(key(1)));
          stage.store().settle();
        });
    stage.store().check_integrity();
    if (any && back.status == static_cast<uint8_t>(Back::Taken))
      for (const Extent& piece : stage.item.pieces)
        for (const Extent& other : theirs) CHECK(piece.offset != other.offset);
    gone += any && back.status == static_cast<uint8_t>(Back::Gone);
    stage.store().end_session(stage.world.rig.owner);
    stage.end();
    if (!any) break;
  }
  CHECK(gone > kPieces);
}

// A file of a zombie that goes meanwhile changes its flags, and nothing else.
TEST(a_file_that_goes_while_its_block_is_taken_back) {
  for (uint64_t at = 1;; ++at) {
    Stage stage(4 * kMiB, true);
    stage.publish();
    CHECK(stage.store().add_disk(key(1), 0));
    const bool any = at_look(at, stage.store(), [&] { stage.store().drop_disk(key(1)); }, [&] { stage.take_back(); });
    CHECK(stage.is(Back::Taken));
    stage.store().check_integrity();
    stage.end();
    if (!any) break;
  }
}

// Fails if the next daemon finds a deleted block's file, and with it the block.
TEST(the_file_of_a_deleted_block_goes_though_its_daemon_was_killed) {
  for (uint64_t at = 1;; ++at) {
    Stage stage(4 * kMiB, true);
    stage.publish();
    CHECK(stage.store().add_disk(key(1), 0));
    std::string table;
    const bool any = at_look(
        at, stage.store(),
        [&] {
          const auto held = StoreTest::hold(stage.store());
          if (stage.world.rig.control(stage.said.block.record).generation() != stage.said.block.generation)
            table = bytes_of(stage.world.rig.segments.table);
        },
        [&] {
          CHECK(stage.store().remove_here(key(1)));
          stage.store().settle();
        });
    if (!table.empty()) {
      stage.world.rig.store.reset();
      KV_INVARIANT(::pwrite(stage.world.rig.segments.table.get(), table.data(), table.size(), 0) ==
                   static_cast<ssize_t>(table.size()));
      stage.world.rig.start(true);
      stage.store().check_integrity();
      CHECK_EQ(StoreTest::files_that_go(stage.store()), 1u);
    }
    if (!any) break;
  }
}

// A pool that is full of what nobody pins, but for the region: what is loose is nobody's to evict.
TEST(room_is_made_in_between) {
  for (const bool published : {false, true})
    for (uint64_t at = 1;; ++at) {
      Stage stage(2 * kMiB);
      for (uint64_t i = 0; i < 200; ++i) stage.world.rig.put(9000 + i, 2 + i % 3);
      if (published) stage.publish();
      const auto crowd = [&] {
        for (const uint32_t pages : {2u, 60u, 150u, 250u, 9u}) stage.world.rig.put(20'000 + pages, pages);
      };
      const bool any = at_look(at, stage.store(), crowd, [&] { published ? stage.take_back() : stage.publish(); });
      stage.store().check_integrity();
      CHECK(published ? stage.is(Back::Taken) : stage.is(Grant::Granted));
      stage.end();
      if (!any) break;
    }
}

// Deleted: its memory goes piece by piece.
TEST(memory_that_goes_piece_by_piece) {
  uint64_t stops = 0;
  for (uint64_t at = 1;; ++at) {
    Stage stage;
    stage.publish();
    const auto other = [&] {
      stage.store().check_integrity();
      stage.store().tick();
      CHECK(stage.world.rig.put(9000, 3) == Grant::Granted);
      stage.world.end();
    };
    const bool any = at_look(at, stage.store(), other, [&] {
      CHECK(stage.store().remove(key(1)));
      stage.store().settle();
    });
    stage.store().check_integrity();
    if (!any) CHECK_EQ(stage.world.used(), stage.used - (kPieces + 1) * kPageBytes);
    stage.end();
    if (!any) break;
    ++stops;
  }
  CHECK(stops > kPieces);
}

// Its writer may still write to what it had open before, and to what it published: none of that is anybody's while it lives.
TEST(a_daemon_killed_in_between_gives_nothing_away) {
  for (const int what : {0, 1, 2})
    for (uint64_t at = 1;; ++at) {
      Stage stage;
      if (what) stage.publish();
      std::string table;
      const bool any = at_look(
          at, stage.store(),
          [&] {
            const auto held = StoreTest::hold(stage.store());
            table = bytes_of(stage.world.rig.segments.table);
          },
          [&] {
            if (what == 0) return stage.publish();
            if (what == 1) return stage.take_back();
            CHECK(stage.store().remove(key(1)));
            stage.store().settle();
          });
      if (any) {
        stage.world.rig.store.reset();
        KV_INVARIANT(::pwrite(stage.world.rig.segments.table.get(), table.data(), table.size(), 0) ==
                     static_cast<ssize_t>(table.size()));
        stage.world.rig.start(true);
        stage.store().check_integrity();
        if (what == 0) CHECK_EQ(stage.world.used(), stage.used);
        const uint64_t open = stage.used - (kPieces + 1) * kPageBytes;  // what was published may be free again
        CHECK(stage.world.used() >= open && stage.world.used() <= stage.used);
      }
      stage.end();
      if (!any) break;
    }
}

TEST(a_block_of_very_many_pieces_gives_the_lock_away) {
  static std::atomic<uint64_t> ticks{0};
  PiecesRig world(64 * kMiB, 8192, 4200);
  const Publish item = world.wanted(1, apart(0, kMaxPieces - 1, 4));
  SlicedMutex::clock = [] { return ticks.fetch_add(1) * 10'000; };  // ten looks a slice
  const auto paused = [&](auto&& operation) {
    const uint64_t before = StoreTest::gave_way(*world.rig.store);
    operation();
    return StoreTest::gave_way(*world.rig.store) - before;
  };
  RegionChange said;
  CHECK(paused([&] { said = world.publish(item); }) >= kMaxPieces / 12);
  CHECK_EQ(said.status, static_cast<uint8_t>(Grant::Granted));
  CHECK(paused([&] { CHECK(world.take_back(said.block) == Back::Taken); }) >= kMaxPieces / 12);
  CHECK_EQ(world.publish(world.wanted(2, apart(0, kMaxPieces - 1, 4))).status, static_cast<uint8_t>(Grant::Granted));
  CHECK(world.rig.store->remove(key(2)));
  CHECK(paused([&] { world.rig.store->settle(); }) >= kMaxPieces / 12);
  SlicedMutex::clock = &monotonic_ns;
  world.end();
  world.nothing_is_left();
}
