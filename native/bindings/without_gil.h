// A scope without the GIL, for calls that wait.
#pragma once

#include <Python.h>
#include <unistd.h>

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

}  // namespace kv
