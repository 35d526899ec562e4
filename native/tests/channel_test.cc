// Goal: what comes over a channel is what was sent, however its bytes are cut on the way, for payloads of every kind of length:
// those that are gathered, that are received where they belong, and behind which the next head is received at once. Who sends
// much to somebody on the same host keeps off its processor. Method: recorded frames, written in pieces; two sockets on loopback.
//
// Proven by removal: the head's bytes that came along forgotten: the first test ends by Broken; keep_apart(): the last fails.
#include "core/peer/channel.h"

#include <arpa/inet.h>
#include <sched.h>
#include <sys/socket.h>

#include <random>

#include "core/base/processor.h"
#include "tests/peer_answers.h"

using namespace kv;
using namespace kv::test;

namespace {

Piece piece_of(size_t bytes, std::mt19937& random) {
  Piece piece;
  piece.head.kind = static_cast<uint16_t>(bytes ? Kind::Layer : Kind::Whole), piece.head.bytes = bytes;
  piece.payload.resize(bytes);
  for (auto& byte : piece.payload) byte = static_cast<std::byte>(random());
  return piece;
}

void write_all(int fd, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n <= 0) return;
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
}

// Two ends of one connection on this host.
Pair on_loopback() {
  Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in at{.sin_family = AF_INET, .sin_port = 0, .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
  socklen_t size = sizeof at;
  KV_INVARIANT(::bind(listener.get(), reinterpret_cast<sockaddr*>(&at), size) == 0 && ::listen(listener.get(), 1) == 0);
  KV_INVARIANT(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&at), &size) == 0);
  Pair pair;
  pair.far = Fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  KV_INVARIANT(::connect(pair.far.get(), reinterpret_cast<sockaddr*>(&at), sizeof at) == 0);
  pair.near = Fd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  return pair;
}

cpu_set_t affinity() {
  cpu_set_t set;
  KV_INVARIANT(::sched_getaffinity(0, sizeof set, &set) == 0);
  return set;
}

}  // namespace

TEST(frames_of_every_length_come_as_they_were_sent_however_they_are_cut) {
  std::mt19937 random(7);
  constexpr size_t kLengths[] = {0,
                                 1,
                                 31,
                                 32,
                                 33,
                                 (16 << 10) - 1,
                                 16 << 10,
                                 64 << 10,
                                 65 << 10,
                                 (128 << 10) - 1,
                                 128 << 10,
                                 (128 << 10) + 1,
                                 (256 << 10) - 1,
                                 256 << 10,
                                 (256 << 10) + 1,
                                 700'001};
  for (const size_t most_at_once : {1000u, 40'000u, 200'000u, 4'000'000u}) {
    std::vector<Piece> sent;
    for (int i = 0; i < 60; ++i) sent.push_back(piece_of(kLengths[random() % std::size(kLengths)], random));
    const Bytes all = joined(sent);
    Pair pair;
    std::jthread writer([&, near = std::move(pair.near), cut = std::mt19937(most_at_once)]() mutable {
      for (std::span<const std::byte> left(all); !left.empty();) {
        const size_t n = std::min<size_t>(left.size(), 1 + cut() % most_at_once);
        write_all(near.get(), left.first(n));
        left = left.subspan(n);
      }
    });
    peer::Channel channel(std::move(pair.far));
    for (const Piece& piece : sent) {
      const Frame head = channel.take_head();
      CHECK_EQ(head.bytes, piece.payload.size());
      Bytes came(head.bytes + 1, std::byte{0xee});
      CHECK_EQ(channel.take_summed(came.data(), head.bytes), head.payload_crc);
      CHECK(came.back() == std::byte{0xee});
      came.pop_back();
      CHECK(came == piece.payload);
    }
    CHECK(!channel.buffered());
  }
}

TEST(on_one_host_it_is_known_where_the_other_end_runs) {
  Pair pair = on_loopback(), local;
  CHECK(::write(pair.far.get(), "a", 1) == 1);
  peer::Channel channel(std::move(pair.near)), unknown(std::move(local.near));
  CHECK(eventually([&] { return channel.beside() != 0; }));
  CHECK(channel.beside() <= CPU_SETSIZE);
  CHECK_EQ(unknown.beside(), 0u);
}

TEST(who_sends_much_keeps_off_the_processor_of_who_asked) {
  Rig host(32 << 20, 64);
  const Window window(*host.store, true);
  const uint32_t layout = host.store->register_layout(layout_blob(4, 4096, 512, kMetaBytes));
  for (const uint64_t number : {1, 2}) {
    const CreateItem item{.key = key(number), .tokens = number == 1 ? 512u : 16u};
    const Granted granted = host.store->create({.owner = host.owner, .layout = layout, .items = {&item, 1}})[0];
    KV_INVARIANT(host.seal(granted.handle) == Done::Ok);
  }
  Pair pair = on_loopback();
  std::jthread sending([&] {
    const cpu_set_t before = affinity();
    peer::Channel channel(std::move(pair.near));
    peer::Admission admission;
    peer::ServedSums sums;
    peer::BlockSender sender(*host.store, window, admission, sums, channel, "b");
    for (const uint64_t number : {1, 2}) {
      std::byte asked;
      channel.take(&asked, 1);
      const uint32_t beside = channel.beside();
      const bool busy = crowded() || CPU_COUNT(&before) == 1;
      const Key wanted = key(number);
      sender.answer(kRequest, {&wanted, 1});
      cpu_set_t others = before;
      if (number == 1) CPU_CLR(beside - 1, &others);
      const cpu_set_t now = affinity();
      if (busy || crowded())
        std::printf("skipped: there is no processor to be had beside\n");
      else
        CHECK(CPU_EQUAL(&others, &now));
    }
  });
  peer::Channel channel(Fd(::dup(pair.far.get())));
  for (int i = 0; i < 2; ++i) {
    CHECK(::write(pair.far.get(), "a", 1) == 1);
    for (Frame head; (head = channel.take_head()).kind != static_cast<uint16_t>(Kind::Whole);) channel.skip(head.bytes);
  }
}
