// CRC32C: every path against a bitwise one, at all sizes and alignments around the boundaries of the code.
#include "core/base/checksum.h"

#include <cstring>
#include <string>

#include "tests/check.h"

using namespace kv;

namespace {

constexpr ChecksumPath kPaths[] = {ChecksumPath::Portable, ChecksumPath::Sse42, ChecksumPath::Avx2, ChecksumPath::Avx512};

template <class Test>
void on_all_paths(Test test) {
  for (ChecksumPath path : kPaths)
    if (supported(path)) {
      use(path);
      test();
    }
}

uint32_t bitwise(const uint8_t* p, size_t n, uint32_t crc = 0) {
  crc = ~crc;
  for (; n > 0; --n, ++p) {
    crc ^= *p;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (0x82f63b78u & -(crc & 1));
  }
  return ~crc;
}

std::vector<uint8_t> noise(size_t n) {
  std::vector<uint8_t> data(n);
  uint64_t state = 88172645463325252u;
  for (uint8_t& byte : data) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    byte = static_cast<uint8_t>(state);
  }
  return data;
}

// Up to two cache lines, around the start of folding, of the four stretches, around multiples of their granule.
std::vector<size_t> sizes() {
  std::vector<size_t> all;
  for (size_t n = 0; n <= 130; ++n) all.push_back(n);
  for (size_t around : {256, 512, 1024, 1100, 4096, 6144, 16384, 65536, 100000})
    for (size_t n = around - 9; n <= around + 9; ++n) all.push_back(n);
  return all;
}

}  // namespace

TEST(this_cpu) {
  for (ChecksumPath path : kPaths)
    std::printf("  path %d: %s\n", static_cast<int>(path), supported(path) ? "tested" : "not on this CPU");
  CHECK(supported(ChecksumPath::Portable));
}

TEST(published_values) {
  on_all_paths([] {  // RFC 3720 B.4 and the catalogue's check value
    uint8_t data[32];
    CHECK_EQ(crc32c("123456789", 9), 0xe3069283u);
    CHECK_EQ(crc32c(std::memset(data, 0, 32), 32), 0x8a9136aau);
    CHECK_EQ(crc32c(std::memset(data, 0xff, 32), 32), 0x62a8ab43u);
    for (int i = 0; i < 32; ++i) data[i] = static_cast<uint8_t>(i);
    CHECK_EQ(crc32c(data, 32), 0x46dd794eu);
    CHECK_EQ(crc32c(data, 0), 0u);
  });
}

TEST(all_sizes_and_alignments) {
  const std::vector<uint8_t> data = noise(110000);
  for (size_t n : sizes())
    for (size_t offset : {0, 1, 3, 8, 63}) {
      const uint32_t expected = bitwise(data.data() + offset, n, 0x12345678);
      on_all_paths([&] { CHECK_EQ(crc32c(data.data() + offset, n, 0x12345678), expected); });
    }
}

TEST(each_changed_byte_changes_it) {
  std::vector<uint8_t> data = noise(8192);
  on_all_paths([&] {
    const uint32_t before = crc32c(data.data(), data.size());
    for (size_t i = 0; i < data.size(); i += 17) {
      data[i] ^= 0x10;
      CHECK(crc32c(data.data(), data.size()) != before);
      data[i] ^= 0x10;
    }
  });
}

TEST(going_on_equals_one_pass) {
  const std::vector<uint8_t> data = noise(70000);
  on_all_paths([&] {
    const uint32_t whole = crc32c(data.data(), data.size());
    for (size_t cut : {size_t{0}, size_t{1}, size_t{511}, size_t{4096}, size_t{69999}, data.size()})
      CHECK_EQ(crc32c(data.data() + cut, data.size() - cut, crc32c(data.data(), cut)), whole);
  });
}

TEST(streaming_copies_and_checksums) {
  const std::vector<uint8_t> data = noise(110000);
  std::vector<uint8_t> room(data.size() + 192);
  uint8_t* dst = room.data() + 64 + -reinterpret_cast<uintptr_t>(room.data()) % 64;
  for (size_t n : sizes())
    for (size_t offset : {0, 1, 8}) {
      const uint32_t expected = bitwise(data.data() + offset, n, 7);
      on_all_paths([&] {
        std::memset(dst - 64, 0xee, n + 128);
        CHECK_EQ(crc32c_stream(dst, data.data() + offset, n, 7), expected);
        CHECK(std::memcmp(dst, data.data() + offset, n) == 0);
        CHECK(dst[-1] == 0xee && dst[n] == 0xee && dst[n + 63] == 0xee);
      });
    }
}
