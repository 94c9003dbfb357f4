// SPDX-License-Identifier: Apache-2.0
// Attention of one tile of query rows over a range of keys: the body of the plain decode and
// prefill kernels.
//
// A row is one query token and one query head; all heads of a group share a KV head, so rows
// (token, head of the group) of one sequence are packed and share every K and V that is read. Each
// warp owns kRowsPerWarp rows for good: lanes stand for keys while scores are made and for columns
// of V afterwards, so the softmax needs no traffic between warps.
//
// Shared memory, float32: q [kRows, kDim], K tile [32, kDim + 4], V tile [32, kDim], weights p
// [kRows, 32]. Barriers: one before a tile is overwritten (all warps are done with the last one,
// the offsets are there) and one after.
//
// Tiles of keys start at fixed places, and a tile that a row does not see leaves that row as it is,
// bit for bit. So a row's bits do not depend on the rows beside it or on kRows.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/attend_params.h"
#include "common/key_tile.cuh"
#include "common/softmax_state.cuh"
#include "problem.h"

namespace tiledattn::cuda {

/// A running sum that keeps what its additions round off: over very many keys the errors of plain
/// additions may all point the same way (W. Kahan, Further remarks on reducing truncation errors,
/// CACM 8, 1965).
struct CompensatedSum {
  float sum = 0.0f;
  float lost = 0.0f;  ///< still to be added

  /// this = this * factor + x.
  __device__ __forceinline__ void scale_and_add(float factor, float x) {
    const float addend = fmaf(lost, factor, x);
    const float before = sum;
    sum = fmaf(before, factor, addend);
    lost = __fadd_rn(fmaf(before, factor, -sum), addend);
    if (!(fabsf(lost) < infinity())) lost = 0.0f;  // the sum is infinite or NaN
  }
  __device__ __forceinline__ float value() const { return __fadd_rn(sum, lost); }
};

/// The same, where the rounding of 16-bit results hides those errors.
struct PlainSum {
  float sum = 0.0f;

