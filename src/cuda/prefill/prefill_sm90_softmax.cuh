// SPDX-License-Identifier: Apache-2.0
// Scores of one tile of keys, made into weights in the registers that hold them.
//
// A thread holds columns 8j + 2 (lane % 4) + {0, 1} of two rows; the four threads of a row agree on
// its maximum, and each sums its own weights until the end. Weights are 2^((s - max) * log2_scale),
// s being dots or, where a transform is asked for, scores.
#pragma once

#include <cstdint>

#include "common/softmax_state.cuh"
#include "prefill/prefill_sm90_config.h"

namespace tiledattn::cuda {

/// Weights that refer to an older maximum may reach 2^60: products with values of up to 2^60 and
/// sums of them stay far within float32.
constexpr float kLargestWeight = 0x1p60f;
/// Up to here the reference stays: 2^kStaleMaximum.
constexpr float kStaleWeight = 256.0f;

/// What is known of a thread's two rows.
struct RowPair {
  float m[2] = {-infinity(), -infinity()};
  float l[2] = {0.0f, 0.0f};        ///< of the thread's own columns
  float rescale[2] = {1.0f, 1.0f};  ///< what the output so far must be multiplied with
  float owed[2] = {1.0f, 1.0f};     ///< lagged: the same, but due in the next step
  bool huge[2] = {false, false};    ///< weights were made that are wrong for scores of this size

  /// Called before and after steps that are not exact. A maximum never falls, so both ends tell how
  /// large any in between was; infinity counts as too large.
  __device__ __forceinline__ void note_size(float log2_scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r) huge[r] |= !(fabsf(m[r] * log2_scale) <= kModerateMaximum);
  }

  __device__ __forceinline__ bool must_rescale() const {
    return __any_sync(kAllLanes, rescale[0] != 1.0f || rescale[1] != 1.0f);
  }
};

/// A thread's accumulators of the output, whose rows lie as those of scores do.
template <int kCount>
__device__ __forceinline__ void scale_output(float (&out)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) out[i] *= factor[i % 4 / 2];
}

/// Columns outside begin[row] .. end[row] - 1 become -inf, whatever they hold. Both bounds are
/// relative to the thread's first column.
template <bool kWindow, int kCount>
__device__ __forceinline__ void mask_scores(float (&scores)[kCount], const int (&begin)[2],
                                            const int (&end)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int row = i % 4 / 2;
    const int column = i / 4 * 8 + i % 2;
    const bool seen = column < end[row] && (!kWindow || column >= begin[row]);
    if (!seen) scores[i] = -infinity();
  }
}

template <int kCount>
__device__ __forceinline__ void transform_scores(float (&scores)[kCount],
                                                 const PrefillSm90Params& params) {
  if (params.scores.transform == ScoreTransform::none) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) scores[i] = __fmul_rn(scores[i], params.scores.softmax_scale);
  if (params.scores.transform == ScoreTransform::scale) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    scores[i] = __fmul_rn(params.scores.softcap,
                          tanhf(__fmul_rn(scores[i], params.scores.inverse_softcap)));
}

/// The largest of `top` and the thread's scores of row r.
template <int kCount>
__device__ __forceinline__ float largest(const float (&scores)[kCount], int r, float top) {
#pragma unroll
  for (int j = 2 * r; j < kCount; j += 4) top = fmaxf(top, fmaxf(scores[j], scores[j + 1]));
  return top;
}

__device__ __forceinline__ float largest_of_row(float top) {
  top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
  return fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
}

/// Scores -> weights that refer to the maximum of the steps before, whatever these scores are.
template <int kCount>
__device__ __forceinline__ void make_lagged_weights(float (&scores)[kCount], RowPair& rows,
                                                    float log2_scale) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float shift = __fmul_rn(rows.m[r], log2_scale);
    rows.rescale[r] = rows.owed[r];
    float sum = rows.l[r] * rows.owed[r];
