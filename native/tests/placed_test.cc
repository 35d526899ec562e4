// Goal: a block that another process brings to its place is published only if it is the block, and memory that such a process was
// lent is nobody else's until it has said that it is done, or has ended: what it writes late is in no block. Method: the test is
// that process. It answers a receiver over a socket, writes into the pool itself, lies, leaves, and writes late.
#include <sys/socket.h>

#include <thread>

#include "core/base/checksum.h"
#include "core/peer/receive_blocks.h"
#include "tests/check.h"
#include "tests/store_fixture.h"

using namespace kv;
using namespace kv::test;
using peer::Broken;
using peer::Frame;
using peer::Kind;
using peer::Outcome;
using Bytes = std::vector<std::byte>;

namespace {

constexpr uint64_t kNumber = 7;
constexpr uint32_t kRequest = 5, kLayers = 3, kTokens = 8, kTokenBytes = 200, kMetaBytes = 64;

// The block that is placed: its parts hold bytes that follow from where they lie.
struct Block {
  Block() : blob(layout_blob(kLayers, kTokenBytes, kTokens, kMetaBytes)), layout(Layout::parse(blob)) {
    extent.resize(layout.extent_bytes(kTokens));
    offer.push_back(fill(layout.meta_offset(kTokens), layout.meta_bytes(kTokens)));
    for (uint32_t layer = 0; layer < kLayers; ++layer)
      offer.push_back(fill(layout.layer_offset(layer, kTokens), layout.layer_bytes(layer, kTokens)));
  }
  uint32_t fill(uint64_t offset, uint64_t bytes) {
    for (uint64_t i = offset; i < offset + bytes; ++i) extent[i] = std::byte(i * 31 % 251), used.push_back(i);
    return crc32c(extent.data() + offset, bytes);
  }
  const std::vector<uint8_t> blob;
  const Layout layout;
  Bytes extent;
  std::vector<uint64_t> used;   // bytes of it that mean something
  std::vector<uint32_t> offer;  // checksums: meta area, layers
};

// The other end, which writes into the pool of the host that asks.
struct Placer {
  Placer(Fd socket, const Window& pool) : channel(std::move(socket)), pool(pool) {}
  void say(Kind kind, std::span<const std::byte> payload = {}, uint32_t layer = 0) {
    channel.put({.kind = static_cast<uint16_t>(kind), .request = kRequest, .layer = layer}, payload);
    channel.flush();
  }
  peer::Room offer(std::span<const uint32_t> sums) {
    Frame asked = channel.take_head();
    channel.skip(asked.bytes);
    say(Kind::Layout, std::as_bytes(std::span(block.blob)));
    const peer::BlockHead head{.key = key(kNumber),
                               .layout = layout_digest(block.layout),
                               .fingerprint = 0,
                               .tokens = kTokens,
                               .base_position = 0,
                               .parent = 0,
                               .priority = 0,
                               .ttl_s = 0,
                               .layers = kLayers};
    say(Kind::Head, peer::bytes_of(head));
    say(Kind::Offer, std::as_bytes(sums));
    return channel.take_value<peer::Room>(Kind::Room);
  }
  void write(const peer::Room& room, const Bytes& bytes) { std::memcpy(pool.at(room.offset), bytes.data(), bytes.size()); }
  bool place() {
    say(Kind::Placed);
    return channel.take_head().layer == 1;
  }
  void send_frames(uint32_t layers = kLayers) {
    const auto part = [&](uint64_t offset, uint64_t bytes) { return std::span(block.extent).subspan(offset, bytes); };
    say(Kind::Meta, part(block.layout.meta_offset(kTokens), block.layout.meta_bytes(kTokens)));
    for (uint32_t layer = 0; layer < layers; ++layer)
      say(Kind::Layer, part(block.layout.layer_offset(layer, kTokens), block.layout.layer_bytes(layer, kTokens)), layer);
    if (layers == kLayers) say(Kind::Whole);
  }
  peer::Channel channel;
  const Window& pool;
  const Block block{};
};

struct Host : Rig {
  Host() : Rig(256 << 10, 64), window(*store, true), loans(*store) {}
  // How one fetch ends, which `answer` answers. Open: the connection broke.
  Outcome fetch(const std::function<void(Placer&)>& answer) {
    int ends[2];
    KV_INVARIANT(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    const uint64_t epoch = loans.epoch();
    std::thread other([&, far = ends[1]] {
      Placer placer(Fd(far), window);
      try {
        answer(placer);
      } catch (const Broken&) {
      }
    });
    Outcome outcome = Outcome::Open;
    {
      peer::Channel channel{Fd(ends[0])};
      peer::BlockReceiver receiver(*store, window, channel, owner, &parked, &loans, epoch);
      const Key wanted = key(kNumber);
      try {
        receiver.fetch(kRequest, {&wanted, 1}, [&](size_t, Outcome how) { outcome = how; });
      } catch (const Broken&) {
        outcome = Outcome::Open;
      }
    }
    other.join();
    store->settle();
    return outcome;
  }
  // What is published, but for the checksums, which are the store's own.
  std::optional<Bytes> content() {
    const auto job = store->begin_read(key(kNumber));
    if (!job) return std::nullopt;
    CHECK(job->sealed);
    const std::byte* at = window.at(job->extent.offset);
    Bytes out(at, at + job->extent.length);
    const Layout& layout = job->layout->layout;
    std::memset(out.data() + layout.checksums_offset(kTokens), 0, layout.meta_offset(kTokens) - layout.checksums_offset(kTokens));
    store->end_read(job->handle);
    return out;
  }
  // Blocks of the same size, until there is no more room: they lie on all memory that is not somebody's.
  std::vector<Extent> fill_up() {
    std::vector<Extent> out;
    for (uint64_t i = 100; i < 160; ++i) {
      const Granted granted = create(i, block.extent.size() / kPageBytes);
      if (granted.status != Grant::Granted) break;
      out.push_back(granted.extent), handles.push_back(granted.handle);
    }
    return out;
  }
  void empty() {
    for (const Handle& handle : std::exchange(handles, {})) store->abort(owner, handle);
    store->settle();
  }
  Window window;
  Quarantine loans;
  peer::Parked parked;
  const Block block{};
  std::vector<Handle> handles;
};

bool overlaps(const std::vector<Extent>& extents, uint64_t offset) {
  for (const Extent& extent : extents)
    if (offset >= extent.offset && offset < extent.offset + extent.length) return true;
  return false;
}

}  // namespace

TEST(a_block_that_was_placed_is_published_if_it_is_the_block) {
  Host host;
  CHECK(host.fetch([&](Placer& placer) {
    const peer::Room room = placer.offer(placer.block.offer);
    CHECK(room.loan != 0 && room.bytes == placer.block.extent.size());
    CHECK_EQ(host.loans.lent(), 1u);
    placer.write(room, placer.block.extent);
    CHECK(placer.place());
  }) == Outcome::Fetched);
  CHECK(host.content() == host.block.extent);
  CHECK_EQ(host.loans.lent(), 0u);
  host.store->check_integrity();
}

TEST(a_byte_that_differs_anywhere_is_found_out_and_its_frames_may_come_instead) {
  Host host;
  for (size_t i = 0; i < host.block.used.size(); i += 7) {
    const bool then = i % 2;
    const Outcome outcome = host.fetch([&](Placer& placer) {
      const peer::Room room = placer.offer(placer.block.offer);
      Bytes flipped = placer.block.extent;
      flipped[host.block.used[i]] ^= std::byte(1 << i % 8);
      placer.write(room, flipped);
      CHECK(!placer.place());
      if (then)
        placer.send_frames();
      else
        placer.say(Kind::Lost);
    });
    CHECK(outcome == (then ? Outcome::Fetched : Outcome::Lost));
    CHECK(host.content() == (then ? std::optional(host.block.extent) : std::nullopt));
    host.store->remove(key(kNumber));
    host.store->settle();
    CHECK_EQ(host.store->stats().used_bytes, 0u);
  }
}

// What stands behind a layer is no reader's business, and is made nothing all the same: it is written to disk, and sent.
TEST(bytes_between_the_parts_are_made_nothing) {
  Host host;
  CHECK(host.fetch([&](Placer& placer) {
    const peer::Room room = placer.offer(placer.block.offer);
    Bytes dirty(placer.block.extent.size(), std::byte{0xee});
    for (const uint64_t at : placer.block.used) dirty[at] = placer.block.extent[at];
    placer.write(room, dirty);
    CHECK(placer.place());
  }) == Outcome::Fetched);
  CHECK(host.content() == host.block.extent);
}

TEST(memory_that_was_lent_is_nobodys_until_its_process_has_ended) {
  Host host;
  peer::Room room{};
  CHECK(host.fetch([&](Placer& placer) { room = placer.offer(placer.block.offer); }) == Outcome::Open);  // killed, or frozen
  CHECK(!host.content());
  CHECK_EQ(host.loans.lent(), 1u);
  const std::vector<Extent> others = host.fill_up();
  CHECK(!others.empty() && !overlaps(others, room.offset));
  host.empty();
  host.loans.process_ended();
  host.store->settle();
  CHECK_EQ(host.loans.lent(), 0u);
  CHECK_EQ(host.store->stats().used_bytes, 0u);
  CHECK(overlaps(host.fill_up(), room.offset));
  host.store->check_integrity();
}

TEST(frames_that_come_while_memory_is_lent_go_elsewhere_and_a_late_write_is_in_no_block) {
  Host host;
  peer::Room room{};
  CHECK(host.fetch([&](Placer& placer) {
    room = placer.offer(placer.block.offer);
    placer.send_frames();
  }) == Outcome::Fetched);
  std::memset(host.window.at(room.offset), 0xaa, room.bytes);  // the transfer goes on
  CHECK(host.content() == host.block.extent);
  CHECK_EQ(host.loans.lent(), 1u);
  const std::vector<Extent> others = host.fill_up();
  CHECK(!overlaps(others, room.offset));
  host.empty();
  CHECK(host.fetch([&](Placer& placer) {  // and is over: said before any answer
    Frame asked = placer.channel.take_head();
    placer.channel.skip(asked.bytes);
    const uint64_t over[] = {room.loan, 12345};
    placer.say(Kind::Over, std::as_bytes(std::span(over)));
    placer.say(Kind::Missing);
  }) == Outcome::Missing);
  CHECK_EQ(host.loans.lent(), 0u);
  CHECK(overlaps(host.fill_up(), room.offset));
  host.store->check_integrity();
}

// Fails if what was offered over a connection that broke is held against the next: the rest would never come, and the fabric
// would count as one that lies.
TEST(a_block_whose_frames_broke_off_behind_an_offer_goes_on_over_the_next_connection) {
  Host host;
  CHECK(host.fetch([&](Placer& placer) {
    const peer::Room room = placer.offer(placer.block.offer);
    placer.write(room, Bytes(placer.block.extent.size()));
    CHECK(!placer.place());
    placer.send_frames(1);
  }) == Outcome::Open);
  CHECK(host.fetch([&](Placer& placer) {
    const peer::Room room = placer.offer(placer.block.offer);
    CHECK(room.loan == 0 && room.bytes == placer.block.extent.size());
    placer.send_frames();
  }) == Outcome::Fetched);
  CHECK(host.content() == host.block.extent);
  host.store->check_integrity();
}

TEST(a_connection_to_a_process_that_has_ended_is_lent_nothing) {
  Host host;
  CHECK(host.fetch([&](Placer& placer) {
    host.loans.process_ended();
    const peer::Room room = placer.offer(placer.block.offer);
    CHECK(room.loan == 0 && room.bytes == placer.block.extent.size());
    placer.send_frames();
  }) == Outcome::Fetched);
  CHECK(host.content() == host.block.extent);
}

TEST(frames_in_another_order_end_the_connection_and_leave_nothing) {
  const std::vector<std::function<void(Placer&)>> lies = {
      [](Placer& placer) { placer.offer(std::span(placer.block.offer).first(2)); },
      [](Placer& placer) {
        placer.offer(placer.block.offer), placer.say(Kind::Offer, std::as_bytes(std::span(placer.block.offer)));
      },
      [](Placer& placer) { placer.offer(placer.block.offer), placer.say(Kind::Whole); },
      [](Placer& placer) { placer.offer(placer.block.offer), placer.say(Kind::Missing); },
      [](Placer& placer) { placer.say(Kind::Placed); },
      [](Placer& placer) { placer.say(Kind::Room), placer.say(Kind::Checked); },
      [](Placer& placer) {
        placer.write(placer.offer(placer.block.offer), placer.block.extent);
        CHECK(placer.place());
        placer.say(Kind::Placed);
      },
  };
  for (size_t i = 0; i < lies.size(); ++i) {
    Host host;
    const Outcome outcome = host.fetch(lies[i]);
    CHECK(outcome == (i + 1 == lies.size() ? Outcome::Fetched : Outcome::Open));
    host.loans.process_ended();
    host.store->remove(key(kNumber));
    host.store->settle();
    CHECK_EQ(host.store->stats().used_bytes, 0u);
    host.store->check_integrity();
  }
}

// A peer is no fabric: of one nothing of this is taken.
TEST(who_was_not_asked_to_place_blocks_may_not) {
  Host host;
  int ends[2];
  KV_INVARIANT(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  std::thread other([&, far = ends[1]] {
    Placer placer(Fd(far), host.window);
    try {
      placer.offer(placer.block.offer);
    } catch (const Broken&) {
    }
  });
  bool malformed = false;
  {
    peer::Channel channel{Fd(ends[0])};
    peer::BlockReceiver receiver(*host.store, host.window, channel, host.owner);
    const Key wanted = key(kNumber);
    try {
      receiver.fetch(kRequest, {&wanted, 1}, [](size_t, Outcome) {});
    } catch (const Broken& error) {
      malformed = error.why == Broken::Why::Malformed;
    }
  }
  other.join();
  CHECK(malformed && !host.content());
}
