// SPDX-License-Identifier: Apache-2.0
// A tile source that is written in Python.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>

#include "tiledattn/tile_source.h"

namespace tiledattn::binding {

/// Host memory as a NumPy array of bytes, [rows, row_bytes], that keeps `owner` alive.
nanobind::object numpy_bytes(void* data, std::int64_t rows, std::int64_t row_bytes,
                             std::shared_ptr<void> owner);

/// Calls read(blocks, buffer) and, where there is one, pin(blocks) of a Python object, from
/// whichever thread.
class PythonSource final : public TileSource {
 public:
  PythonSource(nanobind::object object, const TileGeometry& geometry, std::string name);

  std::string name() const override { return name_; }
  TileGeometry describe() const override { return geometry_; }
  const void* key() const override { return object_.ptr(); }
  Lease pin(const std::int64_t* blocks, std::int64_t count) override;
  std::int64_t read(const TileRead& request) override;

  nanobind::handle object() const { return object_; }

 private:
  nanobind::object object_;
  TileGeometry geometry_;
  std::string name_;
  bool pins_;
};

/// An exception that Python code has raised, as one of the library's errors: it may cross threads
/// that have no GIL.
class RaisedInPython : public Error {
 public:
  /// With the GIL held, as long as `error` is.
  explicit RaisedInPython(const nanobind::python_error& error);
  /// The exception itself.
  nanobind::handle value() const { return static_cast<PyObject*>(value_.get()); }

 private:
  std::shared_ptr<void> value_;
};

/// The same of one that is no Exception, such as KeyboardInterrupt: it ends the call.
class InterruptedInPython : public CancelledError {
 public:
  explicit InterruptedInPython(const nanobind::python_error& error);
  nanobind::handle value() const { return static_cast<PyObject*>(value_.get()); }

 private:
  std::shared_ptr<void> value_;
};

}  // namespace tiledattn::binding
