// Goal: whatever comes in the place of an honest answer, a block that is handed out has the bytes of its writer, nothing is left
// of any other, and no answer goes on for ever. Method: an honest answer is recorded, and played to a receiver with each byte
// flipped, cut off at each byte, with each frame left out, doubled, or swapped with the next, and with each word of a frame or of
// a block's head changed under checksums that are right.
#include <sys/socket.h>

#include <thread>

#include "core/base/polling.h"
#include "core/peer/receive_blocks.h"
#include "tests/peer_answers.h"

using namespace kv;
using namespace kv::test;
using peer::Broken;
using peer::Outcome;

namespace {

// How a fetch ends whose answer this is; Open: the connection broke.
Outcome play(AnswerHost& host, std::span<const std::byte> answer) {
  Pair pair;
  KV_INVARIANT(::write(pair.far.get(), answer.data(), answer.size()) == static_cast<ssize_t>(answer.size()));
  ::shutdown(pair.far.get(), SHUT_WR);
  peer::Channel channel(std::move(pair.near));
  peer::BlockReceiver receiver(*host.store, host.window, channel, host.owner);
  const Key wanted = key(kNumber);
  Outcome outcome = Outcome::Open;
  uint32_t ends = 0;
  bool broken = false;
  try {
    receiver.fetch(kRequest, {&wanted, 1}, [&](size_t, Outcome how) { outcome = how, ends += 1; });
  } catch (const Broken&) {
    broken = true;
  }
  CHECK_EQ(ends, 1u);
  CHECK(broken == (outcome == Outcome::Failed));
  return broken ? Outcome::Open : outcome;
}

struct Hosts {
  Hosts() {
    there.fill();
    honest = record(there);
    wanted = there.content();
    CHECK(play(here, honest) == Outcome::Fetched);
    CHECK(here.content() == wanted);
    here.forget();
  }
  // Plays it. A block that came of it all the same is right, unless the lie is about the head, which has words that nobody can
  // check; nothing else is left.
  void lie(const Bytes& answer, bool of_the_head = false) {
    const Outcome outcome = play(here, answer);
    const auto found = here.content();
    CHECK(found.has_value() == (outcome == Outcome::Fetched));
    if (found && !of_the_head) CHECK(found == wanted);
    fetched += outcome == Outcome::Fetched;
    here.forget();
    CHECK_EQ(here.store->stats().created, 0u);
    CHECK_EQ(here.store->stats().used_bytes, 0u);
    tried += 1;
  }
  AnswerHost here, there;
  Bytes honest;
  std::optional<Bytes> wanted;
  uint32_t tried = 0, fetched = 0;
};

}  // namespace

TEST(a_bit_flipped_in_any_byte_of_an_answer_is_found_out) {
  Hosts hosts;
  for (size_t at = 0; at < hosts.honest.size(); ++at) {
    Bytes flipped = hosts.honest;
    flipped[at] ^= std::byte(1 << at % 8);
    hosts.lie(flipped);
  }
  CHECK(hosts.tried > 700);
  CHECK_EQ(hosts.fetched, 0u);
  hosts.here.store->check_integrity();
}

TEST(an_answer_that_ends_anywhere_leaves_nothing) {
  Hosts hosts;
  for (size_t at = 0; at < hosts.honest.size(); ++at)
    hosts.lie(Bytes(hosts.honest.begin(), hosts.honest.begin() + static_cast<long>(at)));
  CHECK_EQ(hosts.fetched, 0u);
  hosts.here.store->check_integrity();
}

TEST(frames_left_out_doubled_or_swapped_make_no_other_block) {
  Hosts hosts;
  const std::vector<Piece> honest = pieces_of(hosts.honest);
  CHECK_EQ(honest.size(), 4u + kLayers);  // Layout, Head, Meta, layers, Whole
  for (size_t i = 0; i < honest.size(); ++i) {
    std::vector<Piece> pieces = honest;
    pieces.erase(pieces.begin() + static_cast<long>(i));
    hosts.lie(joined(pieces));
    pieces = honest;
    pieces.insert(pieces.begin() + static_cast<long>(i), honest[i]);
    hosts.lie(joined(pieces));
    pieces = honest;
    std::swap(pieces[i], pieces[(i + 1) % pieces.size()]);
    hosts.lie(joined(pieces));
  }
  hosts.here.store->check_integrity();
}

