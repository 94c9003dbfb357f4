// SPDX-License-Identifier: Apache-2.0
// TiledAttention and its dims.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "array_view.h"
#include "bindings.h"
#include "check_tensor.h"
#include "gil.h"
#include "result_arrays.h"
#include "scalar_arg.h"
#include "scale_arg.h"
#include "score_arg.h"
#include "stream_arg.h"
#include "tensor_arg.h"
#include "tiledattn/attention.h"
#include "tiledattn/error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiledattn::binding {

namespace {

using Strides = std::tuple<std::int64_t, std::int64_t, std::int64_t>;

Strides stride_tuple(const PoolStrides& strides) {
  return {strides.block, strides.token, strides.kv_head};
}

TiledAttentionDims make_dims(nb::handle max_seqs, nb::handle num_q_heads, nb::handle num_kv_heads,
                             nb::handle head_dim, nb::handle block_size, nb::handle tile_capacity,
                             nb::handle max_q_len, nb::handle head_dim_v) {
  TiledAttentionDims dims;
  dims.max_seqs = integer_arg(max_seqs, "dims.max_seqs");
  dims.num_q_heads = integer_arg(num_q_heads, "dims.num_q_heads");
  dims.num_kv_heads = integer_arg(num_kv_heads, "dims.num_kv_heads");
  dims.head_dim = integer_arg(head_dim, "dims.head_dim");
  dims.block_size = integer_arg(block_size, "dims.block_size");
  dims.tile_capacity = integer_arg(tile_capacity, "dims.tile_capacity");
  dims.max_q_len = integer_arg(max_q_len, "dims.max_q_len");
  // 0 would mean "like head_dim" to validated().
  const std::optional<std::int64_t> value_dim = optional_integer_arg(head_dim_v, "dims.head_dim_v");
  if (value_dim) check_head_dim("dims.head_dim_v", *value_dim);
  dims.head_dim_v = value_dim.value_or(0);
  return dims.validated();
}

/// The core's object and what its Python face remembers of a step: whose arrays q was, and with how
/// many dimensions.
class BoundAttention {
 public:
  BoundAttention(const TiledAttentionDims& dims, Device device, const ScoreOptions& options)
      : core_(std::make_shared<TiledAttention>(dims, device, options)) {}

  TiledAttention& core() const { return *core_; }

  void begin_step(std::int64_t num_seqs, std::optional<Stream> stream) {
    core_->begin_step(num_seqs, stream);
    q_rank_ = 0;
  }

  void step_tile(const TileArgs& tile, Stream stream, bool check, Framework framework) {
    if (q_rank_ != 0 && framework != framework_) {
      throw TypeError(std::string("q: comes from ") + to_string(framework) + "; expected " +
                      to_string(framework_) + " as in this step's first tile");
    }
    core_->step_tile(tile, stream, check);
    if (q_rank_ != 0) return;
    framework_ = framework;
    q_rank_ = tile.q.rank;
  }

  void load_state(const State& state, const std::optional<Stream>& stream) {
    core_->load_state(state, stream);
    q_rank_ = 0;
  }

  /// What finalize makes when it is given no `out`: like q, or float32 in the shape of the state
  /// before the first tile.
  Tensor result_like() const {
    const TiledAttentionDims& dims = core_->dims();
    const std::optional<DType> dtype = core_->dtype();
    if (!dtype && !core_->device().is_cpu()) {
      throw ValueError(
          "out: got None before the first tile of the step, when there is no q whose framework "
          "could make it; expected an array (or begin_step and step_tile first)");
    }
    const std::int64_t q_len = q_rank_ != 0 ? core_->q_len() : dims.max_q_len;
    const bool has_tokens = q_rank_ == 4 || (q_rank_ == 0 && dims.max_q_len > 1);
    Tensor like;
    like.device = core_->device();
    like.dtype = dtype.value_or(DType::float32);
    like.shape[like.rank++] = core_->num_seqs();
    if (has_tokens) like.shape[like.rank++] = q_len;
    like.shape[like.rank++] = dims.num_q_heads;
    like.shape[like.rank++] = dims.value_dim();
    return like;
  }

  Framework framework() const { return q_rank_ == 0 ? Framework::numpy : framework_.load(); }

