// Goal: a block is found by its fingerprint and by its parent as long as it is indexed, at any offset of a prompt, after an
// adoption too; the finder loses entries only when it is full, and never names what is not there.
// Method: the bare table against a map; a store filled with blocks of chains; prompts that hold them at random offsets.
#include "core/format/finder.h"

#include <map>
#include <memory>
#include <random>
#include <set>

#include "core/client/search.h"
#include "core/format/keys.h"
#include "tests/check.h"
#include "tests/store_fixture.h"

using namespace kv;
using test::key;

namespace {

struct Bare {
  explicit Bare(uint32_t blocks)
      : buckets(new FinderBucket[Finder::buckets_for(blocks)]()), finder(buckets.get(), Finder::buckets_for(blocks)) {}
  std::unique_ptr<FinderBucket[]> buckets;
  Finder finder;

  bool has(uint64_t word, uint32_t record) const {
    uint32_t out[2 * kFinderSlots];
    const size_t count = finder.find(word, out);
    return std::find(out, out + count, record) != out + count;
  }
};

uint64_t word_of(uint32_t record) { return 1 + uint64_t{record} * 0x9e3779b97f4a7c15ull % ((1ull << 61) - 2); }

}  // namespace

TEST(four_fifths_of_the_blocks_have_both_entries) {
  constexpr uint32_t kBlocks = 90'000, kUsed = kBlocks * 4 / 5;
  Bare bare(kBlocks);
  uint32_t lost = 0;
  for (uint32_t r = 0; r < kUsed; ++r) {
    lost += !bare.finder.insert(Finder::by_fingerprint(word_of(r)), r);
    lost += !bare.finder.insert(Finder::by_parent(r + 1), r);
  }
  CHECK(lost < kUsed / 1000);
  std::printf("     %u of %u entries left out at four fifths\n", lost, 2 * kUsed);
  uint32_t missed = 0, wrong = 0;
  for (uint32_t r = 0; r < kUsed; ++r) missed += !bare.has(word_of(r), r) + !bare.has(Finder::by_parent(r + 1), r);
  CHECK_EQ(missed, lost);
  for (uint32_t r = kUsed; r < kBlocks; ++r) {
    uint32_t out[2 * kFinderSlots];
    wrong += static_cast<uint32_t>(bare.finder.find(word_of(r), out));
  }
  CHECK(wrong < (kBlocks - kUsed) / 5);  // an eight-bit tag lets one in ten look at a record in vain
}

TEST(an_erased_entry_is_gone_and_its_room_is_used_again) {
  constexpr uint32_t kBlocks = 1000;
  Bare bare(kBlocks);
  std::mt19937_64 random(7);
  std::map<uint32_t, uint64_t> there;
  for (int i = 0; i < 50'000; ++i) {
    const auto r = static_cast<uint32_t>(random() % 600);
    if (const auto found = there.find(r); found != there.end()) {
      bare.finder.erase(found->second, r);
      CHECK(!bare.has(found->second, r));
      there.erase(found);
    } else {
      const uint64_t word = random() % 4 ? random() % ((1ull << 61) - 1) : random() % 50 + 1;  // some words are shared
      if (bare.finder.insert(word, r)) there[r] = word;
    }
  }
  CHECK(there.size() > 250);
  for (const auto& [r, word] : there) CHECK(bare.has(word, r));
  for (const auto& [r, word] : there) bare.finder.erase(word, r);
  for (uint32_t b = 0; b < Finder::buckets_for(kBlocks); ++b)
    for (const auto& slot : bare.buckets[b].slot) CHECK_EQ(slot.load(), 0u);
}

