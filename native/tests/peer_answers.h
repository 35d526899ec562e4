// One that has a block, its honest answer as recorded frames, and such frames changed and put together again: for tests of who
// receives them.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <optional>
#include <thread>
#include <vector>

#include "core/base/checksum.h"
#include "core/peer/send_blocks.h"
#include "tests/check.h"
#include "tests/store_fixture.h"

namespace kv::test {

using peer::Frame;
using peer::Kind;
using Bytes = std::vector<std::byte>;

inline constexpr uint64_t kNumber = 7;
inline constexpr uint32_t kRequest = 5, kLayers = 3, kTokens = 8, kTokenBytes = 16, kMetaBytes = 64;

struct Pair {
  Pair() {
    int ends[2];
    KV_INVARIANT(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    near = Fd(ends[0]), far = Fd(ends[1]);
  }
  Fd near, far;
};

// One that has the block, or asks for it.
struct AnswerHost : Rig {
  AnswerHost() : Rig(4 << 20, 64), window(*store, true) {}
  void fill(uint32_t layers = kLayers) {
    const auto blob = layout_blob(layers, kTokenBytes, kTokens, kMetaBytes);
    const uint32_t id = store->register_layout(blob);
    const CreateItem item{.key = key(kNumber), .tokens = kTokens};
    const Granted granted = store->create({.owner = owner, .layout = id, .items = {&item, 1}})[0];
    std::byte* at = window.at(granted.extent.offset);
    for (uint64_t i = 0; i < granted.extent.length; ++i) at[i] = std::byte(i * 31 % 251);
    KV_INVARIANT(seal(granted.handle) == Done::Ok);
  }
  // What the layers and the meta area hold; nothing if the block is not here.
  std::optional<Bytes> content() {
    const auto job = store->begin_read(key(kNumber));
    if (!job) return std::nullopt;
    const Layout& layout = job->layout->layout;
    Bytes out;
    const auto add = [&](uint64_t offset, uint64_t bytes) {
      const std::byte* at = window.at(job->extent.offset + offset);
      out.insert(out.end(), at, at + bytes);
    };
    for (uint32_t layer = 0; layer < layout.num_layers(); ++layer)
      add(layout.layer_offset(layer, job->shape.tokens), layout.layer_bytes(layer, job->shape.tokens));
    add(layout.meta_offset(job->shape.tokens), layout.meta_bytes(job->shape.tokens));
    store->end_read(job->handle);
    return out;
  }
  void forget() {
    store->remove(key(kNumber));
    store->settle();
  }
  Window window;
};

inline Bytes record(AnswerHost& host) {
  Pair pair;
  std::thread sender([&] {
    peer::Channel channel(std::move(pair.near));
    peer::Admission admission;
    peer::ServedSums sums;
    const Key wanted = key(kNumber);
    peer::BlockSender(*host.store, host.window, admission, sums, channel, "b").answer(kRequest, {&wanted, 1});
  });
  Bytes out(1 << 16);
  size_t got = 0;
  for (ssize_t n; (n = ::read(pair.far.get(), out.data() + got, out.size() - got)) > 0;) got += static_cast<size_t>(n);
  sender.join();
  out.resize(got);
  return out;
}

struct Piece {
  Frame head;
  Bytes payload;
};

inline std::vector<Piece> pieces_of(const Bytes& answer) {
  std::vector<Piece> out;
  for (size_t at = 0; at < answer.size();) {
    Piece piece;
    std::memcpy(&piece.head, answer.data() + at, sizeof piece.head);
    at += sizeof piece.head;
    piece.payload.assign(answer.begin() + static_cast<long>(at), answer.begin() + static_cast<long>(at + piece.head.bytes));
    at += piece.head.bytes;
    out.push_back(piece);
  }
  return out;
}

// With checksums that are right.
inline Bytes joined(std::vector<Piece> pieces) {
  Bytes out;
  for (Piece& piece : pieces) {
    piece.head.payload_crc = crc32c(piece.payload.data(), piece.payload.size());
    piece.head.head_crc = crc32c(&piece.head, offsetof(Frame, head_crc));
    const auto* head = reinterpret_cast<const std::byte*>(&piece.head);
    out.insert(out.end(), head, head + sizeof piece.head);
    out.insert(out.end(), piece.payload.begin(), piece.payload.end());
  }
  return out;
}

}  // namespace kv::test
