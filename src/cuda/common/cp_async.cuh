// SPDX-License-Identifier: Apache-2.0
// Copies from global to shared memory that need no registers (sm_80 and later).
#pragma once

#include <cstdint>

#include "common/shared_address.cuh"

namespace tiledattn::cuda {

/// 16 bytes of `from`, or zeros, for which `from` may be anything. Both addresses are multiples of
/// 16.
__device__ __forceinline__ void copy_async(std::uint32_t to, const void* from, bool zeros) {
  asm volatile(
      "{\n"
      ".reg .pred zeros;\n"
      "setp.ne.s32 zeros, %2, 0;\n"
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, zeros;\n"
      "}" ::"r"(to),
      "l"(from), "r"(static_cast<int>(zeros))
      : "memory");
}

/// One float. Both addresses are multiples of 4.
__device__ __forceinline__ void copy_float_async(std::uint32_t to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

/// Ends a group of this thread's copies, which may be empty.
__device__ __forceinline__ void end_copy_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits until at most the thread's last `kPending` groups are under way.
template <int kPending>
__device__ __forceinline__ void wait_copy_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace tiledattn::cuda
