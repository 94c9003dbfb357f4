// SPDX-License-Identifier: Apache-2.0
// Elements of the cache as operands of tensor-core products. Elements of 16 bits are multiplied as
// they come from shared memory. Those of one byte become fp16 in registers, which is exact.
//
// ldmatrix moves units of 16 bits: one element, or two of a byte each, so that it brings 16 or 32
// columns of a key, one or two steps of 16. With bytes a lane gets columns 4t .. 4t + 3 of K in
// each step where the product wants 2t, 2t + 1, 2t + 8 and 2t + 9. The columns of a sum may stand
// in any order, so q is read in that of K. Of V, transposed, it gets columns 2g and 2g + 1 where
// the product wants g and g + 8: so the output's columns stand in that order.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "common/mma.cuh"
#include "common/softmax_state.cuh"
#include "common/types.cuh"

namespace tiledattn::cuda {

/// The type in which elements of type T are multiplied.
template <typename T>
using ProductType = std::conditional_t<kQuantized<T>, __half, T>;

/// Steps of 16 columns in one ldmatrix.
template <typename T>
constexpr int kStepsOfLoad = kQuantized<T> ? 2 : 1;

/// Four bytes as fp16: elements 0 and 1, and elements 2 and 3.
template <typename T>
__device__ __forceinline__ uint2 widen(std::uint32_t bytes) {
  uint2 pairs;
  if constexpr (std::is_same_v<T, __nv_fp8_e4m3>) {
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n"
        "}"
        : "=r"(pairs.x), "=r"(pairs.y)
        : "r"(bytes));
  } else {
    static_assert(std::is_same_v<T, std::int8_t>);
    // 0x6400 + n is the fp16 number 1024 + n; n is the element + 128.
    const std::uint32_t shifted = bytes ^ 0x80808080u;
    const __half2 offset = __float2half2_rn(1024.0f + 128.0f);
    const std::uint32_t words[2] = {__byte_perm(shifted, 0x64646464u, 0x4140),
                                    __byte_perm(shifted, 0x64646464u, 0x4342)};
    __half2 halves[2];
    __builtin_memcpy(halves, words, sizeof(words));
    halves[0] = __hsub2(halves[0], offset);
    halves[1] = __hsub2(halves[1], offset);
    __builtin_memcpy(&pairs, halves, sizeof(pairs));
  }
  return pairs;
}

/// K of 16 keys and 16 columns, from what load_matrices() brought.
template <typename T>
__device__ __forceinline__ FragmentA key_operand(const FragmentA& loaded, int step) {
  if constexpr (kQuantized<T>) {
    const uint2 near = widen<T>(loaded.part[2 * step]);
    const uint2 far = widen<T>(loaded.part[2 * step + 1]);  // keys 8 .. 15
    return {{near.x, far.x, near.y, far.y}};
  } else {
    return loaded;
  }
}

/// V of 16 columns and 16 keys, from what load_matrices_transposed() brought.
template <typename T>
__device__ __forceinline__ FragmentA value_operand(const FragmentA& loaded, int step) {
  if constexpr (kQuantized<T>) {
    // Bytes come as two columns of one key, then of the next: a pair is one column of two keys.
    constexpr unsigned kByColumn = 0x3120;
    const uint2 near = widen<T>(__byte_perm(loaded.part[step], 0, kByColumn));
    const uint2 far = widen<T>(__byte_perm(loaded.part[2 + step], 0, kByColumn));
    return {{near.x, near.y, far.x, far.y}};
  } else {
    return loaded;
  }
}

/// The column of q that this lane holds in `half` of a step, the first of two; of 16.
template <typename T>
__device__ __forceinline__ int query_column(int half) {
  const int t = lane_index() % 4;
  return kQuantized<T> ? 4 * t + 2 * half : 8 * half + 2 * t;
}

}  // namespace tiledattn::cuda
