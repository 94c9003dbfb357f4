// SPDX-License-Identifier: Apache-2.0
// Element types on the device: one at a time, and 16 bytes at a time. All arithmetic is float32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "problem.h"

namespace tiledattn::cuda {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__nv_fp8_e4m3 x) { return static_cast<float>(x); }
__device__ __forceinline__ float to_float(std::int8_t x) { return static_cast<float>(x); }

/// A type of K and V that goes with scales, and with a q of another type.
template <typename T>
constexpr bool kQuantized = sizeof(T) == 1;

/// Elements in 16 bytes.
template <typename T>
constexpr int kVectorSize = 16 / static_cast<int>(sizeof(T));

/// 16 bytes of T, as loaded.
template <typename T>
union Vector {
  uint4 bits;
  T items[kVectorSize<T>];
  __device__ Vector() : bits{0, 0, 0, 0} {}
};

__device__ __forceinline__ float load_element(const void* data, DType dtype, std::int64_t offset) {
  switch (dtype) {
    case DType::float16:
      return to_float(static_cast<const __half*>(data)[offset]);
    case DType::bfloat16:
      return to_float(static_cast<const __nv_bfloat16*>(data)[offset]);
    default:
      return static_cast<const float*>(data)[offset];
  }
}

/// Rounds to the nearest value of `dtype`.
__device__ __forceinline__ void store_element(void* data, DType dtype, std::int64_t offset,
                                              float value) {
  switch (dtype) {
    case DType::float16:
      static_cast<__half*>(data)[offset] = __float2half_rn(value);
      break;
    case DType::bfloat16:
      static_cast<__nv_bfloat16*>(data)[offset] = __float2bfloat16_rn(value);
      break;
    default:
      static_cast<float*>(data)[offset] = value;
  }
}

}  // namespace tiledattn::cuda
