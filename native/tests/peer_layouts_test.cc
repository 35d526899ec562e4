// Goal: a layout that has no room, was forgotten, or belongs to no block costs blocks at most, and a connection only who lies;
// and no end of a connection remembers more layouts than it must. Method: a sender and a receiver over a socket pair, the
// receiver's table filled with layouts whose blocks are being written; a peer that only tells layouts is played.
#include <thread>

#include "core/peer/receive_blocks.h"
#include "tests/peer_answers.h"

using namespace kv;
using namespace kv::test;
using peer::Broken;
using peer::Outcome;

namespace {

constexpr uint64_t kWanted = 1, kFiller = 2000;  // numbers of the first block of each kind

struct LayoutHost : Rig {
  LayoutHost() : Rig(16 << 20, 2048), window(*store, true) {}
  // An open block, of the layout of that number.
  Handle begin(uint64_t number, uint64_t like) {
    const uint32_t id = store->register_layout(layout_blob(1, 16 + static_cast<uint32_t>(like), kTokens));
    const CreateItem item{.key = key(number), .tokens = kTokens};
    const Granted granted = store->create({.owner = owner, .layout = id, .items = {&item, 1}})[0];
    KV_INVARIANT(granted.status == Grant::Granted);
    std::memset(window.at(granted.extent.offset), static_cast<int>(number % 251), granted.extent.length);
    return granted.handle;
  }
  Handle begin(uint64_t number) { return begin(number, number); }
  void fill(uint64_t number, uint64_t like) { KV_INVARIANT(seal(begin(number, like)) == Done::Ok); }
  void give_up(Handle handle) {
    KV_INVARIANT(store->abort(owner, handle) == Done::Ok);
    store->settle();
  }
  // Every slot for layouts has one that cannot go: a block of it is being written.
  std::vector<Handle> take_all_slots() {
    std::vector<Handle> open;
    while (open.size() < kMaxLayouts) open.push_back(begin(kFiller + open.size()));
    return open;
  }
  bool right(uint64_t number) {
    const auto job = store->begin_read(key(number));
    if (!job || !job->sealed) return false;
    const std::byte* at = window.at(job->extent.offset);
    bool same = true;
    for (uint64_t i = 0; i < job->layout->layout.layer_bytes(0, kTokens); ++i) same &= at[i] == std::byte(number % 251);
    store->end_read(job->handle);
    return same;
  }
  Window window;
};

// What one connection brings from the one to the other, fetch by fetch.
struct Connected {
  Connected(LayoutHost& here, LayoutHost& there) : receiver(*here.store, here.window, channel, here.owner) {
    serving = std::jthread([this, &there] {
      peer::Channel channel(std::move(pair.far));
      peer::Admission admission;
      peer::ServedSums sums;
      peer::BlockSender sender(*there.store, there.window, admission, sums, channel, "b");
      try {
        for (;;) {
          const Frame head = channel.take_head(-1);
          std::vector<Key> keys(head.bytes / sizeof(Key));
          channel.take_checked(head, reinterpret_cast<std::byte*>(keys.data()));
          sender.answer(head.request, keys);
        }
      } catch (const Broken&) {
        // It hung up.
      }
    });
  }
  ~Connected() { channel.cut(); }
  std::vector<Outcome> fetch(std::initializer_list<uint64_t> numbers) {
    std::vector<Key> keys;
    for (const uint64_t number : numbers) keys.push_back(key(number));
    std::vector<Outcome> out(keys.size(), Outcome::Open);
    receiver.fetch(++request, keys, [&](size_t i, Outcome how) { out[i] = how; });
    return out;
  }
  Pair pair;
  peer::Channel channel{std::move(pair.near)};
  peer::BlockReceiver receiver;
  uint32_t request = 0;
  std::jthread serving;
};

}  // namespace

// Fails where the connection breaks, or where the layout is not asked for again, for it is told once.
TEST(a_layout_without_room_costs_its_blocks_and_nothing_else) {
  LayoutHost here, there;
  const std::vector<Handle> open = here.take_all_slots();
  there.fill(kWanted, kWanted), there.fill(kWanted + 1, kFiller);
  Connected connected(here, there);
  CHECK(connected.fetch({kWanted, kWanted + 1}) == std::vector({Outcome::NoSpace, Outcome::Fetched}));
  here.give_up(open.back());
  CHECK(connected.fetch({kWanted}) == std::vector{Outcome::Fetched});
  CHECK(here.right(kWanted) && here.right(kWanted + 1));
  here.store->remove(key(kWanted)), here.store->settle();
  const Handle instead = here.begin(kWanted + 2);  // its slot is another's now
  CHECK(connected.fetch({kWanted}) == std::vector{Outcome::NoSpace});
  here.give_up(instead);
  CHECK(connected.fetch({kWanted}) == std::vector{Outcome::Fetched});
  CHECK(here.right(kWanted));
  here.store->check_integrity();
}

