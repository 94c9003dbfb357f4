// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "common/attend_params.h"

namespace tiledattn::cuda {

/// Folds the partial results of each row in the order of keys and finishes the row. For
/// params.split() only.
void launch_combine_segments(const AttendParams& params, cudaStream_t stream);

}  // namespace tiledattn::cuda
