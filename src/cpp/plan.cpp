// SPDX-License-Identifier: Apache-2.0
#include "plan.h"

#include <algorithm>
#include <string>

#include "decode_cut.h"
#include "tiledattn/error.h"

namespace tiledattn {

namespace {

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
std::int64_t most_segments(std::int64_t max_keys, SegmentCut cut) {
  return std::clamp<std::int64_t>((max_keys + cut.unit - 1) / cut.unit, 1, cut.limit);
}

/// Segments of each sequence, and the scratch that their results take.
void cut_segments(const AttentionProblem& p, SegmentCut cut, Plan& plan) {
  plan.cut = cut;
  plan.max_segments = most_segments(max_visible_keys(p), cut);
  // One segment needs no partial results: its result is the sequence's.
  if (plan.max_segments > 1)
    plan.sequence_bytes =
        p.q_len * p.num_q_heads * plan.max_segments * partial_row_bytes(p.head_dim_v);
}

/// Prefill of few rows: tiles of rows that leave most of a GPU idle, so their keys are cut as well.
/// By what each sequence has, never by how many there are.
void cut_prefill(const AttentionProblem& p, Plan& plan) {
  if (p.q_len > kMaxSplitPrefillTokens) return;
  // The first key in a window may be anywhere in a block, but a segment begins with a piece of one.
  if (p.key_source == KeySource::paged && p.window_left != kNoWindow) return;
  constexpr std::int64_t kTileRows = 128;
  constexpr std::int64_t kFewTiles = 64;
  const std::int64_t tiles = (p.q_len + kTileRows - 1) / kTileRows * p.num_q_heads;
  if (tiles > kFewTiles) return;
  // Of the smallest tiles a multiprocessor works on two.
  const bool small = p.q_len <= 64 && std::max(p.head_dim, p.head_dim_v) <= 128;
  const std::int64_t enough = small ? 256 : 128;
  const std::int64_t limit = segment_limit(p.q_len * p.num_q_heads, p.head_dim_v);
  cut_segments(p, {std::min(limit, enough / tiles), kPrefillSegmentUnit}, plan);
}

/// For the kernels that multiply by its inverse.
bool fits_softcap(float softcap) {
  constexpr float kSmallest = 1e-30f;
  return softcap <= 0.0f || softcap >= kSmallest;
}

bool is_decode(const AttentionProblem& p) {
  return p.state.m != nullptr || (!p.packed_q() && p.q_len <= kMaxDecodeTokens);
}

/// TMA moves boxes of the array [i, j, k, columns] of elements of `item_bytes`: 16-byte aligned, as
/// are the strides of all dimensions that have more than one element.
bool fits_tma(const void* data, std::int64_t item_bytes, std::int64_t num_i, std::int64_t stride_i,
              std::int64_t num_j, std::int64_t stride_j, std::int64_t num_k,
              std::int64_t stride_k) {
  constexpr std::int64_t kMaxStride = std::int64_t{1} << 39;
  const std::int64_t elements = 16 / item_bytes;
  const auto fits = [elements](std::int64_t size, std::int64_t stride) {
    return size <= 1 || (stride > 0 && stride < kMaxStride && stride % elements == 0);
  };
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && fits(num_i, stride_i) &&
         fits(num_j, stride_j) && fits(num_k, stride_k);
}

/// The Hopper decode kernel: q of a 16-bit type, K and V of the same or of one byte, boxes of 8
/// tokens or more within a block. Key numbers, blocks and sequences are 32-bit in the kernel.
bool fits_decode_sm90(const AttentionProblem& p) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 30;
  if (p.total_q == 0 || p.num_q_heads == 0) return false;
  if (p.q.dtype != DType::float16 && p.q.dtype != DType::bfloat16) return false;
  if (p.packed_q() || p.key_source == KeySource::packed) return false;
  if (p.head_dim % 8 != 0 || p.head_dim_v % 8 != 0) return false;
  if (!fits_softcap(p.softcap)) return false;
  const bool dense = p.key_source == KeySource::dense;
  const std::int64_t num_blocks = dense ? p.num_seqs : p.num_blocks;
  const std::int64_t block_size = dense ? p.dense_kv_len : p.block_size;
  if (num_blocks < 1 || block_size < 1) return false;
  if (!dense && block_size % 8 != 0) return false;
  const std::int64_t item_bytes = p.quantized() ? 1 : 2;
  const auto pool_fits = [&](const PoolView& pool) {
    return fits_tma(pool.data, item_bytes, num_blocks, pool.block_stride, block_size,
                    pool.token_stride, p.num_kv_heads, pool.head_stride);
  };
  if (!pool_fits(p.k) || !pool_fits(p.v)) return false;
  // Queries are read in pairs.
  if (reinterpret_cast<std::uintptr_t>(p.q.data) % 4 != 0 || p.q.seq_stride % 2 != 0 ||
      p.q.token_stride % 2 != 0 || p.q.head_stride % 2 != 0)
    return false;
  const std::int64_t keys = dense ? p.dense_kv_len : p.table_width * p.block_size;
  const std::int64_t rows = p.q_len * p.gqa_ratio();
  if (keys > kLimit || num_blocks > kLimit || p.num_seqs > kLimit || rows * p.num_kv_heads > kLimit)
    return false;
  const double cost = (static_cast<double>(keys) / 16 + kDecodeHeadCost + 2) *
                      static_cast<double>(p.num_kv_heads) * static_cast<double>(rows) *
                      static_cast<double>(p.num_seqs);
  return cost < static_cast<double>(kMaxDecodeCost);
}

void plan_decode_sm90(const AttentionProblem& p, std::int64_t workspace_bytes, Plan& plan) {
  const std::int64_t dim = std::max(p.head_dim, p.head_dim_v);
  // A window may begin inside a chunk.
  const std::int64_t chunks =
      max_visible_keys(p) / decode_chunk_keys(dim, p.quantized() ? 1 : 2) + 2;
  const std::int64_t rows = p.q_len * p.gqa_ratio();
  const std::int64_t together = std::min(rows, decode_rows_together(rows, dim));
  plan.kernel = Kernel::cuda_decode_sm90;
  plan.max_groups = max_decode_groups(chunks, p.num_kv_heads);
  if (plan.max_groups > 1)
    plan.slot_bytes = plan.max_groups * together * (kDecodePartialHeader + p.head_dim_v) * 4;
  plan.num_slots = kWorkspaceCounters;
  if (plan.slot_bytes > 0)
    plan.num_slots = std::min(plan.num_slots, workspace_bytes / plan.slot_bytes);
  if (plan.num_slots < 1) {
    throw ValueError("workspace: has " + std::to_string(workspace_bytes) +
                     " bytes; this call needs at least " + std::to_string(plan.slot_bytes));
  }
  plan.seqs_per_launch = std::max<std::int64_t>(p.num_seqs, 1);
  plan.counters_offset = workspace_counters_offset(workspace_bytes);
}

/// The Hopper prefill kernel: 16-bit types, whose arrays TMA can reach; dense, packed, or paged
/// where token i sees all keys up to its own position, in pieces of blocks of 8 tokens or more.
/// Lengths, windows and numbers of tiles are 32-bit in the kernel.
bool fits_prefill_sm90(const AttentionProblem& p) {
  if (p.quantized()) return false;  // it reads no scales
  constexpr std::int64_t kMaxLength = std::int64_t{1} << 29;
  constexpr std::int64_t kMaxTiles = std::int64_t{1} << 31;
  constexpr std::int64_t kFewestRows = 64;  // of a tile
  constexpr std::int64_t kItemBytes = 2;
  if (p.q.dtype != DType::float16 && p.q.dtype != DType::bfloat16) return false;
  const bool packed = p.packed_q();
  const bool paged = p.key_source == KeySource::paged;
  if (!paged && p.key_source != (packed ? KeySource::packed : KeySource::dense)) return false;
  if (paged && (!p.causal || p.block_size % 8 != 0)) return false;
  if (paged && p.num_blocks < 1) return false;
  if (p.kv_positions.given()) return false;
  if (p.head_dim % 8 != 0 || p.head_dim_v % 8 != 0) return false;

  const std::int64_t batch = packed ? 1 : p.num_seqs;
  const std::int64_t q_rows = packed ? p.total_q : p.q_len;
  const std::int64_t key_rows = paged    ? p.table_width * p.block_size
                                : packed ? p.total_k
                                         : p.dense_kv_len;
  if (p.num_seqs < 1 || q_rows < 1 || key_rows < 1 || p.num_q_heads < 1) return false;
  if (p.num_seqs >= kMaxLength || q_rows >= kMaxLength || key_rows >= kMaxLength ||
      p.num_q_heads >= kMaxLength || p.num_blocks >= kMaxLength)
    return false;
  const double tiles = static_cast<double>(q_rows / kFewestRows + 1 + (packed ? p.num_seqs : 0)) *
                       static_cast<double>(batch) * static_cast<double>(p.num_q_heads);
  if (tiles >= static_cast<double>(kMaxTiles)) return false;

  const auto keys_fit = [&](const PoolView& pool) {
    return fits_tma(pool.data, kItemBytes, paged ? p.num_blocks : batch, pool.block_stride,
                    paged ? p.block_size : key_rows, pool.token_stride, p.num_kv_heads,
                    pool.head_stride);
  };
  const OutputView& out = p.out;
  const bool out_fits =
      out.dtype == DType::float32 || fits_tma(out.data, kItemBytes, batch, out.seq_stride, q_rows,
                                              out.token_stride, p.num_q_heads, out.head_stride);
  return keys_fit(p.k) && keys_fit(p.v) && out_fits &&
         fits_tma(p.q.data, kItemBytes, batch, p.q.seq_stride, q_rows, p.q.token_stride,
                  p.num_q_heads, p.q.head_stride);
}

/// The portable kernel, decode and prefill: 16-bit types, rows of q, K and V that begin at
/// multiples of 16 bytes. Numbers of rows, keys, blocks of the pool and blocks of the grid are
/// 32-bit in it.
bool fits_portable(const AttentionProblem& p) {
  if (p.quantized()) return false;  // it reads no scales
  constexpr std::int64_t kLimit = std::int64_t{1} << 30;
  constexpr std::int64_t kElements = 8;     // 16 bytes
  constexpr std::int64_t kFewestRows = 16;  // of a tile
  if (p.q.dtype != DType::float16 && p.q.dtype != DType::bfloat16) return false;
  if (p.num_q_heads < 1 || p.head_dim % kElements != 0 || p.head_dim_v % kElements != 0)
    return false;
  if (!fits_softcap(p.softcap)) return false;
  const bool dense = p.key_source == KeySource::dense;
  const std::int64_t tokens = p.packed_q() ? p.total_q : p.q_len;
  // The stride of a dimension of one element does not count.
  const auto fits = [](std::int64_t size, std::int64_t stride) {
    return size <= 1 || stride % kElements == 0;
  };
  const auto pool_fits = [&](const PoolView& pool) {
    return reinterpret_cast<std::uintptr_t>(pool.data) % 16 == 0 &&
           fits(dense ? p.num_seqs : p.num_blocks, pool.block_stride) &&
           fits(dense                               ? p.dense_kv_len
                : p.key_source == KeySource::packed ? p.total_k
                                                    : p.block_size,
                pool.token_stride) &&
           fits(p.num_kv_heads, pool.head_stride);
  };
  if (!pool_fits(p.k) || !pool_fits(p.v) || reinterpret_cast<std::uintptr_t>(p.q.data) % 16 != 0 ||
      !fits(p.num_seqs, p.q.seq_stride) || !fits(tokens, p.q.token_stride) ||
      !fits(p.num_q_heads, p.q.head_stride))
    return false;
  for (const std::int64_t number :
       {p.num_seqs, p.num_q_heads, tokens, p.num_blocks, p.block_size, p.table_width,
        p.table_width * p.block_size, p.dense_kv_len, p.total_k}) {
    if (number > kLimit) return false;
  }
  const std::int64_t rows = tokens * p.gqa_ratio();
  const double tiles = static_cast<double>(rows) / kFewestRows + 1 +
                       static_cast<double>(p.packed_q() ? p.num_seqs : 0);
  const double grid = tiles * static_cast<double>(p.num_kv_heads) *
                      static_cast<double>(p.packed_q() ? 1 : p.num_seqs) *
                      static_cast<double>(is_decode(p) ? kMaxSegments : 1);
  return rows <= kLimit && grid < static_cast<double>(2 * kLimit);
}

/// The row tiles of packed q are counted on the device, in 32 bits.
void check_row_tiles(const AttentionProblem& p) {
  const std::int64_t tiles = p.total_q * p.gqa_ratio() / kFewestTileRows + p.num_seqs;
  if (tiles <= kMaxRowTiles) return;
  throw ValueError("q: its rows are cut into up to " + std::to_string(tiles) +
                   " tiles; packed q is limited to " + std::to_string(kMaxRowTiles));
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
    case Kernel::cuda_decode_portable:
      return "cuda_decode_portable";
    case Kernel::cuda_prefill_portable:
      return "cuda_prefill_portable";
    case Kernel::cuda_decode_sm90:
      return "cuda_decode_sm90";
    case Kernel::cuda_prefill_sm90:
      return "cuda_prefill_sm90";
  }
  return "unknown";
}

