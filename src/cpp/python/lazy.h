// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>

namespace tiledattn::binding {

/// A Python object that is made at first use and kept for good. A static local would do but for its
/// lock: making an object can let another thread have the GIL, which would then wait for that lock
/// for ever.
class Lazy {
 public:
  template <typename Make>
  nanobind::handle get(Make make) {
    PyObject* object = object_.load(std::memory_order_acquire);
    if (object) return object;
    nanobind::object made = make();
    if (object_.compare_exchange_strong(object, made.ptr())) return made.release();
    return object;  // another thread was quicker
  }

 private:
  std::atomic<PyObject*> object_ = nullptr;
};

}  // namespace tiledattn::binding
