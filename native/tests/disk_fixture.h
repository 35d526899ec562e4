// What the tests of native/core/disk share: a directory that goes with its object, a layout, a block and its header, and one
// transfer waited for on the engine's eventfd.
#pragma once

#include <poll.h>
#include <stdlib.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "core/base/checksum.h"
#include "core/base/error.h"
#include "core/files/block_file.h"
#include "core/files/engine.h"
#include "core/format/layout.h"

namespace kv::test {

// In the working directory, which ctest puts on the disk the build lies on: /tmp is often a tmpfs.
struct Directory {
  Directory() {
    char name[] = "disk_test.XXXXXX";
    KV_INVARIANT(::mkdtemp(name) != nullptr);
    path = std::filesystem::absolute(name).string();
  }
  ~Directory() { std::filesystem::remove_all(path); }
  Directory(const Directory&) = delete;
  std::string operator/(const std::string& name) const { return path + "/" + name; }
  std::string path;
};

struct Aligned {
  explicit Aligned(size_t bytes) : size(bytes), data(static_cast<std::byte*>(std::aligned_alloc(4096, round_up(bytes, 4096)))) {
    std::memset(data, 0, round_up(bytes, 4096));
  }
  ~Aligned() { std::free(data); }
  Aligned(const Aligned&) = delete;
  std::span<std::byte, kBlockFileHeaderBytes> page() const { return std::span<std::byte, kBlockFileHeaderBytes>(data, 4096); }
  const size_t size;
  std::byte* const data;
};

inline Key key_of_number(uint64_t n) { return {{n * 0x9e3779b97f4a7c15, n, ~n, n << 32 | 7}}; }

inline Layout layout_of_sizes(const std::vector<uint32_t>& sizes, uint32_t meta_per_token = 4) {
  std::vector<uint32_t> words{static_cast<uint32_t>(sizes.size()), 2, 4, 64, 1, 256, 0, 80, meta_per_token};
  words.insert(words.end(), sizes.begin(), sizes.end());
  std::vector<uint8_t> blob(4 + 4 * words.size());
  std::memcpy(blob.data(), "KVL1", 4);
  std::memcpy(blob.data() + 4, words.data(), 4 * words.size());
  return Layout::parse(blob);
}

// A block as a file holds it: header page and data one after the other, checksums right.
struct BlockImage {
  BlockImage(uint64_t number, const Layout& layout, uint32_t tokens)
      : bytes(kBlockFileHeaderBytes + layout.extent_bytes(tokens)), data(bytes.data + kBlockFileHeaderBytes) {
    header().key = key_of_number(number);
    header().identity = key_of_number(~number);
    KV_INVARIANT(describe(header(), layout, tokens));
    uint64_t state = number;
    for (size_t i = 0; i < header().data_bytes; i += 8, state = state * 6364136223846793005 + 1442695040888963407)
      std::memcpy(data + i, &state, 8);
    for (uint32_t layer = 0; layer < header().layers; ++layer)
      header().layer_checksums[layer] = crc32c(data + layout.layer_offset(layer, tokens), layout.layer_bytes(layer, tokens));
    const uint64_t tail = layout.layers_bytes(tokens);
    header().tail_checksum = crc32c(data + tail, header().data_bytes - tail);
    seal();
  }
  void seal() { encode(header(), bytes.page()); }
  FileHeader& header() { return *reinterpret_cast<FileHeader*>(bytes.data); }
  Aligned bytes;
  std::byte* const data;
};

inline Transfer transfer(int fd, bool write, uint64_t offset, void* data, size_t bytes) {
  Transfer t;
  t.fd = fd, t.write = write, t.offset = offset, t.count = 1;
  t.parts[0] = {data, bytes};
  return t;
}

// Waits for `count` completions, 10 seconds at most.
inline std::vector<Transfer*> await(Engine& engine, size_t count) {
  std::vector<Transfer*> all;
  while (all.size() < count) {
    pollfd event{engine.event_fd(), POLLIN, 0};
    if (::poll(&event, 1, 10'000) != 1) break;
    Transfer* done[kMaxDepth];
    const size_t got = engine.completed(done);
    all.insert(all.end(), done, done + got);
  }
  return all;
}

inline int64_t run(Engine& engine, Transfer t) {
  if (!engine.submit(&t)) return -EAGAIN;
  return await(engine, 1).empty() ? -ETIMEDOUT : t.result;
}

}  // namespace kv::test
