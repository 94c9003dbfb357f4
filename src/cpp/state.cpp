// SPDX-License-Identifier: Apache-2.0
// State: a copy of running state that is kept, moved, merged and made into a result.
#include <algorithm>
#include <initializer_list>
#include <string>
#include <vector>

#include "backend.h"
#include "check_tensor.h"
#include "checks.h"
#include "state_view.h"
#include "tiledattn/attention.h"
#include "tiledattn/one_shot.h"

namespace tiledattn {

namespace {

std::string describe(const State& state) {
  return "num_seqs " + std::to_string(state.num_seqs()) + ", q_len " +
         std::to_string(state.q_len()) + ", num_q_heads " + std::to_string(state.num_q_heads()) +
         ", head_dim_v " + std::to_string(state.head_dim_v());
}

void check_like(const State& state, const State& first, std::size_t index) {
  const std::string argument = "states[" + std::to_string(index) + "]";
  if (state.device() != first.device()) {
    throw ValueError(argument + ": is on " + to_string(state.device()) + ", but states[0] is on " +
                     to_string(first.device()) + "; move it with to()");
  }
  if (describe(state) != describe(first))
    refuse(argument, describe(state), describe(first) + " like states[0]");
}

void copy_state(const State& to, const State& from, Stream stream) {
  backend_for(to.device().is_cpu() ? from.device() : to.device())
      .copy(to.buffer().data(), to.device(), from.buffer().data(), from.device(),
            from.buffer().bytes(), stream);
}

/// A capture of `stream` keeps the states that its work reads or writes alive.
void retain_in_capture(std::initializer_list<const State*> states, const Stream& stream) {
  for (const State* state : states) {
    if (state->device().is_cpu()) continue;
    backend_for(state->device())
        .retain_in_capture(state->device().index, stream, state->buffer().owner());
  }
}

}  // namespace

StateView state_view(const State& state) {
  return {static_cast<float*>(state.m().data), static_cast<float*>(state.l().data),
          static_cast<float*>(state.o().data), state.q_len(), false};
}

std::int64_t state_rows(const State& state) {
  return state.num_seqs() * state.q_len() * state.num_q_heads();
}

State::State(Device device, std::int64_t num_seqs, std::int64_t q_len, std::int64_t num_q_heads,
             std::int64_t head_dim_v, Stream stream)
    : num_seqs_(num_seqs),
      q_len_(q_len),
      num_q_heads_(num_q_heads),
      head_dim_v_(head_dim_v),
      stream_(stream) {
  if (num_seqs < 0) refuse("num_seqs", std::to_string(num_seqs), "0 or more");
  if (q_len < 1) refuse("q_len", std::to_string(q_len), "1 or more");
  if (num_q_heads < 1) refuse("num_q_heads", std::to_string(num_q_heads), "1 or more");
  check_head_dim("head_dim_v", head_dim_v);
  // Without a sequence as well, since others read the shape.
  const double bytes = static_cast<double>(std::max<std::int64_t>(num_seqs, 1)) *
                       static_cast<double>(q_len) * static_cast<double>(num_q_heads) *
                       static_cast<double>(head_dim_v + 2) * 4;
  if (bytes > 4e18) refuse("num_seqs", std::to_string(num_seqs), "a state of less than 4e18 bytes");
  buffer_ = Buffer(device, state_rows(*this) * (head_dim_v + 2) * 4);
}

State State::uninitialized(Device device, std::int64_t num_seqs, std::int64_t q_len,
                           std::int64_t num_q_heads, std::int64_t head_dim_v, Stream stream) {
  return State(device, num_seqs, q_len, num_q_heads, head_dim_v, stream);
}

State State::empty(Device device, std::int64_t num_seqs, std::int64_t q_len,
                   std::int64_t num_q_heads, std::int64_t head_dim_v, Stream stream) {
  State state(device, num_seqs, q_len, num_q_heads, head_dim_v, stream);
  if (state_rows(state) > 0) {
    backend_for(device).reset_state(state_view(state), state_rows(state), head_dim_v, device.index,
                                    stream);
  }
  return state;
}

Tensor State::m() const {
  if (q_len_ == 1)
    return make_tensor(buffer_.data(), DType::float32, device(), {num_seqs_, num_q_heads_});
  return make_tensor(buffer_.data(), DType::float32, device(), {num_seqs_, q_len_, num_q_heads_});
}

Tensor State::l() const {
  Tensor l = m();
  l.data = static_cast<float*>(l.data) + state_rows(*this);
  return l;
}

Tensor State::o() const {
  float* data = static_cast<float*>(buffer_.data()) + 2 * state_rows(*this);
  if (q_len_ == 1)
    return make_tensor(data, DType::float32, device(), {num_seqs_, num_q_heads_, head_dim_v_});
  return make_tensor(data, DType::float32, device(),
                     {num_seqs_, q_len_, num_q_heads_, head_dim_v_});
}

State State::to(Device device) const {
  State copy(device, num_seqs_, q_len_, num_q_heads_, head_dim_v_,
             device == this->device() ? stream_ : Stream{});
  if (device != this->device() && !this->device().is_cpu()) {
    backend_for(this->device()).synchronize(this->device().index, stream_);
  }
  if (buffer_.bytes() == 0) return copy;
  retain_in_capture({this, &copy}, copy.stream_);
  copy_state(copy, *this, copy.stream_);
  return copy;
}

void State::finalize(const Tensor& out, const std::optional<Tensor>& lse,
                     const std::optional<Tensor>& sinks, std::optional<Stream> stream) const {
  ScoreOptions options;
  options.sinks = sinks;
  check_score_options(options, device(), num_q_heads_);
  check_attention_dtype("out", out);
  TiledAttentionDims dims;
  dims.max_seqs = num_seqs_;
  dims.num_q_heads = num_q_heads_;
  dims.num_kv_heads = num_q_heads_;
  dims.head_dim = dims.head_dim_v = head_dim_v_;
  dims.max_q_len = q_len_;
  StepShape shape{num_seqs_, true, q_len_, out.dtype};
  shape.of_state = true;
  FinalizeProblem problem = check_finalize(dims, device(), shape, out, lse);
  problem.state = state_view(*this);
  problem.sinks = sinks ? static_cast<const float*>(sinks->data) : nullptr;
  if (state_rows(*this) == 0) return;
  const Backend& backend = backend_for(device());
  const Stream launch = stream.value_or(stream_);
  backend.order(device().index, launch, stream_);
  retain_in_capture({this}, launch);
  backend.finalize(problem, device().index, launch);
}

State merge_states(const std::vector<const State*>& states, std::optional<Stream> stream) {
  if (states.empty()) refuse("states", "an empty list", "one state or more");
  const State& first = *states[0];
  for (std::size_t i = 1; i < states.size(); ++i) check_like(*states[i], first, i);

  const Device device = first.device();
  const Backend& backend = backend_for(device);
  const Stream launch = stream.value_or(first.stream());
  State merged = State::uninitialized(device, first.num_seqs(), first.q_len(), first.num_q_heads(),
                                      first.head_dim_v(), launch);
  if (state_rows(first) == 0) return merged;
  for (const State* state : states) {
    backend.order(device.index, launch, state->stream());
    retain_in_capture({state}, launch);
  }
  retain_in_capture({&merged}, launch);
  copy_state(merged, first, launch);
  for (std::size_t i = 1; i < states.size(); ++i) {
    MergeStatesProblem problem;
    problem.num_rows = state_rows(first);
    problem.head_dim_v = first.head_dim_v();
    problem.into = state_view(merged);
    problem.from = state_view(*states[i]);
    backend.merge_states(problem, device.index, launch);
  }
  return merged;
}

}  // namespace tiledattn
