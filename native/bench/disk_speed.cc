// How fast blocks go to and from a directory through native/core/disk, without the store and without policy: the most that the
// disk tier can reach. `disk_speed DIR write|read BLOCK_BYTES BLOCKS DEPTH` prints one line of JSON; bench/disk_figures.py runs
// it.
//
// write: the file is made and allocated, the header made up, header and extent written, the file published. read: the file is
// opened, read into the pool, its header decoded, every checksum compared. The pool is shared memory that cycles.

#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>

#include "core/base/checksum.h"
#include "core/base/error.h"
#include "core/files/block_file.h"
#include "core/files/engine.h"
#include "core/files/files.h"

using namespace kv;

namespace {

constexpr uint32_t kLayers = 16, kTokens = 128;
constexpr uint64_t kPoolBytes = 512ull << 20;

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double cpu_s() {
  rusage used;
  ::getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& t) { return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec); };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

Layout layout_for(uint64_t block_bytes) {
  // The extent comes out a page or two above `block_bytes`: checksums and meta area.
  std::vector<uint32_t> words{kLayers, 2, 4, 64, 1, kTokens, 0, 80, 4};
  words.resize(words.size() + kLayers, static_cast<uint32_t>(block_bytes / kLayers / kTokens));
  std::vector<uint8_t> blob(4 + 4 * words.size());
  std::memcpy(blob.data(), "KVL1", 4);
  std::memcpy(blob.data() + 4, words.data(), 4 * words.size());
  return Layout::parse(blob);
}

Key key_of_block(uint64_t number) {
  Key key;
  for (uint64_t& word : key.words) word = (number = number * 6364136223846793005 + 1442695040888963407) ^ number >> 29;
  return key;
}

struct Flight {
  Transfer transfer;
  std::byte* page = nullptr;
  uint64_t number = 0;
  std::string temp;
};

class Run {
 public:
  Run(const std::string& directory, uint64_t block_bytes, uint32_t depth)
      : layout_(layout_for(block_bytes)),
        choice_(choose_engine(directory, depth)),
        files_(directory, choice_.direct),
        memory_(::memfd_create("pool", MFD_CLOEXEC)) {
    KV_INVARIANT(::ftruncate(memory_.get(), kPoolBytes) == 0);
    pool_ = Mapping(memory_.get(), kPoolBytes, true);
    auto* words = pool_.at<uint64_t>(0);
    for (uint64_t i = 0; i < kPoolBytes / 8; ++i) words[i] = i * 0x9e3779b97f4a7c15;
    KV_INVARIANT(describe(header_, layout_, kTokens));
    for (uint32_t i = 0; i < depth; ++i) {
      flights_.emplace_back();
      flights_.back().page = static_cast<std::byte*>(std::aligned_alloc(kPageBytes, kPageBytes));
      free_.push_back(&flights_.back());
    }
  }

  // The block's place in the pool, and its checksums the first time the place is used: a writer of blocks has computed them.
  std::byte* extent(uint64_t number) {
    const uint64_t slots = kPoolBytes / header_.data_bytes;
    return pool_.data() + number % slots * header_.data_bytes;
  }

  void prepare(uint64_t blocks) {
    const uint64_t slots = std::min(blocks, kPoolBytes / header_.data_bytes);
    headers_.assign(slots, header_);
    for (uint64_t slot = 0; slot < slots; ++slot) {
      const std::byte* data = extent(slot);
      for (uint32_t layer = 0; layer < kLayers; ++layer)
        headers_[slot].layer_checksums[layer] =
            crc32c(data + layout_.layer_offset(layer, kTokens), layout_.layer_bytes(layer, kTokens));
    }
  }

  void start_write(Flight& flight) {
    FileHeader& header = headers_[flight.number % headers_.size()];
    std::byte* data = extent(flight.number);
    header.key = key_of_block(flight.number);
    const uint64_t tail = layout_.layers_bytes(kTokens);
    header.tail_checksum = crc32c(data + tail, header.data_bytes - tail);
    encode(header, std::span<std::byte, kBlockFileHeaderBytes>(flight.page, kBlockFileHeaderBytes));
    const int fd = files_.create_temp(kBlockFileHeaderBytes + header.data_bytes, &flight.temp);
    if (fd < 0) throw Error(Code::Unavailable, errno_text("create", -fd));
    move(flight, fd, true);
  }

