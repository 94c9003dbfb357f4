// SPDX-License-Identifier: Apache-2.0
// Leaving the GIL to other threads while the library works.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <thread>

namespace tiledattn::binding {

/// Holds the GIL released. Unlike nanobind's guard it survives a daemon thread that comes back
/// after the interpreter has begun to end: Python before 3.14 ends such a thread by unwinding its
/// stack, which no C++ code here could follow.
class GilReleased {
 public:
  GilReleased() noexcept : state_(PyEval_SaveThread()) {}
  ~GilReleased() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      // The thread's end, in glibc's form. It sleeps here until the process is gone, as Python 3.14
      // lets it.
      for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
    }
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace tiledattn::binding
