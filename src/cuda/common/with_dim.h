// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "problem.h"
#include "tiledattn/error.h"

namespace tiledattn::cuda {

/// Calls `f` with std::integral_constant<int, N> for the smallest compiled N that holds both head
/// dims.
template <typename F>
void with_dim(std::int64_t head_dim, std::int64_t head_dim_v, F&& f) {
  const std::int64_t dim = head_dim > head_dim_v ? head_dim : head_dim_v;
  if (dim <= 64) return f(std::integral_constant<int, 64>{});
  if (dim <= 128) return f(std::integral_constant<int, 128>{});
  if (dim <= kMaxHeadDim) return f(std::integral_constant<int, kMaxHeadDim>{});
  throw ValueError("head_dim: the larger of head_dim and head_dim_v is " + std::to_string(dim) +
                   "; at most " + std::to_string(kMaxHeadDim) + " is supported on CUDA");
}

}  // namespace tiledattn::cuda
