// SPDX-License-Identifier: Apache-2.0
// What the host cannot see without waiting is checked on the device, before any kernel uses it.
#pragma once

#include <cuda_runtime_api.h>

#include "common/attend_params.h"

namespace tiledattn::cuda {

/// True when some argument of the problem lies on the device: lengths, counts, block ids,
/// positions.
inline bool needs_validation(const AttentionProblem& p) {
  return p.key_source != KeySource::dense || p.packed_q() || p.kv_positions.given();
}

/// Sets params.flags. The rows of a sequence with a fault become NaN in out, lse and state, and the
/// fault goes to the host.
void validate(const AttendParams& params, cudaStream_t stream);

/// The rows of packed q after the last sequence see no key: out 0 and lse -inf, or the sink. Goes
/// between validate() and the attention.
void fill_rows_after_last_sequence(const AttentionProblem& problem, cudaStream_t stream);

}  // namespace tiledattn::cuda
