// SPDX-License-Identifier: Apache-2.0
// One block checks one sequence: thread 0 its lengths and positions, all threads the block ids that
// it will read.
//
// The cu_seqlens_q of packed q may be wrong themselves. Then the ranges of sequences may overlap,
// so the order of kernels decides: faulty sequences write NaN first, the right ones their results
// after that. Every row is in some range.
#include <cuda_runtime.h>

#include "common/faults.cuh"
#include "common/finish_row.cuh"
#include "common/launch.cuh"
#include "common/softmax_state.cuh"
#include "validate/validate.h"

namespace tiledattn::cuda {

namespace {

constexpr int kThreads = 128;
constexpr std::int64_t kFillBlocks = 512;
constexpr unsigned long long kNoColumn = ~0ull;

__device__ std::int64_t clamp64(std::int64_t x, std::int64_t low, std::int64_t high) {
  return detail::min64(detail::max64(x, low), high);
}

/// Tokens begin .. end - 1 of q that sequence `b` claims, kept inside q whatever cu_seqlens_q
/// holds.
__device__ KeyRange claimed_tokens(const AttentionProblem& p, std::int64_t b) {
  if (!p.packed_q()) return {0, p.q_len};
  const std::int64_t begin = p.cu_seqlens_q.at(b);
  const std::int64_t end = p.cu_seqlens_q.at(b + 1);
  const bool bad = begin < 0 || end < begin || end > p.total_q;
  KeyRange claimed{clamp64(detail::min64(begin, end), 0, p.total_q),
                   clamp64(detail::max64(begin, end), 0, p.total_q)};
  if (b == 0) claimed.begin = 0;
  if (bad && b == p.num_seqs - 1) claimed.end = p.total_q;
  return claimed;
}

/// Out and lse of row (seq, token, head), a token of packed q counted from the first of all.
__device__ void write_row(const AttentionProblem& p, std::int64_t seq, std::int64_t token,
                          std::int64_t head, float value, float lse) {
  if (p.out.data == nullptr) return;
  const std::int64_t at = p.out.row_offset(seq, token, head);
  for (std::int64_t d = lane_index(); d < p.head_dim_v; d += kWarpSize) {
    store_element(p.out.data, p.out.dtype, at + d, value);
  }
  if (p.out.lse != nullptr && lane_index() == 0)
    p.out.lse[p.out.lse_offset(seq, token, head)] = lse;
}

__device__ void poison_sequence(const AttentionProblem& p, std::int64_t b) {
  const KeyRange tokens = claimed_tokens(p, b);
  const float nan = not_a_number();
  const std::int64_t rows = (tokens.end - tokens.begin) * p.num_q_heads;
  for (std::int64_t row = warp_index(); row < rows; row += kThreads / kWarpSize) {
    const std::int64_t token = tokens.begin + row / p.num_q_heads;
    const std::int64_t head = row % p.num_q_heads;
    write_row(p, b, token, head, nan, nan);
    if (p.state.m != nullptr) {
      const std::int64_t at = p.state.row(b, token, head, p.num_q_heads);
      for (std::int64_t d = lane_index(); d < p.head_dim_v; d += kWarpSize)
        p.state.o[at * p.head_dim_v + d] = nan;
      if (lane_index() == 0) p.state.m[at] = p.state.l[at] = nan;
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    validate_kernel(const __grid_constant__ AttendParams params) {
  __shared__ int faulty;
  __shared__ unsigned long long
      faulty_column;  // the first one, so that reports do not depend on timing
  const AttentionProblem& p = params.problem;
  for (std::int64_t i = blockIdx.x; i < params.num_seqs; i += gridDim.x) {
    const std::int64_t b = params.first_seq + i;
    if (threadIdx.x == 0) {
      const Fault fault = check_sequence(p, b);
      if (fault.found()) record_fault(p.faults, fault);
      faulty = fault.found();
      faulty_column = kNoColumn;
    }
    __syncthreads();
    if (!faulty) {
      const Sequence s = sequence_at(p, b);
      const KeyRange columns = table_columns(p, s);
      for (std::int64_t column = columns.begin + threadIdx.x; column < columns.end;
           column += kThreads) {
        if (!check_block(p, s, column).found()) continue;
        atomicMin(&faulty_column, static_cast<unsigned long long>(column));
        break;
      }
      __syncthreads();
      if (threadIdx.x == 0 && faulty_column != kNoColumn) {
        record_fault(p.faults, check_block(p, s, static_cast<std::int64_t>(faulty_column)));
        faulty = 1;
      }
      __syncthreads();
    }
    if (faulty) poison_sequence(p, b);
    if (threadIdx.x == 0) params.flags[i] = faulty;
    __syncthreads();  // everyone has read `faulty` before the next sequence sets it
  }
}

__global__ void __launch_bounds__(kThreads)
    fill_kernel(const __grid_constant__ AttentionProblem p) {
  std::int64_t begin = 0;
  const Fault fault = check_no_sequences(p);
  if (fault.found() && blockIdx.x == 0 && threadIdx.x == 0) record_fault(p.faults, fault);
  if (p.num_seqs > 0) {
    const std::int64_t before = p.cu_seqlens_q.at(p.num_seqs - 1);
    begin = p.cu_seqlens_q.at(p.num_seqs);
    if (begin < detail::max64(before, 0) || begin > p.total_q)
      return;  // the last sequence's fault: its NaN stay
  }
  const std::int64_t rows = (p.total_q - begin) * p.num_q_heads;
  const std::int64_t num_warps = std::int64_t{gridDim.x} * (kThreads / kWarpSize);
  for (std::int64_t row = std::int64_t{blockIdx.x} * (kThreads / kWarpSize) + warp_index();
       row < rows; row += num_warps) {
    const std::int64_t head = row % p.num_q_heads;
    const RowResult empty(-infinity(), 0.0f, p.sinks == nullptr ? nullptr : p.sinks + head);
    const float value = fault.found() ? not_a_number() : empty.value(0.0f);
    const float lse = fault.found() ? not_a_number() : empty.lse;
    write_row(p, 0, begin + row / p.num_q_heads, head, value, lse);
  }
}

}  // namespace

void validate(const AttendParams& params, cudaStream_t stream) {
  launch(validate_kernel, "validate", {params.num_seqs, kThreads}, params, stream);
}

void fill_rows_after_last_sequence(const AttentionProblem& problem, cudaStream_t stream) {
  const std::int64_t rows = problem.total_q * problem.num_q_heads;
  // One block at least: it also judges cu_seqlens where there are neither rows nor sequences.
  const std::int64_t blocks = detail::max64(1, detail::min64(kFillBlocks, (rows + 3) / 4));
  launch(fill_kernel, "fill_rows_after_last_sequence", {blocks, kThreads}, problem, stream);
}

}  // namespace tiledattn::cuda
