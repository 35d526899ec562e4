#include "core/base/processor.h"

#include <sched.h>

namespace kv {

uint32_t this_processor() {
  const int number = ::sched_getcpu();
  return number < 0 ? 0 : static_cast<uint32_t>(number) + 1;
}

bool OwnProcessor::leave_to(uint32_t processor, uint64_t now_ns) {
  if (processor == 0 || processor != this_processor() || now_ns < next_ns_) return false;
  next_ns_ = now_ns + kMoveEveryNs;
  cpu_set_t allowed;  // too small for the machine: the call says so, and the thread stays
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return false;
  cpu_set_t others = allowed;
  CPU_CLR(processor - 1, &others);
  if (CPU_COUNT(&others) == 0 || ::sched_setaffinity(0, sizeof others, &others) != 0) return false;
  ::sched_setaffinity(0, sizeof allowed, &allowed);
  return true;
}

}  // namespace kv
