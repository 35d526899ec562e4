#include "core/base/processor.h"

#include <sched.h>
#include <sys/sysinfo.h>
#include <unistd.h>

namespace kv {
namespace {
constexpr double kMuch = 1.5;
}  // namespace

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

// What somebody else has set meanwhile stays.
bool Apart::keep_off(uint32_t processor) {
  if (processor == off_ || processor > CPU_SETSIZE) return false;
  cpu_set_t now, mine = allowed_;
  if (::sched_getaffinity(0, sizeof now, &now) != 0) return false;
  if (off_) {
    CPU_CLR(off_ - 1, &mine);
    if (CPU_EQUAL(&now, &mine)) now = allowed_;
  }
  cpu_set_t others = now;
  if (processor) CPU_CLR(processor - 1, &others);
  if (CPU_COUNT(&others) == 0 || ::sched_setaffinity(0, sizeof others, &others) != 0) return false;
  allowed_ = now, off_ = processor;
  return true;
}

bool crowded() {
  struct sysinfo all{};
  if (::sysinfo(&all) != 0) return true;
  const double load = static_cast<double>(all.loads[0]) / (1 << SI_LOAD_SHIFT);
  return load > kMuch * static_cast<double>(::sysconf(_SC_NPROCESSORS_ONLN));
}

}  // namespace kv