#pragma unroll
    for (int j = 2 * r; j < kCount; j += 4) {
#pragma unroll
      for (int i = j; i < j + 2; ++i) {
        scores[i] = exp2_fast(fmaf(scores[i], log2_scale, -shift));
        sum += scores[i];
      }
    }
    rows.l[r] = sum;
  }
}

/// The largest weight of each row, of all its four threads, as packed pairs of bfloat16 hold them.
/// They are not negative, so their bits compare as integers do, two at a time; NaN is the largest.
template <int kCount>
__device__ __forceinline__ void largest_weights(float (&largest)[2],
                                                const std::uint32_t (&weights)[kCount]) {
  std::uint32_t top[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    top[r] = weights[r];
#pragma unroll
    for (int j = 2 + r; j < kCount; j += 4)
      top[r] = __vimax3_s16x2(top[r], weights[j], weights[j + 2 < kCount ? j + 2 : j]);
  }
  // One row in each half.
  std::uint32_t both =
      __vmaxs2(__byte_perm(top[0], top[1], 0x5410), __byte_perm(top[0], top[1], 0x7632));
  both = __vmaxs2(both, __shfl_xor_sync(kAllLanes, both, 1));
  both = __vmaxs2(both, __shfl_xor_sync(kAllLanes, both, 2));
  largest[0] = __uint_as_float(both << 16);
  largest[1] = __uint_as_float(both & 0xffff0000u);
}

/// What the weights of a lagged step tell of its maximum, for the next. rows.huge says for which
/// rows the one before was too small.
template <int kCount>
__device__ __forceinline__ void raise_maximum(RowPair& rows, const std::uint32_t (&weights)[kCount],
                                              float log2_scale) {
  float largest[2];
  largest_weights(largest, weights);
  rows.owed[0] = rows.owed[1] = 1.0f;
  bool keep[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) keep[r] = largest[r] <= kStaleWeight;
  if (__all_sync(kAllLanes, keep[0] && keep[1])) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows.huge[r] |= !(largest[r] <= kLargestWeight);
    const float m = rows.m[r] + __fdividef(__log2f(largest[r]), log2_scale);
    // Of the shifts as the steps round them, so that both refer to exactly the same.
    const float rise = __fsub_rn(__fmul_rn(rows.m[r], log2_scale), __fmul_rn(m, log2_scale));
    rows.owed[r] = keep[r] ? 1.0f : exp2_fast(rise);
    rows.m[r] = keep[r] ? rows.m[r] : m;
  }
}

/// Scores -> weights, with the rows' maximum and sum brought up to date. kExact: scores of any
/// size; else rows.huge says for which rows they were too large.
template <bool kExact, int kCount>
__device__ __forceinline__ void make_weights(float (&scores)[kCount], RowPair& rows,
                                             float log2_scale) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float top = largest_of_row(largest(scores, r, rows.m[r]));
    // False for a first maximum, and where both are the same infinity.
    if ((top - rows.m[r]) * log2_scale <= kStaleMaximum) top = rows.m[r];
    const float reference = top == -infinity() ? 0.0f : top;  // all scores so far are -inf or NaN
    rows.rescale[r] = exp2_fast((rows.m[r] - reference) * log2_scale);
    rows.m[r] = top;
    const float shift = reference * log2_scale;
    float sum = rows.l[r] * rows.rescale[r];
#pragma unroll
    for (int j = 2 * r; j < kCount; j += 4) {
#pragma unroll
      for (int i = j; i < j + 2; ++i) {
        // Exact: the difference first, so that nothing is lost at the maximum.
        const float power = kExact ? __fmul_rn(__fsub_rn(scores[i], reference), log2_scale)
                                   : fmaf(scores[i], log2_scale, -shift);
        scores[i] = exp2_fast(power);
        sum += scores[i];
      }
    }
    rows.l[r] = sum;
  }
}

}  // namespace tiledattn::cuda
