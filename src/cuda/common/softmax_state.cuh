// SPDX-License-Identifier: Apache-2.0
// The running softmax of one row in natural units: m = max score, l = sum exp(s - m), o = sum exp(s
// - m) v.
//
// A warp holds a row: m and l in every lane, column lane + 32 j of o in o[j]. No finite number
// stands for infinity: an empty row is (-inf, 0, 0), and NaN in any part stays. Roundings are
// spelled out (fmaf, __fmul_rn), so that each path that folds the same parts gives the same bits.
#pragma once

#include <cstdint>

#include "common/types.cuh"
#include "problem.h"

namespace tiledattn::cuda {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x) % kWarpSize; }
__device__ __forceinline__ int warp_index() { return static_cast<int>(threadIdx.x) / kWarpSize; }
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fc00000); }

/// 2^x; numbers below 2^-126 are 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2)
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2)
    x = __fadd_rn(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

/// Unlike fmaxf, NaN if either is NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) { return a != a || a > b ? a : b; }

__device__ __forceinline__ bool is_empty(float m, float l) { return m == -infinity() && l == 0.0f; }

/// What each of two parts counts in their merge. An empty part leaves the other as it is, bit for
/// bit.
struct Fold {
  float m;
  float l;
  float weight_a;
  float weight_b;
  bool keep_a;
  bool keep_b;

  __device__ Fold(float m_a, float l_a, float m_b, float l_b) {
    keep_a = is_empty(m_b, l_b);
    keep_b = !keep_a && is_empty(m_a, l_a);
    m = keep_a ? m_a : keep_b ? m_b : max_or_nan(m_a, m_b);
    weight_a = expf(__fsub_rn(m_a, m));
    weight_b = expf(__fsub_rn(m_b, m));
    l = keep_a ? l_a : keep_b ? l_b : fmaf(l_b, weight_b, __fmul_rn(l_a, weight_a));
  }
  __device__ float value(float o_a, float o_b) const {
    return keep_a ? o_a : keep_b ? o_b : fmaf(o_b, weight_b, __fmul_rn(o_a, weight_a));
  }
};

/// A row that ends as out and lse. A sink is one more logit, which has no value.
struct RowResult {
  float scale;  ///< out = o * scale / sum; both kept apart, since 1 / sum would round once more
  float sum;
  float lse;

  __device__ RowResult(float m, float l, const float* sink) {
    scale = 1.0f;
    sum = l;
    if (sink != nullptr && *sink != -infinity()) {
      const float top = max_or_nan(m, *sink);
      scale = expf(__fsub_rn(m, top));
      sum = fmaf(l, scale, expf(__fsub_rn(*sink, top)));
      m = top;
    }
    lse = __fadd_rn(m, logf(sum));
  }
  __device__ float value(float o) const {
    return sum == 0.0f ? 0.0f : __fdiv_rn(__fmul_rn(o, scale), sum);
  }
};

/// The columns of one row that a lane holds.
template <int kColumns>
struct WarpRow {
  float m = -infinity();
  float l = 0.0f;
  float o[kColumns] = {};

  __device__ void load(const float* m_at, const float* l_at, const float* o_at,
                       std::int64_t head_dim_v) {
    m = *m_at;
    l = *l_at;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int column = lane_index() + kWarpSize * j;
      o[j] = column < head_dim_v ? o_at[column] : 0.0f;
    }
  }

  __device__ void store(float* m_at, float* l_at, float* o_at, std::int64_t head_dim_v) const {
    if (lane_index() == 0) {
      *m_at = m;
      *l_at = l;
    }
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int column = lane_index() + kWarpSize * j;
      if (column < head_dim_v) o_at[column] = o[j];
    }
  }

  /// this = merge(this, later).
  __device__ void fold(const WarpRow& later) {
    const Fold parts(m, l, later.m, later.l);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) o[j] = parts.value(o[j], later.o[j]);
    m = parts.m;
    l = parts.l;
  }
};

}  // namespace tiledattn::cuda
