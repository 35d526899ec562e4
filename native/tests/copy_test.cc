// Copies: the right bytes and nothing around them, at all alignments of both ends, on every checksum path.
#include "core/base/copy.h"

#include <cstring>

#include "core/base/checksum.h"
#include "tests/check.h"

using namespace kv;

namespace {

struct Room {
  explicit Room(size_t n) : bytes(n + 256), at(bytes.data() + 64 + -reinterpret_cast<uintptr_t>(bytes.data()) % 64) {}
  std::vector<uint8_t> bytes;
  uint8_t* at;  // a multiple of 64, with 64 bytes before it and as many behind n
};

void check_copies(size_t n, size_t dst_offset, size_t src_offset) {
  Room src(n + 64), dst(n + 64);
  uint8_t *from = src.at + src_offset, *to = dst.at + dst_offset;
  for (size_t i = 0; i < n; ++i) from[i] = static_cast<uint8_t>(i * 31 + (i >> 8));
  auto whole = [&] { return std::memcmp(to, from, n) == 0 && to[-1] == 0xee && to[n] == 0xee && to[n + 63] == 0xee; };

  std::memset(dst.bytes.data(), 0xee, dst.bytes.size());
  copy_stream(to, from, n);
  CHECK(whole());
  for (ChecksumPath path : {ChecksumPath::Portable, ChecksumPath::Sse42, ChecksumPath::Avx2, ChecksumPath::Avx512}) {
    if (!supported(path)) continue;
    use(path);
    std::memset(dst.bytes.data(), 0xee, dst.bytes.size());
    CHECK_EQ(copy_crc32c(to, from, n), crc32c(from, n));
    CHECK(whole());
  }
}

}  // namespace

TEST(all_alignments) {
  for (size_t n : {size_t{0}, size_t{1}, size_t{63}, size_t{64}, size_t{200}, size_t{4096}, size_t{33000}})
    for (size_t dst_offset : {0, 1, 16, 32, 63})
      for (size_t src_offset : {0, 1, 16, 63}) check_copies(n, dst_offset, src_offset);
}

TEST(around_the_boundaries) {
  for (size_t around : {4096, 32768, 32768 + 256, 1 << 20})
    for (size_t n = around - 65; n <= around + static_cast<size_t>(65); n += 13) check_copies(n, around % 3, 5);
}

// Sources a little before the destination modulo 4 KiB are copied downwards, in tiles where there is a checksum.
TEST(sources_just_before_the_destination) {
  for (size_t n : {size_t{33000}, size_t{64} << 10, (size_t{64} << 10) + 1, (size_t{200} << 10) + 77}) {
    std::vector<uint8_t> room(2 * (n + 16384));
    auto page = [](uint8_t* p) { return p + -reinterpret_cast<uintptr_t>(p) % 4096; };
    uint8_t *to = page(room.data() + 4096), *source = page(room.data() + n + 16384);
    for (size_t before : {0, 1, 16, 64, 255, 256, 257}) {
      uint8_t* from = source + 4096 - before;
      for (size_t i = 0; i < n; ++i) from[i] = static_cast<uint8_t>(i * 29 + (i >> 9));
      auto whole = [&] { return std::memcmp(to, from, n) == 0 && to[-1] == 0xee && to[n] == 0xee; };
      std::memset(to - 64, 0xee, n + 128);
      copy_stream(to, from, n);
      CHECK(whole());
      use(ChecksumPath::Portable);
      const uint32_t sum = crc32c(from, n);
      for (ChecksumPath path : {ChecksumPath::Portable, ChecksumPath::Sse42, ChecksumPath::Avx2, ChecksumPath::Avx512}) {
        if (!supported(path)) continue;
        use(path);
        std::memset(to - 64, 0xee, n + 128);
        CHECK_EQ(copy_crc32c(to, from, n), sum);
        CHECK(whole());
      }
    }
  }
}

TEST(zeros) {
  for (size_t n : {size_t{0}, size_t{1}, size_t{63}, size_t{64}, size_t{200}, size_t{4096}, size_t{33000}})
    for (size_t offset : {0, 1, 16, 32, 63}) {
      Room room(n + 64);
      uint8_t* to = room.at + offset;
      std::memset(room.bytes.data(), 0xee, room.bytes.size());
      write_zeros(to, n);
      lines_written();
      for (size_t i = 0; i < n; ++i) CHECK(to[i] == 0);
      CHECK(to[-1] == 0xee && to[n] == 0xee && to[n + 63] == 0xee);
    }
}
