// SPDX-License-Identifier: Apache-2.0
// The scale of a quantised KV cache: None, a number or an array.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>

#include "scalar_arg.h"
#include "tensor_arg.h"
#include "tiledattn/error.h"
#include "tiledattn/options.h"

namespace tiledattn::binding {

/// The scale of a source: None or a number.
inline std::optional<double> optional_scale_number(nanobind::handle value, const char* name) {
  return optional_number_arg(value, name);
}

inline std::optional<KvScale> optional_scale_arg(TensorArgs& args, nanobind::handle value,
                                                 const char* name) {
  if (value.is_none()) return std::nullopt;
  if (PyFloat_Check(value.ptr())) return number_arg(value, name);
  if (nanobind::hasattr(value, "__dlpack__")) return args.input(value, name);
  // Integers, and numbers of other libraries, such as numpy.float32.
  if (!is_bool(value) && nanobind::hasattr(value, "__float__")) return number_arg(value, name);
  throw TypeError(std::string(name) + ": expected None, a number or a float32 array, got " +
                  type_name_of(value));
}

}  // namespace tiledattn::binding
