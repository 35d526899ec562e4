// Goal: who serves blocks to other hosts holds them no longer than it sends them, sends nothing of a pool that a client has cut,
// and is kept by no stranger from those who are known. Method: the test is the other end, frame by frame.
#include <arpa/inet.h>
#include <sys/socket.h>

#include <thread>

#include "core/peer/server.h"
#include "tests/peer_answers.h"

using namespace kv;
using namespace kv::test;

namespace {

const peer::Secret kSalt{7, 7, 7};

// A connection to the port; empty where there is none to be had.
Fd connected_to(uint16_t port) {
  Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_in at{.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&at), sizeof at) != 0) return {};
  return socket;
}

}  // namespace

// Fails if a block that was sent stays pinned as long as another of the same answer is waited for: two minutes.
TEST(what_was_sent_is_held_no_longer_while_another_is_computed) {
  Rig host(4 << 20, 64);
  const Window window(*host.store, false);
  CHECK(host.put(1, 3) == Grant::Granted);
  const Handle sent = host.handle(1), computed = host.create(2, 3).handle;
  Pair pair;
  std::jthread serving([&] {
    peer::Channel channel(std::move(pair.near));
    peer::Admission admission;
    peer::ServedSums sums;
    const Key wanted[] = {key(1), key(2)};
    peer::BlockSender(*host.store, window, admission, sums, channel, "b").answer(kRequest, wanted);
  });
  peer::Channel channel(std::move(pair.far));
  for (Frame head; (head = channel.take_head()).kind != static_cast<uint16_t>(Kind::Whole);) channel.skip(head.bytes);
  CHECK(eventually([&] { return !StoreTest::is_read(*host.store, sent.record); }));
  CHECK(StoreTest::is_read(*host.store, computed.record));
  host.store->abort(host.owner, computed);
  CHECK(eventually([&] { return !StoreTest::is_read(*host.store, computed.record); }));
}

// Fails if each reader of a block whose writer left no checksums costs another pass over its bytes; then what its memory has made
// of them since the first is found out by the second.
TEST(checksums_that_were_computed_for_a_reader_are_the_blocks) {
  Rig host(4 << 20, 64);
  const Window window(*host.store, false);
  CHECK(host.put(1, 3) == Grant::Granted);
  const Handle block = host.handle(1);
  peer::ServedSums sums;
  const auto read = [&] {  // whether its layer is what its checksum says
    Pair pair;
    std::jthread serving([&] {
      peer::Channel channel(std::move(pair.near));
      peer::Admission admission;
      const Key wanted = key(1);
      peer::BlockSender(*host.store, window, admission, sums, channel, "b").answer(kRequest, {&wanted, 1});
    });
    peer::Channel channel(std::move(pair.far));
    bool good = false;
    for (Frame head; (head = channel.take_head()).kind != static_cast<uint16_t>(Kind::Whole);) {
      std::vector<std::byte> bytes(head.bytes);
      const uint32_t crc = channel.take_summed(bytes.data(), bytes.size());
      if (head.kind == static_cast<uint16_t>(Kind::Layer)) good = crc == head.payload_crc;
    }
    return good;
  };
  CHECK(!(host.control(block.record).flags() & kFlagChecksummed));
  CHECK(read());
  CHECK(host.control(block.record).flags() & kFlagChecksummed);
  CHECK_EQ(host.store->scrub(0, ~0ull).verified, 1u);
  CHECK(read());
  const auto place = static_cast<off_t>(host.store->lookup(key(1)).snapshot.extent.offset);
  KV_INVARIANT(::pwrite(host.segments.pool.get(), "!", 1, place) == 1);
  CHECK(!read());
  CHECK_EQ(host.store->scrub(0, ~0ull).corrupt, 1u);
}

