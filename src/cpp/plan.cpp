// SPDX-License-Identifier: Apache-2.0
#include "plan.h"

#include <algorithm>
#include <string>

#include "tiledattn/error.h"

namespace tiledattn {

namespace {

/// Before the partial results, scratch holds one int32 for each sequence, rounded up to this many
/// bytes.
constexpr std::int64_t kFlagAlignment = 256;

/// An upper bound of the keys that one sequence's query tokens see together.
std::int64_t max_visible_keys(const AttentionProblem& p) {
  std::int64_t keys = 0;
  switch (p.key_source) {
    case KeySource::tiles:
    case KeySource::paged:
      keys = p.table_width * p.block_size;
      break;
    case KeySource::dense:
      keys = p.dense_kv_len;
      break;
    case KeySource::packed:
      keys = p.total_k;
      break;
  }
  const std::int64_t right = p.causal ? 0 : p.window_right;
  if (p.window_left == kNoWindow || right == kNoWindow) return keys;
  return std::min(keys, p.window_left + right + p.q_len);
}

std::int64_t segment_limit(std::int64_t rows, std::int64_t head_dim_v) {
  const std::int64_t segment_bytes =
      std::max<std::int64_t>(rows, 1) * partial_row_bytes(head_dim_v);
  return std::clamp<std::int64_t>(kMaxSequenceScratch / segment_bytes, 1, kMaxSegments);
}

/// The most segments of any sequence with up to `max_keys` keys: a longer one may have fewer,
/// larger segments.
std::int64_t most_segments(std::int64_t max_keys, std::int64_t limit) {
  return std::clamp<std::int64_t>((max_keys + kSegmentKeys - 1) / kSegmentKeys, 1, limit);
}

bool is_decode(const AttentionProblem& p) {
  return p.state.m != nullptr || (!p.packed_q() && p.q_len <= kMaxDecodeTokens);
}

}  // namespace

const char* to_string(Kernel kernel) {
  switch (kernel) {
    case Kernel::cpu_decode:
      return "cpu_decode";
    case Kernel::cpu_prefill:
      return "cpu_prefill";
    case Kernel::cuda_decode_plain:
      return "cuda_decode_plain";
    case Kernel::cuda_prefill_plain:
      return "cuda_prefill_plain";
  }
  return "unknown";
}

Plan make_plan(const AttentionProblem& p, Device device, std::int64_t workspace_bytes) {
  Plan plan;
  if (is_decode(p)) {
    plan.kernel = device.is_cpu() ? Kernel::cpu_decode : Kernel::cuda_decode_plain;
    const std::int64_t rows = p.q_len * p.num_q_heads;
    plan.segment_limit = segment_limit(rows, p.head_dim_v);
    plan.max_segments = most_segments(max_visible_keys(p), plan.segment_limit);
    // One segment needs no partial results: its result is the sequence's.
    if (plan.max_segments > 1)
      plan.sequence_bytes = rows * plan.max_segments * partial_row_bytes(p.head_dim_v);
  } else {
    plan.kernel = device.is_cpu() ? Kernel::cpu_prefill : Kernel::cuda_prefill_plain;
  }
  const std::int64_t flag_bytes = 4;
  const std::int64_t fit = (workspace_bytes - kFlagAlignment) / (plan.sequence_bytes + flag_bytes);
  if (fit < 1) {
    throw ValueError("workspace: has " + std::to_string(workspace_bytes) +
                     " bytes; this call needs at least " +
                     std::to_string(plan.sequence_bytes + flag_bytes + kFlagAlignment));
  }
  if (!device.is_cpu() && p.packed_q() && fit < p.num_seqs) {
    // Wrong cu_seqlens_q may let sequences overlap, so all must be validated before any writes its
    // result.
    throw ValueError("workspace: holds " + std::to_string(fit) +
                     " sequences; with packed q it must hold all " + std::to_string(p.num_seqs) +
                     ", with 4 bytes for each and 256 more");
  }
  plan.seqs_per_launch = std::min(fit, std::max<std::int64_t>(p.num_seqs, 1));
  return plan;
}

std::int64_t decode_workspace_bytes(std::int64_t num_seqs, std::int64_t q_len,
                                    std::int64_t num_q_heads, std::int64_t head_dim_v,
                                    std::int64_t max_keys) {
  // A call with fewer query tokens may be cut into more segments, but never needs more than the
  // limit or this call's rows.
  const std::int64_t row_bytes = q_len * num_q_heads * partial_row_bytes(head_dim_v);
  const std::int64_t segments = most_segments(max_keys, kMaxSegments);
  std::int64_t sequence_bytes = 0;
  if (segments > 1)
    sequence_bytes = std::min(row_bytes * segments, std::max(kMaxSequenceScratch, row_bytes));
  const std::int64_t partial_bytes =
      std::min(num_seqs * sequence_bytes, std::max(2 * kMaxSequenceScratch, sequence_bytes));
  return partial_bytes + num_seqs * 4 + kFlagAlignment;
}

}  // namespace tiledattn
