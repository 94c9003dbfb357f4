// SPDX-License-Identifier: Apache-2.0
// The arrays of one call: Python objects -> Tensor, and the stream to launch on.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>
#include <vector>

#include "array_type.h"
#include "capsule.h"
#include "tiledattn/tensor.h"

namespace tiledattn::binding {

/// Converts the arrays of one call, and keeps what that needs alive until the call returns. The
/// first array counts: results are arrays of its framework, and without a stream argument the work
/// goes to the stream that its framework is on. Lives while the GIL is held.
class TensorArgs {
 public:
  /// `stream` is the call's argument; where it is None, `otherwise` counts before the first array's
  /// framework.
  explicit TensorArgs(nanobind::handle stream, std::optional<Stream> otherwise = {});

  Tensor input(nanobind::handle array, const char* name) { return convert(array, name, false); }
  std::optional<Tensor> optional_input(nanobind::handle array, const char* name);
  /// An array that will be written to: refuses read-only and immutable ones.
  Tensor output(nanobind::handle array, const char* name);
  /// An output that the library has just made, of which nobody knows yet.
  Tensor new_output(nanobind::handle array, const char* name) { return convert(array, name, true); }

  /// Framework of the first array.
  Framework framework() const { return framework_.value_or(Framework::numpy); }
  /// The stream that the call named.
  std::optional<Stream> given_stream() const { return given_; }
  /// The stream chosen so far, for arrays made between conversion and launch.
  Stream chosen_stream() const { return chosen_.value_or(Stream{}); }
  /// The stream to launch on, ordered after the streams that the arrays' frameworks are on.
  /// ValueError for a stream argument with arrays on the CPU.
  Stream launch_stream();
  /// Tells torch, after the launch, that its tensors among the outputs have changed: gradients of
  /// what was computed from the old values are then refused.
  void mark_written() const;

 private:
  Tensor convert(nanobind::handle array, const char* name, bool writable);
  Tensor convert_quickly(nanobind::handle array, const char* name, const dlpack::ExchangeApi& api);
  Tensor convert_through_dlpack(nanobind::handle array, const char* name, bool writable,
                                ArrayType& type);
  Tensor convert_numpy(nanobind::handle array, const char* name, bool writable, ArrayType& type);
  Tensor consume(nanobind::handle capsule, const char* name, bool writable);
  void came_from(Device device, Stream producer);

  std::optional<Stream> given_;
  std::optional<Stream> chosen_;
  std::optional<Framework> framework_;
  std::optional<Device> device_;                // of the first array
  std::vector<Stream> producers_;               // other streams that frameworks are on
  const dlpack::ExchangeApi* asked_ = nullptr;  // for its stream on device_
  std::optional<bool> in_dual_level_;           // of torch's forward-mode AD
  std::vector<nanobind::handle> torch_outputs_;
  std::vector<ManagedArray> held_;
  std::vector<nanobind::ndarray<nanobind::ro>> held_buffers_;
};

}  // namespace tiledattn::binding
