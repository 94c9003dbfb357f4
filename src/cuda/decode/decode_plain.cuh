// SPDX-License-Identifier: Apache-2.0
// The decode kernel for every shape, type and stride; also the oracle for faster ones on the
// device.
//
// One block handles one (sequence, KV head, tile of rows, segment): it walks the segment's keys
// (attend_rows.cuh) and leaves its rows as partial results, or finishes them where no sequence of
// the call has a second segment. The work is numbered in 64 bits and strided by the grid, so
// nothing is limited by grid dimensions.
#pragma once

#include "common/attend_rows.cuh"
#include "common/finish_row.cuh"
#include "common/launch.cuh"
#include "common/with_dim.h"
#include "decode/decode.h"
#include "plan.h"

namespace tiledattn::cuda {

/// Rows of one segment; none where the sequence has no such segment and nothing is to be written
/// for it.
template <typename Config>
__device__ RowTile decode_tile(const AttendParams& params, std::int64_t b, std::int64_t kv_head,
                               std::int64_t row_tile, std::int64_t segment) {
  const AttentionProblem& p = params.problem;
  const Sequence s = sequence_at(p, b);
  const KeyRange visible = visible_keys(p, s, 0, s.q_len - 1);
  const bool exists = segment < num_segments(visible.end - visible.begin, params.cut);
  const KeyRange keys = exists ? segment_range(visible, segment, params.cut) : KeyRange{};
  RowTile tile = make_row_tile(p, s, kv_head, row_tile * Config::kRows, Config::kRows, keys);
  if (!exists && params.split()) tile.num_rows = 0;
  return tile;
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    decode_plain(const __grid_constant__ AttendParams params) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  AttendShared<Config>& shared = *reinterpret_cast<AttendShared<Config>*>(shared_bytes);
  const AttentionProblem& p = params.problem;
  const std::int64_t row_tiles = (p.q_len * p.gqa_ratio() + Config::kRows - 1) / Config::kRows;
  const std::int64_t num_works = params.num_seqs * p.num_kv_heads * row_tiles * params.max_segments;

  for (std::int64_t work = blockIdx.x; work < num_works; work += gridDim.x) {
    const std::int64_t segment = work % params.max_segments;
    const std::int64_t row_tile = work / params.max_segments % row_tiles;
    const std::int64_t kv_head = work / params.max_segments / row_tiles % p.num_kv_heads;
    const std::int64_t i = work / params.max_segments / row_tiles / p.num_kv_heads;
    if (params.flags != nullptr && params.flags[i] != 0) continue;

    __syncthreads();  // every warp is done with the last tile
    if (threadIdx.x == 0)
      shared.tile = decode_tile<Config>(params, params.first_seq + i, kv_head, row_tile, segment);
    __syncthreads();
    WarpRows<Config> rows;
    attend_rows(params, shared, rows);
    for_each_row(shared, rows, [&](int row, const WarpRow<Config::kColumns>& total) {
      const Sequence& s = shared.tile.sequence;
      const RowName name = row_name(p, shared.tile, row);
      if (params.split()) {
        float* const partial = params.partial_row(s.index, segment, name.token, name.head);
        total.store(partial, partial + 1, partial + 2, p.head_dim_v);
      } else {
        finish_row(p, s, name.token, name.head, total);
      }
    });
  }
}

template <typename Config>
void launch_decode_config(const AttendParams& params, cudaStream_t stream) {
  const AttentionProblem& p = params.problem;
  const std::int64_t row_tiles = (p.q_len * p.gqa_ratio() + Config::kRows - 1) / Config::kRows;
  const std::int64_t blocks = params.num_seqs * p.num_kv_heads * row_tiles * params.max_segments;
  launch(decode_plain<Config>, "decode_plain",
         {blocks, Config::kThreads, shared_bytes_of<AttendShared<Config>>()}, params, stream);
}

template <typename T>
void launch_decode_plain(const AttendParams& params, cudaStream_t stream) {
  const AttentionProblem& p = params.problem;
  with_dim(p.head_dim, p.head_dim_v, [&](auto dim) {
    // With up to 4 rows a warp for each: the common case of one query token and few heads in a
    // group.
    if (p.q_len * p.gqa_ratio() <= 4) {
      launch_decode_config<AttendConfig<T, dim(), 4, 1>>(params, stream);
    } else {
      launch_decode_config<AttendConfig<T, dim(), 4, 4>>(params, stream);
    }
  });
}

}  // namespace tiledattn::cuda
