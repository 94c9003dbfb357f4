// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch: kernels of a stream that overlap at their ends. Before sm_90 there
// is none, and nothing to do.
#pragma once

namespace tiledattn::cuda {

/// The next kernel of the stream may be made ready from now on, if it was launched so. What it must
/// not see half done it waits for itself. After wait_for_predecessor(): then whatever runs before
/// this kernel is done when the next one starts, which may rely on that (early_start).
__device__ __forceinline__ void start_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Returns once the kernels before this one are done and what they wrote can be read. At once where
/// this one was launched the ordinary way.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace tiledattn::cuda
