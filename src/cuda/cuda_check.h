// SPDX-License-Identifier: Apache-2.0
// Host code. Calls to the CUDA runtime go through check(), save those of clean-up, which has nobody
// to tell.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "tiledattn/error.h"

namespace tiledattn::cuda {

/// "cudaErrorInvalidValue: invalid argument".
inline std::string describe(cudaError_t status) {
  return std::string(cudaGetErrorName(status)) + ": " + cudaGetErrorString(status);
}

/// Throws CudaError with the name of the call and the driver's text. The runtime also remembers the
/// error of a failed call for cudaGetLastError; we take it back, or another library's next check
/// would report it as its own.
inline void check(cudaError_t status, const std::string& call) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  if (status == cudaErrorMemoryAllocation)
    throw MemoryError(call + " failed with " + describe(status));
  throw CudaError(call + " failed with " + describe(status));
}

}  // namespace tiledattn::cuda
