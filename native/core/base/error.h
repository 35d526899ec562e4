// Three kinds of failure: a miss is a value, an operating error is an Error, a broken invariant stops the program.
#pragma once

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace kv {

enum class Code {
  InvalidArgument,
  NotFound,
  NoSpace,
  Unavailable,
  Detached,
  NotPermitted,
  PinsExhausted,
  DeadlineExceeded,
  BlockLost,
  Closed,
  IncompatibleVersion,
  FailedPrecondition,
  Integrity,
  Fenced,
  LayoutLost,
};

class Error : public std::runtime_error {
 public:
  Error(Code code, const std::string& message) : std::runtime_error(message), code(code) {}
  const Code code;
};

inline std::string errno_text(const std::string& what, int error = errno) { return what + ": " + std::strerror(error); }

[[noreturn]] inline void broken(const char* file, int line, const char* what) {
  std::fprintf(stderr, "level=fatal event=broken_invariant where=%s:%d what=\"%s\"\n", file, line, what);
  std::abort();
}

}  // namespace kv

// A condition that can only be false if the program is wrong.
#define KV_INVARIANT(condition)                                     \
  do {                                                              \
    if (!(condition)) ::kv::broken(__FILE__, __LINE__, #condition); \
  } while (0)
