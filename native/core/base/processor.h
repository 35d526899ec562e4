// The processor that a thread runs on which polls, or sends much. Woken beside the client that it polls for, the two would take
// turns on one processor while another lies idle, and a scheduler sees no reason to part them: to it, a virtual processor that
// halted looks like one that the host took away (docs/log.md).
//
// Owns the thread's place only. Never leaves the processors that the thread may run on, and never moves a client's thread.
#pragma once

#include <sched.h>

#include <cstdint>

namespace kv {

// As sessions' pages have it: the number of the processor that the caller runs on, plus 1. 0: not known.
uint32_t this_processor();

class OwnProcessor {
 public:
  static constexpr uint64_t kMoveEveryNs = 20'000'000;  // a client may say what it likes

  // Moves the calling thread to another processor if it runs on this one. False if it stays: it is elsewhere, has just moved, or
  // may run nowhere else.
  bool leave_to(uint32_t processor, uint64_t now_ns);

 private:
  uint64_t next_ns_ = 0;
};

// Keeps a thread that sends much off the processor of who receives it, where that one is on this host: the two would take turns.
class Apart {
 public:
  // Of the calling thread, always the same. 0: it may run everywhere again. True if that changed anything.
  bool keep_off(uint32_t processor);

 private:
  uint32_t off_ = 0;
  cpu_set_t allowed_{};  // but for `off_`, if there is one
};

// Whether much more wants to run than there are processors, over the last minute: none is to be had beside, and bytes that stay
// in one processor's cache are sooner here than those that cross over.
bool crowded();

}  // namespace kv
