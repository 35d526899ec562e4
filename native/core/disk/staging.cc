#include "core/disk/staging.h"

#include <sys/mman.h>

#include <utility>

#include "core/base/error.h"

namespace kv {

Staging::Staging(uint32_t count) : bytes_(round_up(count * kBufferBytes, kHugePageBytes) + kHugePageBytes) {
  void* base = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) throw Error(Code::Unavailable, errno_text("buffers for reading"));
  base_ = static_cast<std::byte*>(base);
  ::madvise(base_, bytes_, MADV_HUGEPAGE);  // refused, it works with small pages
  const uint64_t first = round_up(reinterpret_cast<uintptr_t>(base_), kHugePageBytes) - reinterpret_cast<uintptr_t>(base_);
  for (uint32_t i = count; i-- > 0;) free_.push_back(base_ + first + i * kBufferBytes);
}

Staging::Staging(Staging&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)), bytes_(other.bytes_), free_(std::move(other.free_)) {}

Staging::~Staging() {
  if (base_) ::munmap(base_, bytes_);
}

std::byte* Staging::take() {
  if (free_.empty()) return nullptr;
  std::byte* buffer = free_.back();
  free_.pop_back();
  return buffer;
}

}  // namespace kv
