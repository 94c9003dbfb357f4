// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace tiledattn::cuda {

/// 10 * major + minor of the GPU, but 80 in place of 90 where the build has no code for sm_90a. At
/// most 80 where TILEDATTN_CUDA_KERNELS=portable in the environment asks for the portable kernel, 0
/// where it asks for the plain ones, with which the others are compared; it may change between
/// calls.
int compute_capability(int device);

/// Streaming multiprocessors of the device that a DeviceGuard has made current.
int num_multiprocessors();

}  // namespace tiledattn::cuda
