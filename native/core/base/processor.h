// The processor that a thread which polls runs on. Woken beside the client that it polls for, the two would take turns on one
// processor while another lies idle, and a scheduler sees no reason to part them: to it, a virtual processor that halted looks
// like one that the host took away (docs/log.md).
//
// Owns the thread's place only. Never leaves the processors that the thread may run on, and never moves a client's thread.
#pragma once

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

}  // namespace kv
