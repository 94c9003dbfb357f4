// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "problem.h"
#include "tiledattn/attention.h"

namespace tiledattn {

/// A State's buffers as backends take them.
StateView state_view(const State& state);

/// Rows of a State: one for each (sequence, query token, query head).
std::int64_t state_rows(const State& state);

}  // namespace tiledattn