  void start_read(Flight& flight) {
    uint64_t bytes = 0;
    const int fd = files_.open_read(path_of(key_of_block(flight.number), {}), &bytes);
    if (fd < 0) throw Error(Code::Unavailable, errno_text("open", -fd));
    move(flight, fd, false);
  }

  void move(Flight& flight, int fd, bool write) {
    flight.transfer = {};
    flight.transfer.fd = fd, flight.transfer.write = write, flight.transfer.count = 2, flight.transfer.user = &flight;
    flight.transfer.parts[0] = {flight.page, kBlockFileHeaderBytes};
    flight.transfer.parts[1] = {extent(flight.number), header_.data_bytes};
    KV_INVARIANT(choice_.engine->submit(&flight.transfer));
  }

  void finish(Flight& flight) {
    const Transfer& done = flight.transfer;
    files_.close(done.fd);
    if (done.result != static_cast<int64_t>(done.bytes())) throw Error(Code::Unavailable, "moved " + std::to_string(done.result));
    if (done.write) {
      KV_INVARIANT(files_.publish(flight.temp, path_of(key_of_block(flight.number), {})) == 0);
      return;
    }
    const Decoded decoded =
        decode(std::span<const std::byte, kBlockFileHeaderBytes>(flight.page, kBlockFileHeaderBytes), done.bytes());
    if (!decoded || decoded.header->key != key_of_block(flight.number)) throw Error(Code::Integrity, "header");
    const std::byte* data = extent(flight.number);
    for (uint32_t layer = 0; layer < kLayers; ++layer)
      if (!layer_matches(*decoded.header, layer, data + layout_.layer_offset(layer, kTokens)))
        throw Error(Code::Integrity, "layer " + std::to_string(layer));
    if (!tail_matches(*decoded.header, data + layout_.layers_bytes(kTokens))) throw Error(Code::Integrity, "tail");
  }

  void run(bool write, uint64_t blocks) {
    if (write) prepare(blocks);
    const double began = now_s(), busy = cpu_s();
    uint64_t next = 0, done = 0;
    while (done < blocks) {
      while (next < blocks && !free_.empty()) {
        Flight* flight = free_.front();
        free_.pop_front();
        flight->number = next++;
        write ? start_write(*flight) : start_read(*flight);
      }
      pollfd event{choice_.engine->event_fd(), POLLIN, 0};
      if (::poll(&event, 1, 30'000) != 1) throw Error(Code::Unavailable, "nothing completed for 30 s");
      Transfer* finished[kMaxDepth];
      const size_t count = choice_.engine->completed(finished);
      for (size_t i = 0; i < count; ++i) {
        auto* flight = static_cast<Flight*>(finished[i]->user);
        finish(*flight);
        free_.push_back(flight);
      }
      done += count;
    }
    const double seconds = now_s() - began, cpu = cpu_s() - busy;
    std::printf("{\"engine\": \"%s\", \"bytes\": %llu, \"seconds\": %.6f, \"cpu_s\": %.6f}\n", choice_.engine->name().c_str(),
                static_cast<unsigned long long>(blocks * header_.data_bytes), seconds, cpu);
  }

 private:
  const Layout layout_;
  Choice choice_;
  RealFiles files_;
  Fd memory_;
  Mapping pool_;
  FileHeader header_ = {};
  std::vector<FileHeader> headers_;
  std::deque<Flight> flights_;
  std::deque<Flight*> free_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) {
    std::fprintf(stderr, "usage: disk_speed DIR write|read BLOCK_BYTES BLOCKS DEPTH\n");
    return 2;
  }
  try {
    Run(argv[1], std::strtoull(argv[3], nullptr, 10), static_cast<uint32_t>(std::strtoul(argv[5], nullptr, 10)))
        .run(std::strcmp(argv[2], "write") == 0, std::strtoull(argv[4], nullptr, 10));
  } catch (const Error& error) {
    std::fprintf(stderr, "disk_speed: %s\n", error.what());
    return 1;
  }
  return 0;
}
