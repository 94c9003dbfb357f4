// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace tiledattn::cuda {

/// 90 for compute capability 9.0, 80 in its place where the build has no code for sm_90a. 0 where
/// TILEDATTN_CUDA_KERNELS=plain in the environment asks for the plain kernels, with which the
/// others are compared; it may change between calls.
int compute_capability(int device);

/// Streaming multiprocessors of the current device.
int num_multiprocessors();

}  // namespace tiledattn::cuda
