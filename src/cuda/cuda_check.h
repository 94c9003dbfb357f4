// SPDX-License-Identifier: Apache-2.0
// Host code. Calls to the CUDA runtime go through check(), save those of clean-up, which has nobody
// to tell.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <string_view>

#include "tiledattn/error.h"

namespace tiledattn::cuda {

/// "cudaErrorInvalidValue: invalid argument".
inline std::string describe(cudaError_t status) {
  return std::string(cudaGetErrorName(status)) + ": " + cudaGetErrorString(status);
}

/// Throws CudaError with the name of the call, what it was for, and the driver's text. The runtime
/// also remembers the error of a failed call for cudaGetLastError; we take it back, or another
/// library's next check would report it as its own.
[[noreturn]] inline void fail(cudaError_t status, std::string_view call, std::string_view of) {
  (void)cudaGetLastError();
  std::string text(call);
  if (!of.empty()) text.append(" of ").append(of);
  text.append(" failed with ").append(describe(status));
  if (status == cudaErrorMemoryAllocation) throw MemoryError(text);
  throw CudaError(text);
}

/// Costs nothing where the call has succeeded.
inline void check(cudaError_t status, std::string_view call, std::string_view of = {}) {
  if (status != cudaSuccess) fail(status, call, of);
}

}  // namespace tiledattn::cuda
