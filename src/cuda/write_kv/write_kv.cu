// SPDX-License-Identifier: Apache-2.0
// One warp for each (token, KV head), K and then V. Where pools have the type of k, bytes are
// copied: the type matters for its size alone. Else elements are divided by their scale and
// rounded.
#include <cuda_fp8.h>

#include <cstdint>

#include "common/dependents.cuh"
#include "common/faults.cuh"
#include "common/launch.cuh"
#include "common/softmax_state.cuh"
#include "common/types.cuh"
#include "write_kv/write_kv.h"

namespace tiledattn::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;

template <typename Piece>
__device__ void copy_pieces(char* to, const char* from, std::int64_t bytes) {
  const std::int64_t count = bytes / static_cast<std::int64_t>(sizeof(Piece));
  for (std::int64_t i = lane_index(); i < count; i += kWarpSize) {
    reinterpret_cast<Piece*>(to)[i] = reinterpret_cast<const Piece*>(from)[i];
  }
}

/// In the widest pieces that both addresses and the length allow.
__device__ void copy_row(char* to, const char* from, std::int64_t bytes) {
  const std::uintptr_t bits = reinterpret_cast<std::uintptr_t>(to) |
                              reinterpret_cast<std::uintptr_t>(from) |
                              static_cast<std::uintptr_t>(bytes);
  if (bits % 16 == 0) {
    copy_pieces<uint4>(to, from, bytes);
  } else if (bits % 4 == 0) {
    copy_pieces<std::uint32_t>(to, from, bytes);
  } else if (bits % 2 == 0) {
    copy_pieces<std::uint16_t>(to, from, bytes);
  } else {
    copy_pieces<std::uint8_t>(to, from, bytes);
  }
}

/// Saturated at +-448 or +-127; NaN stays NaN in float8_e4m3fn and is 0 in int8.
__device__ std::uint8_t quantize(float x, DType dtype) {
  if (dtype == DType::float8_e4m3fn) return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
  const float limited = x != x ? 0.0f : fminf(fmaxf(x, -127.0f), 127.0f);
  return static_cast<std::uint8_t>(__float2int_rn(limited));
}

/// A scale of 0 counts every finite element as 0.
__device__ void quantize_row(std::uint8_t* to, DType to_dtype, const void* from, DType from_dtype,
                             std::int64_t first, std::int64_t dim, float scale) {
  for (std::int64_t d = lane_index(); d < dim; d += kWarpSize) {
    const float x = load_element(from, from_dtype, first + d);
    to[d] = quantize(scale == 0.0f ? __fmul_rn(x, 0.0f) : __fdiv_rn(x, scale), to_dtype);
  }
}

template <bool kIsQuantized>
__device__ void write_token(const WriteKvProblem& p, const PoolView& from, const PoolView& to,
                            const ScaleView& scale, std::int64_t token, std::int64_t kv_head,
                            std::int64_t slot, std::int64_t dim) {
  const KeyPlace place{slot / p.block_size, slot % p.block_size};
  const std::int64_t source = pool_offset(from, {0, token}, kv_head);
  const std::int64_t target = pool_offset(to, place, kv_head);
  void* const data = const_cast<void*>(to.data);
  if constexpr (kIsQuantized) {
    quantize_row(static_cast<std::uint8_t*>(data) + target, p.pool_dtype, from.data, p.dtype,
                 source, dim, scale.at(place.block, place.token, kv_head));
  } else {
    const std::int64_t item = item_bytes(p.dtype);
    copy_row(static_cast<char*>(data) + target * item,
             static_cast<const char*>(from.data) + source * item, dim * item);
  }
}

template <bool kIsQuantized>
__global__ void __launch_bounds__(kThreads) write_kv(const __grid_constant__ WriteKvProblem p) {
  wait_for_predecessor();
  start_dependents();
  const std::int64_t rows = p.num_tokens * p.num_kv_heads;
  const std::int64_t step = std::int64_t{gridDim.x} * kWarps;
  for (std::int64_t row = std::int64_t{blockIdx.x} * kWarps + warp_index(); row < rows;
       row += step) {
    const std::int64_t token = row / p.num_kv_heads;
    const std::int64_t kv_head = row % p.num_kv_heads;
    const std::int64_t slot = p.slot_mapping.at(token);
    if (slot < 0) continue;
    const Fault fault = check_slot(p, token);
    if (fault.found()) {
      if (kv_head == 0 && lane_index() == 0) record_fault(p.faults, fault);
      continue;
    }
    write_token<kIsQuantized>(p, p.k, p.k_pool, p.k_scale, token, kv_head, slot, p.head_dim);
    write_token<kIsQuantized>(p, p.v, p.v_pool, p.v_scale, token, kv_head, slot, p.head_dim_v);
  }
}

}  // namespace

void launch_write_kv(const WriteKvProblem& problem, bool overlaps, cudaStream_t stream) {
  const std::int64_t rows = problem.num_tokens * problem.num_kv_heads;
  launch(is_quantized(problem.pool_dtype) ? write_kv<true> : write_kv<false>, "write_kv",
         {(rows + kWarps - 1) / kWarps, kThreads, 0, overlaps}, problem, stream);
}

}  // namespace tiledattn::cuda
