// SPDX-License-Identifier: Apache-2.0
// Descriptions of strided arrays for TMA.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>

#include "tiledattn/tensor.h"

namespace tiledattn::cuda {

/// An array of up to five dimensions, innermost first, and the box of it that one transfer moves.
struct TensorMapSpec {
  const void* data = nullptr;
  DType dtype = DType::bfloat16;
  int rank = 0;
  std::array<std::int64_t, 5> sizes{};
  std::array<std::int64_t, 5> strides{};  ///< elements; [0] is 1
  std::array<int, 5> box{};
  int swizzle_bytes = 128;  ///< 0, 32, 64 or 128

  bool operator==(const TensorMapSpec&) const = default;
};

/// What TMA asks of the array: 16-byte alignment of the address and of all strides but the first,
/// strides above 0 and below 2^40 bytes, at most 2^31 elements along a dimension.
bool fits_tensor_map(const TensorMapSpec& spec);

/// Throws CudaError where the driver refuses it. The driver is asked for its function; nothing
/// links to it. A thread keeps its last maps.
CUtensorMap encode_tensor_map(const TensorMapSpec& spec);

}  // namespace tiledattn::cuda
