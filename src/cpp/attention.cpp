// SPDX-License-Identifier: Apache-2.0
// TiledAttention: owns the running state, checks calls and hands problems to a backend.
#include "tiledattn/attention.h"

#include <cstddef>
#include <mutex>
#include <string>
#include <vector>

#include "backend.h"
#include "check_apart.h"
#include "check_tensor.h"
#include "checks.h"
#include "fault.h"
#include "state_view.h"

namespace tiledattn {

namespace {

State make_buffers(const TiledAttentionDims& dims, Device device) {
  return State::empty(device, dims.max_seqs, dims.max_q_len, dims.num_q_heads, dims.value_dim());
}

Workspace make_workspace(const TiledAttentionDims& dims, Device device) {
  return Workspace(device,
                   decode_workspace_bytes(dims.max_seqs, dims.max_q_len, dims.num_q_heads,
                                          dims.value_dim(), dims.block_size * dims.tile_capacity));
}

}  // namespace

struct TiledAttention::Impl {
  Impl(const TiledAttentionDims& checked, Device where, const ScoreOptions& score)
      : dims(checked),
        device(where),
        backend(backend_for(where)),
        options(score),
        faults(backend.make_fault_log(where.index)),
        buffers(make_buffers(checked, where)),
        workspace(make_workspace(checked, where)) {
    if (options.sinks) copy_sinks();
    // The buffers' first contents were written on the legacy default stream; calls may come on any.
    backend.synchronize(device.index, {});
  }

  /// Where a call without a stream of its own puts its work.
  Stream stream_or_last(const std::optional<Stream>& given) const { return given.value_or(last); }

  void copy_sinks() {
    sinks = Buffer(device, dims.num_q_heads * 4);
    backend.copy(sinks.data(), device, options.sinks->data, device, dims.num_q_heads * 4, {});
    options.sinks = make_tensor(sinks.data(), DType::float32, device, {dims.num_q_heads});
  }

  /// Every call begins here: what the device found earlier, the rule that a step lies inside one
  /// capture or outside all, and the order of streams. `chosen`: the caller named the stream.
  void enter(const Stream& stream, bool chosen) {
    raise_fault(faults.get());
    const std::uint64_t id = backend.capture_id(device.index, stream);
    if (capture && *capture != id) {
      throw ValueError(
          "stream: begin_step and the other calls of a step must all be inside one graph capture, "
          "or all outside "
          "captures; begin the step inside the capture");
    }
    if (id != 0 && id != retained) {
      for (const std::shared_ptr<void>& owner :
           {buffers.buffer().owner(), workspace.buffer().owner(), sinks.owner(),
            std::shared_ptr<void>(faults)}) {
        if (owner) backend.retain_in_capture(device.index, stream, owner);
      }
      retained = id;
    }
    capture = id;
    // The caller orders the streams that they chose, but cannot know of work that this object put
    // on the last one by itself.
    if (own_work) backend.order(device.index, stream, last);
    own_work = !chosen;
    last = stream;
  }

  void enter(const std::optional<Stream>& given) {
    enter(stream_or_last(given), given.has_value());
  }

  /// A capture cannot wait. Asked before a call changes anything.
  void refuse_waiting_in_capture(const char* got, const Stream& stream) const {
    if (backend.capture_id(device.index, stream) == 0) return;
    refuse("check", got, "no check before the capture has ended: a capture cannot wait");
  }

  /// A capture keeps this state alive as well.
  void retain(const State& state, const Stream& stream) const {
    if (capture.value_or(0) != 0)
      backend.retain_in_capture(device.index, stream, state.buffer().owner());
  }

  /// Make the pending begin_step true in memory, for calls that read the state as it is.
  void settle(const Stream& stream) {
    if (!fresh) return;
    const std::int64_t rows = step.num_seqs * dims.max_q_len * dims.num_q_heads;
    if (rows > 0)
      backend.reset_state(state_view(buffers), rows, dims.value_dim(), device.index, stream);
    fresh = false;
  }

  /// The tiles as problems, but for the state; `shape` is what the step has fixed after them.
  std::vector<AttentionStep> check_tiles(const TileArgs* tiles, std::size_t count,
                                         StepShape& shape) const {
    std::vector<AttentionStep> steps(count);
    for (std::size_t i = 0; i < count; ++i) {
      AttentionProblem& problem = steps[i].problem;
      problem = check_step_tile(dims, options, device, shape, tiles[i]);
      if (tiles[i].out) check_apart_from_state(*tiles[i].out, tiles[i].lse);
      if (!shape.fixed) shape.has_tokens = tiles[i].q.rank == 4;
      shape.fixed = true;
      shape.q_len = problem.q_len;
      shape.dtype = problem.q.dtype;
    }
    return steps;
  }

