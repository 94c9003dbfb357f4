// SPDX-License-Identifier: Apache-2.0
// Arrays that the library itself owns, handed to Python through DLPack.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "tiledattn/tensor.h"

namespace tiledattn::binding {

/// A float32, bfloat16 or float16 array in C order. Whoever reads it through __dlpack__ is ordered
/// after the work that made its contents, and keeps its memory alive.
class ArrayView {
 public:
  /// Brings the memory up to date and tells the stream on which it is.
  using Settle = std::function<Stream()>;

  ArrayView(const Tensor& tensor, std::shared_ptr<void> owner, Settle settle)
      : tensor_(tensor), owner_(std::move(owner)), settle_(std::move(settle)) {}

  /// A new array of undefined contents that work on `stream` will fill.
  static ArrayView make(const Tensor& shape, Stream stream);

  const Tensor& tensor() const { return tensor_; }
  std::int64_t nbytes() const { return tensor_.size() * item_bytes(tensor_.dtype); }

  /// A DLPack capsule, with the arguments of the Python protocol.
  nanobind::object dlpack(nanobind::handle stream, nanobind::handle max_version,
                          nanobind::handle dl_device, nanobind::handle copy) const;
  /// A NumPy array over the same memory; CPU only.
  nanobind::object to_numpy(nanobind::handle self, nanobind::handle dtype,
                            nanobind::handle copy) const;

 private:
  /// The same values in new memory.
  ArrayView copied_to(Device device, Stream stream) const;

  Tensor tensor_;
  std::shared_ptr<void> owner_;
  Settle settle_;
};

}  // namespace tiledattn::binding
