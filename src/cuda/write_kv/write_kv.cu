// SPDX-License-Identifier: Apache-2.0
// One warp for each (token, KV head), K and then V. Bytes are copied: the type matters for its size
// alone.
#include <cstdint>

#include "common/faults.cuh"
#include "common/launch.cuh"
#include "common/softmax_state.cuh"
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

__device__ void copy_token(const WriteKvProblem& p, const PoolView& from, const PoolView& to,
                           std::int64_t token, std::int64_t kv_head, std::int64_t slot,
                           std::int64_t dim) {
  const std::int64_t item = item_bytes(p.dtype);
  const std::int64_t source = token * from.token_stride + kv_head * from.head_stride;
  const std::int64_t target = slot / p.block_size * to.block_stride +
                              slot % p.block_size * to.token_stride + kv_head * to.head_stride;
  copy_row(static_cast<char*>(const_cast<void*>(to.data)) + target * item,
           static_cast<const char*>(from.data) + source * item, dim * item);
}

__global__ void __launch_bounds__(kThreads) write_kv(const __grid_constant__ WriteKvProblem p) {
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
    copy_token(p, p.k, p.k_pool, token, kv_head, slot, p.head_dim);
    copy_token(p, p.v, p.v_pool, token, kv_head, slot, p.head_dim_v);
  }
}

}  // namespace

void launch_write_kv(const WriteKvProblem& problem, cudaStream_t stream) {
  const std::int64_t rows = problem.num_tokens * problem.num_kv_heads;
  launch(write_kv, "write_kv", {(rows + kWarps - 1) / kWarps, kThreads}, problem, stream);
}

}  // namespace tiledattn::cuda
