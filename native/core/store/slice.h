// One slice of long work under the store's lock: over after so many steps, or when it has taken a part of the 500 µs that anybody
// may wait, whichever is first. How long a step takes depends on how much memory it meets in no cache: at a million blocks it is
// four times what it is at fifty thousand.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/base/slices.h"

namespace kv {

class Slice {
 public:
  // `look`: steps between two looks at the clock.
  explicit Slice(size_t most, size_t look = 16) : most_(most), look_(look) {}
  // After each step. True: who waits has the lock next, and again() follows.
  bool over() {
    ++steps_;
    return steps_ >= most_ || (steps_ % look_ == 0 && over_now());
  }
  // After a step that is long by itself.
  bool over_now() const { return SlicedMutex::clock() - began_ns_ >= kNs; }
  void again() { steps_ = 0, began_ns_ = SlicedMutex::clock(); }

 private:
  static constexpr uint64_t kNs = 100'000;  // what the slice leaves to do, memory to be freed, takes as long again
  const size_t most_, look_;
  size_t steps_ = 0;
  uint64_t began_ns_ = SlicedMutex::clock();
};

}  // namespace kv
