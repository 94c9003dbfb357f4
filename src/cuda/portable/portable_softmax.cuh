// SPDX-License-Identifier: Apache-2.0
// Scores of 16 rows, made into weights.
//
// A thread holds columns 8j + 2 (lane % 4) + {0, 1} of rows lane / 4 (r = 0) and lane / 4 + 8 (r =
// 1); the four threads of a row agree on its maximum, and each sums its own weights until the end.
#pragma once

#include <cstdint>

#include "common/mma.cuh"
#include "common/softmax_state.cuh"
#include "portable/portable_shared.cuh"

namespace tiledattn::cuda {

/// The thread's number, read anew: what is made of it would take registers all through the loop.
__device__ __forceinline__ int read_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

/// What is known of a thread's two rows.
struct RowSums {
  float m[2] = {-infinity(), -infinity()};
  float l[2] = {0.0f, 0.0f};  ///< of the thread's own columns
};

/// Dots -> scores.
template <int kTiles>
__device__ __forceinline__ void transform_dots(const PortableParams& params,
                                               float (&scores)[kTiles][4]) {
  const AttentionProblem& p = params.attend.problem;
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float score = __fmul_rn(scores[j][e], p.softmax_scale);
      if (params.scores.transform == ScoreTransform::softcap)
        score = __fmul_rn(p.softcap, tanhf(__fmul_rn(score, params.scores.inverse_softcap)));
      scores[j][e] = score;
    }
  }
}

/// Keys that a row does not see get -inf. `rows` are 16 rows, `first_column` is that of scores[0].
template <int kTiles>
__device__ __forceinline__ void mask_scores(float (&scores)[kTiles][4], const PortableRow* rows,
                                            int first_column) {
  const int lane = read_thread() % kWarpSize;
  const int column = first_column + lane % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const PortableRow& row = rows[lane / 4 + 8 * r];
    const int begin = row.begin - column;
    const int end = row.end - column;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = 8 * j + e;
        if (at < begin || at >= end) scores[j][2 * r + e] = -infinity();
      }
    }
  }
}

/// Brings the maxima of all rows up to date, and what refers to them. The weight of a score is then
/// 2^(score * log2_scale - shift).
template <int kBlocks, int kTiles, int kColumns>
__device__ __forceinline__ void update_maxima(const PortableParams& params,
                                              float (&scores)[kBlocks][kTiles][4],
                                              RowSums (&rows)[kBlocks],
                                              float (&output)[kBlocks][kColumns][4],
                                              float (&shift)[kBlocks][2]) {
  const float scale = params.scores.log2_scale;
  float rescale[kBlocks][2];
  bool moderate = true;
  bool rescaled = false;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = rows[block].m[r];
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
        top = fmaxf(top, fmaxf(scores[block][j][2 * r], scores[block][j][2 * r + 1]));
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
      // False for a first maximum, and where both are the same infinity.
      if ((top - rows[block].m[r]) * scale <= params.stale_maximum) top = rows[block].m[r];
      const float reference = top == -infinity() ? 0.0f : top;  // all scores are -inf or NaN
      rescale[block][r] = exp2_fast((rows[block].m[r] - reference) * scale);
      shift[block][r] = reference * scale;
      rows[block].m[r] = top;
      rescaled = rescaled || rescale[block][r] != 1.0f;
      moderate = moderate && fabsf(shift[block][r]) <= kModerateMaximum;
    }
  }
  if (!__any_sync(kAllLanes, rescaled || !moderate)) return;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rows[block].l[r] *= rescale[block][r];
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        output[block][j][2 * r] *= rescale[block][r];
        output[block][j][2 * r + 1] *= rescale[block][r];
      }
    }
  }
  if (__all_sync(kAllLanes, moderate)) return;
  // The difference first, so that nothing is lost at the maximum.
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float reference = rows[block].m[r] == -infinity() ? 0.0f : rows[block].m[r];
      shift[block][r] = 0.0f;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e)
          scores[block][j][e] = __fsub_rn(scores[block][j][e], reference);
      }
    }
  }
}

/// Scores -> weights, added to the rows' sums, as operands of 16 columns each.
template <typename T, int kTiles>
__device__ __forceinline__ void make_weights(float log2_scale, const float (&scores)[kTiles][4],
                                             const float (&shift)[2], RowSums& rows,
                                             FragmentA (&weights)[kTiles / 2]) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float first = exp2_fast(fmaf(scores[j][2 * r], log2_scale, -shift[r]));
      const float second = exp2_fast(fmaf(scores[j][2 * r + 1], log2_scale, -shift[r]));
      rows.l[r] += first + second;
      weights[j / 2].part[j % 2 * 2 + r] = pack<T>(first, second);
    }
  }
}

}  // namespace tiledattn::cuda
