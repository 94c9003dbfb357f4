// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory (sm_90): for transfers and for warps that wait for each other, and the
// numbered barriers of a block.
#pragma once

#include <cstdint>

namespace tiledattn::cuda {

/// Completes a phase when `count` arrivals and all expected bytes are in. Waiting for phase parity
/// 1 of a new barrier returns at once.
class MBarrier {
 public:
  __device__ __forceinline__ void init(int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(count) : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }
  /// Arrive, and let the phase wait for `bytes` of transfers as well.
  __device__ __forceinline__ void arrive_expecting(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()),
                 "r"(bytes)
                 : "memory");
  }
  /// Returns once the phase with this parity is complete.
  __device__ __forceinline__ void wait(std::uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(address()),
        "r"(parity)
        : "memory");
  }
  __device__ __forceinline__ std::uint32_t address() const {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(&state_));
  }

 private:
  std::uint64_t state_;
};

/// Makes initialised barriers visible to transfers. A __syncthreads() must follow for other
/// threads.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Numbered barriers of a block; number 0 is __syncthreads(). `threads` counts those that sync and
/// those that only arrive.
__device__ __forceinline__ void named_barrier_sync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

}  // namespace tiledattn::cuda
