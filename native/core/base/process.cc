#include "core/base/process.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace kv {

uint64_t process_identity(uint32_t pid) {
  char path[32], text[512];
  std::snprintf(path, sizeof path, "/proc/%u/stat", pid);
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  const ssize_t got = ::read(fd, text, sizeof text - 1);
  ::close(fd);
  if (got <= 0) return 0;
  text[got] = 0;
  const char* at = std::strrchr(text, ')');  // a program's name may have anything in it
  if (!at || at[1] != ' ' || at[2] == 'Z' || at[2] == 'X') return 0;
  at += 2;
  for (int field = 3; field < 22 && at; ++field) at = std::strchr(at, ' '), at = at ? at + 1 : nullptr;
  if (!at) return 0;
  return std::strtoull(at, nullptr, 10) << kPidBits | pid;
}

}  // namespace kv
