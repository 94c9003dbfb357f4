// SPDX-License-Identifier: Apache-2.0
// One warp for each row; the grid strides over rows, so their number has no limit.
#include "common/finish_row.cuh"
#include "common/launch.cuh"
#include "common/softmax_state.cuh"
#include "common/types.cuh"
#include "merge/merge.h"

namespace tiledattn::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;

__device__ __forceinline__ std::int64_t first_row() {
  return std::int64_t{blockIdx.x} * kWarps + warp_index();
}
__device__ __forceinline__ std::int64_t row_step() { return std::int64_t{gridDim.x} * kWarps; }

struct ResetParams {
  StateView state;
  std::int64_t rows;
  std::int64_t head_dim_v;
};

__global__ void __launch_bounds__(kThreads)
    reset_state(const __grid_constant__ ResetParams params) {
  for (std::int64_t row = first_row(); row < params.rows; row += row_step()) {
    float* const o = params.state.o + row * params.head_dim_v;
    for (std::int64_t d = lane_index(); d < params.head_dim_v; d += kWarpSize) o[d] = 0.0f;
    if (lane_index() == 0) {
      params.state.m[row] = -infinity();
      params.state.l[row] = 0.0f;
    }
  }
}

__global__ void __launch_bounds__(kThreads) finalize(const __grid_constant__ FinalizeProblem p) {
  const std::int64_t rows = p.num_seqs * p.q_len * p.num_q_heads;
  for (std::int64_t row = first_row(); row < rows; row += row_step()) {
    const std::int64_t head = row % p.num_q_heads;
    const std::int64_t token = row / p.num_q_heads % p.q_len;
    const std::int64_t seq = row / p.num_q_heads / p.q_len;
    const std::int64_t at = p.state.row(seq, token, head, p.num_q_heads);
    const RowResult result(p.state.m[at], p.state.l[at],
                           p.sinks == nullptr ? nullptr : p.sinks + head);

    const std::int64_t out = p.out.row_offset(seq, token, head);
    for (std::int64_t d = lane_index(); d < p.head_dim_v; d += kWarpSize) {
      const float o = p.state.o[at * p.head_dim_v + d];
      store_element(p.out.data, p.out.dtype, out + d, result.value(o));
    }
    if (p.out.lse != nullptr && lane_index() == 0)
      p.out.lse[p.out.lse_offset(seq, token, head)] = result.lse;
  }
}

__global__ void __launch_bounds__(kThreads)
    merge_states(const __grid_constant__ MergeStatesProblem p) {
  for (std::int64_t row = first_row(); row < p.num_rows; row += row_step()) {
    const Fold parts(p.into.m[row], p.into.l[row], p.from.m[row], p.from.l[row]);
    for (std::int64_t d = lane_index(); d < p.head_dim_v; d += kWarpSize) {
      const std::int64_t at = row * p.head_dim_v + d;
      p.into.o[at] = parts.value(p.into.o[at], p.from.o[at]);
    }
    __syncwarp();  // every lane has read m and l
    if (lane_index() == 0) {
      p.into.m[row] = parts.m;
      p.into.l[row] = parts.l;
    }
  }
}

/// Each side counts as exp(lse); a side with lse -inf has seen no key, and the other is the result,
/// bit for bit.
__global__ void __launch_bounds__(kThreads)
    merge_attention(const __grid_constant__ MergeAttentionProblem p) {
  const std::int64_t rows = p.shape[0] * p.shape[1] * p.shape[2];
  for (std::int64_t row = first_row(); row < rows; row += row_step()) {
    const std::int64_t k = row % p.shape[2];
    const std::int64_t j = row / p.shape[2] % p.shape[1];
    const std::int64_t i = row / p.shape[2] / p.shape[1];
    const float lse_a = p.a.lse[p.a.lse_offset(i, j, k)];
    const float lse_b = p.b.lse[p.b.lse_offset(i, j, k)];
    const bool empty_a = lse_a == -infinity();
    const bool empty_b = lse_b == -infinity();
    const float natural_a = __fmul_rn(lse_a, p.lse_scale);
    const float natural_b = __fmul_rn(lse_b, p.lse_scale);
    const float top = max_or_nan(natural_a, natural_b);
    const float weight_a = expf(__fsub_rn(natural_a, top));
    const float weight_b = expf(__fsub_rn(natural_b, top));
    const float sum = __fadd_rn(weight_a, weight_b);

    const std::int64_t at_a = p.a.row_offset(i, j, k);
    const std::int64_t at_b = p.b.row_offset(i, j, k);
    const std::int64_t at = p.out.row_offset(i, j, k);
    for (std::int64_t d = lane_index(); d < p.head_dim_v; d += kWarpSize) {
      const float a = empty_a ? 0.0f : load_element(p.a.data, p.a.dtype, at_a + d);
      const float b = empty_b ? 0.0f : load_element(p.b.data, p.b.dtype, at_b + d);
      const float merged = __fdiv_rn(fmaf(b, weight_b, __fmul_rn(a, weight_a)), sum);
      store_element(p.out.data, p.out.dtype, at + d, empty_b ? a : empty_a ? b : merged);
    }
    __syncwarp();  // every lane has read both lse, one of which may be the result's
    if (p.out.lse != nullptr && lane_index() == 0) {
      const float merged = __fdiv_rn(__fadd_rn(top, logf(sum)), p.lse_scale);
      p.out.lse[p.out.lse_offset(i, j, k)] = empty_b ? lse_a : empty_a ? lse_b : merged;
    }
  }
}

LaunchShape shape_for(std::int64_t rows) { return {(rows + kWarps - 1) / kWarps, kThreads}; }

}  // namespace

void launch_reset_state(const StateView& state, std::int64_t rows, std::int64_t head_dim_v,
                        cudaStream_t stream) {
  launch(reset_state, "reset_state", shape_for(rows), ResetParams{state, rows, head_dim_v}, stream);
}

void launch_finalize(const FinalizeProblem& problem, cudaStream_t stream) {
  launch(finalize, "finalize", shape_for(problem.num_seqs * problem.q_len * problem.num_q_heads),
         problem, stream);
}

void launch_merge_states(const MergeStatesProblem& problem, cudaStream_t stream) {
  launch(merge_states, "merge_states", shape_for(problem.num_rows), problem, stream);
}

void launch_merge_attention(const MergeAttentionProblem& problem, cudaStream_t stream) {
  const std::int64_t rows = problem.shape[0] * problem.shape[1] * problem.shape[2];
  launch(merge_attention, "merge_attention", shape_for(rows), problem, stream);
}

}  // namespace tiledattn::cuda
