// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "plan.h"
#include "problem.h"

namespace tiledattn::cpu {

/// Attention of all sequences: checks what lies in the arrays, then folds the keys into state and
/// result.
void attend(const AttentionProblem& problem, const Plan& plan, void* scratch);

/// Steps over the same state, each with a q of the same sizes, in turn.
void attend_in_turn(const std::vector<AttentionStep>& steps, void* scratch);

}  // namespace tiledattn::cpu
