// SPDX-License-Identifier: Apache-2.0
// What a consumer of the Hopper prefill kernel does with a finished tile of rows: sums, lse and the
// output, which leaves in one of three ways.
#pragma once

#include <cstdint>

#include "common/finish_row.cuh"
#include "common/softmax_state.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "prefill/prefill_sm90_shared.cuh"
#include "prefill/prefill_sm90_softmax.cuh"

namespace tiledattn::cuda {

/// The output of a warpgroup's 64 rows of a tile.
template <typename Config>
class OutputRows {
 public:
  using T = typename Config::T;
  using Shared = PrefillSm90Shared<Config>;
  static constexpr int kOutputs = Config::kDim / 2;  ///< of a thread

  __device__ __forceinline__ OutputRows(const PrefillSm90Params& params, Shared& shared, int index)
      : params_(params),
        shared_(shared),
        index_(index),
        row_(index * kWgmmaRows + consumer_warp_row() + consumer_lane() / 4) {}

  /// Sums, lse, and the output on its way.
  __device__ __forceinline__ void write(float (&out)[kOutputs], const RowPair& rows,
                                        const WorkTile& work, int rows_left) {
    if (Config::kSplits && work.segment != WorkTile::kWhole)
      return store_partial(out, rows, work, rows_left);
    const AttentionProblem& p = params_.attend.problem;
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = sum_of_row(rows, r);
      const RowResult result(rows.m[r] * params_.scores.natural_scale, sum,
                             p.sinks == nullptr ? nullptr : p.sinks + work.head);
      factor[r] = result.sum == 0.0f ? 0.0f : rows.owed[r] * __fdividef(result.scale, result.sum);
      if (p.out.lse != nullptr && consumer_lane() % 4 == 0 && rows_left > 8 * r) {
        p.out.lse[p.out.lse_offset(work.batch, work.q_row + row_ + 8 * r, work.head)] = result.lse;
      }
    }
    scale_output(out, factor);
    if (params_.float_output) {
      store_floats(out, work, rows_left);
    } else if constexpr (Config::kOwnOutput) {
      store_tile(out, work);
    } else {
      store_pieces(out, work, rows_left);
    }
  }

  /// Returns once all rows have left, before which the block must not end.
  __device__ __forceinline__ void wait() const {
    if (leads_consumer()) wait_for_stores();
  }

 private:
  __device__ __forceinline__ static float sum_of_row(const RowPair& rows, int r) {
    float sum = rows.l[r] * rows.owed[r];
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    return sum + __shfl_xor_sync(kAllLanes, sum, 2);
  }