  __device__ __forceinline__ void scale_and_add(float factor, float x) {
    sum = fmaf(sum, factor, x);
  }
  __device__ __forceinline__ float value() const { return sum; }
};

/// T: of K and V. kDim bounds head_dim and head_dim_v.
template <typename T, int kDim_, int kWarps_, int kRowsPerWarp_>
struct AttendConfig {
  using Element = T;
  /// With a quantised cache q and the result may be float32.
  static constexpr bool kPrecise = std::is_same_v<T, float> || kQuantized<T>;
  using Sum = std::conditional_t<kPrecise, CompensatedSum, PlainSum>;
  static constexpr int kDim = kDim_;
  static constexpr int kWarps = kWarps_;
  static constexpr int kRowsPerWarp = kRowsPerWarp_;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kRows = kWarps * kRowsPerWarp;
  static constexpr int kColumns = kDim / kWarpSize;  ///< of V, for each lane
  /// Blocks that fit the registers of an SM. Left to itself, ptxas takes fewer registers and
  /// spills.
  static constexpr int kMinBlocks = kRowsPerWarp == 1                          ? 4
                                    : kWarps == 8 || (kPrecise && kDim == 256) ? 2
                                                                               : 3;
  static constexpr int kKeyStride =
      kDim + 4;  ///< lanes read 16 bytes of 8 keys at a time from all 32 banks
};

/// Rows first_row .. first_row + num_rows of a sequence and KV head: row = token * gqa_ratio + head
/// of the group.
struct RowTile {
  Sequence sequence;
  std::int64_t kv_head = 0;
  std::int64_t first_row = 0;
  int num_rows = 0;
  KeyRange keys;            ///< the part of the sequence's keys to walk, within what the rows see
  std::int64_t origin = 0;  ///< tiles of keys begin at origin + 32 i
};

template <typename Config>
struct AttendShared {
  float q[Config::kRows][Config::kDim];
  float k[kTileKeys][Config::kKeyStride];
  float v[kTileKeys][Config::kDim];
  float p[Config::kRows][kTileKeys];
  TileOffsets offsets[2];  ///< of this tile and the next
  KeyRange visible[Config::kRows];
  RowTile tile;  ///< here, since it would take a quarter of the registers
};

struct RowName {
  std::int64_t token;
  std::int64_t head;
};

__device__ __forceinline__ RowName row_name(const AttentionProblem& p, const RowTile& tile,
                                            int row) {
  const std::int64_t group = p.gqa_ratio();
  const std::int64_t at = tile.first_row + row;
  return {at / group, tile.kv_head * group + at % group};
}

/// The tile whose rows start at `first_row`, walking those of `keys` that its rows see.
__device__ __forceinline__ RowTile make_row_tile(const AttentionProblem& p, const Sequence& s,
                                                 std::int64_t kv_head, std::int64_t first_row,
                                                 int max_rows, const KeyRange& keys) {
  const std::int64_t group = p.gqa_ratio();
  RowTile tile;
  tile.sequence = s;
  tile.kv_head = kv_head;
  tile.first_row = first_row;
  tile.num_rows = static_cast<int>(detail::min64(max_rows, s.q_len * group - first_row));
  tile.origin = keys.begin;
  if (tile.num_rows <= 0) return tile;
  const KeyRange seen =
      visible_keys(p, s, first_row / group, (first_row + tile.num_rows - 1) / group);
  tile.keys = {detail::max64(keys.begin, seen.begin), detail::min64(keys.end, seen.end)};
  return tile;
}

/// Scale, then softcap. Rounded here for good: the maximum and the difference to it must see the
/// same score.
__device__ __forceinline__ float make_score(const AttentionProblem& p, float dot) {
  float score = __fmul_rn(dot, p.softmax_scale);
  if (p.softcap > 0.0f) score = __fmul_rn(p.softcap, tanhf(__fdiv_rn(score, p.softcap)));
  return score;
}

/// The rows of one warp.
template <typename Config>
struct WarpRows {
  static constexpr int kRowsPerWarp = Config::kRowsPerWarp;
  static constexpr int kColumns = Config::kColumns;
  float m[kRowsPerWarp];                 ///< the same in every lane
  typename Config::Sum l[kRowsPerWarp];  ///< of this lane's keys alone
  typename Config::Sum o[kRowsPerWarp][kColumns];

  __device__ WarpRows() {
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) m[i] = -infinity();
  }
};

/// An element of q, which has the type of K and V unless that is quantised.
template <typename T>
__device__ __forceinline__ float load_query(const QueryView& q, std::int64_t offset) {
  if constexpr (kQuantized<T>) return load_element(q.data, q.dtype, offset);
  return to_float(static_cast<const T*>(q.data)[offset]);
}

template <typename Config>
__device__ void load_queries(const AttentionProblem& p, const RowTile& tile,
                             AttendShared<Config>& shared) {
  const Sequence& s = tile.sequence;
  for (int row = warp_index(); row < Config::kRows; row += Config::kWarps) {
    const bool present = row < tile.num_rows;
    std::int64_t offset = 0;
    KeyRange visible;
    if (present) {
      const RowName name = row_name(p, tile, row);
      offset = s.index * p.q.seq_stride + (s.q_begin + name.token) * p.q.token_stride +
               name.head * p.q.head_stride;
      visible = visible_keys(p, s, name.token);
      visible = {detail::max64(visible.begin, tile.keys.begin),
                 detail::min64(visible.end, tile.keys.end)};
    }
    if (lane_index() == 0) shared.visible[row] = visible;
    for (int d = lane_index(); d < Config::kDim; d += kWarpSize) {
      shared.q[row][d] =
          present && d < p.head_dim ? load_query<typename Config::Element>(p.q, offset + d) : 0.0f;
    }
  }
}

