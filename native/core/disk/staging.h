// Buffers between a file and the pool: what is read lands here, and a block's bytes reach the pool in the same pass that checks
// them. Of huge pages where the kernel gives them, so that a request is a few pieces for the device whatever the pool is made of
// (docs/disk.md). One thread's. Takes memory when a buffer is first used; the most recently used one is given out first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/files/block_file.h"

namespace kv {

class Staging {
 public:
  static constexpr uint64_t kPieceBytes = 1ull << 20;
  static constexpr uint64_t kBufferBytes = kBlockFileHeaderBytes + kPieceBytes;  // a piece, and the header before the first

  explicit Staging(uint32_t count);  // throws Unavailable
  Staging(Staging&& other) noexcept;
  ~Staging();

  std::byte* take();  // on a page; null if all are taken
  void give(std::byte* buffer) { free_.push_back(buffer); }

 private:
  std::byte* base_ = nullptr;
  size_t bytes_ = 0;
  std::vector<std::byte*> free_;
};

}  // namespace kv
