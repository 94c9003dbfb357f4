// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch (sm_90 and later): kernels of a stream that overlap at their ends.
#pragma once

namespace tiledattn::cuda {

/// The next kernel of the stream may be made ready from now on, if it was launched so. What it must
/// not see half done it waits for itself.
__device__ __forceinline__ void start_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/// Returns once the kernels before this one are done and what they wrote can be read. At once where
/// this one was launched the ordinary way.
__device__ __forceinline__ void wait_for_predecessor() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace tiledattn::cuda
