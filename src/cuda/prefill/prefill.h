// SPDX-License-Identifier: Apache-2.0
// Prefill: many query rows for each sequence, each of which walks all its keys. One launch function
// for each variant.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/attend_params.h"

namespace tiledattn::cuda {

/// T is the element type of K and V, and of q unless it is quantised. Instantiated in inst/.
template <typename T>
void launch_prefill_plain(const AttendParams& params, cudaStream_t stream);

/// float16 and bfloat16 on Hopper, where the plan says so. counters: two, zero before and after.
void launch_prefill_sm90(const AttendParams& params, std::int32_t* counters, cudaStream_t stream);

/// Packed q: turns params.flags into the number of row tiles (of `tile_rows` rows) up to and with
/// each sequence.
void launch_count_row_tiles(const AttendParams& params, int tile_rows, cudaStream_t stream);

}  // namespace tiledattn::cuda
