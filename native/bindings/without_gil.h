// A scope without the GIL, for calls that wait or move much.
#pragma once

#include <Python.h>
#include <unistd.h>

#include <cstdint>

namespace kv {

// In a daemon thread at the end of the program the interpreter does not give the GIL back: before 3.14 it unwinds the thread
// instead, which C++ answers with abort(). Here the thread stays where it is until the process is gone, as it does since 3.14.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  ~WithoutGil() noexcept(false) {  // or the unwinding would end here before it finds `stay`
    struct Stay {
      bool unwound = true;
      ~Stay() {
        while (unwound) pause();
      }
    } stay;
    PyEval_RestoreThread(state_);
    stay.unwound = false;
  }

 private:
  PyThreadState* const state_;
};

// Copies and checksums from here on let other threads run; for shorter ones the hand-over costs more than it gives.
inline constexpr uint64_t kReleaseBytes = 1 << 20;

template <class Call>
auto without_gil(uint64_t bytes, Call call) {
  if (bytes < kReleaseBytes) return call();
  const WithoutGil released;
  return call();
}

}  // namespace kv
