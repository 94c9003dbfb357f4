// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace tiledattn::cuda {

/// For make_plan: 90 for a GPU of compute capability 9.0 and a build with code for sm_90a, else 0.
/// TILEDATTN_CUDA_KERNELS=portable in the environment makes it kPortableCapability, =plain 0; it
/// may change between calls.
int compute_capability(int device);

/// Streaming multiprocessors of the current device.
int num_multiprocessors();

}  // namespace tiledattn::cuda
