// Goal: of a large block two connections bring half each, and whatever comes in the place of either half, a block that is handed
// out has the bytes of its writer, nothing is left of any other, and nobody writes into memory that was given back. Method: a
// block of 32 MiB between a server and a tier; then a small one whose halves the test plays to two receivers, the second cut off
// or with a bit flipped at each byte, and both with frames left out, doubled, swapped and changed under right checksums.
#include <poll.h>
#include <sys/socket.h>

#include <thread>

#include "core/peer/server.h"
#include "core/peer/tier.h"
#include "tests/peer_answers.h"

using namespace kv;
using namespace kv::test;
using peer::Broken;
using peer::Outcome;
using peer::SecondHalf;

namespace {

constexpr uint32_t kSix = 6, kMiddle = 3, kCopy = 77;
const peer::Secret kSalt{7, 7, 7};

// As the honest sender would send them of a large block.
struct Halves {
  explicit Halves(AnswerHost& host) {
    for (const Piece& piece : pieces_of(record(host))) {
      Piece said = piece;
      const auto kind = static_cast<Kind>(piece.head.kind);
      if (kind == Kind::Meta) said.head.layer = kCopy;
      if (kind != Kind::Layer || piece.head.layer >= kMiddle) second.push_back(said);
      if (kind == Kind::Head) said.head.layer = kMiddle;
      if (kind == Kind::Whole) said.head.kind = static_cast<uint16_t>(Kind::Half);
      if (kind != Kind::Layer || piece.head.layer < kMiddle) first.push_back(said);
    }
  }
  std::vector<Piece> first, second;
};

struct Played {
  Outcome outcome = Outcome::Open;  // Open: the connection broke
  uint64_t halves = 0;
  uint32_t asked = 0;  // by who has the block
};

struct How {
  bool first_ends = false, second_stands_still = false;
  bool nobody_ends_the_second = false;  // but who cuts it off
};

// Whether somebody cuts the other end off, which is waited for.
bool is_cut_off(const Fd& end) {
  pollfd polled{end.get(), POLLRDHUP, 0};
  return ::poll(&polled, 1, 20'000) == 1;
}

struct Hosts {
  Hosts() { there.fill(kSix), honest.emplace(there), wanted = there.content(); }

  // What is asked for behind the first half is answered as it should be, unless the connection ends with that half.
  Played play(const Bytes& first, const Bytes& second, How how = {}) {
    Pair ours, theirs;
    Played played;
    std::jthread peer([&] {
      peer::Channel channel(std::move(ours.far));
      peer::Admission admission;
      peer::ServedSums sums;
      peer::BlockSender sender(*there.store, there.window, admission, sums, channel, "b");
      try {
        for (;;) {
          const Frame head = channel.take_head(-1);
          Key asked;
          channel.take_checked(head, reinterpret_cast<std::byte*>(&asked));
          if (!played.asked++) {
            CHECK_EQ(head.item, 1u);
            KV_INVARIANT(::send(channel.fd(), first.data(), first.size(), MSG_NOSIGNAL) >= 0);
            if (how.first_ends) ::shutdown(channel.fd(), SHUT_WR);
          } else {
            sender.answer(head.request, {&asked, 1}, head.layer, head.item == 1);
          }
        }
      } catch (const Broken&) {
        // It hung up.
      }
    });
    KV_INVARIANT(::send(theirs.far.get(), second.data(), second.size(), 0) == static_cast<ssize_t>(second.size()));
    if (!how.second_stands_still && !how.nobody_ends_the_second) ::shutdown(theirs.far.get(), SHUT_WR);
    peer::Channel near(std::move(ours.near)), beside(std::move(theirs.near));
    peer::BlockReceiver receiver(*here.store, here.window, near, here.owner);
    peer::BlockReceiver bringer(*here.store, here.window, beside, here.owner);
    std::jthread bringing;
    std::atomic<bool> writes{false};
    const peer::Offer offer = [&](const std::shared_ptr<SecondHalf>& half) {
      CHECK(half->begin(beside));
      writes = true;
      bringing = std::jthread([&, half] {
        try {
          if (how.nobody_ends_the_second)
            CHECK(is_cut_off(theirs.far));
          else
            bringer.bring(kRequest, *half);
        } catch (const Broken&) {  // as a connection that ends
        }
        writes = false;
        half->ended();
      });
    };
    const Key key_wanted = key(kNumber);
    try {
      const auto received = receiver.fetch(
          kRequest, {&key_wanted, 1}, [&](size_t, Outcome outcome) { played.outcome = outcome; }, false, nullptr, offer);
      played.halves = received.halves;
    } catch (const Broken&) {
      CHECK(played.outcome == Outcome::Failed);
      played.outcome = Outcome::Open;
    }
    CHECK(!writes);
    near.cut();
    return played;
  }

  // What came of it all the same is right; nothing else is left.
  Played lie(const Bytes& first, const Bytes& second, How how = {}) {
    const Played played = play(first, second, how);
    const auto found = here.content();
    CHECK(found.has_value() == (played.outcome == Outcome::Fetched));
    if (found) CHECK(found == wanted);
    here.forget();
    CHECK_EQ(here.store->stats().created, 0u);
    CHECK_EQ(here.store->stats().used_bytes, 0u);
    return played;
  }

  AnswerHost here, there;
  std::optional<Halves> honest;
  std::optional<Bytes> wanted;
};

constexpr uint32_t kLargeLayers = 8, kLargeTokens = 8;

// One that has a block of 32 MiB, or asks for it.
struct LargeHost : Rig {
  explicit LargeHost(uint64_t bytes = 80 << 20) : Rig(bytes, 64), window(*store, true) {}
  void fill() {
    const uint32_t id = store->register_layout(layout_blob(kLargeLayers, 512 << 10, kLargeTokens, kMetaBytes));
    const CreateItem item{.key = key(kNumber), .tokens = kLargeTokens};
    const Granted granted = store->create({.owner = owner, .layout = id, .items = {&item, 1}})[0];
    KV_INVARIANT(granted.status == Grant::Granted);
    extent = granted.extent;
    auto* at = reinterpret_cast<uint64_t*>(window.at(extent.offset));
    for (uint64_t i = 0; i < extent.length / 8; ++i) at[i] = i * 0x9e3779b97f4a7c15ull;
    KV_INVARIANT(seal(granted.handle) == Done::Ok);
  }
  bool has_what(LargeHost& other) {
    const auto job = store->begin_read(key(kNumber));
    if (!job) return false;
    const bool same = !std::memcmp(window.at(job->extent.offset), other.window.at(other.extent.offset),
                                   job->layout->layout.layer_offset(kLargeLayers, kLargeTokens));
    store->end_read(job->handle);
    return job->sealed && same;
  }
  Window window;
  Extent extent{0, 0};
};

// Layers of the answer to who asks for the block, or its first half, which says where it ends; or for the second, from a layer
// on.
uint32_t layers_sent(Store& store, const Window& window, peer::ServedSums& sums, bool half, uint32_t from = 0) {
  Pair pair;
  std::jthread sending([&] {
    peer::Channel channel(std::move(pair.near));
    peer::Admission admission;
    const Key wanted = key(kNumber);
    peer::BlockSender(store, window, admission, sums, channel, "b").answer(kRequest, {&wanted, 1}, from, half);
  });
  peer::Channel channel(std::move(pair.far));
  uint32_t layers = 0, end = 0;
  for (;;) {
    const Frame head = channel.take_head();
    channel.skip(head.bytes);
    if (head.kind == static_cast<uint16_t>(Kind::Head)) end = head.layer;
    layers += head.kind == static_cast<uint16_t>(Kind::Layer);
    if (head.kind == static_cast<uint16_t>(Kind::Whole)) CHECK_EQ(end, 0u);
    if (head.kind == static_cast<uint16_t>(Kind::Half)) CHECK_EQ(end, layers);
    if (head.kind == static_cast<uint16_t>(Kind::Missing)) return 0;
    if (head.kind == static_cast<uint16_t>(Kind::Whole) || head.kind == static_cast<uint16_t>(Kind::Half)) return layers;
  }
}

}  // namespace

// Fails if a large block comes over one connection. Who is to bring the second half may be late, so it may take a few.
TEST(two_connections_bring_half_of_a_large_block_each) {
  LargeHost here, there;
  there.fill();
  peer::Server server({.node = "a", .address = "127.0.0.1", .peers = {"b"}});
  server.share(*there.store, kSalt);
  server.start();
  peer::Tier tier(*here.store, "b", kSalt, std::vector<peer::Tier::Address>{{"a", "127.0.0.1", server.port()}});
  tier.start();
  const Key wanted = key(kNumber);
  CHECK(eventually([&] { return tier.stats()[0].held == 1; }));
  CHECK(eventually([&] {
    here.store->remove(wanted);
    here.store->settle();
    CHECK(eventually([&] { return here.store->promote({&wanted, 1}, kDefaultPriority, Wanting{})[0] == Presence::Resident; }));
    CHECK(here.has_what(there));
    return tier.stats()[0].halved > 0;
  }));
  CHECK_EQ(tier.stats()[0].gone + tier.stats()[0].malformed + tier.stats()[0].corrupt, 0u);
  tier.stop();
  server.stop();
  here.store->check_integrity(), there.store->check_integrity();
}

// Fails if one that knows of no halves is not sent all of a large block, or of a small one who wants it by halves.
TEST(who_asks_for_all_of_a_block_is_sent_all_of_it) {
  AnswerHost small;
  small.fill(kSix);
  LargeHost large;
  large.fill();
  peer::ServedSums sums;
  CHECK_EQ(layers_sent(*small.store, small.window, sums, false), kSix);
  CHECK_EQ(layers_sent(*small.store, small.window, sums, true), kSix);
  CHECK_EQ(layers_sent(*large.store, large.window, sums, false), kLargeLayers);
  CHECK_EQ(layers_sent(*large.store, large.window, sums, true), kLargeLayers / 2);
}

// Fails if the second half counts against what other hosts may hold while the first goes out.
TEST(the_second_half_is_sent_of_whatever_block_the_first_is) {
  LargeHost host;  // of which it is more than a quarter
  host.fill();
  const auto first = host.store->begin_read(key(kNumber));
  CHECK(first.has_value());
  peer::ServedSums sums;
  CHECK_EQ(layers_sent(*host.store, host.window, sums, true, kLargeLayers / 2), kLargeLayers / 2);
  host.store->end_read(first->handle);
}

// Fails if the checksums that two connections compute, each of its half, are lost, or kept for one half.
TEST(checksums_of_two_halves_are_the_blocks) {
  LargeHost host;
  host.fill();
  const auto known = [&] { return (host.control(host.handle(kNumber).record).flags() & kFlagChecksummed) != 0; };
  peer::ServedSums sums;
  layers_sent(*host.store, host.window, sums, true);
  CHECK(!known());
  layers_sent(*host.store, host.window, sums, true, kLargeLayers / 2);
  CHECK(known());
  CHECK_EQ(host.store->scrub(0, ~0ull).verified, 1u);
}

TEST(halves_make_the_block) {
  Hosts hosts;
  const Played played = hosts.lie(joined(hosts.honest->first), joined(hosts.honest->second));
  CHECK(played.outcome == Outcome::Fetched);
  CHECK_EQ(played.halves, 1u);
  CHECK_EQ(played.asked, 1u);
}

// Fails if a block is lost, or has a gap, where the connection of its second half breaks.
TEST(a_second_half_that_breaks_anywhere_is_asked_for_on_the_first_connection) {
  Hosts hosts;
  const Bytes first = joined(hosts.honest->first), second = joined(hosts.honest->second);
  for (size_t at = 0; at < second.size(); at += at + 40 < second.size() ? 5 : 1) {
    const Played cut = hosts.lie(first, Bytes(second.begin(), second.begin() + static_cast<long>(at)));
    CHECK(cut.outcome == Outcome::Fetched);
    CHECK_EQ(cut.halves, second.size() - at <= sizeof(Frame));  // its layers are all there
    if (at % 2) continue;
    Bytes flipped = second;
    flipped[at] ^= std::byte(1 << at % 8);
    CHECK(hosts.lie(first, flipped).outcome == Outcome::Fetched);
  }
  hosts.here.store->check_integrity();
}

TEST(lies_about_either_half_make_no_other_block) {
  Hosts hosts;
  const Halves honest = *hosts.honest;
  const Bytes right[2] = {joined(honest.first), joined(honest.second)};
  for (const bool of_second : {false, true}) {
    const std::vector<Piece>& said = of_second ? honest.second : honest.first;
    const auto lie = [&](const std::vector<Piece>& pieces) {
      of_second ? hosts.lie(right[0], joined(pieces)) : hosts.lie(joined(pieces), right[1], {.first_ends = true});
    };
    for (size_t i = 0; i < said.size(); ++i) {
      std::vector<Piece> pieces = said;
      pieces.erase(pieces.begin() + static_cast<long>(i)), lie(pieces);
      pieces = said, pieces.insert(pieces.begin() + static_cast<long>(i), said[i]), lie(pieces);
      pieces = said, std::swap(pieces[i], pieces[(i + 1) % pieces.size()]), lie(pieces);
      for (uint32_t value = 0; value < 28; value += 3) {
        pieces = said, pieces[i].head.kind = static_cast<uint16_t>(value), lie(pieces);
        pieces = said, pieces[i].head.layer = value, lie(pieces);
        pieces = said, pieces[i].head.item = static_cast<uint16_t>(value + 1), lie(pieces);
      }
      for (const int more : {-1, 1, 4096}) {
        pieces = said;
        if (more < 0 && pieces[i].payload.empty()) continue;
        pieces[i].payload.resize(pieces[i].payload.size() + static_cast<size_t>(more));
        pieces[i].head.bytes = pieces[i].payload.size();
        lie(pieces);
      }
    }
  }
  hosts.here.store->check_integrity();
}

// Fails if layers of a block that was computed anew meanwhile are put behind those of the one before.
TEST(halves_of_two_copies_are_not_put_together) {
  Hosts hosts;
  std::vector<Piece> other = hosts.honest->second;
  for (Piece& piece : other) {
    if (piece.head.kind == static_cast<uint16_t>(Kind::Meta)) piece.head.layer = kCopy + 1;
    if (piece.head.kind == static_cast<uint16_t>(Kind::Layer)) piece.payload[0] ^= std::byte{1};
  }
  CHECK(hosts.lie(joined(hosts.honest->first), joined(other)).outcome == Outcome::Open);
}

// Fails if two hosts, or one that was started anew without its pool, number their copies alike: each begins at the same record.
TEST(copies_in_two_pools_have_other_numbers) {
  const auto number = [] {
    AnswerHost host;
    host.fill(kSix);
    Pair pair;
    std::jthread sending([&] {
      peer::Channel channel(std::move(pair.near));
      peer::Admission admission;
      peer::ServedSums sums;
      const Key wanted = key(kNumber);
      peer::BlockSender(*host.store, host.window, admission, sums, channel, "b").answer(kRequest, {&wanted, 1}, kMiddle, true);
    });
    peer::Channel channel(std::move(pair.far));
    for (;;) {
      const Frame head = channel.take_head();
      channel.skip(head.bytes);
      if (head.kind == static_cast<uint16_t>(Kind::Meta)) return head.layer;
    }
  };
  CHECK(number() != number());
}

// Fails if a connection that stands still takes with it a block that another has half of.
TEST(a_second_half_that_stands_still_is_asked_for_on_the_first_connection) {
  Hosts hosts;
  const Bytes second = joined(hosts.honest->second);
  const Bytes begun(second.begin(), second.end() - 300);
  CHECK(hosts.lie(joined(hosts.honest->first), begun, {.second_stands_still = true}).outcome == Outcome::Fetched);
}

// Fails if who has the block, and is done with its half, waits for the other as long as that connection lives.
TEST(a_second_half_that_stands_still_is_taken_over_from_a_connection_that_lives) {
  Hosts hosts;
  CHECK(hosts.lie(joined(hosts.honest->first), {}, {.nobody_ends_the_second = true}).outcome == Outcome::Fetched);
}

// By a clock of the test's: the first half took 100 ms for 40 MiB.
TEST(a_second_half_is_too_slow_when_it_stands_still_or_is_much_slower_than_the_first) {
  constexpr uint64_t kMs = 1'000'000, kMB = 1'000'000;
  const auto until_slow = [](uint64_t bytes_per_ms) {
    peer::SecondPace pace(40 * kMB, 100 * kMs, 7, 5 * kMs);
    for (uint64_t ms = 0; ms < 20'000; ms += 10)
      if (pace.too_slow(7 + ms * bytes_per_ms, (5 + ms) * kMs)) return ms;
    return uint64_t{20'000};
  };
  CHECK_EQ(until_slow(0), 200u);
  CHECK_EQ(until_slow(400'000 / 5), 200u);
  CHECK_EQ(until_slow(400'000 / 3), 20'000u);
  CHECK_EQ(until_slow(4'000'000), 20'000u);
  peer::SecondPace freezes(40 * kMB, 100 * kMs, 0, 0);
  for (uint64_t ms = 0; ms <= 1000; ms += 50) CHECK(!freezes.too_slow(ms * 400'000, ms * kMs));
  for (uint64_t ms = 1050; ms < 1200; ms += 50) CHECK(!freezes.too_slow(1000 * 400'000, ms * kMs));
  CHECK(freezes.too_slow(1000 * 400'000, 1200 * kMs));
}

// Fails if the memory of a block is given back while somebody may still write its second half there, or if nobody is told to
// stop.
TEST(who_gives_a_block_up_ends_its_second_half_first) {
  Hosts hosts;
  const Bytes second = joined(hosts.honest->second);
  std::vector<Piece> lost(hosts.honest->first.begin(), hosts.honest->first.begin() + 3);  // Layout, Head, Meta
  lost.push_back({{.kind = static_cast<uint16_t>(Kind::Lost), .request = kRequest}, {}});
  const Played played = hosts.play(joined(lost), Bytes(second.begin(), second.begin() + 400), {.second_stands_still = true});
  CHECK(played.outcome == Outcome::Lost);
  CHECK_EQ(hosts.here.store->stats().created, 0u);
  CHECK_EQ(hosts.here.store->stats().used_bytes, 0u);
}