Plan make_plan(const AttentionProblem& p, Device device, std::int64_t workspace_bytes,
               int compute_capability) {
  Plan plan;
  if (!device.is_cpu() && is_decode(p) && compute_capability == 90 && fits_decode_sm90(p)) {
    plan_decode_sm90(p, workspace_bytes, plan);
    return plan;
  }
  plan.counters_offset = workspace_counters_offset(workspace_bytes);
  const bool portable = !device.is_cpu() && compute_capability >= 80 && fits_portable(p);
  if (is_decode(p)) {
    plan.kernel = device.is_cpu() ? Kernel::cpu_decode
                  : portable      ? Kernel::cuda_decode_portable
                                  : Kernel::cuda_decode_plain;
    cut_segments(p, {segment_limit(p.q_len * p.num_q_heads, p.head_dim_v), kSegmentKeys}, plan);
  } else {
    plan.kernel = device.is_cpu()                                    ? Kernel::cpu_prefill
                  : compute_capability == 90 && fits_prefill_sm90(p) ? Kernel::cuda_prefill_sm90
                  : portable                                         ? Kernel::cuda_prefill_portable
                                                                     : Kernel::cuda_prefill_plain;
    if (plan.kernel == Kernel::cuda_prefill_sm90 && !p.packed_q()) cut_prefill(p, plan);
  }
  const std::int64_t fit = (workspace_bytes - kFlagAlignment) / (plan.sequence_bytes + kFlagBytes);
  if (fit < 1) {
    throw ValueError("workspace: has " + std::to_string(workspace_bytes) +
                     " bytes; this call needs at least " +
                     std::to_string(plan.sequence_bytes + kFlagBytes + kFlagAlignment));
  }
  if (!device.is_cpu() && p.packed_q() && fit < p.num_seqs) {
    // Wrong cu_seqlens_q may let sequences overlap, so all must be validated before any writes its
    // result.
    throw ValueError("workspace: holds " + std::to_string(fit) +
                     " sequences; with packed q it must hold all " + std::to_string(p.num_seqs) +
                     ", with 4 bytes for each and 256 more");
  }
  if (!device.is_cpu() && p.packed_q()) check_row_tiles(p);
  plan.seqs_per_launch = std::min(fit, std::max<std::int64_t>(p.num_seqs, 1));
  return plan;
}

