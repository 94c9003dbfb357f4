// SPDX-License-Identifier: Apache-2.0
// Running states that are kept, moved, merged and packed.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <bit>
#include <cstring>
#include <string>
#include <vector>

#include "array_view.h"
#include "bindings.h"
#include "gil.h"
#include "result_arrays.h"
#include "scalar_arg.h"
#include "stream_arg.h"
#include "tensor_arg.h"
#include "tiledattn/attention.h"
#include "tiledattn/error.h"
#include "tiledattn/one_shot.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiledattn::binding {

namespace {

static_assert(std::endian::native == std::endian::little, "packed states are little-endian");

/// What stands before the float32 values of m, l and o in a packed state.
struct PackedHeader {
  char magic[12];
  std::uint32_t version;
  std::int64_t num_seqs;
  std::int64_t q_len;
  std::int64_t num_q_heads;
  std::int64_t head_dim_v;
};
static_assert(sizeof(PackedHeader) == 48);

constexpr char kMagic[12] = {'t', 'i', 'l', 'e', 'd', 'a', 't', 't', 'n', '.', 's', 't'};
constexpr std::uint32_t kPackVersion = 1;

ArrayView view_of(const State& state, const Tensor& tensor) {
  return ArrayView(tensor, state.buffer().owner(), [stream = state.stream()] { return stream; });
}

nb::bytes pack(const State& state) {
  const State on_cpu = [&] {
    const GilReleased unlocked;
    return state.device().is_cpu() ? state : state.to({DeviceKind::cpu, 0});
  }();
  PackedHeader header{
      {}, kPackVersion, state.num_seqs(), state.q_len(), state.num_q_heads(), state.head_dim_v()};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  const auto bytes = static_cast<std::size_t>(on_cpu.buffer().bytes());
  std::string packed(sizeof(header) + bytes, '\0');
  std::memcpy(packed.data(), &header, sizeof(header));
  if (bytes > 0) std::memcpy(packed.data() + sizeof(header), on_cpu.buffer().data(), bytes);
  return nb::bytes(packed.data(), packed.size());
}

[[noreturn]] void refuse_packed(const std::string& why) {
  throw ValueError("data: " + why + "; expected what State.pack() gave");
}

State unpack(nb::handle data, nb::handle device) {
  if (!PyBytes_Check(data.ptr()))
    throw TypeError("data: expected bytes, got " + type_name_of(data));
  const nb::bytes bytes = nb::borrow<nb::bytes>(data);
  const Device where = device_arg(device);
  PackedHeader header;
  if (bytes.size() < sizeof(header))
    refuse_packed(std::to_string(bytes.size()) + " bytes are too few for a header");
  std::memcpy(&header, bytes.c_str(), sizeof(header));
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0)
    refuse_packed("these bytes are no packed state");
  if (header.version != kPackVersion) {
    refuse_packed("format version " + std::to_string(header.version) + " is not version " +
                  std::to_string(kPackVersion));
  }
  // Sizes that the bytes cannot hold are refused before memory is asked for.
  const std::size_t given = bytes.size() - sizeof(header);
  const double values = static_cast<double>(header.num_seqs) * static_cast<double>(header.q_len) *
                        static_cast<double>(header.num_q_heads) *
                        (static_cast<double>(header.head_dim_v) + 2);
  const bool sensible = header.num_seqs >= 0 && header.q_len >= 1 && header.num_q_heads >= 1 &&
                        header.head_dim_v >= 1;
  if (!sensible || values * 4 != static_cast<double>(given)) {
    refuse_packed("num_seqs " + std::to_string(header.num_seqs) + ", q_len " +
                  std::to_string(header.q_len) + ", num_q_heads " +
                  std::to_string(header.num_q_heads) + " and head_dim_v " +
                  std::to_string(header.head_dim_v) + " in its header do not go with the " +
                  std::to_string(given) + " bytes after it");
  }
  State state = State::uninitialized({DeviceKind::cpu, 0}, header.num_seqs, header.q_len,
                                     header.num_q_heads, header.head_dim_v);
  if (given > 0) std::memcpy(state.buffer().data(), bytes.c_str() + sizeof(header), given);
  if (where.is_cpu()) return state;
  const GilReleased unlocked;
  return state.to(where);
}

nb::any finalize(const State& state, nb::handle sinks, nb::handle stream) {
  TensorArgs args(stream, stream_arg(stream, state.device()).value_or(state.stream()));
  const std::optional<Tensor> sinks_tensor = args.optional_input(sinks, "sinks");
  const Framework framework = state.device().is_cpu() ? Framework::numpy : Framework::other;
  const ResultArrays results(args, state.o(), nb::none(), nb::none(), true, framework);
  if (sinks_tensor) args.launch_stream();  // to order it after the sinks
  {
    const GilReleased unlocked;
    state.finalize(results.out(), results.lse(), sinks_tensor, args.chosen_stream());
  }
  return results.value();
}

State merge(const nb::typed<nb::list, State>& states, nb::handle stream) {
  std::vector<const State*> given;
  for (const nb::handle state : states) given.push_back(nb::cast<const State*>(state));
  const Device device = given.empty() ? Device{} : given.front()->device();
  const std::optional<Stream> launch = stream_arg(stream, device);
  const GilReleased unlocked;
  return merge_states(given, launch);
}

}  // namespace

void bind_state(nb::module_& m) {
  nb::class_<State>(m, "State")
      .def_prop_ro("m", [](const State& self) { return view_of(self, self.m()); })
      .def_prop_ro("l", [](const State& self) { return view_of(self, self.l()); })
      .def_prop_ro("o", [](const State& self) { return view_of(self, self.o()); })
      .def_prop_ro("num_seqs", &State::num_seqs)
      .def_prop_ro("q_len", &State::q_len)
      .def_prop_ro("num_q_heads", &State::num_q_heads)
      .def_prop_ro("head_dim_v", &State::head_dim_v)
      .def_prop_ro("nbytes", [](const State& self) { return self.buffer().bytes(); })
      .def_prop_ro("device", [](const State& self) { return to_string(self.device()); })
      .def(
          "to",
          [](const State& self, nb::handle device) {
            const Device where = device_arg(device);
            const GilReleased unlocked;
            return self.to(where);
          },
          "device"_a.none())
      .def("finalize", finalize, "sinks"_a.none(), "stream"_a.none())
      .def("pack", pack)
      .def_static("unpack", unpack, "data"_a.none(), "device"_a.none());
  m.def("merge_states", merge, "states"_a, "stream"_a.none());
}

}  // namespace tiledattn::binding
