// SPDX-License-Identifier: Apache-2.0
// One call from XLA: its buffers and attributes by name, its stream, and one problem at a time of
// those that vmap put together.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tiledattn/tensor.h"
#include "xla_ffi_abi.h"

namespace tiledattn::binding {

/// Runs without the GIL, on a thread of XLA. The attribute `operands` names the arguments with
/// their ranks, "q:4 k:4 v:4", and `results` the results. vmap puts dimensions before those; they
/// are 1 where an argument is the same for all.
class XlaCall {
 public:
  XlaCall(const xla::CallFrame& frame, DeviceKind device);

  /// Problems that vmap put together: 1 without it.
  std::int64_t num_problems() const { return num_problems_; }

  Tensor operand(std::string_view name, std::int64_t problem) const;
  std::optional<Tensor> optional_operand(std::string_view name, std::int64_t problem) const;
  Tensor result(std::string_view name, std::int64_t problem) const;

  std::optional<double> number(std::string_view name) const;
  std::optional<std::int64_t> integer(std::string_view name) const;
  bool flag(std::string_view name) const { return integer(name).value_or(0) != 0; }
  std::string text(std::string_view name) const;

  Stream stream() const { return stream_; }

 private:
  struct Named {
    std::string name;
    int rank;
    const xla::Buffer* buffer;
  };
  std::vector<Named> named(const char* attribute, const xla::Buffers& buffers) const;
  Tensor tensor(const Named& named, std::int64_t problem) const;
  const void* attribute(std::string_view name, std::int32_t type) const;

  const xla::CallFrame& frame_;
  Device device_;
  Stream stream_;
  std::vector<Named> operands_;
  std::vector<Named> results_;
  std::vector<std::int64_t> outer_shape_;  // what vmap put before the results' own dimensions
  std::int64_t num_problems_ = 1;
};

/// What the current exception is to XLA; called in a catch block.
xla::Error* xla_error(const xla::Api& api);

/// Answer XLA's question what a handler was built for; false where the frame is a call.
bool answer_metadata(const xla::CallFrame& frame);

}  // namespace tiledattn::binding
