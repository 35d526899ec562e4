#include "core/format/block.h"

#include <sys/random.h>

#include "core/base/error.h"

namespace kv {

uint64_t key_hash_seed() {
  uint64_t seed;
  KV_INVARIANT(::getrandom(&seed, sizeof seed, 0) == sizeof seed);
  return seed;
}

std::string_view name(State state) {
  switch (state) {
    case State::Free: return "FREE";
    case State::Created: return "CREATED";
    case State::Sealed: return "SEALED";
    case State::Zombie: return "ZOMBIE";
    case State::Quarantined: return "QUARANTINED";
    case State::Disk: return "DISK";
    case State::Piece: return "PIECE";
  }
  return "?";
}

std::string_view name(Event event) {
  switch (event) {
    case Event::Create: return "create";
    case Event::Seal: return "seal";
    case Event::Evict: return "evict";
    case Event::Delete: return "delete";
    case Event::Abort: return "abort";
    case Event::SessionEnd: return "session end";
    case Event::SessionLockFree: return "session lock free";
    case Event::LastPinGone: return "last pin gone";
    case Event::Indexed: return "indexed";
    case Event::Demote: return "demote";
    case Event::TakeBack: return "take back";
  }
  return "?";
}

}  // namespace kv