// Fails if checksums are written down behind a block that took the place of theirs, or is being written.
TEST(checksums_are_kept_for_what_is_there_alone) {
  Rig host(4 << 20, 64);
  const uint32_t sums[] = {1};
  CHECK(host.put(1, 3) == Grant::Granted);
  const Handle gone = host.handle(1);
  CHECK(host.store->remove(key(1)));
  host.store->settle();
  CHECK(host.put(2, 3) == Grant::Granted);
  CHECK_EQ(host.handle(2).record, gone.record);
  host.store->keep_checksums(gone, sums);
  CHECK(!(host.control(gone.record).flags() & kFlagChecksummed));
  const Handle written = host.create(3, 3).handle;
  host.store->keep_checksums(written, sums);
  CHECK(host.seal(written) == Done::Ok);
  CHECK(!(host.control(written.record).flags() & kFlagChecksummed));
}

// Fails if two halves are put together that are not the two halves of one block.
TEST(halves_of_checksums) {
  peer::ServedSums sums;
  const std::vector<uint32_t> low = {1, 2}, high = {3, 4, 5}, all = {1, 2, 3, 4, 5};
  CHECK(sums.add({7, 1}, 5, 0, all) == all);
  CHECK(sums.add({7, 1}, 5, 0, low).empty());
  CHECK(sums.add({7, 1}, 5, 2, high) == all);
  CHECK(sums.add({7, 1}, 5, 2, high).empty());
  CHECK(sums.add({7, 2}, 5, 0, low).empty());  // another block
  CHECK(sums.add({7, 1}, 5, 0, low) == all);
  CHECK(sums.add({7, 2}, 5, 0, low).empty());  // twice the same
  CHECK(sums.add({8, 1}, 5, 2, high).empty());
  CHECK(sums.add({8, 1}, 5, 3, high).empty());
  CHECK(sums.add({9, 1}, 5, 1, low).empty());
  CHECK(sums.add({9, 1}, 5, 3, low).empty());
  for (uint32_t i = 100; i < 1000; ++i) CHECK(sums.add({i, 1}, 5, 0, low).empty());
  CHECK(sums.add({100, 1}, 5, 2, high).empty());  // long forgotten
}

// Fails if zeros, which lie where a client has cut the pool, are sent under a checksum that matches them.
TEST(of_a_pool_that_was_cut_nothing_is_sent) {
  AnswerHost host;
  host.fill();
  CHECK(pieces_of(record(host)).back().head.kind == static_cast<uint16_t>(Kind::Whole));
  KV_INVARIANT(::ftruncate(host.segments.pool.get(), 0) == 0);
  const std::vector<Piece> answer = pieces_of(record(host));
  CHECK(answer.back().head.kind == static_cast<uint16_t>(Kind::Lost));
  for (const Piece& piece : answer)
    CHECK(piece.head.kind != static_cast<uint16_t>(Kind::Layer) && piece.head.kind != static_cast<uint16_t>(Kind::Meta));
}

// Fails if as many connections as there may be of strangers keep everybody else out for as long as their second lasts.
TEST(strangers_that_say_nothing_keep_no_peer_out) {
  Rig host(4 << 20, 64);
  peer::Server server({.node = "a", .address = "127.0.0.1", .peers = {"b"}});
  server.share(*host.store, kSalt);
  server.start();
  bool known = false;
  std::vector<Fd> silent;
  for (int again = 0; again < 20 && !known; ++again) {  // a handshake has a second, and this machine may be busy
    for (int i = 0; i < 32; ++i) silent.push_back(connected_to(server.port()));
    CHECK(eventually([&] { return server.stats().connections + server.stats().refused >= silent.size(); }));
    try {
      peer::Channel channel(connected_to(server.port()));
      peer::introduce(channel, "b", host.store->name(), kSalt, "a");
      known = true;
    } catch (const peer::Broken&) {
      // Not this time.
    }
  }
  CHECK(known);
  CHECK(eventually([&] { return server.stats().refused >= silent.size(); }));
  server.stop();
}
