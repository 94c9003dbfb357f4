// SPDX-License-Identifier: Apache-2.0
// One row of a running softmax: merging rows and making results of them. A row is one query head of
// one token.
#pragma once

#include <cstdint>

#include "problem.h"

namespace tiledattn::cpu {

/// Natural units: m the largest score, l the sum of exp(score - m), o[head_dim_v] the sum of
/// exp(score - m) v.
struct Row {
  float* m;
  float* l;
  float* o;
};

/// No key so far, or none whose score is above -inf.
bool is_empty(const Row& row);
void clear_row(const Row& row, std::int64_t head_dim_v);
void copy_row(const Row& from, const Row& into, std::int64_t head_dim_v);

/// Folds `from` into `into`. When either is empty the result is the other, bit for bit.
void merge_row(const Row& into, const Row& from, std::int64_t head_dim_v);

/// Row (token, head) of sequence `seq` in the state's buffers.
Row state_row(const StateView& state, std::int64_t seq, std::int64_t token, std::int64_t head,
              std::int64_t num_q_heads, std::int64_t head_dim_v);

/// out = o / l and lse = m + ln l of (seq, token, head), with the sink where there is one. Does not
/// change the row.
void write_result(const OutputView& out, const float* sinks, std::int64_t seq, std::int64_t token,
                  std::int64_t head, const Row& row, std::int64_t head_dim_v);

}  // namespace tiledattn::cpu
