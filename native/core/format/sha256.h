// SHA-256 (FIPS 180-4). Uses the CPU's SHA instructions where it has them, chosen at run time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/format/block.h"

namespace kv {

// Hashes what it is fed piece by piece. An object hashes one message; a copy of it goes on from where it was.
class Sha256 {
 public:
  Sha256& update(const void* data, size_t n);
  Key finish();                                       // the digest, in byte order; the object is used up
  Key finish_with(const void* data, size_t n) const;  // the digest of what was fed and of these behind it

 private:
  uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint64_t length_ = 0;  // bytes fed
  uint8_t tail_[64];     // the last length_ % 64 of them
};

namespace sha256 {

// Mixes `blocks` blocks of 64 bytes into the state.
using Compress = void (*)(uint32_t state[8], const uint8_t* data, size_t blocks);

Compress portable();
Compress accelerated();       // null where the CPU has no SHA instructions
void use(Compress compress);  // for tests: what every Sha256 uses from now on

}  // namespace sha256
}  // namespace kv
