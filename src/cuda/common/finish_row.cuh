// SPDX-License-Identifier: Apache-2.0
// What becomes of the row of a call: it is folded into the state, made into out and lse, or both.
#pragma once

#include "common/softmax_state.cuh"
#include "common/types.cuh"
#include "problem.h"

namespace tiledattn::cuda {

/// Called by a whole warp.
template <int kColumns>
__device__ void finish_row(const AttentionProblem& p, const Sequence& s, std::int64_t token,
                           std::int64_t head, const WarpRow<kColumns>& of_call) {
  WarpRow<kColumns> row = of_call;
  if (p.state.m != nullptr) {
    const std::int64_t at = p.state.row(s.index, token, head, p.num_q_heads);
    float* const m = p.state.m + at;
    float* const l = p.state.l + at;
    float* const o = p.state.o + at * p.head_dim_v;
    if (!p.state.fresh) {
      WarpRow<kColumns> state;
      state.load(m, l, o, p.head_dim_v);
      state.fold(of_call);
      row = state;
      __syncwarp();  // every lane has read m and l before lane 0 writes them
    }
    row.store(m, l, o, p.head_dim_v);
  }
  if (p.out.data == nullptr) return;
  const RowResult result(row.m, row.l, p.sinks == nullptr ? nullptr : p.sinks + head);
  const std::int64_t at = p.out.row_offset(s.index, s.q_begin + token, head);
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    const int column = lane_index() + kWarpSize * j;
    if (column < p.head_dim_v)
      store_element(p.out.data, p.out.dtype, at + column, result.value(row.o[j]));
  }
  if (p.out.lse != nullptr && lane_index() == 0) {
    p.out.lse[p.out.lse_offset(s.index, s.q_begin + token, head)] = result.lse;
  }
}

}  // namespace tiledattn::cuda
