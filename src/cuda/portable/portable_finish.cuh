// SPDX-License-Identifier: Apache-2.0
// What becomes of a block's rows. Results as the caller wants them leave through shared memory, 16
// bytes at a time. All else (the state, partial results of a segment, other types and strides, keys
// cut among warps) goes through shared memory as float32, a row to a warp.
#pragma once

#include <cstdint>

#include "common/cp_async.cuh"
#include "common/finish_row.cuh"
#include "common/mma.cuh"
#include "common/softmax_state.cuh"
#include "portable/portable_softmax.cuh"

namespace tiledattn::cuda {

__device__ __forceinline__ float sum_of_quad(float x) {
  x = __fadd_rn(x, __shfl_xor_sync(kAllLanes, x, 1));
  return __fadd_rn(x, __shfl_xor_sync(kAllLanes, x, 2));
}

/// The maximum in natural units. A NaN score never wins it; here it reaches m, as the state
/// promises.
__device__ __forceinline__ float natural_maximum(const PortableParams& params, float m, float l) {
  return l != l && m != infinity() ? l : m * params.scores.natural_scale;
}

/// Out and lse of the warp's rows.
template <typename T, typename Config>
__device__ __forceinline__ void write_rows(
    const PortableParams& params, PortableShared<T, Config>& shared,
    const RowSums (&sums)[Config::kRowBlocks],
    const float (&output)[Config::kRowBlocks][Config::kDim / 8][4]) {
  const AttentionProblem& p = params.attend.problem;
  const PortableTile& tile = shared.tile;
  const Sequence& s = tile.sequence;
  const int lane = read_thread() % kWarpSize;
  const int warp_row = warp_index() * Config::kWarpRows;
  T(*const staged)[Config::kPitch] = &shared.slots[0][warp_row];
#pragma unroll
  for (int block = 0; block < Config::kRowBlocks; ++block) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = block * 16 + 8 * r + lane / 4;
      const PortableRow& row = shared.rows[warp_row + at];
      const float l = sum_of_quad(sums[block].l[r]);
      const RowResult result(natural_maximum(params, sums[block].m[r], l), l,
                             p.sinks == nullptr ? nullptr : p.sinks + row.head);
#pragma unroll
      for (int j = 0; j < Config::kDim / 8; ++j) {
        const float* const pair = &output[block][j][2 * r];
        *reinterpret_cast<std::uint32_t*>(&staged[at][8 * j + lane % 4 * 2]) =
            pack<T>(result.value(pair[0]), result.value(pair[1]));
      }
      if (p.out.lse != nullptr && lane % 4 == 0 && warp_row + at < tile.num_rows)
        p.out.lse[p.out.lse_offset(s.index, s.q_begin + row.token, row.head)] = result.lse;
    }
  }
  __syncwarp();
  T* const out = static_cast<T*>(p.out.data);
  constexpr int kRowPieces = Config::kDim / 8;  // 16 bytes each
#pragma unroll 4
  for (int at = lane; at < Config::kWarpRows * kRowPieces; at += kWarpSize) {
    const int index = at / kRowPieces;
    const int column = at % kRowPieces * 8;
    if (warp_row + index >= tile.num_rows || column >= p.head_dim_v) continue;
    const PortableRow& row = shared.rows[warp_row + index];
    T* const to = out + row.out + column;
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(&staged[index][column]);
  }
}

/// Rows as WarpRow: those of key warps are folded, then kept as partial results or finished.
template <typename T, typename Config>
__device__ __forceinline__ void fold_rows(
    const PortableParams& params, PortableShared<T, Config>& shared,
    const RowSums (&sums)[Config::kRowBlocks],
    const float (&output)[Config::kRowBlocks][Config::kDim / 8][4]) {
  constexpr int kColumns = Config::kDim / kWarpSize;
  const AttendParams& call = params.attend;
  const AttentionProblem& p = call.problem;
  const PortableTile& tile = shared.tile;
  float (*const parts)[Config::kPitch] =
      reinterpret_cast<float (*)[Config::kPitch]>(&shared.slots[0][0][0]);
  const int lane = read_thread() % kWarpSize;
#pragma unroll
  for (int block = 0; block < Config::kRowBlocks; ++block) {
    if (block > 0) __syncthreads();  // the rows of the last block are read
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = warp_index() * 16 + 8 * r + lane / 4;
      const float l = sum_of_quad(sums[block].l[r]);
      if (lane % 4 == 0) {
        shared.m[at] = natural_maximum(params, sums[block].m[r], l);
        shared.l[at] = l;
      }
#pragma unroll
      for (int j = 0; j < Config::kDim / 8; ++j) {
        *reinterpret_cast<float2*>(&parts[at][8 * j + lane % 4 * 2]) =
            make_float2(output[block][j][2 * r], output[block][j][2 * r + 1]);
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int at = warp_index(); at < Config::kRowWarps * 16; at += Config::kWarps) {
      const int index = at / 16 * Config::kWarpRows + block * 16 + at % 16;
      if (index >= tile.num_rows) continue;
      WarpRow<kColumns> total;
#pragma unroll 1
      for (int part = at; part < Config::kWarps * 16; part += Config::kRowWarps * 16) {
        WarpRow<kColumns> row;
        row.load(&shared.m[part], &shared.l[part], parts[part], p.head_dim_v);
        total.fold(row);
      }
      const PortableRow& row = shared.rows[index];
      if (call.split()) {
        float* const partial =
            call.partial_row(tile.sequence.index, tile.segment, row.token, row.head);
        total.store(partial, partial + 1, partial + 2, p.head_dim_v);
      } else {
        finish_row(p, tile.sequence, row.token, row.head, total);
      }
    }
  }
}

}  // namespace tiledattn::cuda
