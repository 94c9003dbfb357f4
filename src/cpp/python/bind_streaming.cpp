// SPDX-License-Identifier: Apache-2.0
// StreamingAttention.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "gil.h"
#include "lazy.h"
#include "python_source.h"
#include "result_arrays.h"
#include "scalar_arg.h"
#include "score_arg.h"
#include "stream_arg.h"
#include "tensor_arg.h"
#include "tiledattn/error.h"
#include "tiledattn/streaming.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiledattn::binding {

namespace {

using Sequences = std::vector<std::shared_ptr<StreamSequence>>;

StreamSequences const_sequences(const Sequences& sequences) {
  return {sequences.begin(), sequences.end()};
}

/// The core's object. Sources written in Python need the GIL to end what they are at, so nothing
/// here waits for them with the GIL held.
struct BoundStreaming {
  BoundStreaming(const TiledAttentionDims& dims, Device device, const ScoreOptions& score,
                 const StreamOptions& options)
      : core(std::make_unique<StreamingAttention>(dims, device, score, options)) {}
  ~BoundStreaming() {
    const GilReleased unlocked;
    core.reset();
  }
  BoundStreaming(const BoundStreaming&) = delete;
  BoundStreaming& operator=(const BoundStreaming&) = delete;

  std::unique_ptr<StreamingAttention> core;
  std::atomic<int> calls = 0;  // under way; changes only with the GIL held
};

/// Lets other threads of Python run during a call of the core.
class CoreCall {
 public:
  explicit CoreCall(BoundStreaming& streaming) : counted_(streaming.calls) {}

 private:
  struct Counted {
    explicit Counted(std::atomic<int>& calls) : calls(calls) { ++calls; }
    ~Counted() { --calls; }
    Counted(const Counted&) = delete;
    Counted& operator=(const Counted&) = delete;
    std::atomic<int>& calls;
  };
  const Counted counted_;
  const GilReleased unlocked_;  // last: the GIL is back when the call is no longer counted
};

/// The exception behind an error, if it is Python's.
PyObject* python_exception(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const RaisedInPython& raised) {
    return raised.value().ptr();
  } catch (...) {
  }
  return nullptr;
}

// A source may hold the object that has prefetched from it. Python finds such a cycle by what this
// tells its garbage collector: each sequence, lease and error has one reference. During calls of
// other threads it tells nothing, so what they use stays.
int traverse_streaming(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  const BoundStreaming& streaming = *nb::inst_ptr<BoundStreaming>(self);
  if (streaming.calls > 0) return 0;
  const Prefetched kept = streaming.core->prefetched();
  for (const auto& sequence : kept.sequences) {
    const nb::object object = nb::find(*sequence);
    Py_VISIT(object.ptr());
  }
  for (const auto& [source, lease] : kept.leases) {
    if (dynamic_cast<const PythonSource*>(source)) Py_VISIT(static_cast<PyObject*>(lease.get()));
  }
  for (const std::exception_ptr& error : kept.errors) {
    PyObject* const exception = python_exception(error);
    Py_VISIT(exception);
  }
  return 0;
}

PyType_Slot streaming_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_streaming)},
                                 {0, nullptr}};

void construct(BoundStreaming* self, const TiledAttentionDims& dims, nb::handle device,
               nb::handle scratch_bytes, nb::handle num_slots, nb::handle num_readers,
               nb::handle poison_scratch, nb::handle softmax_scale, nb::handle softcap,
               nb::handle window, nb::handle sinks) {
  TensorArgs args(nb::none(), Stream{});
  const Device where = device_arg(device);
  StreamOptions options;
  options.scratch_bytes = integer_arg(scratch_bytes, "scratch_bytes");
  options.num_slots = integer_arg(num_slots, "num_slots");
  options.num_readers = integer_arg(num_readers, "num_readers");
  options.poison_scratch = bool_arg(poison_scratch, "poison_scratch");
  const ScoreOptions score = score_arg(args, softmax_scale, softcap, window, sinks);
  args.launch_stream();
  const GilReleased unlocked;
  new (self) BoundStreaming(dims, where, score, options);
}

/// Python's signals now and then, such as Ctrl-C. Not at each tile: other threads may hold the GIL.
std::function<void()> check_signals() {
  using Clock = std::chrono::steady_clock;
  return [last = Clock::now()]() mutable {
    if (Clock::now() - last < std::chrono::milliseconds(50)) return;
    last = Clock::now();
    const nb::gil_scoped_acquire locked;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  };
}

nb::handle tile_error_type() {
  static Lazy type;
  return type.get([] { return nb::module_::import_("tiledattn._errors").attr("TileError"); });
}

/// The Python exception, with the details as attributes.
nb::object tile_error(const TileError& error) {
  const TileError::Details& details = error.details();
  nb::object made = tile_error_type()(error.what());
  made.attr("source") = details.source;
  made.attr("sequence") = details.sequence;
  made.attr("position") = details.position;
  made.attr("num_blocks") = details.num_blocks;
  made.attr("wanted_bytes") = details.wanted_bytes;
  made.attr("got_bytes") = details.got_bytes ? nb::cast(*details.got_bytes) : nb::none();
  try {
    if (details.cause) std::rethrow_exception(details.cause);
  } catch (const RaisedInPython& cause) {
    PyException_SetCause(made.ptr(), cause.value().inc_ref().ptr());
  } catch (...) {  // its text is in the message
  }
  return made;
}

