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

inline std::optional<KvScale> optional_scale_arg(TensorArgs& args, nanobind::handle value,
                                                 const char* name) {
  if (value.is_none()) return std::nullopt;
  const bool is_bool = PyBool_Check(value.ptr()) != 0;
  if (!is_bool && (PyFloat_Check(value.ptr()) || PyLong_Check(value.ptr())))
    return number_arg(value, name);
  if (nanobind::hasattr(value, "__dlpack__")) return args.input(value, name);
  // Numbers of other libraries, such as numpy.float32.
  if (!is_bool && nanobind::hasattr(value, "__float__")) return number_arg(value, name);
  throw TypeError(std::string(name) + ": expected None, a number or a float32 array, got " +
                  type_name_of(value));
}

}  // namespace tiledattn::binding
