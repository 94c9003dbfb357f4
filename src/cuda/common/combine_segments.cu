// SPDX-License-Identifier: Apache-2.0
// One warp for each row of the launch. The segments of a sequence are those that the attention
// kernel made: a function of its visible keys alone.
#include "common/combine_segments.h"

#include "common/finish_row.cuh"
#include "common/launch.cuh"
#include "common/softmax_state.cuh"
#include "common/with_dim.h"
#include "plan.h"

namespace tiledattn::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kColumns = static_cast<int>(kMaxHeadDim) / kWarpSize;

__global__ void __launch_bounds__(kThreads)
    combine_segments(const __grid_constant__ AttendParams params) {
  const AttentionProblem& p = params.problem;
  const std::int64_t num_rows = params.num_seqs * p.q_len * p.num_q_heads;
  const std::int64_t num_warps = std::int64_t{gridDim.x} * kWarps;
  for (std::int64_t row = std::int64_t{blockIdx.x} * kWarps + warp_index(); row < num_rows;
       row += num_warps) {
    const std::int64_t head = row % p.num_q_heads;
    const std::int64_t token = row / p.num_q_heads % p.q_len;
    const std::int64_t i = row / p.num_q_heads / p.q_len;
    if (params.flags != nullptr && params.flags[i] != 0) continue;

    const Sequence s = sequence_at(p, params.first_seq + i);
    const KeyRange visible = visible_keys(p, s, 0, s.q_len - 1);
    const std::int64_t segments = num_segments(visible.end - visible.begin, params.cut);
    if (params.one_is_final && segments <= 1) continue;
    WarpRow<kColumns> total;
    for (std::int64_t segment = 0; segment < segments; ++segment) {
      const float* const partial = params.partial_row(s.index, segment, token, head);
      WarpRow<kColumns> part;
      part.load(partial, partial + 1, partial + 2, p.head_dim_v);
      total.fold(part);
    }
    finish_row(p, s, token, head, total);
  }
}

}  // namespace

void launch_combine_segments(const AttendParams& params, cudaStream_t stream) {
  const AttentionProblem& p = params.problem;
  const std::int64_t rows = params.num_seqs * p.q_len * p.num_q_heads;
  launch(combine_segments, "combine_segments", {(rows + kWarps - 1) / kWarps, kThreads}, params,
         stream);
}

}  // namespace tiledattn::cuda
