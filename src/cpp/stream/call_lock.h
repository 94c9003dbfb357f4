// SPDX-License-Identifier: Apache-2.0
// One call of an object at a time.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "tiledattn/error.h"

namespace tiledattn {

/// A mutex that refuses, with a ValueError, where a mutex would wait for ever: a thread that holds
/// it already, and a process that was forked while another thread did.
class CallLock {
 public:
  void lock() {
    const std::uint64_t me = process() | thread();
    for (std::uint64_t holder = 0; !holder_.compare_exchange_weak(holder, me); holder = 0) {
      if (holder == me) {
        throw ValueError(
            "StreamingAttention: called in the middle of a call of the same object by the same "
            "thread, as a signal handler or the pin() of a source may do; use another object "
            "there");
      }
      if (holder != 0 && holder >> 32 != process() >> 32) refuse_forked();
      if (holder != 0) holder_.wait(holder);
    }
  }

  void unlock() {
    holder_ = 0;
    holder_.notify_one();
  }

  [[noreturn]] static void refuse_forked() {
    throw ValueError(
        "StreamingAttention: the process was forked in the middle of a call of this object; make "
        "another one in the child");
  }

 private:
  static std::uint64_t process() { return static_cast<std::uint64_t>(getpid()) << 32; }

  /// Unlike the system's numbers it is the same in a child.
  static std::uint64_t thread() {
    static std::atomic<std::uint32_t> threads = 0;
    thread_local const std::uint32_t number = ++threads;
    return number;
  }

  std::atomic<std::uint64_t> holder_ = 0;  // process and thread; 0: nobody
};

}  // namespace tiledattn