/// Columns begin .. end - 1 of q . k of this lane's key, for each of the warp's rows.
template <typename Config>
__device__ __forceinline__ void make_dots(const AttendShared<Config>& shared, int first_row,
                                          int begin, int end, float (&dots)[Config::kRowsPerWarp]) {
  float4 sums[Config::kRowsPerWarp];
#pragma unroll
  for (int i = 0; i < Config::kRowsPerWarp; ++i) sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const float* const key = shared.k[lane_index()];
#pragma unroll 2
  for (int d = begin; d < end; d += 4) {
    const float4 k = *reinterpret_cast<const float4*>(key + d);
#pragma unroll
    for (int i = 0; i < Config::kRowsPerWarp; ++i) {
      const float4 q = *reinterpret_cast<const float4*>(&shared.q[first_row + i][d]);
      sums[i].x = fmaf(q.x, k.x, sums[i].x);
      sums[i].y = fmaf(q.y, k.y, sums[i].y);
      sums[i].z = fmaf(q.z, k.z, sums[i].z);
      sums[i].w = fmaf(q.w, k.w, sums[i].w);
    }
  }
#pragma unroll
  for (int i = 0; i < Config::kRowsPerWarp; ++i) {
    dots[i] = __fadd_rn(__fadd_rn(sums[i].x, sums[i].y), __fadd_rn(sums[i].z, sums[i].w));
  }
}

/// q . k of this lane's key for each of the warp's rows. Each addition to a sum of one sign rounds
/// off more than the one before, so rows beyond 128 columns are summed in parts.
template <typename Config>
__device__ void make_dots(const AttendShared<Config>& shared, int first_row, int head_dim,
                          float (&dots)[Config::kRowsPerWarp]) {
  if constexpr (Config::kDim <= 128) {
    make_dots(shared, first_row, 0, head_dim, dots);
  } else {
    constexpr int kPart = 64;
#pragma unroll
    for (int i = 0; i < Config::kRowsPerWarp; ++i) dots[i] = 0.0f;
#pragma unroll 1
    for (int begin = 0; begin < head_dim; begin += kPart) {
      float part[Config::kRowsPerWarp];
      make_dots(shared, first_row, begin, min(begin + kPart, head_dim), part);
#pragma unroll
      for (int i = 0; i < Config::kRowsPerWarp; ++i) dots[i] = __fadd_rn(dots[i], part[i]);
    }
  }
}

/// Fold the tile of keys in shared memory into the warp's rows. Called by a whole warp.
template <typename Config>
__device__ void fold_key_tile(const AttentionProblem& p, AttendShared<Config>& shared,
                              std::int64_t first_key, WarpRows<Config>& rows) {
  constexpr int kRowsPerWarp = Config::kRowsPerWarp;
  constexpr int kColumns = Config::kColumns;
  const int first_row = warp_index() * kRowsPerWarp;

  float dots[kRowsPerWarp];
  make_dots(shared, first_row, static_cast<int>(p.head_dim), dots);

  // Scores -> weights. The sum of weights stays apart for each lane, which also rounds less.
  float rescale[kRowsPerWarp];
  bool touched[kRowsPerWarp];  // some key of the tile is visible to the row: the same in every lane
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const std::int64_t key = first_key + lane_index();
    const KeyRange visible = shared.visible[first_row + i];
    const bool seen = key >= visible.begin && key < visible.end;
    const float score = seen ? make_score(p, dots[i]) : -infinity();
    const float top = fmaxf(rows.m[i], warp_max(score));
    const float shift = top == -infinity() ? 0.0f : top;  // all scores so far are -inf or NaN
    const float weight = seen ? expf(__fsub_rn(score, shift)) : 0.0f;
    touched[i] = __any_sync(kAllLanes, seen) != 0;
    rescale[i] = expf(__fsub_rn(rows.m[i], shift));
    if (touched[i]) {
      rows.l[i].scale_and_add(rescale[i], weight);
      rows.m[i] = top;
    }
    shared.p[first_row + i][lane_index()] = weight;
  }
  __syncwarp();

  // Weights times V. Summed for the tile alone first, so that few additions need compensation.
  float sums[kRowsPerWarp][kColumns] = {};
