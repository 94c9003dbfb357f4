// SPDX-License-Identifier: Apache-2.0
// Numbers, flags and windows for the Python modules that do not hand them to the core: torch's
// operators and XLA's handlers would take some that the library refuses, or refuse them without a
// name.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "bindings.h"
#include "scalar_arg.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiledattn::binding {

namespace {

using Sides = std::pair<std::optional<std::int64_t>, std::optional<std::int64_t>>;

Sides bound_window(nb::handle value) {
  const Window window = window_arg(value);
  return {window.left, window.right};
}

}  // namespace

void bind_scalar(nb::module_& m) {
  m.def(
      "flag", [](nb::handle value, const char* name) { return bool_arg(value, name); },
      "value"_a.none(), "name"_a);
  m.def(
      "integer", [](nb::handle value, const char* name) { return integer_arg(value, name); },
      "value"_a.none(), "name"_a);
  m.def(
      "number", [](nb::handle value, const char* name) { return number_arg(value, name); },
      "value"_a.none(), "name"_a);
  m.def("window", bound_window, "value"_a.none());
}

}  // namespace tiledattn::binding
