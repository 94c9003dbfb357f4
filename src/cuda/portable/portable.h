// SPDX-License-Identifier: Apache-2.0
// The portable kernel: attention in float16 and bfloat16 on any GPU from sm_80 on. Decode and
// prefill alike.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/attend_params.h"
#include "common/divisor.h"
#include "common/score_form.h"

namespace tiledattn::cuda {

struct PortableParams {
  AttendParams attend;

  // Blocks of the grid: segment, row tile, KV head, sequence, the first of which is the fastest.
  // Packed q: the row tiles of all sequences.
  Divisor num_segments;
  Divisor num_row_tiles;
  Divisor num_kv_heads;
  Divisor gqa_ratio;
  Divisor block_size;

  ScoreForm scores;
  float stale_maximum = 0.0f;  ///< a maximum is kept while scores exceed it by less than 2^this
  bool direct_output = false;  ///< rows of out can be written as they are, 16 bytes at a time
};

/// Decode or prefill, where the plan says so.
void launch_portable(const AttendParams& params, cudaStream_t stream);

/// kDim bounds head_dim and head_dim_v. Instantiated in inst/.
template <typename T, int kDim>
void launch_portable_dim(PortableParams& params, cudaStream_t stream);

}  // namespace tiledattn::cuda
