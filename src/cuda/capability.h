// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace tiledattn::cuda {

/// 90 for compute capability 9.0, 80 in its place where the build has no code for sm_90a. At most
/// 80 where TILEDATTN_CUDA_KERNELS=portable in the environment asks for the portable kernel, 0
/// where it asks for the plain ones, with which the others are compared; it may change between
/// calls.
int compute_capability(int device);

/// Streaming multiprocessors of the current device.
int num_multiprocessors();

}  // namespace tiledattn::cuda
