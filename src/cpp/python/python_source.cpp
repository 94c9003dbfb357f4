// SPDX-License-Identifier: Apache-2.0
#include "python_source.h"

#include <nanobind/ndarray.h>

#include <cstring>
#include <utility>

#include "scalar_arg.h"

namespace nb = nanobind;

namespace tiledattn::binding {

namespace {

/// A reference that may be dropped by a thread without the GIL.
std::shared_ptr<void> shared_reference(nb::handle object) {
  return {object.inc_ref().ptr(), [](void* last) {
            if (Py_IsInitialized() == 0) return;  // what static objects held when the process ends
            const nb::gil_scoped_acquire locked;
            Py_DECREF(static_cast<PyObject*>(last));
          }};
}

std::string summary(const nb::python_error& error) {
  const std::string type = text_of(error.type().attr("__name__"));
  try {
    const std::string text = text_of(error.value());
    return text.empty() ? type : type + ": " + text;
  } catch (const nb::python_error&) {  // an exception may fail to say what it is
    return type;
  }
}

/// Not writable: blocks[i] belongs to row i of the buffer, so a source that sorts them in place, or
/// counts them from elsewhere, would fill rows with what is not theirs.
nb::object block_array(const std::int64_t* blocks, std::int64_t count) {
  auto* const copy = new std::int64_t[static_cast<std::size_t>(count)];
  const nb::capsule owner(copy, [](void* p) noexcept { delete[] static_cast<std::int64_t*>(p); });
  std::memcpy(copy, blocks, static_cast<std::size_t>(count) * sizeof(std::int64_t));
  return nb::cast(nb::ndarray<nb::numpy, const std::int64_t, nb::ndim<1>>(
      copy, {static_cast<std::size_t>(count)}, owner));
}

}  // namespace

RaisedInPython::RaisedInPython(const nb::python_error& error)
    : Error(summary(error)), value_(shared_reference(error.value())) {}

InterruptedInPython::InterruptedInPython(const nb::python_error& error)
    : CancelledError(summary(error)), value_(shared_reference(error.value())) {}

nb::object numpy_bytes(void* data, std::int64_t rows, std::int64_t row_bytes,
                       std::shared_ptr<void> owner) {
  auto* const kept = new std::shared_ptr<void>(std::move(owner));
  const nb::capsule capsule(
      kept, [](void* p) noexcept { delete static_cast<std::shared_ptr<void>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<2>>(
      data, {static_cast<std::size_t>(rows), static_cast<std::size_t>(row_bytes)}, capsule));
}

PythonSource::PythonSource(nb::object object, const TileGeometry& geometry, std::string name)
    : object_(std::move(object)),
      geometry_(geometry),
      name_(std::move(name)),
      pins_(nb::hasattr(object_, "pin")) {}

Lease PythonSource::pin(const std::int64_t* blocks, std::int64_t count) {
  if (!pins_) return nullptr;
  const nb::gil_scoped_acquire locked;
  try {
    return shared_reference(object_.attr("pin")(block_array(blocks, count)));
  } catch (const nb::python_error& error) {
    // The caller's own thread: a signal handler may have raised it.
    if (!error.matches(PyExc_Exception)) throw InterruptedInPython(error);
    throw RaisedInPython(error);
  }
}

std::int64_t PythonSource::read(const TileRead& request) {
  const nb::gil_scoped_acquire locked;
  try {
    const nb::object blocks = block_array(request.blocks, request.count);
    const nb::object buffer =
        numpy_bytes(request.data, request.count, request.bytes / request.count, request.owner);
    const nb::object filled = object_.attr("read")(blocks, buffer);
    if (!PyIndex_Check(filled.ptr()) || PyBool_Check(filled.ptr())) {
      throw TypeError(type_name_of(filled) +
                      " from read(), not the number of bytes that it filled");
    }
    return integer_arg(filled, "the result of read()");
  } catch (const nb::python_error& error) {
    throw RaisedInPython(error);
  }
}

}  // namespace tiledattn::binding
