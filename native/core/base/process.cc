#include "core/base/process.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace kv {
namespace {

// The beginning of one of the kernel's files on a process; false if there is none.
template <size_t N>
bool read_about(uint32_t pid, const char* what, char (&text)[N]) {
  char path[32];
  std::snprintf(path, sizeof path, "/proc/%u/%s", pid, what);
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  const ssize_t got = ::read(fd, text, N - 1);
  ::close(fd);
  text[got > 0 ? got : 0] = 0;
  return got > 0;
}

}  // namespace

uint64_t process_identity(uint32_t pid) {
  char text[512];
  if (!read_about(pid, "stat", text)) return 0;
  const char* at = std::strrchr(text, ')');  // a program's name may have anything in it
  if (!at || at[1] != ' ' || at[2] == 'Z' || at[2] == 'X') return 0;
  at += 2;
  for (int field = 3; field < 22 && at; ++field) at = std::strchr(at, ' '), at = at ? at + 1 : nullptr;
  if (!at) return 0;
  return std::strtoull(at, nullptr, 10) << kPidBits | pid;
}

std::optional<uint32_t> process_user(uint64_t identity) {
  char text[4096];
  if (!read_about(static_cast<uint32_t>(identity & ((1u << kPidBits) - 1)), "status", text)) return std::nullopt;
  unsigned real, effective;
  const char* at = std::strstr(text, "\nUid:");  // a newline in a program's name is written as \n there
  if (!at || std::sscanf(at, " Uid: %u %u", &real, &effective) != 2) return std::nullopt;
  return effective;
}

}  // namespace kv