  /// The views of the state are given out, and a result is no reason to change it.
  void check_apart_from_state(const Tensor& out, const std::optional<Tensor>& lse) const {
    check_results_apart(out, lse, [&](const Written& written) {
      written.check_apart("m", buffers.m());
      written.check_apart("l", buffers.l());
      written.check_apart("o", buffers.o());
    });
  }

  void fold(const TileArgs* tiles, std::size_t count, const Stream& stream) {
    if (count == 0) return;
    StepShape shape = step;
    std::vector<AttentionStep> steps = check_tiles(tiles, count, shape);
    enter(stream, true);
    // The first tile's kernel starts from an empty state by itself, unless it writes only some of
    // the rows.
    const AttentionProblem& any = steps[0].problem;  // all have as many query tokens
    if (any.q_len != dims.max_q_len || any.total_q == 0) settle(stream);
    if (any.total_q > 0) {
      for (AttentionStep& each : steps) {
        each.problem.state = state_view(buffers);
        each.problem.state.fresh = fresh && &each == steps.data();
        each.problem.faults = faults ? faults->device_record() : nullptr;
        each.plan = make_plan(each.problem, device, workspace.bytes(),
                              backend.compute_capability(device.index));
      }
      backend.attend_in_turn(steps, workspace.buffer().data(), device.index, stream);
      fresh = false;
    }
    step_stream = stream;
    step = shape;
  }

  void settle_view() {
    if (!fresh) return;
    enter(last, false);
    settle(last);
  }

  TiledAttentionDims dims;
  Device device;
  const Backend& backend;
  ScoreOptions options;
  // Before the buffers, whose freeing waits for the kernels that may still write a fault.
  std::shared_ptr<FaultLog> faults;
  State buffers;  // all max_seqs sequences
  Workspace workspace;
  Buffer sinks;