TEST(a_flood_of_one_word_fills_two_buckets_and_no_more) {
  Bare bare(10'000);
  uint32_t in = 0;
  for (uint32_t r = 0; r < 1000; ++r) in += bare.finder.insert(42, r);
  CHECK_EQ(in, 1000u);
  uint32_t used = 0;
  for (uint32_t b = 0; b < Finder::buckets_for(10'000); ++b)
    for (const auto& slot : bare.buckets[b].slot) used += slot.load() != 0;
  CHECK(used <= 2 * kFinderSlots);
  CHECK(!bare.finder.insert(0, 1));  // no fingerprint, no parent
  uint32_t out[4];
  CHECK_EQ(bare.finder.find(42, out), 4u);  // no more than was asked for
  CHECK_EQ(bare.finder.find(0, out), 0u);
}

// A document in many prompts: its oldest copies are the first to be evicted, and it must not become invisible with them.
TEST(copies_beyond_the_room_are_found_when_the_first_are_gone) {
  Bare bare(10'000);
  for (uint32_t r = 0; r < 100; ++r) bare.finder.insert(42, r);
  for (uint32_t r = 0; r < 60; ++r) bare.finder.erase(42, r);
  uint32_t out[2 * kFinderSlots];
  const size_t found = bare.finder.find(42, out);
  CHECK(found >= kFinderSlots / 2);
  for (size_t i = 0; i < found; ++i) CHECK(out[i] >= 60 && out[i] < 100);
  std::printf("     %zu of 40 copies found\n", found);
}

namespace {

constexpr uint32_t kWindow = 16;

// A store with the blocks of some prompts, put as a client with a chain does.
struct Searched {
  explicit Searched(uint32_t blocks = 4096, bool disk = false) : rig(64 << 20, blocks, disk), identity(key(77)) {}

  std::vector<int32_t> prompt(size_t count, uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<int32_t> out(count);
    for (auto& id : out) id = static_cast<int32_t>(random() % 50'000);
    return out;
  }
  Chain put(const std::vector<int32_t>& tokens) {
    Chain chain(identity, tokens.data(), tokens.size(), nullptr, 0, kWindow, false);
    std::vector<CreateItem> items;
    for (size_t i = 0; i < chain.size(); ++i)
      items.push_back({.key = chain.keys()[i],
                       .fingerprint = chain.fingerprint(i),
                       .tokens = kWindow,
                       .base_position = static_cast<uint32_t>(chain.start_token(i)),
                       .parent = static_cast<uint32_t>(chain.parent_key(i).words[0])});
    const auto granted =
        rig.store->create({.owner = rig.owner, .layout = rig.layout, .priority = kDefaultPriority, .ttl_s = 0, .items = items});
    for (const Granted& g : granted)
      if (g.status == Grant::Granted) rig.seal(g.handle);
    return chain;
  }
  std::vector<Placed> find(const std::vector<int32_t>& tokens) {
    return search(index(), fingerprint_base(identity), tokens, kWindow);
  }
  Index& index() { return StoreTest::index(*rig.store); }

  test::Rig rig;
  Key identity;
};

}  // namespace

TEST(every_block_is_found_at_every_shift) {
  Searched store;
  const std::vector<int32_t> text = store.prompt(20 * kWindow, 1);
  const Chain chain = store.put(text);
  for (size_t shift : {size_t{0}, size_t{1}, size_t{7}, size_t{15}, size_t{16}, size_t{5000}}) {
    std::vector<int32_t> moved = store.prompt(shift, 2);
    moved.insert(moved.end(), text.begin(), text.end());
    const std::vector<Placed> found = store.find(moved);
    CHECK_EQ(found.size(), chain.size());
    for (size_t i = 0; i < std::min(found.size(), chain.size()); ++i) {
      CHECK_EQ(found[i].start, shift + i * kWindow);
      CHECK(found[i].block.key == chain.keys()[i]);
    }
  }
  CHECK(store.find(store.prompt(4000, 3)).empty());
  CHECK(store.find({}).empty());
  CHECK(store.find(std::vector<int32_t>(text.begin(), text.begin() + kWindow - 1)).empty());
  CHECK_EQ(store.find(std::vector<int32_t>(text.begin() + kWindow, text.begin() + 2 * kWindow)).size(), 1u);
  CHECK(search(store.index(), fingerprint_base(key(78)), text, kWindow).empty());  // another identity
}

TEST(a_block_has_children_and_they_are_its_own) {
  Searched store;
  std::vector<int32_t> text = store.prompt(4 * kWindow, 1);
  const Chain first = store.put(text);
  text.back() += 1;
  const Chain other = store.put(text);  // differs in the last block
  CHECK_EQ(children(store.index(), first.keys()[0]).size(), 1u);
  std::set<uint64_t> found;
  for (const Sighting& s : children(store.index(), first.keys()[2])) found.insert(s.key.words[0]);
  CHECK(found == (std::set<uint64_t>{first.keys()[3].words[0], other.keys()[3].words[0]}));
  CHECK(children(store.index(), first.keys()[3]).empty());
}

TEST(what_is_deleted_evicted_or_being_written_is_not_found) {
  Searched store;
  const std::vector<int32_t> text = store.prompt(6 * kWindow, 1);
  const Chain chain = store.put(text);
  store.rig.store->remove(chain.keys()[2]);
  CHECK_EQ(store.find(text).size(), 5u);
  store.put(text);
  CHECK_EQ(store.find(text).size(), 6u);
  for (uint64_t i = 0; i < 2000; ++i) store.put(store.prompt(2 * kWindow, 100 + i));  // more than the pool holds
  CHECK(store.rig.store->stats().evictions > 0);
  size_t left = 0;
  for (size_t i = 0; i < chain.size(); ++i) left += store.rig.store->lookup(chain.keys()[i]).presence == Presence::Resident;
  CHECK_EQ(store.find(text).size(), left);
  std::vector<int32_t> open = store.prompt(kWindow, 9);
  const Chain last(store.identity, open.data(), open.size(), nullptr, 0, kWindow, false);
  const CreateItem item{.key = last.keys()[0], .fingerprint = last.fingerprint(0), .tokens = kWindow};
  const auto granted = store.rig.store->create(
      {.owner = store.rig.owner, .layout = store.rig.layout, .priority = kDefaultPriority, .ttl_s = 0, .items = {&item, 1}});
  CHECK(store.find(open).empty());
  store.rig.seal(granted[0].handle);
  CHECK_EQ(store.find(open).size(), 1u);  // as soon as seal has returned
  store.rig.store->flush(), store.rig.store->settle();
  CHECK(store.find(open).empty());
  store.rig.store->check_integrity();
}

TEST(what_was_evicted_to_disk_is_found_when_asked_for) {
  Searched store(4096, true);
  const std::vector<int32_t> text = store.prompt(6 * kWindow, 1);
  const Chain chain = store.put(text);
  for (size_t i = 0; i < chain.size(); ++i) CHECK(store.rig.store->add_disk(chain.keys()[i], 0));  // as if it were written
  for (uint64_t i = 0; i < 2000; ++i) store.put(store.prompt(2 * kWindow, 100 + i));
  CHECK(store.find(text).empty());
  const std::vector<Placed> found = search(store.index(), fingerprint_base(store.identity), text, kWindow, true);
  CHECK_EQ(found.size(), chain.size());
  for (const Placed& f : found) CHECK(f.block.on_disk);
  CHECK(children(store.index(), chain.keys()[0]).empty());
  CHECK_EQ(children(store.index(), chain.keys()[0], true).size(), 1u);
  store.rig.store->remove(chain.keys()[2]);
  CHECK_EQ(search(store.index(), fingerprint_base(store.identity), text, kWindow, true).size(), chain.size() - 1);
}

TEST(the_finder_is_derived_anew_at_adoption) {
  Searched store;
  const std::vector<int32_t> text = store.prompt(12 * kWindow, 1);
  const Chain chain = store.put(text);
  store.rig.store->remove(chain.keys()[5]);
  // What the daemon before left in it is not believed.
  auto* buckets = reinterpret_cast<FinderBucket*>(reinterpret_cast<std::byte*>(&store.index().header()) +
                                                  store.index().header().finder_offset);
  std::mt19937 random(3);
  for (uint32_t b = 0; b < store.index().header().finder_buckets; ++b)
    for (auto& slot : buckets[b].slot) slot.store(static_cast<uint32_t>(random()));
  store.rig.restart();
  CHECK_EQ(store.find(text).size(), 11u);
  CHECK_EQ(children(store.index(), chain.keys()[0]).size(), 1u);
}

TEST(a_prompt_of_one_repeated_token_names_a_block_once_a_window) {
  Searched store;
  const std::vector<int32_t> text(4 * kWindow, 5);
  store.put(text);
  const std::vector<Placed> found = store.find(std::vector<int32_t>(100 * kWindow + 3, 5));
  CHECK(found.size() <= 4 * 101);
  CHECK(found.size() >= 100);
}

// A planted collision: the fingerprint is another block's. The finder names it; that it is no match is the reader's to find.
TEST(a_foreign_fingerprint_is_named_but_only_as_a_candidate) {
  Searched store;
  const std::vector<int32_t> text = store.prompt(kWindow, 1);
  const Chain chain(store.identity, text.data(), text.size(), nullptr, 0, kWindow, false);
  const CreateItem liar{.key = key(5), .fingerprint = chain.fingerprint(0), .tokens = kWindow};
  const auto granted = store.rig.store->create(
      {.owner = store.rig.owner, .layout = store.rig.layout, .priority = kDefaultPriority, .ttl_s = 0, .items = {&liar, 1}});
  store.rig.seal(granted[0].handle);
  const std::vector<Placed> found = store.find(text);
  CHECK_EQ(found.size(), 1u);
  CHECK(found[0].block.key == key(5));
}
