// SPDX-License-Identifier: Apache-2.0
// The threads of the CPU backend.
//
// Tasks are handed out by one counter, and the caller takes them too: a worker that wakes late
// costs nothing. Workers sleep between jobs; spinning ones would fight with the threads of other
// libraries for the same cores.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace tiledattn::cpu {

/// A reference to something callable with a task's number; the callable must outlive it.
class TaskRef {
 public:
  template <typename F>
    requires(!std::is_same_v<std::remove_cvref_t<F>, TaskRef>)
  TaskRef(F&& callable)  // NOLINT: conversion is the point
      : object_(const_cast<void*>(static_cast<const void*>(std::addressof(callable)))),
        call_([](void* object, std::int64_t task) {
          (*static_cast<std::remove_reference_t<F>*>(object))(task);
        }) {}
  void operator()(std::int64_t task) const { call_(object_, task); }

 private:
  void* object_;
  void (*call_)(void*, std::int64_t);
};

/// Calls task(0) .. task(num_tasks - 1), each once, in any order, on several threads; returns when
/// all have returned. Rethrows the first exception, after which no further task is started. A call
/// from within a task, or while another thread's call has the workers, runs on the calling thread
/// alone.
void parallel_for(std::int64_t num_tasks, TaskRef task);

}  // namespace tiledattn::cpu