  /// Straight from the registers.
  __device__ __forceinline__ void store_floats(const float (&out)[kOutputs], const WorkTile& work,
                                               int rows_left) const {
    const AttentionProblem& p = params_.attend.problem;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (rows_left <= 8 * r) continue;
      store_row(out, r,
                static_cast<float*>(p.out.data) +
                    p.out.row_offset(work.batch, work.q_row + row_ + 8 * r, work.head));
    }
  }
  __device__ __forceinline__ void store_row(const float (&out)[kOutputs], int r, float* to) const {
    const int head_dim_v = static_cast<int>(params_.attend.problem.head_dim_v);
#pragma unroll
    for (int j = 0; j < kOutputs / 4; ++j) {
      const int column = 8 * j + consumer_lane() % 4 * 2;  // head_dim_v is even
      if (column >= head_dim_v) continue;
      to[column] = out[4 * j + 2 * r];
      to[column + 1] = out[4 * j + 2 * r + 1];
    }
  }

  /// What combine_segments takes: m, l and o of a segment. It is empty for a row that sees nothing
  /// of it.
  __device__ __forceinline__ void store_partial(float (&out)[kOutputs], const RowPair& rows,
                                                const WorkTile& work, int rows_left) const {
    if (Config::kLagged) scale_output(out, rows.owed);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = sum_of_row(rows, r);
      if (rows_left <= 8 * r) continue;
      float* const to = params_.attend.partial_row(work.batch, work.segment,
                                                   work.q_row + row_ + 8 * r, work.head);
      if (consumer_lane() % 4 == 0) {
        to[0] = rows.m[r] * params_.scores.natural_scale;
        to[1] = sum;
      }
      store_row(out, r, to + 2);
    }
  }

  /// Straight from the registers, 16 bytes a thread: the four threads of a row exchange what they
  /// hold of 32 columns, so that each has 8 neighbours.
  __device__ __forceinline__ void store_pieces(const float (&out)[kOutputs], const WorkTile& work,
                                               int rows_left) const {
    const AttentionProblem& p = params_.attend.problem;
    const int head_dim_v = static_cast<int>(p.head_dim_v);  // a multiple of 8
    const int quarter = consumer_lane() % 4;
    const bool odd = quarter % 2 != 0;
    const bool high = quarter / 2 != 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      T* const to = static_cast<T*>(p.out.data) +
                    p.out.row_offset(work.batch, work.q_row + row_ + 8 * r, work.head);
#pragma unroll
      for (int block = 0; block < kOutputs / 16; ++block) {
        std::uint32_t pair[4];  // [i]: columns 8i + 2 * quarter of the block
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 4 * (4 * block + i) + 2 * r;
          pair[i] = pack_pair<T>(out[at], out[at + 1]);
        }
        // A transposition of 4 x 4 over the threads of the row, in two exchanges.
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          const std::uint32_t got = __shfl_xor_sync(kAllLanes, odd ? pair[i] : pair[i + 1], 1);
          pair[i] = odd ? got : pair[i];
          pair[i + 1] = odd ? pair[i + 1] : got;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const std::uint32_t got = __shfl_xor_sync(kAllLanes, high ? pair[i] : pair[i + 2], 2);
          pair[i] = high ? got : pair[i];
          pair[i + 2] = high ? pair[i + 2] : got;
        }
        const int column = 32 * block + 8 * quarter;
        if (rows_left > 8 * r && column < head_dim_v)
          *reinterpret_cast<uint4*>(to + column) = uint4{pair[0], pair[1], pair[2], pair[3]};
      }
    }
  }

  /// Through shared memory: by TMA, which writes nothing outside the array, or row by row where the
  /// rows behind the tile's are another sequence's.
  __device__ __forceinline__ void store_tile(const float (&out)[kOutputs], const WorkTile& work) {
    T* const slabs = shared_.out + index_ * kWgmmaRows * kSlabColumns;
    constexpr int kSlab = Config::kRows * kSlabColumns;
    if (leads_consumer()) {
      // The same rows, written a second time, must arrive after the first.
      if (work.again) {
        wait_for_stores();
      } else {
        wait_for_reads_of_stores();
      }
    }
    barrier();
    const unsigned lane = computed_here(threadIdx.x % 32u);
    const std::uint32_t row_address =
        shared_address(slabs) + (consumer_warp_row() + lane % 16) * kSlabRowBytes;
#pragma unroll
    for (int j = 0; j < kOutputs / 8; ++j) {  // 16 columns each
      const unsigned piece = 2 * j + lane / 16;
      const std::uint32_t at =
          row_address + piece / 8 * kSlab * sizeof(T) + ((piece % 8 ^ lane % 8) << 4);
      store_matrices(at, pack_pair<T>(out[8 * j], out[8 * j + 1]),
                     pack_pair<T>(out[8 * j + 2], out[8 * j + 3]),
                     pack_pair<T>(out[8 * j + 4], out[8 * j + 5]),
                     pack_pair<T>(out[8 * j + 6], out[8 * j + 7]));
    }
    fence_async_proxy();
    barrier();
    const int first_row = index_ * kWgmmaRows;
    const int num_rows = min(kWgmmaRows, work.num_rows - first_row);
    if (params_.attend.problem.packed_q() && num_rows < kWgmmaRows) {
      copy_rows(slabs, work, num_rows);
    } else if (leads_consumer() && num_rows > 0) {
#pragma unroll
      for (int slab = 0; slab < Config::kSlabs; ++slab) {
        store_box(params_.out, {slab * kSlabColumns, work.q_row + first_row, work.head, work.batch},
                  slabs + slab * kSlab);
      }
      commit_stores();
    }
  }

  __device__ __forceinline__ void copy_rows(const T* slabs, const WorkTile& work,
                                            int num_rows) const {
    const AttentionProblem& p = params_.attend.problem;
    constexpr int kItems = 16 / sizeof(T);
    const int pieces = static_cast<int>(p.head_dim_v) / kItems;  // head_dim_v is a multiple of 8
    const int thread = static_cast<int>(computed_here(threadIdx.x) % kWarpgroupSize);
    T* const to = static_cast<T*>(p.out.data);
#pragma unroll 1
    for (int first = 0; first < num_rows * pieces; first += kWarpgroupSize) {
      const int i = first + thread;
      if (i >= num_rows * pieces) continue;
      const int row = i / pieces;
      const int piece = i - row * pieces;
      const T* const from =
          slabs + (piece / 8 * Config::kRows + row) * kSlabColumns + (piece % 8 ^ row % 8) * kItems;
      const std::int64_t at =
          p.out.row_offset(work.batch, work.q_row + index_ * kWgmmaRows + row, work.head);
      *reinterpret_cast<uint4*>(to + at + piece * kItems) = *reinterpret_cast<const uint4*>(from);
    }
  }

  __device__ __forceinline__ void barrier() const {
    named_barrier_sync(kFirstOutputBarrier + index_, kWarpgroupSize);
  }

  const PrefillSm90Params& params_;
  Shared& shared_;
  const int index_;  ///< of the consumer
  const int row_;    ///< of the tile: the thread's first, the other is 8 below
};

}  // namespace tiledattn::cuda
