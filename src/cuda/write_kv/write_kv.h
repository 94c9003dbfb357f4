// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "problem.h"

namespace tiledattn::cuda {

/// Copies tokens into the slots of a pool. A token whose slot is outside the pool is skipped and
/// reported. `overlaps`: the kernel that runs is one that waits for the kernel before it by itself
/// (dependents.cuh).
void launch_write_kv(const WriteKvProblem& problem, bool overlaps, cudaStream_t stream);

}  // namespace tiledattn::cuda
