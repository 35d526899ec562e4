#include "core/copy.h"

#include <algorithm>
#include <cstring>

#include "core/checksum.h"
#include "core/stream.h"

namespace kv {
namespace {

// Shorter copies stay in the caches: measured, docs/log.md.
constexpr size_t kStreamBytes = 32 << 10;

// Bytes up to the next cache line.
size_t to_line(const void* p) { return -reinterpret_cast<uintptr_t>(p) % 64; }

}  // namespace

uint32_t copy_crc32c(void* dst, const void* src, size_t n) {
  const size_t head = std::min(to_line(dst), n);
  std::memcpy(dst, src, head);
  const uint32_t crc = crc32c(src, head);
  return crc32c_stream(static_cast<uint8_t*>(dst) + head, static_cast<const uint8_t*>(src) + head, n - head, crc);
}

void copy_stream(void* dst, const void* src, size_t n) {
  auto* to = static_cast<uint8_t*>(dst);
  const auto* from = static_cast<const uint8_t*>(src);
#if defined(__x86_64__)
  if (n >= kStreamBytes) {
    const size_t head = to_line(dst);
    std::memcpy(to, from, head);
    to += head, from += head, n -= head;
    const size_t stretch = n / kStretches & ~size_t{63};
    for (size_t i = 0; i < stretch; i += 64) stream_lines(to + i, from + i, stretch);
    _mm_sfence();  // a release store of the seal does not order these
    to += kStretches * stretch, from += kStretches * stretch, n -= kStretches * stretch;
  }
#endif
  std::memcpy(to, from, n);
}

}  // namespace kv
