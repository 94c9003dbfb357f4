// SPDX-License-Identifier: Apache-2.0
// The only argument of every attention kernel: the problem, and the sequences of it that one launch
// works on.
#pragma once

#include <cstdint>

#include "plan.h"
#include "problem.h"

namespace tiledattn::cuda {

struct AttendParams {
  AttentionProblem problem;
  std::int64_t first_seq = 0;  ///< of this launch
  std::int64_t num_seqs = 0;   ///< of this launch

  /// [num_seqs], null where the host has seen every argument. After validation: 1 for a sequence
  /// with a fault, else 0. Prefill of packed q makes these into the number of row tiles up to and
  /// with each sequence.
  std::int32_t* flags = nullptr;

  /// Rows of K (V) can be read in 16-byte pieces.
  bool vector_k = false;
  bool vector_v = false;

  // Where keys are cut into segments. Partial row (segment, token, head) of a sequence is m, l,
  // o[head_dim_v].
  std::int64_t max_segments = 1;
  SegmentCut cut;
  /// A sequence of one segment has no partial result: the kernel has made its rows' results.
  bool one_is_final = false;
  float* partials = nullptr;  ///< null: no sequence of the call has more than one segment
  std::int64_t partial_seq_stride = 0;

  TILEDATTN_HOST_DEVICE bool split() const { return partials != nullptr; }
  TILEDATTN_HOST_DEVICE float* partial_row(std::int64_t seq, std::int64_t segment,
                                           std::int64_t token, std::int64_t head) const {
    const std::int64_t row = (segment * problem.q_len + token) * problem.num_q_heads + head;
    return partials + (seq - first_seq) * partial_seq_stride + row * (problem.head_dim_v + 2);
  }
};

}  // namespace tiledattn::cuda