// Fails where the one end believes that the other remembers what it has forgotten.
TEST(both_ends_forget_the_same_layouts) {
  LayoutHost here, there;
  const std::vector<Handle> open = here.take_all_slots();
  constexpr uint64_t kMany = peer::kMostLayoutsTold + 6;
  for (uint64_t i = 0; i < kMany; ++i) there.fill(kWanted + i, kWanted + i);
  Connected connected(here, there);
  for (uint64_t i = 0; i < kMany; ++i) CHECK(connected.fetch({kWanted + i}) == std::vector{Outcome::NoSpace});
  here.give_up(open[0]);
  for (uint64_t i = 0; i < kMany; ++i) {  // each in the slot of the one before
    CHECK(connected.fetch({kWanted + i}) == std::vector{Outcome::Fetched});
    CHECK(here.right(kWanted + i));
    here.store->remove(key(kWanted + i)), here.store->settle();
  }
  here.store->check_integrity();
}

// Fails where a sender remembers each layout that it ever told on a connection: it tells none again.
TEST(a_sender_remembers_few_layouts) {
  LayoutHost there;
  constexpr uint64_t kMany = peer::kMostLayoutsTold + 1;
  std::vector<Key> keys;
  for (uint64_t i = 0; i < kMany; ++i) there.fill(i, i), keys.push_back(key(i));
  keys.push_back(key(0));
  Pair pair;
  std::jthread sending([&] {
    peer::Channel channel(std::move(pair.near));
    peer::Admission admission;
    peer::ServedSums sums;
    peer::BlockSender sender(*there.store, there.window, admission, sums, channel, "b");
    for (const Key& wanted : keys) sender.answer(kRequest, {&wanted, 1});
  });
  peer::Channel channel(std::move(pair.far));
  uint64_t told = 0;
  for (uint64_t whole = 0; whole < keys.size();) {
    const Frame head = channel.take_head();
    channel.skip(head.bytes);
    told += head.kind == static_cast<uint16_t>(Kind::Layout), whole += head.kind == static_cast<uint16_t>(Kind::Whole);
  }
  CHECK_EQ(told, kMany + 1);
}

// Fails where layouts that no block comes of are counted for one answer only.
TEST(who_tells_layouts_answer_after_answer_is_cut_off) {
  LayoutHost here;
  const size_t before = here.store->layouts().size();
  Pair pair;
  peer::Channel channel(std::move(pair.near)), far(std::move(pair.far));
  peer::BlockReceiver receiver(*here.store, here.window, channel, here.owner);
  const Key wanted = key(kWanted);
  uint32_t request = 0, answered = 0;
  bool malformed = false;
  for (; !malformed && request < 10; answered += !malformed) {
    ++request;
    for (uint32_t i = 0; i < 20; ++i) {
      const std::vector<uint8_t> blob = layout_blob(1, 20 * request + i, kTokens);
      far.put({.kind = static_cast<uint16_t>(Kind::Layout), .request = request}, std::as_bytes(std::span(blob)));
    }
    far.put({.kind = static_cast<uint16_t>(Kind::Missing), .request = request}, {});
    far.flush();
    try {
      receiver.fetch(request, {&wanted, 1}, [](size_t, Outcome) {});
    } catch (const Broken& error) {
      malformed = error.why == Broken::Why::Malformed;
    }
  }
  CHECK(malformed);
  CHECK_EQ(answered, uint32_t{peer::kMostLayoutsTold} / 20);
  CHECK_EQ(here.store->layouts().size(), before);
}

// Fails where a block that was taken away before it was sealed is said to be there.
TEST(a_block_whose_seal_is_refused_is_a_miss) {
  AnswerHost here, there;
  there.fill();
  std::vector<Piece> pieces = pieces_of(record(there));
  const Piece whole = pieces.back();
  pieces.pop_back();
  Pair pair;
  const auto send = [&](const Bytes& bytes) {
    KV_INVARIANT(::send(pair.far.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
  };
  const Key wanted = key(kNumber);
  std::vector<Outcome> outcomes;
  std::jthread receiving([&] {
    peer::Channel channel(std::move(pair.near));
    peer::BlockReceiver receiver(*here.store, here.window, channel, here.owner);
    receiver.fetch(kRequest, {&wanted, 1}, [&](size_t, Outcome how) { outcomes.push_back(how); });
  });
  send(joined(pieces));
  const auto created = [&] {
    const Snapshot at = here.store->lookup(wanted).snapshot;
    return here.presence(kNumber) == Presence::Pending && here.store->layers_now(here.handle(kNumber)).layers == kLayers &&
           at.control.state() == State::Created;
  };
  CHECK(eventually(created));
  CHECK(here.store->abort(here.owner, here.handle(kNumber)) == Done::Ok);
  send(joined({whole}));
  receiving.join();
  CHECK(outcomes == std::vector{Outcome::Lost});
  CHECK(!here.resident(kNumber));
  here.store->settle();
  here.store->check_integrity();
}
