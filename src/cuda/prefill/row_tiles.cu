// SPDX-License-Identifier: Apache-2.0
// One block sums up the row tiles of all sequences of a launch. Faulty sequences have none: their
// rows are NaN already.
#include "common/launch.cuh"
#include "prefill/prefill.h"

namespace tiledattn::cuda {

namespace {

constexpr int kThreads = 1024;

struct CountParams {
  AttendParams attend;
  std::int64_t tile_rows;
};

/// Sums stay below this: overlapping sequences, which only wrong cu_seqlens_q have, could pass 32
/// bits.
__device__ std::int64_t limited(std::int64_t tiles) { return detail::min64(tiles, kMaxBlocks); }

__global__ void __launch_bounds__(kThreads)
    count_row_tiles(const __grid_constant__ CountParams params) {
  __shared__ std::int64_t sums[kThreads];
  const AttentionProblem& p = params.attend.problem;
  std::int32_t* const flags = params.attend.flags;
  const int thread = static_cast<int>(threadIdx.x);

  // Each thread sums neighbouring sequences, then the threads' sums are added up, then each thread
  // writes its own.
  const std::int64_t share = (params.attend.num_seqs + kThreads - 1) / kThreads;
  const std::int64_t begin = detail::min64(thread * share, params.attend.num_seqs);
  const std::int64_t end = detail::min64(begin + share, params.attend.num_seqs);
  std::int64_t sum = 0;
  for (std::int64_t i = begin; i < end; ++i) {
    std::int64_t tiles = 0;
    if (flags[i] == 0) {
      const std::int64_t rows = sequence_at(p, params.attend.first_seq + i).q_len * p.gqa_ratio();
      tiles = (rows + params.tile_rows - 1) / params.tile_rows;
    }
    sum = limited(sum + tiles);
    flags[i] = static_cast<std::int32_t>(sum);
  }

  sums[thread] = sum;
  __syncthreads();
  for (int step = 1; step < kThreads; step *= 2) {
    const std::int64_t before = thread >= step ? sums[thread - step] : 0;
    __syncthreads();
    sums[thread] = limited(sums[thread] + before);
    __syncthreads();
  }
  const std::int64_t before = thread == 0 ? 0 : sums[thread - 1];
  for (std::int64_t i = begin; i < end; ++i)
    flags[i] = static_cast<std::int32_t>(limited(flags[i] + before));
}

}  // namespace

void launch_count_row_tiles(const AttendParams& params, int tile_rows, cudaStream_t stream) {
  launch(count_row_tiles, "count_row_tiles", {1, kThreads}, CountParams{params, tile_rows}, stream);
}

}  // namespace tiledattn::cuda
