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
    const Key wanted[] = {key(1), key(2)};
    peer::BlockSender(*host.store, window, admission, channel, "b").answer(kRequest, wanted);
  });
  peer::Channel channel(std::move(pair.far));
  for (Frame head; (head = channel.take_head()).kind != static_cast<uint16_t>(Kind::Whole);) channel.skip(head.bytes);
  CHECK(eventually([&] { return !StoreTest::is_read(*host.store, sent.record); }));
  CHECK(StoreTest::is_read(*host.store, computed.record));
  host.store->abort(host.owner, computed);
  CHECK(eventually([&] { return !StoreTest::is_read(*host.store, computed.record); }));
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