TEST(words_that_lie_under_right_checksums_make_no_other_block) {
  Hosts hosts;
  const std::vector<Piece> honest = pieces_of(hosts.honest);
  for (size_t i = 0; i < honest.size(); ++i) {
    for (uint32_t value = 0; value < 40; ++value) {
      std::vector<Piece> pieces = honest;
      pieces[i].head.kind = static_cast<uint16_t>(value);
      hosts.lie(joined(pieces));
      pieces = honest, pieces[i].head.item = static_cast<uint16_t>(value + 1);
      hosts.lie(joined(pieces));
      pieces = honest, pieces[i].head.layer = value;
      hosts.lie(joined(pieces));
      pieces = honest, pieces[i].head.request = value == kRequest ? ~0u : value;
      hosts.lie(joined(pieces));
    }
    for (const int more : {-1, 1, 4096}) {  // shorter and longer, and as long as it says
      std::vector<Piece> pieces = honest;
      if (more < 0 && pieces[i].payload.empty()) continue;
      pieces[i].payload.resize(pieces[i].payload.size() + static_cast<size_t>(more));
      pieces[i].head.bytes = pieces[i].payload.size();
      hosts.lie(joined(pieces));
    }
    for (const uint64_t bytes : {uint64_t{1} << 40, ~uint64_t{0}}) {  // that never come
      std::vector<Piece> pieces = honest;
      pieces[i].head.bytes = bytes;
      hosts.lie(joined(pieces));
    }
  }
  for (size_t at = 0; at < honest[1].payload.size(); at += 4)  // of the block's head, and of the layout
    for (const uint32_t value : {0u, 1u, 2u, 9u, 4096u, 1u << 31, ~0u}) {
      std::vector<Piece> pieces = honest;
      std::memcpy(pieces[1].payload.data() + at, &value, 4);
      hosts.lie(joined(pieces), true);
      pieces = honest;
      if (at + 4 > pieces[0].payload.size()) continue;
      std::memcpy(pieces[0].payload.data() + at, &value, 4);
      hosts.lie(joined(pieces), true);
    }
  hosts.here.store->check_integrity();
}

// The table has 512 places: who only names layouts, and brings no block of any, takes none of them, and is cut off.
TEST(layouts_without_blocks_fill_no_table) {
  Hosts hosts;
  const size_t before = hosts.here.store->layouts().size();
  std::vector<Piece> pieces;
  for (uint32_t i = 0; i < 200; ++i) {
    const auto blob = layout_blob(kLayers + 1 + i, kTokenBytes, kTokens, kMetaBytes);
    Piece piece{{.kind = static_cast<uint16_t>(Kind::Layout), .request = kRequest}, {}};
    const auto* bytes = reinterpret_cast<const std::byte*>(blob.data());
    piece.payload.assign(bytes, bytes + blob.size());
    piece.head.bytes = static_cast<uint32_t>(blob.size());
    pieces.push_back(piece);
  }
  pieces.push_back({{.kind = static_cast<uint16_t>(Kind::Missing), .request = kRequest}, {}});
  CHECK(play(hosts.here, joined(pieces)) == Outcome::Open);
  CHECK_EQ(hosts.here.store->layouts().size(), before);
}

TEST(an_answer_without_an_end_ends) {
  Hosts hosts;
  const std::vector<Piece> honest = pieces_of(hosts.honest);
  const Frame waiting{.kind = static_cast<uint16_t>(Kind::Waiting), .request = kRequest};
  for (const Piece& again : {honest[0], honest[2], Piece{waiting, {}}}) {
    Pair pair;
    const Bytes begun = joined({honest[0], honest[1]}), endless = joined({again});
    std::thread peer([&] {  // until the other end has had enough
      if (::send(pair.far.get(), begun.data(), begun.size(), MSG_NOSIGNAL) < 0) return;
      while (::send(pair.far.get(), endless.data(), endless.size(), MSG_NOSIGNAL) > 0) continue;
    });
    const Key wanted = key(kNumber);
    bool malformed = false;
    {
      peer::Channel channel(std::move(pair.near));
      peer::BlockReceiver receiver(*hosts.here.store, hosts.here.window, channel, hosts.here.owner);
      try {
        receiver.fetch(kRequest, {&wanted, 1}, [](size_t, Outcome) {});
      } catch (const Broken& error) {
        malformed = error.why == Broken::Why::Malformed;
      }
    }
    peer.join();
    CHECK(malformed);
    CHECK(!hosts.here.content());
  }
}

// Fails where what a long prompt's answer may have of signs of life is counted over all of it.
TEST(an_answer_whose_layers_come_may_take_any_time) {
  Hosts hosts;
  std::vector<Piece> slow;
  for (const Piece& piece : pieces_of(hosts.honest)) {
    const Frame waiting{.kind = static_cast<uint16_t>(Kind::Waiting), .request = kRequest};
    if (piece.head.kind == static_cast<uint16_t>(Kind::Layer)) slow.insert(slow.end(), 1000, Piece{waiting, {}});
    slow.push_back(piece);
  }
  CHECK(play(hosts.here, joined(slow)) == Outcome::Fetched);
  CHECK(hosts.here.content() == hosts.wanted);
}
