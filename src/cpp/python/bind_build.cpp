// SPDX-License-Identifier: Apache-2.0
// Questions about the build and the machine.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>

#include "backend.h"
#include "bindings.h"
#include "gil.h"
#include "scalar_arg.h"
#include "tiledattn/error.h"
#include "tiledattn/one_shot.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiledattn::binding {

namespace {

nb::typed<nb::dict, std::string, nb::any> info() {
  const BuildInfo build = build_info();
  nb::list devices;
  for (int i = 0; i < build.num_cuda_devices; ++i) devices.append(cuda_backend()->device_name(i));
  nb::dict answer;
  answer["version"] = build.version;
  answer["cuda"] = build.cuda;
  answer["no_cuda"] = build.no_cuda;
  answer["cpu_isa"] = build.cpu_isa;
  answer["cpu_isas"] = cpu_isas();
  answer["num_threads"] = get_num_threads();
  answer["num_cuda_devices"] = build.num_cuda_devices;
  answer["cuda_devices"] = devices;
  return nb::borrow<nb::typed<nb::dict, std::string, nb::any>>(answer);
}

SupportQuery::Operation operation_arg(nb::handle value) {
  using Operation = SupportQuery::Operation;
  const std::string operation = text_arg(value, "operation");
  if (operation == "flash_attention") return Operation::flash_attention;
  if (operation == "paged_attention") return Operation::paged_attention;
  if (operation == "tiled_attention") return Operation::tiled_attention;
  throw ValueError("operation: got \"" + operation +
                   "\"; expected \"flash_attention\", \"paged_attention\" or \"tiled_attention\"");
}

/// The element type that a name means; any type that an array may have, supported or not.
DType dtype_arg(nb::handle value, const char* argument) {
  struct Named {
    const char* name;
    int dtype;
  };
  constexpr Named kNames[] = {
      {"bfloat16", 0x0410},      {"float16", 0x0210}, {"float32", 0x0220}, {"float64", 0x0240},
      {"int8", 0x0008},          {"int16", 0x0010},   {"int32", 0x0020},   {"int64", 0x0040},
      {"uint8", 0x0108},         {"uint16", 0x0110},  {"uint32", 0x0120},  {"uint64", 0x0140},
      {"float8_e4m3fn", 0x0a08}, {"bool", 0x0608},
  };
  const std::string dtype = text_arg(value, argument);
  for (const Named& named : kNames) {
    if (dtype == named.name) return static_cast<DType>(named.dtype);
  }
  throw ValueError(std::string(argument) + ": got \"" + dtype +
                   "\"; expected the name of an element type, such as \"bfloat16\"");
}

std::tuple<bool, std::string, std::string> answer_supports(
    nb::handle operation, nb::handle device, nb::handle dtype, nb::handle kv_dtype,
    nb::handle num_q_heads, nb::handle num_kv_heads, nb::handle head_dim, nb::handle head_dim_v,
    nb::handle block_size, nb::handle q_len) {
  SupportQuery query;
  query.operation = operation_arg(operation);
  query.device = device_arg(device);
  query.dtype = dtype_arg(dtype, "dtype");
  if (!kv_dtype.is_none()) query.kv_dtype = dtype_arg(kv_dtype, "kv_dtype");
  query.num_q_heads = integer_arg(num_q_heads, "num_q_heads");
  query.num_kv_heads = integer_arg(num_kv_heads, "num_kv_heads");
  query.head_dim = integer_arg(head_dim, "head_dim");
  query.head_dim_v = optional_integer_arg(head_dim_v, "head_dim_v").value_or(0);
  query.block_size = integer_arg(block_size, "block_size");
  query.q_len = optional_integer_arg(q_len, "q_len");
  const Support answer = supports(query);
  return {answer.supported, answer.kernel, answer.reason};
}

}  // namespace

void bind_build(nb::module_& m) {
  m.def("info", info);
  m.def("supports", answer_supports, "operation"_a.none(), "device"_a.none(), "dtype"_a.none(),
        "kv_dtype"_a.none(), "num_q_heads"_a.none(), "num_kv_heads"_a.none(), "head_dim"_a.none(),
        "head_dim_v"_a.none(), "block_size"_a.none(), "q_len"_a.none());
  m.def(
      "check",
      [](nb::handle device) {
        const Device where = device_arg(device);
        const GilReleased unlocked;
        check(where);
      },
      "device"_a.none());
  m.def(
      "set_num_threads",
      [](nb::handle num_threads) { set_num_threads(integer_arg(num_threads, "num_threads")); },
      "num_threads"_a.none());
  m.def("get_num_threads", get_num_threads);
}

}  // namespace tiledattn::binding
