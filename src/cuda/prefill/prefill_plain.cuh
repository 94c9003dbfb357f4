// SPDX-License-Identifier: Apache-2.0
// The prefill kernel for every shape, type and stride; also the oracle for faster ones on the
// device.
//
// One block handles one (sequence, KV head, tile of rows) and walks all keys that its rows see
// (attend_rows.cuh). Where q is packed, only the device knows the lengths: row_tiles.cu has counted
// the tiles of each sequence, and a block finds its own by binary search. The work is numbered in
// 64 bits and strided by the grid, so nothing is limited by grid dimensions.
#pragma once

#include "common/attend_rows.cuh"
#include "common/finish_row.cuh"
#include "common/launch.cuh"
#include "common/with_dim.h"
#include "plan.h"
#include "prefill/prefill.h"
#include "prefill/row_tiles.cuh"

namespace tiledattn::cuda {

/// Row tile number `work`; without rows where the sequence is faulty. seq_tiles: of each sequence,
/// where q is not packed.
template <typename Config>
__device__ RowTile prefill_tile(const AttendParams& params, std::int64_t work,
                                std::int64_t seq_tiles) {
  const AttentionProblem& p = params.problem;
  const std::int64_t tile = work / p.num_kv_heads;
  std::int64_t i = 0;
  std::int64_t tile_of_seq = 0;
  if (p.packed_q()) {
    i = find_sequence(params.flags, params.num_seqs, tile);
    tile_of_seq = tile - (i == 0 ? 0 : params.flags[i - 1]);
  } else {
    i = tile / seq_tiles;
    if (params.flags != nullptr && params.flags[i] != 0) return {};
    // Under a causal mask the last tile is the longest, so it goes first.
    tile_of_seq = seq_tiles - 1 - tile % seq_tiles;
  }
  const Sequence s = sequence_at(p, params.first_seq + i);
  return make_row_tile(p, s, work % p.num_kv_heads, tile_of_seq * Config::kRows, Config::kRows,
                       KeyRange{0, s.kv_len});
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    prefill_plain(const __grid_constant__ AttendParams params) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  AttendShared<Config>& shared = *reinterpret_cast<AttendShared<Config>*>(shared_bytes);
  const AttentionProblem& p = params.problem;
  const std::int64_t seq_tiles = (p.q_len * p.gqa_ratio() + Config::kRows - 1) / Config::kRows;
  const std::int64_t num_tiles = !p.packed_q()          ? params.num_seqs * seq_tiles
                                 : params.num_seqs == 0 ? 0
                                                        : params.flags[params.num_seqs - 1];

  for (std::int64_t work = blockIdx.x; work < num_tiles * p.num_kv_heads; work += gridDim.x) {
    __syncthreads();  // every warp is done with the last tile
    if (threadIdx.x == 0) shared.tile = prefill_tile<Config>(params, work, seq_tiles);
    __syncthreads();
    WarpRows<Config> rows;
    attend_rows(params, shared, rows);
    for_each_row(shared, rows, [&](int row, const WarpRow<Config::kColumns>& total) {
      const RowName name = row_name(p, shared.tile, row);
      finish_row(p, shared.tile.sequence, name.token, name.head, total);
    });
  }
}

template <typename Config>
void launch_prefill_config(const AttendParams& params, cudaStream_t stream) {
  const AttentionProblem& p = params.problem;
  std::int64_t tiles =
      params.num_seqs * ((p.q_len * p.gqa_ratio() + Config::kRows - 1) / Config::kRows);
  if (p.packed_q()) {
    static_assert(Config::kRows >= kFewestTileRows);
    tiles = p.total_q * p.gqa_ratio() / Config::kRows + params.num_seqs;
    launch_count_row_tiles(params, Config::kRows, stream);
  }
  launch(prefill_plain<Config>, "prefill_plain",
         {tiles * p.num_kv_heads, Config::kThreads, shared_bytes_of<AttendShared<Config>>()},
         params, stream);
}

template <typename T>
void launch_prefill_plain(const AttendParams& params, cudaStream_t stream) {
  with_dim(params.problem.head_dim, params.problem.head_dim_v, [&](auto dim) {
    // Beyond 256 bytes for each row: shared memory for 32 rows is more than sm_86 and sm_120 have,
    // or registers spill.
    // With one byte for each element 8 warps have too few pieces of a tile to load, with four bytes
    // too few registers.
    constexpr int kWarps = dim() <= 128 && sizeof(T) == 2 ? 8 : 4;
    launch_prefill_config<AttendConfig<T, dim(), kWarps, 4>>(params, stream);
  });
}

}  // namespace tiledattn::cuda