std::int64_t decode_workspace_bytes(std::int64_t num_seqs, std::int64_t q_len,
                                    std::int64_t num_q_heads, std::int64_t head_dim_v,
                                    std::int64_t max_keys) {
  // A call with fewer query tokens may be cut into more segments, but never needs more than the
  // limit or this call's rows.
  const std::int64_t row_bytes = q_len * num_q_heads * partial_row_bytes(head_dim_v);
  const std::int64_t segments = most_segments(max_keys, {kMaxSegments, kSegmentKeys});
  std::int64_t sequence_bytes = 0;
  if (segments > 1)
    sequence_bytes = std::min(row_bytes * segments, std::max(kMaxSequenceScratch, row_bytes));
  const std::int64_t partial_bytes =
      std::min(num_seqs * sequence_bytes, std::max(2 * kMaxSequenceScratch, sequence_bytes));
  // The Hopper kernel has up to 64 groups of each KV head of a sequence; all rows of a sequence are
  // as many as with one KV head.
  const std::int64_t groups =
      max_decode_groups(max_keys / decode_chunk_keys(kMaxHeadDim, 2) + 2, 1);
  const std::int64_t group_bytes =
      q_len * num_q_heads * (kDecodePartialHeader + head_dim_v) * 4 * groups;
  const std::int64_t slots_bytes =
      std::min(num_seqs * group_bytes, std::max(2 * kMaxSequenceScratch, group_bytes));
  return std::max(partial_bytes + num_seqs * kFlagBytes + kFlagAlignment, slots_bytes);
}

}  // namespace tiledattn
