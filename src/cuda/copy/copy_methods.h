// SPDX-License-Identifier: Apache-2.0
// The ways to copy many pieces to the current device, and which of them is the fastest here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "copy_plan.h"

namespace tiledattn::cuda {

/// Copies pieces from pinned or device memory. False, with nothing done, where the driver does not
/// know how; `each` always works, also from pageable memory.
bool copy_by(CopyMethod method, const CopyPiece* pieces, std::size_t count, cudaStream_t stream);

/// Of the current device, for the life of the process. Measured by the first call for it, which
/// takes some milliseconds and, meanwhile, some memory there; not for a capture.
const CopyRates& copy_rates(int device);

}  // namespace tiledattn::cuda
