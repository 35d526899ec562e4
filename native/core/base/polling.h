// When to look for a message for a while before sleeping. A processor that fell asleep takes tens of microseconds to wake, so on
// an idle machine looking pays. On a busy one nothing sleeps, a blocked reader is woken at once, and who polls is put aside by
// the scheduler for milliseconds. Being put aside is how this notices; then nobody polls for a while, and for longer if that was
// so again as soon as somebody did: on an idle machine it also happens, after half a million looks or so.
#pragma once

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace kv {

inline uint64_t monotonic_ns() {
  timespec t;
  ::clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(t.tv_nsec);
}
inline uint64_t monotonic_ms() { return monotonic_ns() / 1'000'000; }

// Between two looks at memory.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Requests that come close behind each other. One thread notes, any may ask.
class Stream {
 public:
  explicit Stream(uint64_t gap_ns) : gap_ns_(gap_ns) {}
  void note(uint64_t now_ns) {
    if (now_ns - last_ns_ < gap_ns_) until_ns_.store(now_ns + gap_ns_, std::memory_order_relaxed);
    last_ns_ = now_ns;
  }
  bool runs(uint64_t now_ns) const { return now_ns < until_ns_.load(std::memory_order_relaxed); }

 private:
  const uint64_t gap_ns_;
  uint64_t last_ns_ = 0;
  std::atomic<uint64_t> until_ns_{0};
};

class Polling {
 public:
  static constexpr uint64_t kPutAsideNs = 500'000;  // a slice of the scheduler's is milliseconds
  static constexpr uint64_t kMinPauseNs = 20'000'000;
  static constexpr uint64_t kMaxPauseNs = 80'000'000;
  static constexpr uint64_t kFewLooks = 10'000;

  bool worthwhile(uint64_t now_ns) const { return now_ns >= resume_ns_; }

  // Between two looks: gives way to whoever wants the processor. False if that took so long that polling is over.
  bool give_way() {
    const uint64_t before = monotonic_ns();
    ::sched_yield();
    return looked(before, monotonic_ns());
  }

  bool looked(uint64_t before_ns, uint64_t after_ns) {
    ++looks_;
    if (after_ns - before_ns < kPutAsideNs) return true;
    pause_ns_ = looks_ <= kFewLooks ? std::min(2 * pause_ns_, kMaxPauseNs) : kMinPauseNs;
    resume_ns_ = after_ns + pause_ns_;
    looks_ = 0;
    return false;
  }

 private:
  uint64_t pause_ns_ = kMinPauseNs / 2;  // doubled before it is used
  uint64_t resume_ns_ = 0;
  uint64_t looks_ = 0;  // since the last pause
};

}  // namespace kv
