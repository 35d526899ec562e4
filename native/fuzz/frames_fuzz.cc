// libFuzzer: what a peer may send. One input is a list of frames (kind, item, layer, flags, u16 length, bytes) that get right
// checksums, since no mutation finds those, and go to a fetch as its answer, or, by the first byte, as they are. Flags have a
// payload of the length that belongs there, and a head that names what was asked for. By the second bit of the first byte who
// sends may place blocks itself, in memory that is zeros; by the third it answers for the second half of a block, by the fourth
// for one that may come by halves, of which nobody brings the second. The fetch ends, the store stays whole, and nothing stays
// half filled, or lent when that process has ended.
#include <sys/socket.h>

#include <algorithm>
#include <cstring>

#include "core/base/checksum.h"
#include "core/files/block_file.h"
#include "core/peer/receive_blocks.h"
#include "tests/store_fixture.h"

namespace {

using namespace kv;
using namespace kv::peer;

constexpr uint64_t kBytes = 1 << 20;
constexpr uint64_t kZeros = 64 << 10;  // of the pool, where blocks lie first
constexpr size_t kMaxFrames = 48;
constexpr uint32_t kRequest = 1, kTokens = 2;
constexpr uint8_t kRightLength = 1, kRightHead = 2, kWrongSum = 4, kOtherRequest = 8;

struct Side : test::Rig {
  Side() : Rig(kBytes, 64), window(*store, true), loans(*store), owner(store->open_owner()) {
    store->register_layout(test::layout_blob(3, 64, 4, 32));
    for (auto& listed : store->layouts()) layout = listed.known->layout;
  }
  // As who has the block has it brought, whatever comes of it.
  void bring(BlockReceiver& receiver, const Channel& channel) {
    const CreateItem item{.key = test::key(0), .tokens = kTokens};
    const auto known = store->find_layout(layout_digest(layout));
    const Granted granted = store->create({.owner = owner, .layout = known->id, .items = {&item, 1}})[0];
    KV_INVARIANT(granted.status == Grant::Granted);
    SecondHalf half(Landing{.key = item.key, .tokens = kTokens, .known = known, .extent = granted.extent});
    half.begin(channel);
    try {
      receiver.bring(kRequest, half);
    } catch (const Broken&) {
      // What came was no half.
    }
    half.ended();
    store->abort(owner, granted.handle);
  }
  Window window;
  Quarantine loans;
  uint32_t owner;
  Layout layout;
};

struct Said {
  uint8_t kind, item, layer, flags;
  uint16_t bytes;
} __attribute__((packed));

uint64_t right_length(const Layout& layout, const Said& said) {
  switch (static_cast<Kind>(said.kind)) {
    case Kind::Layout: return layout.blob.size();
    case Kind::Head: return sizeof(BlockHead);
    case Kind::Meta: return layout.meta_bytes(kTokens);
    case Kind::Layer: return layout.layer_bytes(said.layer % layout.num_layers(), kTokens);
    case Kind::Offer: return sizeof(uint32_t) * (1 + layout.num_layers());
    default: return 0;
  }
}

std::vector<uint8_t> offer_of_zeros(const Layout& layout) {
  const std::vector<uint8_t> zeros(32 << 10);
  std::vector<uint32_t> sums{crc32c(zeros.data(), layout.meta_bytes(kTokens))};
  for (uint32_t layer = 0; layer < layout.num_layers(); ++layer)
    sums.push_back(crc32c(zeros.data(), layout.layer_bytes(layer, kTokens)));
  const auto* at = reinterpret_cast<const uint8_t*>(sums.data());
  return {at, at + sizeof(uint32_t) * sums.size()};
}

void append(std::vector<std::byte>& out, const Layout& layout, const Said& said, std::span<const uint8_t> bytes) {
  std::vector<uint8_t> payload(bytes.begin(), bytes.end());
  if (said.flags & kRightLength) payload.resize(std::min<uint64_t>(right_length(layout, said), 32 << 10));
  if (said.flags & kRightHead && said.kind == static_cast<uint8_t>(Kind::Head) && payload.size() == sizeof(BlockHead)) {
    BlockHead head{};
    head.key = test::key(said.item % 2), head.layout = layout_digest(layout);
    head.tokens = kTokens, head.layers = layout.num_layers();
    std::memcpy(payload.data(), &head, sizeof head);
  }
  if (said.flags & kRightHead && said.kind == static_cast<uint8_t>(Kind::Layout)) payload = layout.blob;
  if (said.flags & kRightHead && said.kind == static_cast<uint8_t>(Kind::Offer)) payload = offer_of_zeros(layout);
  Frame frame{.kind = said.kind, .item = said.item, .request = kRequest + (said.flags & kOtherRequest), .layer = said.layer};
  frame.bytes = payload.size();
  frame.payload_crc = crc32c(payload.data(), payload.size()) + (said.flags & kWrongSum);
  frame.head_crc = crc32c(&frame, offsetof(Frame, head_crc));
  const auto* at = reinterpret_cast<const std::byte*>(&frame);
  out.insert(out.end(), at, at + sizeof frame);
  const auto* from = reinterpret_cast<const std::byte*>(payload.data());
  out.insert(out.end(), from, from + payload.size());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Side& side = *new Side;
  if (size == 0) return 0;
  std::vector<std::byte> answer;
  if (data[0] & 1) {
    for (size_t at = 1, frames = 0; at + sizeof(Said) <= size && frames < kMaxFrames; ++frames) {
      Said said;
      std::memcpy(&said, data + at, sizeof said);
      at += sizeof said;
      const size_t bytes = std::min<size_t>(said.bytes, size - at);
      append(answer, side.layout, said, {data + at, bytes});
      at += bytes;
    }
  } else {
    const auto* from = reinterpret_cast<const std::byte*>(data + 1);
    answer.assign(from, from + size - 1);
  }
  int ends[2];
  KV_INVARIANT(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  Fd far(ends[1]);
  const int room = 4 << 20;
  ::setsockopt(far.get(), SOL_SOCKET, SO_SNDBUFFORCE, &room, sizeof room);
  answer.resize(static_cast<size_t>(std::max<ssize_t>(0, ::send(far.get(), answer.data(), answer.size(), MSG_DONTWAIT))));
  ::shutdown(far.get(), SHUT_WR);
  const Key keys[2] = {test::key(0), test::key(1)};
  size_t ended = 0;
  {
    Channel channel{Fd(ends[0])};
    Quarantine* const loans = data[0] & 2 ? &side.loans : nullptr;
    if (loans) std::memset(side.window.at(0), 0, kZeros);
    BlockReceiver receiver(*side.store, side.window, channel, side.owner, nullptr, loans, side.loans.epoch());
    const std::span<const Key> wanted(keys, data[0] & 8 ? 1 : 2);
    const Offer offer = [](const std::shared_ptr<SecondHalf>&) {};
    try {
      if (data[0] & 4)
        side.bring(receiver, channel);
      else
        receiver.fetch(kRequest, wanted, [&](size_t, Outcome) { ++ended; }, false, nullptr, data[0] & 8 ? offer : nullptr);
    } catch (const Broken&) {
      // What came was no answer.
    }
  }
  KV_INVARIANT(ended == (data[0] & 4 ? 0u : data[0] & 8 ? 1u : 2u));
  side.loans.process_ended();
  side.store->remove(keys[0]), side.store->remove(keys[1]);
  side.store->settle();
  KV_INVARIANT(side.store->stats().created == 0 && side.store->stats().used_bytes == 0);
  static uint64_t inputs = 0;
  if (++inputs % 1000 == 0) side.store->check_integrity();
  return 0;
}
