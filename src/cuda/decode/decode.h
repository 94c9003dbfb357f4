// SPDX-License-Identifier: Apache-2.0
// Decode: few query rows for each sequence, keys cut into segments. One launch function for each
// variant of the kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "common/attend_params.h"

namespace tiledattn::cuda {

/// T is the element type of K and V, and of q unless it is quantised. Instantiated in inst/.
template <typename T>
void launch_decode_plain(const AttendParams& params, cudaStream_t stream);

}  // namespace tiledattn::cuda
