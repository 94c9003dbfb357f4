// SPDX-License-Identifier: Apache-2.0
// Attention on the host side: sequences go in groups that the scratch memory holds, and each group
// is validated, attended to and, where keys are cut into segments, combined.
#include "attend.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cstdint>

#include "common/attend_params.h"
#include "common/combine_segments.h"
#include "decode/decode.h"
#include "decode/decode_sm90.h"
#include "portable/portable.h"
#include "prefill/prefill.h"
#include "tiledattn/error.h"
#include "validate/validate.h"

namespace tiledattn::cuda {

namespace {

constexpr std::int64_t kVectorBytes = 16;

/// Calls `f` with a null pointer of the device type for `dtype`.
template <typename F>
void with_element_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::float32:
      return f(static_cast<float*>(nullptr));
    case DType::float16:
      return f(static_cast<__half*>(nullptr));
    case DType::bfloat16:
      return f(static_cast<__nv_bfloat16*>(nullptr));
    case DType::float8_e4m3fn:
      return f(static_cast<__nv_fp8_e4m3*>(nullptr));
    case DType::int8:
      return f(static_cast<std::int8_t*>(nullptr));
    default:
      throw TypeError("k_pool: got " + to_string(dtype) + ", which no kernel reads");
  }
}

/// Every row of the pool starts at a multiple of 16 bytes and is a multiple of 16 bytes long.
bool vector_rows(const PoolView& pool, std::int64_t dim, DType dtype) {
  const std::int64_t item = item_bytes(dtype);
  const auto fits = [item](std::int64_t elements) { return elements * item % kVectorBytes == 0; };
  return reinterpret_cast<std::uintptr_t>(pool.data) % kVectorBytes == 0 && fits(dim) &&
         fits(pool.block_stride) && fits(pool.token_stride) && fits(pool.head_stride);
}

void launch_group(const AttendParams& params, Kernel kernel, std::int32_t* counters,
                  cudaStream_t stream) {
  const AttentionProblem& p = params.problem;
  if (params.flags != nullptr) validate(params, stream);
  if (p.packed_q()) fill_rows_after_last_sequence(p, stream);
  if (params.num_seqs == 0 || p.total_q == 0) return;
  if (kernel == Kernel::cuda_prefill_sm90) {
    launch_prefill_sm90(params, counters, stream);
  } else if (kernel == Kernel::cuda_prefill_portable || kernel == Kernel::cuda_decode_portable) {
    launch_portable(params, stream);
  } else {
    with_element_type(p.kv_dtype, [&](auto* element) {
      using T = std::remove_pointer_t<decltype(element)>;
      if (kernel == Kernel::cuda_prefill_plain) return launch_prefill_plain<T>(params, stream);
      launch_decode_plain<T>(params, stream);
    });
  }
  if (params.split()) launch_combine_segments(params, stream);
}

}  // namespace

void attend(const AttentionProblem& problem, const Plan& plan, void* scratch, cudaStream_t stream) {
  if (problem.num_q_heads == 0) return;
  if (plan.kernel == Kernel::cuda_decode_sm90)
    return launch_decode_sm90(problem, plan, scratch, stream);
  const bool decode =
      plan.kernel == Kernel::cuda_decode_plain || plan.kernel == Kernel::cuda_decode_portable;
  if (!decode && plan.kernel != Kernel::cuda_prefill_plain &&
      plan.kernel != Kernel::cuda_prefill_portable && plan.kernel != Kernel::cuda_prefill_sm90) {
    throw Error(std::string("plan: kernel ") + to_string(plan.kernel) +
                " is not one of the CUDA backend");
  }
  if (decode && problem.packed_q()) {
    throw Error("plan: packed q needs a prefill kernel");
  }
  const std::int64_t group = std::max<std::int64_t>(plan.seqs_per_launch, 1);

  AttendParams params;
  params.problem = problem;
  params.vector_k = vector_rows(problem.k, problem.head_dim, problem.kv_dtype);
  params.vector_v = vector_rows(problem.v, problem.head_dim_v, problem.kv_dtype);
  if (needs_validation(problem)) params.flags = static_cast<std::int32_t*>(scratch);
  params.max_segments = plan.max_segments;
  params.cut = plan.cut;
  params.one_is_final = plan.kernel == Kernel::cuda_prefill_sm90;
  if (plan.max_segments > 1) {
    params.partials = reinterpret_cast<float*>(static_cast<char*>(scratch) + flags_bytes(group));
    params.partial_seq_stride = plan.sequence_bytes / 4;
  }
  std::int32_t* const counters =
      reinterpret_cast<std::int32_t*>(static_cast<char*>(scratch) + plan.counters_offset);
  std::int64_t first = 0;
  do {
    params.first_seq = first;
    params.num_seqs = std::min(group, problem.num_seqs - first);
    launch_group(params, plan.kernel, counters, stream);
    first += group;
  } while (first < problem.num_seqs);
}

}  // namespace tiledattn::cuda
