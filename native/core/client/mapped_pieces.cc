#include "core/client/mapped_pieces.h"

#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <new>

namespace kv {
namespace {
std::atomic<size_t> mapped_pieces{0};
}  // namespace

MappedPieces::MappedPieces(const std::byte* pool, std::span<const Extent> pieces) {
  for (const Extent& piece : pieces) length_ += piece.length;
  void* const base = ::mmap(nullptr, length_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) throw std::bad_alloc();
  bytes_ = static_cast<std::byte*>(base);
  mapped_ = pieces.size();
  // A mapping costs some 10 µs, with its faults and its end: what is shorter is sooner copied.
  const bool worth_it = length_ >= kLeastMapped * pieces.size();
  if (!worth_it) mapped_ = 0;
  bool map = worth_it && mapped_pieces.fetch_add(mapped_) + mapped_ <= kMostMapped;
  uint64_t at = 0;
  for (const Extent& piece : pieces) {
    auto* const from = const_cast<std::byte*>(pool) + piece.offset;
    // Of nothing: the same pages once more.
    if (map && ::mremap(from, 0, piece.length, MREMAP_MAYMOVE | MREMAP_FIXED, bytes_ + at) != bytes_ + at) {
      map = false;  // what was mapped there may be gone
      constexpr int kThere = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
      if (::mmap(bytes_ + at, length_ - at, PROT_READ | PROT_WRITE, kThere, -1, 0) == MAP_FAILED) {
        ::munmap(bytes_, length_);
        mapped_pieces.fetch_sub(mapped_);
        throw std::bad_alloc();
      }
    }
    if (!map) std::memcpy(bytes_ + at, from, piece.length);
    at += piece.length;
  }
  if (!map) ::mprotect(bytes_, length_, PROT_READ);
}

MappedPieces::~MappedPieces() {
  ::munmap(bytes_, length_);
  mapped_pieces.fetch_sub(mapped_);
}

}  // namespace kv
