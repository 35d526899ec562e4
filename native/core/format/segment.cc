#include "core/format/segment.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <mutex>

#include "core/base/error.h"
#include "core/format/block.h"

namespace kv {

void Fd::reset(int fd) {
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

namespace {

bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % kHugePageBytes == 0; }

// At an address where the page tables can name its huge pages whole. The kernel chooses such a one by itself where the file
// system says that it has them. Null where there is no room for it.
void* map_aligned(int fd, size_t length, int protection) {
  const size_t room = length + kHugePageBytes;
  void* const reserved = ::mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(reserved);
  std::byte* const at = begin + (kHugePageBytes - reinterpret_cast<uintptr_t>(reserved) % kHugePageBytes) % kHugePageBytes;
  if (::mmap(at, length, protection, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    ::munmap(reserved, room);
    return nullptr;
  }
  const uintptr_t page = kPageBytes;
  auto* const end = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(at) + length + page - 1) / page * page);
  if (at > begin) ::munmap(begin, static_cast<size_t>(at - begin));
  if (begin + room > end) ::munmap(end, static_cast<size_t>(begin + room - end));
  return at;
}

}  // namespace

Mapping::Mapping(int fd, size_t length, bool writable) {
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* p = ::mmap(nullptr, length, protection, MAP_SHARED, fd, 0);
  if (p == MAP_FAILED) throw Error(Code::Unavailable, errno_text("mmap of " + std::to_string(length) + " bytes"));
  if (length >= kHugePageBytes && !is_aligned(p))
    if (void* const aligned = map_aligned(fd, length, protection)) ::munmap(p, length), p = aligned;
  base_ = static_cast<std::byte*>(p);
  length_ = length;
}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  reset();
  base_ = std::exchange(other.base_, nullptr);
  length_ = std::exchange(other.length_, 0);
  return *this;
}

void Mapping::reset() {
  if (base_) ::munmap(base_, length_);
  base_ = nullptr;
  length_ = 0;
}

namespace {

struct GuardSlot {
  std::atomic<uintptr_t> begin{0};
  std::atomic<uintptr_t> end{0};
  std::atomic<std::atomic<bool>*> hit{nullptr};
};
GuardSlot guard_slots[kMaxGuards];
std::mutex guard_mutex;
struct sigaction previous_action;

// Only async-signal-safe calls: loads, one mmap, a store.
void on_sigbus(int signal, siginfo_t* info, void* context) {
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  for (GuardSlot& slot : guard_slots) {
    if (address < slot.begin.load(std::memory_order_acquire) || address >= slot.end.load(std::memory_order_acquire)) continue;
    std::atomic<bool>* hit = slot.hit.load(std::memory_order_acquire);
    void* page = reinterpret_cast<void*>(address & ~(uintptr_t{kPageBytes} - 1));
    if (hit && ::mmap(page, kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED) {
      hit->store(true, std::memory_order_release);
      return;
    }
  }
  if (previous_action.sa_flags & SA_SIGINFO && previous_action.sa_sigaction)
    return previous_action.sa_sigaction(signal, info, context);
  ::signal(SIGBUS, SIG_DFL);  // the faulting instruction runs again and ends the program
}

void install_handler() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action = {};
    action.sa_sigaction = on_sigbus;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    ::sigaction(SIGBUS, &action, &previous_action);
  });
}

}  // namespace

Guard::Guard(const Mapping& mapping, std::atomic<bool>* hit) {
  install_handler();
  std::lock_guard lock(guard_mutex);
  for (size_t i = 0; i < kMaxGuards; ++i) {
    GuardSlot& slot = guard_slots[i];
    if (slot.hit.load(std::memory_order_relaxed)) continue;
    slot.begin.store(reinterpret_cast<uintptr_t>(mapping.data()), std::memory_order_relaxed);
    slot.hit.store(hit, std::memory_order_relaxed);
    slot.end.store(reinterpret_cast<uintptr_t>(mapping.data()) + mapping.size(), std::memory_order_release);
    slot_ = static_cast<int>(i);
    return;
  }
  throw Error(Code::FailedPrecondition, "all " + std::to_string(kMaxGuards) + " memory guards are in use");
}

void Guard::reset() {
  if (slot_ < 0) return;
  std::lock_guard lock(guard_mutex);
  guard_slots[slot_].end.store(0, std::memory_order_release);
  guard_slots[slot_].hit.store(nullptr, std::memory_order_release);
  slot_ = -1;
}

}  // namespace kv