  /// A live view: `part` is m, l or o of the core's object, read anew each time that somebody takes
  /// the view.
  ArrayView view(Tensor (TiledAttention::*part)()) const {
    const auto settle = [core = core_, part] {
      (core.get()->*part)();
      return core->stream();
    };
    const Tensor tensor = (core_.get()->*part)();
    return ArrayView(tensor, core_->state_buffer().owner(), settle);
  }

 private:
  std::shared_ptr<TiledAttention> core_;
  std::atomic<Framework> framework_ = Framework::numpy;
  std::atomic<int> q_rank_ = 0;  // 0 before the step's first tile
};

void construct(BoundAttention* self, const TiledAttentionDims& dims, nb::handle device,
               nb::handle softmax_scale, nb::handle softcap, nb::handle window, nb::handle sinks) {
  // The constructor copies the sinks on the legacy default stream and waits.
  TensorArgs args(nb::none(), Stream{});
  const Device where = device_arg(device);
  const ScoreOptions options = score_arg(args, softmax_scale, softcap, window, sinks);
  args.launch_stream();
  const GilReleased unlocked;
  new (self) BoundAttention(dims, where, options);
}

void begin_step(BoundAttention& self, nb::handle num_seqs, nb::handle stream) {
  const std::optional<Stream> given = stream_arg(stream, self.core().device());
  const std::int64_t count = integer_arg(num_seqs, "num_seqs");
  const GilReleased unlocked;
  self.begin_step(count, given);
}

State state(BoundAttention& self, nb::handle stream) {
  const std::optional<Stream> given = stream_arg(stream, self.core().device());
  const GilReleased unlocked;
  return self.core().state(given);
}

void load_state(BoundAttention& self, const State& state, nb::handle stream) {
  const std::optional<Stream> given = stream_arg(stream, self.core().device());
  const GilReleased unlocked;
  self.load_state(state, given);
}

/// None, a number for every sequence, or an array.
void valid_slots_arg(TensorArgs& args, nb::handle value, TileArgs& tile) {
  constexpr const char* kName = "last_block_valid_slots";
  if (value.is_none()) return;
  const bool is_number = PyLong_Check(value.ptr()) ||
                         (PyIndex_Check(value.ptr()) && !nb::hasattr(value, "__dlpack__"));
  if (is_number) {
    tile.last_block_valid_slots_all = integer_arg(value, kName);
  } else {
    tile.last_block_valid_slots = args.input(value, kName);
  }
}

nb::any step_tile(BoundAttention& self, nb::handle q, nb::handle k_pool, nb::handle v_pool,
                  nb::handle tile_blocks, nb::handle tile_block_counts,
                  nb::handle last_block_valid_slots, nb::handle kv_positions,
                  nb::handle q_positions, nb::handle k_scale, nb::handle v_scale, nb::handle out,
                  nb::handle lse, nb::handle early_start, nb::handle check, nb::handle stream) {
  TensorArgs args(stream);
  TileArgs tile;
  tile.q = args.input(q, "q");
  tile.k_pool = args.input(k_pool, "k_pool");
  tile.v_pool = args.input(v_pool, "v_pool");
  tile.tile_blocks = args.input(tile_blocks, "tile_blocks");
  tile.tile_block_counts = args.input(tile_block_counts, "tile_block_counts");
  valid_slots_arg(args, last_block_valid_slots, tile);
  tile.kv_positions = args.optional_input(kv_positions, "kv_positions");
  tile.q_positions = args.optional_input(q_positions, "q_positions");
  tile.k_scale = optional_scale_arg(args, k_scale, "k_scale");
  tile.v_scale = optional_scale_arg(args, v_scale, "v_scale");
  if (!out.is_none()) tile.out = args.output(out, "out");
  if (!lse.is_none()) tile.lse = args.output(lse, "lse");
  tile.early_start = bool_arg(early_start, "early_start");
  const bool wait = bool_arg(check, "check");
  const Stream launch = args.launch_stream();
  {
    const GilReleased unlocked;
    self.step_tile(tile, launch, wait, args.framework());
  }
  args.mark_written();
  if (lse.is_none()) return nb::borrow<nb::any>(out);  // None where no out was given
  return nb::borrow<nb::any>(nb::make_tuple(out, lse));
}

nb::any finalize(BoundAttention& self, nb::handle out, nb::handle lse, nb::handle return_lse,
                 nb::handle stream) {
  TensorArgs args(stream, self.core().step_stream());
  const Tensor like = out.is_none() ? self.result_like() : Tensor{};
  const ResultArrays results(args, like, out, lse, bool_arg(return_lse, "return_lse"),
                             self.framework());
  args.launch_stream();
  {
    const GilReleased unlocked;
    self.core().finalize(results.out(), results.lse(), args.given_stream());
  }
  args.mark_written();
  return results.value();
}

}  // namespace