void translate_errors(const std::exception_ptr& error, void* /*payload*/) {
  try {
    std::rethrow_exception(error);
  } catch (const TileError& e) {
    const nb::object made = tile_error(e);
    PyErr_SetObject(tile_error_type().ptr(), made.ptr());
  } catch (const InterruptedInPython& e) {
    PyErr_SetObject(e.value().type().ptr(), e.value().ptr());
  }
}

/// The result or None, the state or None, the errors.
using Attended = nb::typed<nb::tuple, nb::any, nb::any, nb::any>;

/// None, or one for each sequence.
/// As the stub has it; what the entries are is checked one by one.
using NumberList = nb::typed<nb::list, nb::any>;

std::vector<std::int64_t> q_positions_arg(const std::optional<NumberList>& given,
                                          const Sequences& sequences) {
  if (!given) return {};
  std::vector<std::int64_t> positions = integers_arg(*given, "q_positions");
  if (positions.empty() && !sequences.empty()) {
    throw ValueError("q_positions: got 0 numbers; expected " + std::to_string(sequences.size()) +
                     ", one for each sequence");
  }
  return positions;
}

Attended attend(BoundStreaming& self, nb::handle q, const Sequences& sequences, const State* state,
                const std::optional<NumberList>& q_positions, nb::handle out, nb::handle lse,
                nb::handle return_lse, nb::handle return_state, bool partial, nb::handle stream) {
  TensorArgs args(stream);
  AttendArgs call;
  call.q = args.input(q, "q");
  call.sequences = const_sequences(sequences);
  call.state = state;
  call.q_positions = q_positions_arg(q_positions, sequences);
  Tensor like = call.q;
  if (like.rank > 0) like.shape[like.rank - 1] = self.core->dims().value_dim();
  const ResultArrays results(args, like, out, lse, bool_arg(return_lse, "return_lse"),
                             args.framework());
  call.out = results.out();
  call.lse = results.lse();
  call.return_state = bool_arg(return_state, "return_state");
  call.on_error = partial ? OnTileError::partial : OnTileError::raise;
  call.poll = check_signals();
  const Stream launch = args.launch_stream();
  AttendResult result;
  {
    const CoreCall call_of_core(self);
    result = self.core->attend(call, launch);
  }
  args.mark_written();
  nb::list errors;
  for (const TileError& error : result.errors) errors.append(tile_error(error));
  const nb::object value = result.complete ? nb::object(results.value()) : nb::none();
  const nb::object after = result.state ? nb::cast(std::move(*result.state)) : nb::none();
  return nb::borrow<Attended>(nb::make_tuple(value, after, errors));
}

bool prefetch(BoundStreaming& self, const Sequences& sequences, nb::handle q_len,
              const std::optional<NumberList>& q_positions) {
  const std::int64_t tokens = integer_arg(q_len, "q_len");
  const std::vector<std::int64_t> positions = q_positions_arg(q_positions, sequences);
  const StreamSequences wanted = const_sequences(sequences);
  const CoreCall call_of_core(self);
  return self.core->prefetch(wanted, tokens, positions);
}

nb::tuple tier(const TierStats& stats) {
  return nb::make_tuple(stats.tiles, stats.bytes, stats.seconds);
}

nb::typed<nb::dict, std::string, nb::any> stats(const BoundStreaming& self) {
  const StreamStats s = self.core->stats();
  nb::dict dict;
  dict["calls"] = s.calls;
  dict["launches"] = s.launches;
  dict["failed_tiles"] = s.failed_tiles;
  dict["prefetched_launches"] = s.prefetched_launches;
  dict["dropped_launches"] = s.dropped_launches;
  dict["seconds"] = s.seconds;
  dict["stall_seconds"] = s.stall_seconds;
  nb::dict tiers;
  for (int i = 0; i < kNumResidencies; ++i)
    tiers[to_string(static_cast<Residency>(i))] = tier(s.tiers[i]);
  dict["tiers"] = tiers;
  dict["link"] = tier(s.link);
  return nb::borrow<nb::typed<nb::dict, std::string, nb::any>>(dict);
}

}  // namespace

void bind_streaming(nb::module_& m) {
  const nb::exception<CancelledError> cancelled(m, "CancelledError", PyExc_RuntimeError);
  cancelled.attr("__doc__") = "`StreamingAttention.cancel` ended the call; nothing was written.";
  nb::register_exception_translator(translate_errors);

  nb::class_<BoundStreaming>(m, "StreamingAttention", nb::type_slots(streaming_slots))
      .def("__init__", construct, "dims"_a, "device"_a.none(), "scratch_bytes"_a.none(),
           "num_slots"_a.none(), "num_readers"_a.none(), "poison_scratch"_a.none(),
           "softmax_scale"_a.none(), "softcap"_a.none(), "window"_a.none(), "sinks"_a.none())
      .def("attend", attend, "q"_a.none(), "sequences"_a, "state"_a.none(), "q_positions"_a.none(),
           "out"_a.none(), "lse"_a.none(), "return_lse"_a.none(), "return_state"_a.none(),
           "partial"_a, "stream"_a.none())
      .def("prefetch", prefetch, "sequences"_a, "q_len"_a.none(), "q_positions"_a.none())
      .def("discard",
           [](BoundStreaming& self) {
             const CoreCall call_of_core(self);
             self.core->discard();
           })
      .def("cancel", [](BoundStreaming& self) { return self.core->cancel(); })
      .def("stats", stats)
      .def("reset_stats", [](BoundStreaming& self) { self.core->reset_stats(); })
      .def_prop_ro("device",
                   [](const BoundStreaming& self) { return to_string(self.core->device()); })
      .def_prop_ro("nbytes", [](const BoundStreaming& self) { return self.core->nbytes(); });
}

}  // namespace tiledattn::binding
