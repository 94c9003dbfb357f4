// SPDX-License-Identifier: Apache-2.0
// Attention in float16 and bfloat16 on tensor cores, for any GPU from sm_80 on: the decode and the
// prefill kernel for what no kernel of a GPU's own generation takes.
//
// A block handles one (sequence, KV head, tile of rows, segment of keys); prefill has one segment.
// Rows (query token, head of the group) share every K and V that is read. The work:
//
//   K of tile n   scores, then weights       meanwhile V of tile n arrives
//   V of tile n   output += weights V        meanwhile K of tile n + 1 arrives
//
// (With three slots the copies are one step further ahead.)
//
// A barrier before each of the two says that all copies into the slot are there and that all warps
// are done with the slot before it, which is then filled again. Warps cut the rows, or, where there
// are few, the keys; then their results are folded in the order of warps.
#pragma once

#include "common/launch.cuh"
#include "portable/portable_finish.cuh"
#include "portable/portable_keys.cuh"
#include "portable/portable_products.cuh"
#include "portable/portable_softmax.cuh"
#include "prefill/prefill.h"

namespace tiledattn::cuda {

/// The first row and the first key of a tile that are a warp's.
template <typename Config>
struct WarpShare {
  int row;
  int key;
  __device__ __forceinline__ WarpShare() {
    const int warp = read_thread() / kWarpSize;
    row = Config::kRowWarps == 1 ? 0 : warp % Config::kRowWarps * Config::kWarpRows;
    key = Config::kKeyWarps == 1 ? 0 : warp / Config::kRowWarps * Config::kWarpKeys;
  }
};

template <typename T, typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    attend_portable(const __grid_constant__ PortableParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<PortableShared<T, Config>*>(shared_bytes);
  if (threadIdx.x == 0) shared.tile = find_tile<Config>(params);
  __syncthreads();
  if (shared.tile.num_rows <= 0) return;

  constexpr int kSlots = Config::kSlots;
  KeyLoader<T, Config> loader(params, shared);
  for (int tile = 0; tile < 2; ++tile) {
    loader.look_up(tile);
    loader.store_place(tile);
  }
  if (static_cast<int>(threadIdx.x) < Config::kRows)
    shared.rows[threadIdx.x] = find_row<T>(params, shared.tile, static_cast<int>(threadIdx.x));
  __syncthreads();
  auto* const staged_q = Config::kOwnQ ? shared.q : shared.slots[kSlots - 1];
  copy_rows<Config, Config::kRows>(
      staged_q, params.attend.problem.head_dim,
      [&](std::uint32_t row) { return static_cast<const T*>(shared.rows[row].q); });
  end_copy_group();
  loader.template copy<false>(0, 0);
  if constexpr (kSlots == 3) loader.template copy<true>(0, 1);

  Queries<Config> q;
  q.address = shared_address(staged_q[WarpShare<Config>().row]) + lane_offset<Config::kPitch>();
  if constexpr (Config::kKeepQ) {
    wait_copy_groups<kSlots - 1>();
    __syncthreads();
    q.hold();
  }
  const std::uint32_t keys =
      shared_address(shared.slots[0][WarpShare<Config>().key]) + lane_offset<Config::kPitch>();
  constexpr std::uint32_t kSlotBytes = Config::kKeys * Config::kPitch * sizeof(T);

  RowSums sums[Config::kRowBlocks];
  float output[Config::kRowBlocks][Config::kDim / 8][4] = {};
  int slot = 0;  // the next to be used; with two, K is always in the first
  const auto wait_for_slot = [&](int known) {
    wait_copy_groups<kSlots - 2>();
    __syncthreads();
    return keys + static_cast<std::uint32_t>(kSlots == 2 ? known : slot) * kSlotBytes;
  };
  // Goes on to the next slot and fills the one that was used before this.
  const auto refill = [&](auto fill_v, int tile) {
    const int used = kSlots == 2 ? (fill_v() ? 0 : 1) : slot;
    loader.template copy<fill_v()>(tile, used == 0 ? kSlots - 1 : used - 1);
    slot = used + 1 == kSlots ? 0 : used + 1;
  };

#pragma unroll 1
  for (int tile = 0; tile < loader.num_tiles(); ++tile) {
    const WarpShare<Config> warp;
    const PortableRow* const rows = &shared.rows[warp.row];
    const PortableRow& last_row = rows[Config::kWarpRows - 1];
    const int begin = tile * Config::kKeys + warp.key;  // the warp's keys, as rows count them
    const int end = begin + Config::kWarpKeys;
    const bool needed = rows[0].q != nullptr && begin < last_row.end && end > rows[0].begin;
    FragmentA weights[Config::kRowBlocks][Config::kWarpKeys / 16];

    // With two slots V of this tile and K of the next are copied meanwhile, with three one more.
    const std::uint32_t k = wait_for_slot(0);
    const auto under_dots = [&] {
      refill(std::bool_constant<kSlots == 2>{}, tile + kSlots - 2);
      loader.look_up(tile + 2);
    };
    if (needed) {
      float scores[Config::kRowBlocks][Config::kWarpKeys / 8][4];
      make_dots<T, Config>(q, k, under_dots, scores);
      const bool masked = begin < last_row.begin || end > rows[0].end;
#pragma unroll
      for (int block = 0; block < Config::kRowBlocks; ++block) {
        if (params.scores.transform != ScoreTransform::none) transform_dots(params, scores[block]);
        if (masked) mask_scores(scores[block], &rows[block * 16], begin);
      }
      float shift[Config::kRowBlocks][2];
      update_maxima(params, scores, sums, output, shift);
#pragma unroll
      for (int block = 0; block < Config::kRowBlocks; ++block)
        make_weights<T>(params.scores.log2_scale, scores[block], shift[block], sums[block],
                        weights[block]);
    } else {
      under_dots();
    }

    const std::uint32_t v = wait_for_slot(1);
    const auto under_values = [&] {
      refill(std::bool_constant<kSlots == 3>{}, tile + 1);
      loader.store_place(tile + 2);
    };
    if (needed) {
      add_values<T, Config>(weights, v, under_values, output);
    } else {
      under_values();
    }
  }

  wait_copy_groups<0>();
  __syncthreads();  // results leave through the slots
  if constexpr (Config::kKeyWarps == 1) {
    if (params.direct_output) return write_rows<T, Config>(params, shared, sums, output);
  }
  fold_rows<T, Config>(params, shared, sums, output);
}

template <typename T, typename Config>
void launch_portable_config(PortableParams& params, cudaStream_t stream) {
  const AttendParams& call = params.attend;
  const AttentionProblem& p = call.problem;
  std::int64_t row_tiles = (p.q_len * p.gqa_ratio() + Config::kRows - 1) / Config::kRows;
  std::int64_t blocks = call.num_seqs;
  if (p.packed_q()) {
    row_tiles = p.total_q * p.gqa_ratio() / Config::kRows + call.num_seqs;
    blocks = 1;
    launch_count_row_tiles(call, Config::kRows, stream);
  }
  params.num_row_tiles = Divisor(std::max<std::int64_t>(row_tiles, 1));
  blocks *= row_tiles * p.num_kv_heads * call.max_segments;
  launch(attend_portable<T, Config>, "attend_portable",
         {blocks, Config::kThreads, shared_bytes_of<PortableShared<T, Config>>()}, params, stream);
}

/// Shapes by the number of rows of a sequence and KV head. Where q is packed only the device knows
/// it, and the lengths of others must not choose.
template <typename T, int kDim>
void launch_portable_dim(PortableParams& params, cudaStream_t stream) {
  const AttentionProblem& p = params.attend.problem;
  const std::int64_t rows = p.q_len * p.gqa_ratio();
  if (!p.packed_q() && rows <= 16)
    return launch_portable_config<T, PortableConfig<PortableNarrow<kDim>>>(params, stream);
  if constexpr (kDim <= 128) {
    if (p.packed_q() || rows > 64)
      return launch_portable_config<T, PortableConfig<PortableWide<kDim>>>(params, stream);
  }
  launch_portable_config<T, PortableConfig<PortableMiddle<kDim>>>(params, stream);
}

}  // namespace tiledattn::cuda
