// SPDX-License-Identifier: Apache-2.0
// The Hopper decode kernel: parameters and launch functions.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/divisor.h"
#include "plan.h"
#include "problem.h"

namespace tiledattn::cuda {

struct DecodeSm90Params {
  CUtensorMap
      k_map;  ///< [block][kv head][token][column]; a box is box_tokens x 128 bytes, or fewer
  CUtensorMap v_map;
  AttentionProblem problem;

  float inverse_softcap = 0.0f;
  bool short_line = false;     ///< all the work costs less than 2^31
  bool few_seqs = false;       ///< likewise, and a lane for each sequence
  bool short_lengths = false;  ///< lengths are int32 and say all: paged, sees_all
  unsigned max_len = 0;        ///< that a table holds
  bool sees_all = false;       ///< each query token sees all keys of its sequence
  bool early_start = false;    ///< see AttentionProblem; also no scale is read for a key
  bool reads_once = false;     ///< K and V, as far as L2 is concerned; else by many row tiles
  int box_tokens = 0;
  int num_blocks = 0;
  int rows = 0;           ///< of each KV head: q_len * gqa_ratio
  int heads_per_seq = 0;  ///< num_kv_heads * row tiles: a "head" of the schedule
  int num_teams = 0;
  Divisor block_size;
  Divisor group;      ///< gqa_ratio
  Divisor row_tiles;  ///< of each KV head
  Divisor teams;

  // Partial results: [slot][group][row of the tile][header, head_dim_v], see plan.h.
  float* partials = nullptr;
  std::uint32_t* counters = nullptr;  ///< [slot]: groups that have arrived
  int max_groups = 1;
  bool slot_for_each_head = false;  ///< else one for each team that begins a head
};

/// Everything of one call, in one launch.
void launch_decode_sm90(const AttentionProblem& problem, const Plan& plan, void* scratch,
                        cudaStream_t stream);

/// One instance. T: the type of K and V, which is that of q or a quantised one; kDim: columns of K
/// and V, at least head_dim and head_dim_v; kRows: query rows that share each K and V.
/// Instantiated in inst/.
template <typename T, int kDim, int kRows>
void launch_decode_sm90_instance(const DecodeSm90Params& params, cudaStream_t stream);

}  // namespace tiledattn::cuda
