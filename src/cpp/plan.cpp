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

/// TMA moves boxes of the array [sequence, token, head, columns]: 16-byte aligned, as are the
/// strides of all dimensions that have more than one element.
bool fits_tma(const void* data, std::int64_t num_seqs, std::int64_t seq_stride,
              std::int64_t num_tokens, std::int64_t token_stride, std::int64_t num_heads,
              std::int64_t head_stride) {
  constexpr std::int64_t kElements = 8;  // 16 bytes
  constexpr std::int64_t kMaxStride = std::int64_t{1} << 39;
  const auto fits = [](std::int64_t size, std::int64_t stride) {
    return size <= 1 || (stride > 0 && stride < kMaxStride && stride % kElements == 0);
  };
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && fits(num_seqs, seq_stride) &&
         fits(num_tokens, token_stride) && fits(num_heads, head_stride);
}

/// The Hopper prefill kernel: 16-bit types, dense or packed, whose arrays TMA can reach. Lengths,
/// windows and numbers of tiles are 32-bit in the kernel.
bool fits_prefill_sm90(const AttentionProblem& p) {
  constexpr std::int64_t kMaxLength = std::int64_t{1} << 29;
  constexpr std::int64_t kMaxTiles = std::int64_t{1} << 31;
  constexpr std::int64_t kFewestRows = 64;  // of a tile
  if (p.q.dtype != DType::float16 && p.q.dtype != DType::bfloat16) return false;
  const bool packed = p.packed_q();
  if (p.key_source != (packed ? KeySource::packed : KeySource::dense)) return false;
  if (p.kv_positions.given()) return false;
  if (p.head_dim % 8 != 0 || p.head_dim_v % 8 != 0) return false;

  const std::int64_t batch = packed ? 1 : p.num_seqs;
  const std::int64_t q_rows = packed ? p.total_q : p.q_len;
  const std::int64_t key_rows = packed ? p.total_k : p.dense_kv_len;
  if (p.num_seqs < 1 || q_rows < 1 || key_rows < 1 || p.num_q_heads < 1) return false;
  if (p.num_seqs >= kMaxLength || q_rows >= kMaxLength || key_rows >= kMaxLength ||
      p.num_q_heads >= kMaxLength)
    return false;
  const double tiles = static_cast<double>(q_rows / kFewestRows + 1 + (packed ? p.num_seqs : 0)) *
                       static_cast<double>(batch) * static_cast<double>(p.num_q_heads);
  if (tiles >= static_cast<double>(kMaxTiles)) return false;

  const auto keys_fit = [&](const PoolView& pool) {
    return fits_tma(pool.data, batch, pool.block_stride, key_rows, pool.token_stride,
                    p.num_kv_heads, pool.head_stride);
  };
  const OutputView& out = p.out;
  const bool out_fits =
      out.dtype == DType::float32 || fits_tma(out.data, batch, out.seq_stride, q_rows,
                                              out.token_stride, p.num_q_heads, out.head_stride);
  return keys_fit(p.k) && keys_fit(p.v) && out_fits &&
         fits_tma(p.q.data, batch, p.q.seq_stride, q_rows, p.q.token_stride, p.num_q_heads,
                  p.q.head_stride);
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
    case Kernel::cuda_prefill_sm90:
      return "cuda_prefill_sm90";
  }
  return "unknown";
}

Plan make_plan(const AttentionProblem& p, Device device, std::int64_t workspace_bytes,
               int compute_capability) {
  Plan plan;
  plan.counters_offset = workspace_counters_offset(workspace_bytes);
  if (is_decode(p)) {
    plan.kernel = device.is_cpu() ? Kernel::cpu_decode : Kernel::cuda_decode_plain;
    const std::int64_t rows = p.q_len * p.num_q_heads;
    plan.segment_limit = segment_limit(rows, p.head_dim_v);
    plan.max_segments = most_segments(max_visible_keys(p), plan.segment_limit);
    // One segment needs no partial results: its result is the sequence's.
    if (plan.max_segments > 1)
      plan.sequence_bytes = rows * plan.max_segments * partial_row_bytes(p.head_dim_v);
  } else {
    plan.kernel = device.is_cpu()                                    ? Kernel::cpu_prefill
                  : compute_capability == 90 && fits_prefill_sm90(p) ? Kernel::cuda_prefill_sm90
                                                                     : Kernel::cuda_prefill_plain;
  }
  const std::int64_t flag_bytes = 4;
  const std::int64_t fit = (workspace_bytes - kFlagAlignment) / (plan.sequence_bytes + flag_bytes);
  if (fit < 1) {
    throw ValueError("workspace: has " + std::to_string(workspace_bytes) +
                     " bytes; this call needs at least " +
                     std::to_string(plan.sequence_bytes + flag_bytes + kFlagAlignment));
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
