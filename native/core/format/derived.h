// Keys of blocks that an engine names by a hash of its own: SHA-256(identity | 32 zero bytes | name).
//
// Owns the derivation; never knows what a name is. Invariant: two names under one identity, or one name under two, have
// one key only if SHA-256 has a collision. The first 64 bytes are one step of SHA-256, which is taken once.
#pragma once

#include <cstddef>

#include "core/format/sha256.h"

namespace kv {

class DerivedKeys {
 public:
  explicit DerivedKeys(const Key& identity) {
    static constexpr uint8_t kZeros[32] = {};
    begun_.update(&identity, sizeof identity).update(kZeros, sizeof kZeros);
  }
  Key of(const void* name, size_t length) const { return begun_.finish_with(name, length); }

 private:
  Sha256 begun_;
};

}  // namespace kv
