// SPDX-License-Identifier: Apache-2.0
// The scales of a quantised cache: K's belong to scores, V's to weights.
//
// A scale of a whole head is a factor of all its scores, or of its sums. Scales that differ from
// key to key are copied to shared memory ahead, like the keys.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/softmax_state.cuh"
#include "decode/decode_sm90_element.cuh"

namespace tiledattn::cuda {

/// Shared memory of a warp: factors of the head at hand, and the scales of two chunks' keys, which
/// take turns.
template <int kTiles, int kKeys>
struct ScaleBuffers {
  float rows[kTiles * 8];             ///< a product of this row times this is a score
  float value;                        ///< of all sums, where V's keys have none of their own
  float units[kTiles][2][kWarpSize];  ///< each lane's own: of its sums, where they have
  float k[2][kKeys];
  float v[2][kKeys];
};

/// In its place, where nothing has a scale.
struct NoScales {};

template <typename Config>
using WarpScales = std::conditional_t<kQuantized<typename Config::Element>,
                                      ScaleBuffers<Config::kTiles, Config::kChunkKeys>, NoScales>;

/// 1 / x of a power of two from 2^-126 to 2^126.
__device__ __forceinline__ float inverse_of_power(float x) {
  return __uint_as_float((254u << 23) - __float_as_uint(x));
}

/// The power of two that brings x >= 0 to 2^14 .. 2^15, in the upper part of fp16, or as near as a
/// float from 2^-126 to 2^126 does.
__device__ __forceinline__ float power_for_fp16(float x) {
  constexpr std::uint32_t kLargest = 127 + 126;
  constexpr std::uint32_t kSum = 127 + 127 + 14;  // of both exponents as they are stored
  const std::uint32_t exponent = kSum - (__float_as_uint(x) >> 23);
  return __uint_as_float((exponent < kLargest ? exponent : kLargest) << 23);
}

/// Two elements of a 16-bit q.
__device__ __forceinline__ float2 unpack_query(std::uint32_t pair, DType dtype) {
  if (dtype == DType::float16) {
    __half2 halves;
    __builtin_memcpy(&halves, &pair, sizeof(pair));
    return __half22float2(halves);
  }
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

/// |x|, or 0 where that is no finite number.
__device__ __forceinline__ float finite_magnitude(float x) {
  return fabsf(x) < infinity() ? fabsf(x) : 0.0f;
}

/// Sets the factors of a head, and makes `queries`, which are as loaded from q, fp16. Each row is
/// multiplied by a power of two, so that no finite number is too large and only those far below the
/// row's largest are lost.
template <typename Config, typename Queries>
__device__ __forceinline__ void begin_head(const AttentionProblem& p, int kv_head, Queries& queries,
                                           WarpScales<Config>& scales) {
  const float k_scale = p.k_scale.by_key ? 1.0f : p.k_scale.at(0, 0, kv_head);
  if (lane_index() == 0) scales.value = p.v_scale.by_key ? 1.0f : p.v_scale.at(0, 0, kv_head);
#pragma unroll
  for (int tile = 0; tile < Config::kTiles; ++tile) {
    float top = 0.0f;
#pragma unroll
    for (int i = 0; i < Config::kDim / 16; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 x = unpack_query(queries.part[i][tile].part[half], p.q.dtype);
        top = fmaxf(top, fmaxf(finite_magnitude(x.x), finite_magnitude(x.y)));
      }
#pragma unroll
    for (int step = 1; step < 4; step *= 2)  // the lanes of a row
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
    const float power = power_for_fp16(top);
#pragma unroll
    for (int i = 0; i < Config::kDim / 16; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t& pair = queries.part[i][tile].part[half];
        const float2 x = unpack_query(pair, p.q.dtype);
        pair = pack<__half>(__fmul_rn(x.x, power), __fmul_rn(x.y, power));
      }
    if (lane_index() % 4 == 0)
      scales.rows[tile * 8 + lane_index() / 4] =
          __fmul_rn(__fmul_rn(p.softmax_scale, k_scale), inverse_of_power(power));
  }
  __syncwarp();
}

}  // namespace tiledattn::cuda
