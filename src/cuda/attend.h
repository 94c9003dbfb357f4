// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "plan.h"
#include "problem.h"

namespace tiledattn::cuda {

/// Launches what the plan says on the current device. `scratch` holds one int32 for each sequence
/// of a launch, rounded up to 256 bytes, then the partial results of each sequence.
void attend(const AttentionProblem& problem, const Plan& plan, void* scratch, cudaStream_t stream);

}  // namespace tiledattn::cuda
