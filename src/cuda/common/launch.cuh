// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "common/shared_limit.h"
#include "cuda_check.h"

namespace tiledattn::cuda {

struct LaunchShape {
  std::int64_t blocks = 0;
  int threads = 0;
  std::size_t shared_bytes = 0;
  /// The kernel may start while the one before it in the stream ends, and waits for that by itself
  /// (griddepcontrol.wait) before it touches global memory.
  bool overlaps = false;
};

/// The largest grid.x. Kernels stride over their work by the grid, so more work than this is only
/// slower.
constexpr std::int64_t kMaxBlocks = 2147483647;

/// Dynamic shared memory that a kernel has without asking.
constexpr std::size_t kDefaultSharedBytes = 48 * 1024;

/// Dynamic shared memory of a kernel for every GPU from sm_80 on; sm_86, sm_89 and sm_120 have
/// least.
template <typename Shared>
constexpr std::size_t shared_bytes_of() {
  constexpr std::size_t kMostOfBlock = 99 * 1024;
  static_assert(sizeof(Shared) <= kMostOfBlock);
  return sizeof(Shared);
}

/// Of a kernel for sm_90, kBlocks of which are meant to run on an SM.
template <typename Shared, int kBlocks = 1>
constexpr std::size_t shared_bytes_of_sm90() {
  constexpr std::size_t kMostOfSm = 228 * 1024;
  constexpr std::size_t kReserved = 1024;  // for each block
  static_assert(kBlocks * (sizeof(Shared) + kReserved) <= kMostOfSm);
  return sizeof(Shared);
}

/// Launches a kernel with one argument. The launch's own status is read, never the one that the
/// runtime remembers: that may be another library's.
template <typename Params>
void launch(void (*kernel)(Params), const char* name, const LaunchShape& shape,
            const Params& params, cudaStream_t stream) {
  if (shape.blocks <= 0) return;
  if (shape.shared_bytes > kDefaultSharedBytes)
    allow_shared_bytes(reinterpret_cast<const void*>(kernel), name, shape.shared_bytes);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(std::min(shape.blocks, kMaxBlocks)));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  if (shape.overlaps) {
    config.attrs = &overlap;
    config.numAttrs = 1;
  }
  check(cudaLaunchKernelEx(&config, kernel, params), "launch", name);
}

}  // namespace tiledattn::cuda
