// Waiting on a word of shared memory, across processes. Not std::atomic::wait: that never wakes another process.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <span>

namespace kv {

// The futex word of a 64-bit word: its low half (x86-64 and AArch64 are little-endian).
inline uint32_t* futex_word(const std::atomic<uint64_t>& word) {
  return reinterpret_cast<uint32_t*>(const_cast<std::atomic<uint64_t>*>(&word));
}

inline void futex_wake_all(const std::atomic<uint64_t>& word) {
  ::syscall(SYS_futex, futex_word(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

inline bool passed(const timespec& deadline) {
  timespec now;
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec > deadline.tv_sec || (now.tv_sec == deadline.tv_sec && now.tv_nsec >= deadline.tv_nsec);
}

// Sleeps while the low half is `expected`, until woken or `deadline` (CLOCK_MONOTONIC) has passed. Works on a read-only mapping.
inline void futex_wait(const std::atomic<uint64_t>& word, uint32_t expected, const timespec& deadline) {
  ::syscall(SYS_futex, futex_word(word), FUTEX_WAIT_BITSET, expected, &deadline, nullptr, FUTEX_BITSET_MATCH_ANY);
}

// One word of several, as futex_waitv() has it; its flag is FUTEX_32, across processes.
struct FutexWord {
  uint64_t expected, address;
  uint32_t flags = 2, reserved = 0;
};

// The same of all of these, 128 at most: until one is another or is woken. False: this kernel cannot (before 5.16).
inline bool futex_wait_any(std::span<const FutexWord> words, const timespec& deadline) {
  constexpr long kFutexWaitv = 449;  // everywhere; not in the headers of older systems
  return ::syscall(kFutexWaitv, words.data(), words.size(), 0, &deadline, CLOCK_MONOTONIC) >= 0 ||
         (errno != ENOSYS && errno != EPERM);
}

}  // namespace kv
