// A process, told from any later one that has its number: by when it began.
#pragma once

#include <cstdint>
#include <optional>

namespace kv {

inline constexpr uint32_t kPidBits = 24;  // the kernel's numbers have 22

// In the low bits its number, above when it began, in the kernel's ticks. 0: no such process, or one that ended and is waited
// for.
uint64_t process_identity(uint32_t pid);

// Whose it is: its effective user, as the kernel says it. Nothing: no such process.
std::optional<uint32_t> process_user(uint64_t identity);

inline bool process_lives(uint64_t identity) {
  return identity && process_identity(static_cast<uint32_t>(identity & ((1u << kPidBits) - 1))) == identity;
}

}  // namespace kv