void bind_attention(nb::module_& m) {
  using Dims = TiledAttentionDims;
  nb::class_<Dims>(m, "Dims")
      .def(
          "__init__",
          [](Dims* self, nb::handle max_seqs, nb::handle num_q_heads, nb::handle num_kv_heads,
             nb::handle head_dim, nb::handle block_size, nb::handle tile_capacity,
             nb::handle max_q_len, nb::handle head_dim_v) {
            new (self) Dims(make_dims(max_seqs, num_q_heads, num_kv_heads, head_dim, block_size,
                                      tile_capacity, max_q_len, head_dim_v));
          },
          "max_seqs"_a.none(), "num_q_heads"_a.none(), "num_kv_heads"_a.none(), "head_dim"_a.none(),
          "block_size"_a.none(), "tile_capacity"_a.none(), "max_q_len"_a.none(),
          "head_dim_v"_a.none())
      .def_prop_ro("head_dim_v", &Dims::value_dim)
      .def_prop_ro("gqa_ratio", &Dims::gqa_ratio)
      .def_prop_ro("m_bytes", &Dims::m_bytes)
      .def_prop_ro("l_bytes", &Dims::l_bytes)
      .def_prop_ro("o_bytes", &Dims::o_bytes)
      .def_prop_ro("output_bytes", &Dims::output_bytes)
      .def_prop_ro("state_bytes", &Dims::state_bytes)
      .def("paged_strides", [](const Dims& self) { return stride_tuple(self.paged_strides()); })
      .def("scratch_pool_strides",
           [](const Dims& self) { return stride_tuple(self.scratch_pool_strides()); });

  nb::class_<BoundAttention>(m, "TiledAttention")
      .def("__init__", construct, "dims"_a, "device"_a.none(), "softmax_scale"_a.none(),
           "softcap"_a.none(), "window"_a.none(), "sinks"_a.none())
      .def("begin_step", begin_step, "num_seqs"_a.none(), "stream"_a.none())
      .def("step_tile", step_tile, "q"_a.none(), "k_pool"_a.none(), "v_pool"_a.none(),
           "tile_blocks"_a.none(), "tile_block_counts"_a.none(), "last_block_valid_slots"_a.none(),
           "kv_positions"_a.none(), "q_positions"_a.none(), "k_scale"_a.none(), "v_scale"_a.none(),
           "out"_a.none(), "lse"_a.none(), "early_start"_a.none(), "check"_a.none(),
           "stream"_a.none())
      .def("finalize", finalize, "out"_a.none(), "lse"_a.none(), "return_lse"_a.none(),
           "stream"_a.none())
      .def(
          "check", [](BoundAttention& self) { self.core().check(); }, nb::call_guard<GilReleased>())
      .def("state", state, "stream"_a.none())
      .def("load_state", load_state, "state"_a, "stream"_a.none())
      .def_prop_ro("m", [](const BoundAttention& self) { return self.view(&TiledAttention::m); })
      .def_prop_ro("l", [](const BoundAttention& self) { return self.view(&TiledAttention::l); })
      .def_prop_ro("o", [](const BoundAttention& self) { return self.view(&TiledAttention::o); })
      .def_prop_ro("num_seqs", [](const BoundAttention& self) { return self.core().num_seqs(); })
      .def_prop_ro("device",
                   [](const BoundAttention& self) { return to_string(self.core().device()); })
      .def_prop_ro("nbytes", [](const BoundAttention& self) { return self.core().nbytes(); });
}

}  // namespace tiledattn::binding
