// SPDX-License-Identifier: Apache-2.0
#include "common/tensor_map.h"

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "cuda_check.h"
#include "device_guard.h"
#include "tiledattn/error.h"

namespace tiledattn::cuda {

namespace {

constexpr std::int64_t kAlignment = 16;
constexpr std::int64_t kMaxStrideBytes = std::int64_t{1} << 40;
constexpr std::int64_t kMaxSize = std::int64_t{1} << 31;

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode find_encode() {
  constexpr unsigned kFirstVersion = 12000;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kFirstVersion,
                                         cudaEnableDefault, &found),
        "cudaGetDriverEntryPointByVersion for cuTensorMapEncodeTiled");
  if (found != cudaDriverEntryPointSuccess || function == nullptr)
    throw CudaError("the driver has no cuTensorMapEncodeTiled");
  return reinterpret_cast<Encode>(function);
}

CUtensorMapDataType data_type(DType dtype) {
  switch (dtype) {
    case DType::float32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case DType::float16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::bfloat16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::float8_e4m3fn:
    case DType::int8:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    default:
      throw TypeError("tensor map: no element type for " + to_string(dtype));
  }
}

CUtensorMapSwizzle swizzle(int bytes) {
  switch (bytes) {
    case 128:
      return CU_TENSOR_MAP_SWIZZLE_128B;
    case 64:
      return CU_TENSOR_MAP_SWIZZLE_64B;
    case 32:
      return CU_TENSOR_MAP_SWIZZLE_32B;
    default:
      return CU_TENSOR_MAP_SWIZZLE_NONE;
  }
}

/// The stride of a dimension of one element is never used, but must look right.
std::int64_t stride_bytes(const TensorMapSpec& spec, std::size_t dimension) {
  return spec.sizes[dimension] > 1 ? spec.strides[dimension] * item_bytes(spec.dtype) : kAlignment;
}

CUtensorMap encode(const TensorMapSpec& spec) {
  static const Encode encode_tiled = find_encode();
  std::array<cuuint64_t, 5> sizes{};
  std::array<cuuint64_t, 5> strides{};  // bytes, from the second dimension on
  std::array<cuuint32_t, 5> box{};
  std::array<cuuint32_t, 5> steps{};
  for (std::size_t i = 0; i < static_cast<std::size_t>(spec.rank); ++i) {
    sizes[i] = static_cast<cuuint64_t>(spec.sizes[i]);
    if (i > 0) strides[i - 1] = static_cast<cuuint64_t>(stride_bytes(spec, i));
    box[i] = static_cast<cuuint32_t>(spec.box[i]);
    steps[i] = 1;
  }
  CUtensorMap map;
  const auto ask_driver = [&] {
    return encode_tiled(&map, data_type(spec.dtype), static_cast<cuuint32_t>(spec.rank),
                        const_cast<void*>(spec.data), sizes.data(), strides.data(), box.data(),
                        steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle(spec.swizzle_bytes),
                        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult status = ask_driver();
  if (status == CUDA_ERROR_INVALID_CONTEXT) {  // the runtime has done nothing in this thread yet
    check(cudaSetDevice(DeviceGuard::current()), "cudaSetDevice");
    status = ask_driver();
  }
  if (status != CUDA_SUCCESS) {
    throw CudaError("cuTensorMapEncodeTiled failed with CUresult " +
                    std::to_string(static_cast<int>(status)));
  }
  return map;
}

}  // namespace

bool fits_tensor_map(const TensorMapSpec& spec) {
  if (reinterpret_cast<std::uintptr_t>(spec.data) % kAlignment != 0) return false;
  for (std::size_t i = 0; i < static_cast<std::size_t>(spec.rank); ++i) {
    if (spec.sizes[i] < 1 || spec.sizes[i] > kMaxSize) return false;
    if (i == 0) continue;
    const std::int64_t bytes = stride_bytes(spec, i);
    if (bytes <= 0 || bytes >= kMaxStrideBytes || bytes % kAlignment != 0) return false;
  }
  return true;
}

CUtensorMap encode_tensor_map(const TensorMapSpec& spec) {
  // A map is made of its spec alone, and an engine's calls have the same pools again and again.
  struct Known {
    TensorMapSpec spec;
    CUtensorMap map;
  };
  constexpr std::size_t kKnown = 16;
  thread_local std::array<Known, kKnown> known{};
  thread_local std::size_t oldest = 0;
  for (const Known& one : known)
    if (one.spec == spec) return one.map;
  const CUtensorMap map = encode(spec);
  known[oldest] = {spec, map};
  oldest = (oldest + 1) % kKnown;
  return map;
}

}  // namespace tiledattn::cuda
