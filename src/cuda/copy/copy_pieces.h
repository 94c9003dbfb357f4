// SPDX-License-Identifier: Apache-2.0
// Copies by kernels, which read pinned host memory by themselves. For pieces of some KiB they are
// many times as fast as the copy engines, and for long ones a little slower.
//
// What a kernel needs to know goes with its launch, so it is read before the call returns, and
// nothing has to be kept until the kernel runs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "copy_plan.h"

namespace tiledattn::cuda {

/// Copies small pieces of which kernel_can_copy() is true, from memory that the current device can
/// read.
void launch_copy_pieces(const CopyPiece* pieces, std::size_t count, cudaStream_t stream);

/// Writes what `from` holds now into device memory. Addresses and bytes are multiples of 8.
void launch_write_words(void* to, const void* from, std::int64_t bytes, cudaStream_t stream);

}  // namespace tiledattn::cuda
