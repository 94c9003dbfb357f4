// SPDX-License-Identifier: Apache-2.0
// Arguments -> problems. Every message about an argument is written in checks*.cpp; nothing here
// touches a device.
#pragma once

#include <cstdint>

#include "problem.h"
#include "tiledattn/attention.h"
#include "tiledattn/one_shot.h"

namespace tiledattn {

/// What the first tile of a step fixed: later calls of the step must agree.
struct StepShape {
  std::int64_t num_seqs = 0;
  bool fixed = false;  ///< false before the first tile: then only num_seqs holds
  std::int64_t q_len = 0;
  DType dtype = DType::float32;
  bool has_tokens = false;  ///< q was [B, q_len, Hq, D]; then out is [B, q_len, Hq, Dv]
  bool of_state = false;    ///< of a State, which no begin_step began
};

/// Checks scale, softcap, window and sinks for a device and these heads; throws ValueError or
/// TypeError.
void check_score_options(const ScoreOptions& options, Device device, std::int64_t num_q_heads);

/// Copies the options into a problem whose head_dim is set.
void set_score(AttentionProblem& problem, const ScoreOptions& options);

AttentionProblem check_step_tile(const TiledAttentionDims& dims, const ScoreOptions& options,
                                 Device device, const StepShape& step, const TileArgs& tile);
FinalizeProblem check_finalize(const TiledAttentionDims& dims, Device device, const StepShape& step,
                               const Tensor& out, const std::optional<Tensor>& lse);
AttentionProblem check_flash_attention(const FlashArgs& args);
AttentionProblem check_paged_attention(const PagedArgs& args);
MergeAttentionProblem check_merge_attention(const Tensor& out_a, const Tensor& lse_a,
                                            const Tensor& out_b, const Tensor& lse_b,
                                            const Tensor& out, const Tensor& lse, double lse_base);
WriteKvProblem check_write_kv(const WriteKvArgs& args);

/// The message of a device-found fault, as IndexError (block ids and slots) or ValueError (the
/// rest).
[[noreturn]] void throw_fault(const Fault& fault);

}  // namespace tiledattn
