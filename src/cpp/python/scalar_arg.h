// SPDX-License-Identifier: Apache-2.0
// Python numbers, flags and words -> C++ values, with the argument's name in every error.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tiledattn/options.h"
#include "tiledattn/tensor.h"

namespace tiledattn::binding {

/// str(object), whatever it holds.
std::string text_of(nanobind::handle object);
/// "list", "numpy.ndarray": the type of an object as its users write it.
std::string type_name_of(nanobind::handle object);

/// True or False, Python's or NumPy's.
bool is_bool(nanobind::handle value);
bool bool_arg(nanobind::handle value, const char* name);
/// Any integer that is no bool.
std::int64_t integer_arg(nanobind::handle value, const char* name);
std::optional<std::int64_t> optional_integer_arg(nanobind::handle value, const char* name);
double number_arg(nanobind::handle value, const char* name);
std::optional<double> optional_number_arg(nanobind::handle value, const char* name);
/// Half surrogates come as their escapes.
std::string text_arg(nanobind::handle value, const char* name);
/// Each entry of a list by integer_arg.
std::vector<std::int64_t> integers_arg(nanobind::list values, const char* name);
/// (left, right), each None or an integer.
Window window_arg(nanobind::handle value);
/// None is the best device present; anything but a number counts by its text: "cuda:1",
/// torch.device("cpu").
Device device_arg(nanobind::handle value);

}  // namespace tiledattn::binding
