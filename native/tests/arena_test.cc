// Goal: extents never overlap, memory comes back whole, has_room and room tell what allocate does, and an adopted arena is cut as
// the old one was. Method: random sequences against an interval map, check_integrity after each step.
#include "core/store/arena.h"

#include <algorithm>
#include <map>
#include <random>

#include "core/format/layout.h"
#include "tests/check.h"

using namespace kv;

namespace {

constexpr uint64_t kMiB = 1 << 20;

struct Model {
  std::map<uint64_t, std::pair<uint64_t, uint32_t>> extents;  // offset -> length, record
  bool free(Extent e) const {
    auto next = extents.lower_bound(e.offset);
    if (next != extents.end() && next->first < e.end()) return false;
    return next == extents.begin() || (--next, next->first + next->second.first <= e.offset);
  }
};

uint64_t pages(uint64_t n) { return n * kPageBytes; }

// room() says how many allocate() will grant.
void check_room(Arena& arena, uint64_t length) {
  constexpr size_t kMost = 60;
  const size_t told = arena.room(length, kMost);
  std::vector<uint64_t> granted;
  while (granted.size() < kMost)
    if (const auto at = arena.allocate(length, 0))
      granted.push_back(*at);
    else
      break;
  CHECK_EQ(told, granted.size());
  for (uint64_t at : granted) arena.release({at, length}, 0);
}

// All slots of all pieces, in order, tile the pool without a hole.
void check_tiles(const Arena& arena, uint64_t frontier, bool by_slab) {
  uint64_t at = 0;
  for (const Arena::Piece& piece : arena.pieces(by_slab)) {
    CHECK_EQ(piece.extent.offset, at);
    CHECK(piece.extent.length > 0);
    at = piece.extent.end();
  }
  CHECK_EQ(at, frontier);
}

}  // namespace

TEST(size_classes_waste_little_and_never_round_down) {
  for (uint64_t length = kPageBytes; length < 100 * kMiB; length += kPageBytes * (1 + length / (8 * kMiB))) {
    const uint64_t slot = Arena::size_class(length);
    CHECK(slot >= length && slot % kPageBytes == 0);
    CHECK(static_cast<double>(slot - length) <= 0.0626 * static_cast<double>(length));
    CHECK_EQ(Arena::size_class(slot), slot);
  }
}

TEST(a_full_pool_holds_what_its_size_promises) {
  for (uint64_t block : {pages(1), pages(16), pages(33), kMiB + pages(1), 3 * kMiB, 9 * kMiB}) {
    constexpr uint64_t kPool = 512 * kMiB;
    Arena arena(kPool);
    arena.set_frontier(kPool);
    uint64_t used = 0;
    uint32_t record = 0;
    while (arena.has_room(block)) {
      CHECK(arena.allocate(block, record++).has_value());
      used += block;
    }
    CHECK(!arena.allocate(block, record).has_value());
    CHECK(static_cast<double>(used) >= 0.87 * kPool);
    arena.check_integrity();
  }
}

TEST(nothing_is_granted_above_the_frontier) {
  Arena arena(64 * kMiB);
  CHECK(!arena.has_room(pages(1)));
  CHECK(!arena.allocate(pages(1), 0));
  arena.set_frontier(8 * kMiB);
  uint32_t record = 0;
  while (auto at = arena.allocate(pages(7), record)) CHECK(*at + pages(7) <= 8 * kMiB), ++record;
  CHECK(record > 200);
  CHECK(!arena.claim({8 * kMiB, pages(1)}, record));
  CHECK(!arena.claim({8 * kMiB - pages(1), pages(2)}, record));
  CHECK(!arena.claim({0, 0}, record));
  arena.set_frontier(16 * kMiB);
  CHECK(arena.allocate(pages(7), record).has_value());
}

TEST(any_sequence_keeps_extents_apart_and_gives_all_memory_back) {
  constexpr uint64_t kPool = 64 * kMiB;
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<std::atomic<uint64_t>> geometry(Arena::geometry_words(kPool));
    Arena arena(kPool, geometry.data());
    arena.set_frontier(kPool);
    Model model;
    uint64_t refused = 0;
    for (uint32_t step = 0; step < 3000; ++step) {
      const bool grow = random() % 100 < (step / 500 % 2 ? 35u : 65u);
      if (grow) {
        const uint64_t length = pages(1 + (random() % 8 ? random() % 40 : random() % 1500));
        const bool room = arena.has_room(length);
        const auto at = arena.allocate(length, step);
        CHECK_EQ(room, at.has_value());
        refused += !at;
        if (at) CHECK(model.free({*at, length})), model.extents[*at] = {length, step};
      } else if (random() % 4 == 0) {  // exactly here
        const Extent wanted{pages(random() % (kPool / kPageBytes)), pages(1 + random() % 300)};
        if (arena.claim(wanted, step))
          CHECK(model.free(wanted)), model.extents[wanted.offset] = {wanted.length, step};
        else
          CHECK(wanted.end() > kPool || !model.extents.empty());
      } else if (!model.extents.empty()) {
        auto victim = model.extents.lower_bound(pages(random() % (kPool / kPageBytes)));
        if (victim == model.extents.end()) victim = model.extents.begin();
        arena.release({victim->first, victim->second.first}, victim->second.second);
        model.extents.erase(victim);
      }
      if (step % 20 == 0) check_room(arena, pages(1 + random() % (step % 3 ? 40 : 1500)));
      if (step % 8 == 0) arena.check_integrity();
      if (step % 500 == 0) check_tiles(arena, kPool, false), check_tiles(arena, kPool, true);
    }
    CHECK(refused > 0);
    for (auto& [offset, what] : model.extents) arena.release({offset, what.first}, what.second);
    arena.check_integrity();
    CHECK_EQ(arena.slack_bytes(), 0u);
    CHECK_EQ(arena.pieces(true).size(), 1u);  // one free run: all slabs are gone
    for (auto& word : geometry) CHECK_EQ(word.load(), 0u);
    CHECK(arena.allocate(kPool, 1).has_value());
  }
}

