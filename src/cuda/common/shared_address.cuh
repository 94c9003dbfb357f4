// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace tiledattn::cuda {

/// Where `at`, in shared memory, lies for instructions that take 32-bit addresses.
__device__ __forceinline__ std::uint32_t shared_address(const void* at) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(at));
}

}  // namespace tiledattn::cuda
