// SPDX-License-Identifier: Apache-2.0
#include "portable/portable.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "tiledattn/error.h"

namespace tiledattn::cuda {

namespace {

/// Results are of the type of q and every row begins at a multiple of 16 bytes.
bool direct_output(const AttentionProblem& p) {
  const auto fits = [](std::int64_t elements) { return elements % 8 == 0; };
  return p.state.m == nullptr && p.out.dtype == p.q.dtype &&
         reinterpret_cast<std::uintptr_t>(p.out.data) % 16 == 0 && fits(p.out.seq_stride) &&
         fits(p.out.token_stride) && fits(p.out.head_stride);
}

template <typename T>
void launch_type(PortableParams& params, cudaStream_t stream) {
  const AttentionProblem& p = params.attend.problem;
  const std::int64_t dim = std::max(p.head_dim, p.head_dim_v);
  if (dim <= 64) return launch_portable_dim<T, 64>(params, stream);
  if (dim <= 96) return launch_portable_dim<T, 96>(params, stream);
  if (dim <= 128) return launch_portable_dim<T, 128>(params, stream);
  if (dim <= 192) return launch_portable_dim<T, 192>(params, stream);
  launch_portable_dim<T, 256>(params, stream);
}

}  // namespace

void launch_portable(const AttendParams& attend, cudaStream_t stream) {
  const AttentionProblem& p = attend.problem;
  PortableParams params;
  params.attend = attend;
  params.num_segments = Divisor(attend.max_segments);
  params.num_kv_heads = Divisor(p.num_kv_heads);
  params.gqa_ratio = Divisor(p.gqa_ratio());
  params.block_size = Divisor(std::max<std::int64_t>(p.block_size, 1));
  params.direct_output = !attend.split() && direct_output(p);
  params.scores = score_form(p);
  // The state promises the true maximum.
  params.stale_maximum = p.state.m != nullptr ? 0.0f : kStaleMaximum;
  if (p.q.dtype == DType::bfloat16) return launch_type<__nv_bfloat16>(params, stream);
  if (p.q.dtype == DType::float16) return launch_type<__half>(params, stream);
  throw TypeError("q: got " + to_string(p.q.dtype) + "; expected float16 or bfloat16");
}

}  // namespace tiledattn::cuda
