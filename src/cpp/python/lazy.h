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

/// The name of an attribute that every call reads. Python finds a name that it holds once (is
/// interned) by its address.
class LazyName {
 public:
  explicit LazyName(const char* text) : text_(text) {}
  nanobind::handle get() {
    return name_.get([this] {
      PyObject* const name = PyUnicode_InternFromString(text_);
      if (!name) throw nanobind::python_error();
      return nanobind::steal(name);
    });
  }

 private:
  const char* text_;
  Lazy name_;
};

}  // namespace tiledattn::binding
