// SPDX-License-Identifier: Apache-2.0
// Python's streams: the `stream` argument of a call, and the stream that a framework is on.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>

#include "tiledattn/tensor.h"

namespace tiledattn::binding {

/// The stream with this handle. 0 and 1 both name the legacy default stream.
inline Stream stream_of(std::uintptr_t handle) {
  return {reinterpret_cast<void*>(handle == 1 ? 0 : handle)};
}

/// The handle to give to a DLPack producer, for which 1 is the legacy default stream and 0 is
/// forbidden.
inline std::uintptr_t dlpack_handle(Stream stream) {
  const auto handle = reinterpret_cast<std::uintptr_t>(stream.handle);
  return handle == 0 ? 1 : handle;
}

/// None, an int handle, or an object with cuda_stream, ptr or __cuda_stream__, which the result
/// keeps alive. TypeError and ValueError name `stream`.
std::optional<Stream> stream_arg(nanobind::handle stream);
/// The same for a call on one device: ValueError for a stream on the CPU.
std::optional<Stream> stream_arg(nanobind::handle stream, Device device);

/// The stream that CuPy or torch uses now on a device.
Stream current_cupy_stream(int device_index);
Stream current_torch_stream(int device_index);

}  // namespace tiledattn::binding