  StepShape step;      // what this step has fixed so far
  bool fresh = false;  // begin_step was called and the buffers don't show it yet
  std::optional<std::uint64_t> capture;
  std::uint64_t retained = 0;
  Stream last;                        // of the last call
  bool own_work = false;              // the last call's stream was not of the caller's choice
  std::optional<Stream> step_stream;  // of the step's last step_tile
  std::mutex mutex;                   // one object used from two threads is serialised
};

TiledAttention::TiledAttention(const TiledAttentionDims& dims, Device device,
                               const ScoreOptions& options) {
  const TiledAttentionDims checked = dims.validated();
  check_score_options(options, device, checked.num_q_heads);
  impl_ = std::make_unique<Impl>(checked, device, options);
}

TiledAttention::~TiledAttention() = default;
TiledAttention::TiledAttention(TiledAttention&&) noexcept = default;
TiledAttention& TiledAttention::operator=(TiledAttention&&) noexcept = default;

void TiledAttention::begin_step(std::int64_t num_seqs, std::optional<Stream> stream) {
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  raise_fault(impl_->faults.get());
  if (num_seqs < 0 || num_seqs > impl_->dims.max_seqs) {
    refuse("num_seqs", std::to_string(num_seqs),
           "0 to dims.max_seqs = " + std::to_string(impl_->dims.max_seqs));
  }
  impl_->capture.reset();
  impl_->step_stream.reset();
  if (stream) impl_->enter(stream);
  impl_->step = {num_seqs, false, 0, DType::float32};
  impl_->fresh = true;
  // On the CPU a reset costs less than a view that shows it late; on a GPU it would cost a launch.
  if (impl_->device.is_cpu()) impl_->settle(impl_->last);
}

void TiledAttention::step_tile(const TileArgs& tile, Stream stream, bool check) {
  Impl& self = *impl_;
  const std::lock_guard<std::mutex> lock(self.mutex);
  raise_fault(self.faults.get());
  if (check) self.refuse_waiting_in_capture("True in a graph capture", stream);
  self.fold(&tile, 1, stream);
  if (check) {
    self.backend.synchronize(self.device.index, stream);
    raise_fault(self.faults.get());
  }
}

void TiledAttention::step_tiles(const std::vector<TileArgs>& tiles, Stream stream) {
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  raise_fault(impl_->faults.get());
  impl_->fold(tiles.data(), tiles.size(), stream);
}

void TiledAttention::finalize(const Tensor& out, const std::optional<Tensor>& lse,
                              std::optional<Stream> stream) {
  Impl& self = *impl_;
  const std::lock_guard<std::mutex> lock(self.mutex);
  raise_fault(self.faults.get());
  FinalizeProblem problem = check_finalize(self.dims, self.device, self.step, out, lse);
  self.check_apart_from_state(out, lse);
  // The tiles' stream is the caller's choice too.
  const bool chosen = stream.has_value() || self.step_stream.has_value();
  const Stream launch = stream ? *stream : self.step_stream.value_or(self.last);
  self.enter(launch, chosen);
  self.settle(launch);
  if (problem.num_seqs == 0 || problem.q_len == 0) return;
  problem.state = state_view(self.buffers);
  problem.sinks =
      self.options.sinks ? static_cast<const float*>(self.options.sinks->data) : nullptr;
  self.backend.finalize(problem, self.device.index, launch);
}

const TiledAttentionDims& TiledAttention::dims() const { return impl_->dims; }
Device TiledAttention::device() const { return impl_->device; }

std::int64_t TiledAttention::num_seqs() const {
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->step.num_seqs;
}

std::int64_t TiledAttention::q_len() const {
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->step.q_len;
}

Stream TiledAttention::stream() const {
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->last;
}

Stream TiledAttention::step_stream() const {
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->step_stream.value_or(impl_->last);
}

const Buffer& TiledAttention::state_buffer() const { return impl_->buffers.buffer(); }

std::optional<DType> TiledAttention::dtype() const {
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  if (!impl_->step.fixed) return std::nullopt;
  return impl_->step.dtype;
}

std::int64_t TiledAttention::nbytes() const {
  return impl_->buffers.buffer().bytes() + impl_->workspace.bytes() + impl_->sinks.bytes();
}

Tensor TiledAttention::m() {
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  impl_->settle_view();
  return impl_->buffers.m();
}

Tensor TiledAttention::l() {
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  impl_->settle_view();
  return impl_->buffers.l();
}

Tensor TiledAttention::o() {
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  impl_->settle_view();
  return impl_->buffers.o();
}

namespace {

/// Copy the first `copied` sequences' m, l and o between two sets of buffers on one device.
void copy_sequences(const Backend& backend, const State& to, const State& from, std::int64_t copied,
                    Stream stream) {
  const Device device = to.device();
  const std::int64_t rows = copied * from.q_len() * from.num_q_heads();
  const std::int64_t row_bytes = rows * 4;
  if (rows == 0) return;
  backend.copy(to.m().data, device, from.m().data, device, row_bytes, stream);
  backend.copy(to.l().data, device, from.l().data, device, row_bytes, stream);
  backend.copy(to.o().data, device, from.o().data, device, row_bytes * from.head_dim_v(), stream);
}

}  // namespace

State TiledAttention::state(std::optional<Stream> stream) {
  Impl& self = *impl_;
  const std::lock_guard<std::mutex> lock(self.mutex);
  const Stream launch = self.stream_or_last(stream);
  self.enter(stream);
  self.settle(launch);
  State copy = State::uninitialized(self.device, self.step.num_seqs, self.dims.max_q_len,
                                    self.dims.num_q_heads, self.dims.value_dim(), launch);
  self.retain(copy, launch);
  copy_sequences(self.backend, copy, self.buffers, self.step.num_seqs, launch);
  return copy;
}

void TiledAttention::load_state(const State& state, std::optional<Stream> stream) {
  Impl& self = *impl_;
  const std::lock_guard<std::mutex> lock(self.mutex);
  raise_fault(self.faults.get());
  const std::string allowed = "at most dims.max_seqs = " + std::to_string(self.dims.max_seqs);
  if (state.num_seqs() > self.dims.max_seqs)
    refuse("state", std::to_string(state.num_seqs()) + " sequences", allowed);
  const std::string got = "q_len " + std::to_string(state.q_len()) + ", num_q_heads " +
                          std::to_string(state.num_q_heads()) + ", head_dim_v " +
                          std::to_string(state.head_dim_v());
  const std::string wanted = "q_len " + std::to_string(self.dims.max_q_len) + ", num_q_heads " +
                             std::to_string(self.dims.num_q_heads) + ", head_dim_v " +
                             std::to_string(self.dims.value_dim());
  if (got != wanted) refuse("state", got, wanted + " as in dims");
  if (state.device() != self.device) {
    throw ValueError("state: is on " + to_string(state.device()) +
                     ", but this TiledAttention is on " + to_string(self.device) +
                     "; move it with to()");
  }
  const Stream launch = self.stream_or_last(stream);
  self.capture.reset();
  self.step_stream.reset();
  self.enter(stream);
  self.retain(state, launch);
  self.backend.order(self.device.index, launch, state.stream());
  copy_sequences(self.backend, self.buffers, state, state.num_seqs(), launch);
  self.step = {state.num_seqs(), false, 0, DType::float32};
  self.fresh = false;
}

void TiledAttention::check() {
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  impl_->refuse_waiting_in_capture("a call in a graph capture", impl_->last);
  impl_->backend.synchronize(impl_->device.index, impl_->last);
  raise_fault(impl_->faults.get());
}

}  // namespace tiledattn
