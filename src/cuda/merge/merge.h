// SPDX-License-Identifier: Apache-2.0
// States and results of rows, without keys: reset, finalize, merge.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "problem.h"

namespace tiledattn::cuda {

void launch_reset_state(const StateView& state, std::int64_t rows, std::int64_t head_dim_v,
                        cudaStream_t stream);
void launch_finalize(const FinalizeProblem& problem, cudaStream_t stream);
void launch_merge_states(const MergeStatesProblem& problem, cudaStream_t stream);
void launch_merge_attention(const MergeAttentionProblem& problem, cudaStream_t stream);

}  // namespace tiledattn::cuda