// Without the geometry the same claims stand, but the pool is cut page by page.
TEST(claims_in_any_order_restore_the_slabs_that_were) {
  constexpr uint64_t kPool = 64 * kMiB;
  std::mt19937_64 random(7);
  std::vector<std::atomic<uint64_t>> geometry(Arena::geometry_words(kPool));
  std::vector<std::pair<Extent, uint32_t>> blocks;
  auto count = [&](Arena& arena, uint64_t length) {
    std::vector<uint64_t> got;
    while (auto at = arena.allocate(length, 9'000'000)) got.push_back(*at);
    for (uint64_t at : got) arena.release({at, length}, 9'000'000);
    return got.size();
  };
  std::map<uint64_t, size_t> room;
  const uint64_t lengths[] = {pages(1), pages(5), pages(33), pages(200), pages(700)};
  {
    Arena arena(kPool, geometry.data());
    arena.set_frontier(kPool);
    for (uint32_t r = 0; r < 4000; ++r) {
      const uint64_t length = lengths[random() % 5];
      if (const auto at = arena.allocate(length, r)) blocks.emplace_back(Extent{*at, length}, r);
    }
    std::shuffle(blocks.begin(), blocks.end(), random);
    for (size_t i = 0; i < blocks.size() / 2; ++i) arena.release(blocks[i].first, blocks[i].second);
    blocks.erase(blocks.begin(), blocks.begin() + static_cast<ptrdiff_t>(blocks.size() / 2));
    arena.check_integrity();
    for (uint64_t length : lengths) room[length] = count(arena, length);
  }
  std::vector<std::atomic<uint64_t>> none(geometry.size());
  Arena adopted(kPool, geometry.data()), blind(kPool, none.data());
  adopted.set_frontier(kPool), blind.set_frontier(kPool);
  for (auto& [extent, record] : blocks) {
    CHECK(adopted.claim(extent, record));
    CHECK(!adopted.claim(extent, record + 1));  // taken
    CHECK(blind.claim(extent, record));
    adopted.check_integrity();
  }
  blind.check_integrity();
  check_tiles(adopted, kPool, false);
  for (uint64_t length : lengths) CHECK_EQ(count(adopted, length), room[length]);
  for (auto& [extent, record] : blocks) adopted.release(extent, record), blind.release(extent, record);
  CHECK_EQ(adopted.pieces(true).size(), 1u);
  CHECK_EQ(blind.pieces(true).size(), 1u);
  CHECK_EQ(adopted.slack_bytes() + blind.slack_bytes(), 0u);
}

// What stands in the geometry is a hint: any garbage leaves the claims exact.
TEST(garbage_in_the_geometry_harms_nothing) {
  constexpr uint64_t kPool = 16 * kMiB;
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<std::atomic<uint64_t>> geometry(Arena::geometry_words(kPool));
    for (auto& word : geometry) {
      const uint64_t small = (random() % 40) << 40 | random() % 200;
      word = random() % 4 == 0 ? random() : random() % 3 ? small : 0;
    }
    Arena arena(kPool, geometry.data());
    arena.set_frontier(kPool);
    Model model;
    for (uint32_t r = 0; r < 200; ++r) {
      const Extent wanted{pages(random() % (kPool / kPageBytes)), pages(1 + random() % 60)};
      if (arena.claim(wanted, r)) CHECK(model.free(wanted)), model.extents[wanted.offset] = {wanted.length, r};
      arena.check_integrity();
    }
    CHECK(!model.extents.empty());
    check_tiles(arena, kPool, false);
    for (auto& [offset, what] : model.extents) arena.release({offset, what.first}, what.second);
    CHECK_EQ(arena.pieces(true).size(), 1u);
    CHECK_EQ(arena.slack_bytes(), 0u);
  }
}

// Pieces name everyone who stands in them: what the store evicts to make a run is all that is in the run.
TEST(pieces_name_who_stands_in_them) {
  constexpr uint64_t kPool = 16 * kMiB;
  Arena arena(kPool);
  arena.set_frontier(kPool);
  std::mt19937_64 random(8);
  std::map<uint32_t, Extent> standing;
  for (uint32_t r = 0; r < 300; ++r) {
    const uint64_t length = pages(1 + random() % 30);
    if (const auto at = arena.allocate(length, r)) standing[r] = {*at, length};
  }
  for (bool by_slab : {false, true}) {
    std::map<uint32_t, int> seen;
    for (const Arena::Piece& piece : arena.pieces(by_slab))
      for (uint32_t r : piece.records) {
        CHECK(standing.at(r).offset >= piece.extent.offset && standing.at(r).end() <= piece.extent.end());
        ++seen[r];
      }
    CHECK_EQ(seen.size(), standing.size());
    for (auto& [r, times] : seen) CHECK_EQ(times, 1);
  }
}
