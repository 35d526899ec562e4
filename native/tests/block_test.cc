// Goal: the transition table is the picture of docs/design.md §3, words survive packing at their limits, and a block costs at
// most 160 bytes of index. Method: exhaustive over states and events; limits packed and unpacked; a store filled to its last
// record and counted.
#include "core/format/block.h"

#include <set>

#include "core/store/arena.h"
#include "tests/check.h"
#include "tests/store_fixture.h"

using namespace kv;

namespace {

constexpr int kStates = 7;
constexpr int kEvents = 11;

}  // namespace

TEST(transitions_are_those_of_the_picture) {
  using S = State;
  using E = Event;
  const std::set<std::tuple<S, E, S>> picture{
      {S::Free, E::Create, S::Created},
      {S::Created, E::Seal, S::Sealed},
      {S::Sealed, E::Evict, S::Zombie},
      {S::Sealed, E::Delete, S::Zombie},
      {S::Zombie, E::LastPinGone, S::Free},
      {S::Created, E::Abort, S::Zombie},
      {S::Created, E::SessionEnd, S::Quarantined},
      {S::Quarantined, E::SessionLockFree, S::Zombie},
      {S::Quarantined, E::Abort, S::Zombie},  // its writer came back and says that it has stopped
      {S::Free, E::Indexed, S::Disk},
      {S::Zombie, E::Demote, S::Disk},
      {S::Disk, E::Delete, S::Free},
      {S::Disk, E::Evict, S::Free},
      {S::Free, E::Create, S::Piece},
      {S::Piece, E::LastPinGone, S::Free},        // its block was a zombie
      {S::Piece, E::SessionEnd, S::Quarantined},  // there is no block: a daemon was killed before
      {S::Piece, E::TakeBack, S::Created}};
  size_t count = 0;
  for (int from = 0; from < kStates; ++from)
    for (int event = 0; event < kEvents; ++event)
      for (int to = 0; to < kStates; ++to) {
        const auto f = static_cast<S>(from), t = static_cast<S>(to);
        const auto e = static_cast<E>(event);
        CHECK_EQ(allowed(f, e, t), picture.count({f, e, t}) == 1);
        count += allowed(f, e, t);
      }
  CHECK_EQ(count, kTransitions.size());
}

// Nothing leads from memory that somebody may touch to memory that is handed out, but through ZOMBIE: its own, or of a PIECE that
// of its block.
TEST(memory_becomes_free_only_through_zombie) {
  for (const Transition& t : kTransitions)
    if (t.to == State::Free) CHECK(t.from == State::Zombie || t.from == State::Disk || t.from == State::Piece);
}

TEST(every_state_and_event_has_a_name) {
  std::set<std::string_view> names;
  for (int i = 0; i < kStates; ++i) names.insert(name(static_cast<State>(i)));
  for (int i = 0; i < kEvents; ++i) names.insert(name(static_cast<Event>(i)));
  CHECK_EQ(names.size(), static_cast<size_t>(kStates + kEvents));
  CHECK(!names.count("?"));
}

TEST(words_survive_packing_at_their_limits) {
  for (uint64_t generation : {uint64_t{1}, uint64_t{0x123456789a}, kMaxGeneration})
    for (int state = 0; state < kStates; ++state)
      for (int flags : {0, 1, 0x80, 0xff}) {
        const Control c = Control::make(generation, static_cast<State>(state), static_cast<uint8_t>(flags));
        CHECK_EQ(c.generation(), generation);
        CHECK_EQ(static_cast<int>(c.state()), state);
        CHECK_EQ(static_cast<int>(c.flags()), flags);
      }
  for (uint32_t record : {0u, 1u, kMaxRecords - 1})
    for (uint64_t generation : {uint64_t{1}, kMaxGeneration}) {
      CHECK(pin_word(record, generation) != 0);
      CHECK_EQ(pin_record(pin_word(record, generation)), record);
      CHECK_EQ(pin_generation(pin_word(record, generation)), generation);
    }
  for (uint64_t pages : {uint64_t{1}, (uint64_t{1} << 28) - 1})
    for (uint64_t first : {uint64_t{0}, (uint64_t{1} << 36) - 1}) {
      const Extent e{first * kPageBytes, pages * kPageBytes};
      CHECK_EQ(Extent::unpack(e.pack()).offset, e.offset);
      CHECK_EQ(Extent::unpack(e.pack()).length, e.length);
      CHECK(e.end() > e.offset);
    }
  for (const Shape s : {Shape{0, 0, 1, 0}, Shape{kMaxLayouts - 1, kMaxPriority, kMaxTokens, kMaxBasePosition}}) {
    const Shape back = Shape::unpack(s.pack());
    CHECK(back.layout == s.layout && back.priority == s.priority && back.tokens == s.tokens &&
          back.base_position == s.base_position);
  }
  for (uint32_t layers : {0u, 1u, kMaxLayers})
    for (Phase phase : {Phase::Writing, Phase::Sealed, Phase::Ended}) {
      const uint64_t word = progress_word(kMaxGeneration, layers, phase);
      CHECK_EQ(progress_generation(word), kMaxGeneration);
      CHECK_EQ(progress_layers(word), layers);
      CHECK(progress_phase(word) == phase);
      CHECK((progress_word(1, layers, phase) & 0xffffffff) !=
            (progress_word(1, layers + 1, phase) & 0xffffffff));  // the futex word changes
    }
}

// Table, progress words, and on the daemon's heap: per block an entry of the eviction heap (record, score), its place there, two
// of the arena's slot lists, and at most five quarters of an expiry.
TEST(a_block_costs_at_most_160_bytes_of_index) {
  CHECK_EQ(sizeof(Record), 64u);
  CHECK_EQ(sizeof(Upkeep), 32u);
  CHECK_EQ(sizeof(Bucket), 64u);
  constexpr uint32_t kBlocks = 1u << 20;
  constexpr uint64_t kCapacity = uint64_t{kBlocks} * (64 << 10);
  // What does not grow with the blocks, layouts above all, is subtracted by taking a second size.
  const uint64_t more = Store::table_bytes(2 * kBlocks, kCapacity) - Store::table_bytes(kBlocks, kCapacity);
  const uint64_t shared =
      more / kBlocks + (Store::progress_bytes(2) - Store::progress_bytes(1)) + 8 * Arena::geometry_words(kCapacity) / kBlocks;
  const uint64_t heap =
      sizeof(double) + 2 * sizeof(uint32_t) + 2 * sizeof(uint32_t) + 5 * sizeof(std::pair<uint32_t, uint32_t>) / 4;
  CHECK(shared + heap <= 160);
  std::printf("     %lu bytes shared, %lu of heap\n", shared, heap);
}
