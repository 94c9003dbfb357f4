// SPDX-License-Identifier: Apache-2.0
#include "stream_arg.h"

#include <memory>
#include <string>

#include "scalar_arg.h"
#include "tiledattn/error.h"

namespace nb = nanobind;

namespace tiledattn::binding {

namespace {

Stream stream_from_handle(nb::handle handle) {
  const std::int64_t value = integer_arg(handle, "stream");
  if (value < 0) {
    throw ValueError("stream: got " + std::to_string(value) +
                     "; expected a stream handle of 0 (the legacy default stream) or more");
  }
  return stream_of(static_cast<std::uintptr_t>(value));
}

/// The handle from the protocol of cuda.core: a method (or attribute) that gives (version, handle).
Stream stream_from_protocol(nb::handle stream) {
  nb::object pair = stream.attr("__cuda_stream__");
  if (PyCallable_Check(pair.ptr())) pair = pair();
  if (!PyTuple_Check(pair.ptr()) || nb::len(pair) != 2) {
    throw TypeError("stream: __cuda_stream__ gave " + type_name_of(pair) +
                    "; expected (version, handle)");
  }
  return stream_from_handle(pair[1]);
}

/// The stream, with the Python object that would destroy it as its owner.
Stream owned_by(nb::handle object, Stream stream) {
  PyObject* const owner = object.inc_ref().ptr();
  stream.owner = std::shared_ptr<void>(owner, [](void* last) {
    if (Py_IsInitialized() == 0) return;  // what static objects held when the process ends
    const nb::gil_scoped_acquire locked;
    Py_DECREF(static_cast<PyObject*>(last));
  });
  return stream;
}

}  // namespace

std::optional<Stream> stream_arg(nb::handle stream, Device device) {
  std::optional<Stream> given = stream_arg(stream);
  if (given && device.is_cpu())
    throw ValueError("stream: got a stream, but the work is on the CPU; expected None");
  return given;
}

std::optional<Stream> stream_arg(nb::handle stream) {
  if (stream.is_none()) return std::nullopt;
  if (PyLong_Check(stream.ptr())) return stream_from_handle(stream);  // a bool is refused there
  if (nb::hasattr(stream, "cuda_stream"))
    return owned_by(stream, stream_from_handle(stream.attr("cuda_stream")));
  if (nb::hasattr(stream, "__cuda_stream__")) return owned_by(stream, stream_from_protocol(stream));
  if (nb::hasattr(stream, "ptr")) return owned_by(stream, stream_from_handle(stream.attr("ptr")));
  throw TypeError(
      "stream: expected None, an int handle, or an object with cuda_stream, ptr or "
      "__cuda_stream__, got " +
      type_name_of(stream));
}

Stream current_cupy_stream(int device_index) {
  nb::object stream = nb::module_::import_("cupy.cuda").attr("get_current_stream")(device_index);
  return owned_by(stream, stream_from_handle(stream.attr("ptr")));
}

Stream current_torch_stream(int device_index) {
  nb::object stream = nb::module_::import_("torch.cuda").attr("current_stream")(device_index);
  return stream_from_handle(stream.attr("cuda_stream"));
}

}  // namespace tiledattn::binding