#pragma unroll 1
  for (int key = 0; key < kTileKeys; key += 4) {
    float weights[kRowsPerWarp][4];
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
      *reinterpret_cast<float4*>(weights[i]) =
          *reinterpret_cast<const float4*>(&shared.p[first_row + i][key]);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const float v = shared.v[key + k][lane_index() + kWarpSize * j];
#pragma unroll
        for (int i = 0; i < kRowsPerWarp; ++i) sums[i][j] = fmaf(weights[i][k], v, sums[i][j]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      if (touched[i]) rows.o[i][j].scale_and_add(rescale[i], sums[i][j]);
    }
  }
}

/// Calls finish(row of the tile, WarpRow) for each of the warp's rows. They go through the warp's
/// own part of shared memory, so that the code of `finish` is there once and not for each register
/// that holds a row.
template <typename Config, typename Finish>
__device__ void for_each_row(AttendShared<Config>& shared, const WarpRows<Config>& rows,
                             Finish&& finish) {
  const int first_row = warp_index() * Config::kRowsPerWarp;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < Config::kRowsPerWarp; ++i) {
    WarpRow<Config::kColumns> row;
    row.l = warp_sum(rows.l[i].value());
    // A NaN score never wins the maximum; here it reaches the row's m, as the state promises.
    row.m = row.l != row.l && rows.m[i] != infinity() ? row.l : rows.m[i];
#pragma unroll
    for (int j = 0; j < Config::kColumns; ++j) row.o[j] = rows.o[i][j].value();
    row.store(&shared.p[first_row + i][0], &shared.p[first_row + i][1], shared.q[first_row + i],
              Config::kDim);
  }
  __syncwarp();
#pragma unroll 1
  for (int row = first_row; row < first_row + Config::kRowsPerWarp && row < shared.tile.num_rows;
       ++row) {
    WarpRow<Config::kColumns> total;
    total.load(&shared.p[row][0], &shared.p[row][1], shared.q[row], Config::kDim);
    finish(row, total);
  }
}

/// All of it, for shared.tile. Called by a whole block between barriers that protect shared memory.
template <typename Config>
__device__ void attend_rows(const AttendParams& params, AttendShared<Config>& shared,
                            WarpRows<Config>& rows) {
  using T = typename Config::Element;
  const AttentionProblem& p = params.problem;
  const RowTile& tile = shared.tile;
  if (tile.keys.empty()) return;
  const std::int64_t first_tile = (tile.keys.begin - tile.origin) / kTileKeys;
  const std::int64_t last_tile = (tile.keys.end - 1 - tile.origin) / kTileKeys;
  const bool idle =
      warp_index() * Config::kRowsPerWarp >= tile.num_rows;  // a warp without rows only loads

  load_queries(p, tile, shared);
  shared.offsets[first_tile % 2].template find<T>(p, tile.sequence, tile.kv_head, tile.keys,
                                                  tile.origin + first_tile * kTileKeys);
  for (std::int64_t index = first_tile; index <= last_tile; ++index) {
    const std::int64_t first_key = tile.origin + index * kTileKeys;
    const TileOffsets& offsets = shared.offsets[index % 2];
    __syncthreads();
    load_key_tile<T, Config::kDim, Config::kKeyStride, Config::kThreads>(
        &shared.k[0][0], p.k.data, offsets.k, offsets.k_scale, static_cast<int>(p.head_dim),
        params.vector_k);
    load_key_tile<T, Config::kDim, Config::kDim, Config::kThreads>(
        &shared.v[0][0], p.v.data, offsets.v, offsets.v_scale, static_cast<int>(p.head_dim_v),
        params.vector_v);
    if (index < last_tile) {
      shared.offsets[(index + 1) % 2].template find<T>(p, tile.sequence, tile.kv_head, tile.keys,
                                                       first_key + kTileKeys);
    }
    __syncthreads();
    if (!idle) fold_key_tile(p, shared, first_key, rows);
  }
}

}  // namespace tiledattn::cuda
