// SPDX-License-Identifier: Apache-2.0
// One warp's attention over its slice of a group, chunk by chunk, on tensor cores.
//
// Products are transposed, S^T = K Q^T and O^T = V^T P^T: K and V are the 16-row operand, and 8
// query rows fill the other, so nothing is wasted on the few rows of decode. With g = lane / 4 and
// t = lane % 4 a lane holds, for query rows 2t and 2t + 1 of each tile, the scores of keys g and
// g + 8 of each 16 and columns g and g + 8 of each 16 of the output.
#pragma once

#include <cstdint>

#include "common/mma.cuh"
#include "common/softmax_state.cuh"
#include "common/tma.cuh"
#include "decode/decode_sm90_work.cuh"

namespace tiledattn::cuda {

__device__ __forceinline__ std::uint32_t shared_address(const void* at) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(at));
}

/// exp(x) for x <= 0, or NaN.
__device__ __forceinline__ float exp_fast(float x) {
  constexpr float kLog2E = 1.4426950408889634f;
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * kLog2E));
  return y;
}

/// Q of one head: row `tile * 8 + g`, as the second operand.
template <typename Config>
struct QueryFragments {
  FragmentB part[Config::kDim / 16][Config::kTiles];

  /// Rows first_row .. of the head's rows (token, head of the group).
  __device__ __forceinline__ void load(const DecodeSm90Params& params, int seq, int kv_head,
                                       int first_row) {
    const AttentionProblem& p = params.problem;
#pragma unroll
    for (int tile = 0; tile < Config::kTiles; ++tile) {
      const int row = first_row + tile * 8 + lane_index() / 4;
      const bool present = row < params.rows;
      const int token = params.group.divide(row);
      const int group = static_cast<int>(params.group.value);
      const int head = kv_head * group + row - token * group;
      const auto* const q =
          static_cast<const typename Config::Element*>(p.q.data) +
          (present ? seq * p.q.seq_stride + token * p.q.token_stride + head * p.q.head_stride : 0);
#pragma unroll
      for (int i = 0; i < Config::kDim / 16; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int column = i * 16 + half * 8 + lane_index() % 4 * 2;
          part[i][tile].part[half] = present && column < p.head_dim
                                         ? *reinterpret_cast<const std::uint32_t*>(q + column)
                                         : 0;
        }
      }
    }
  }
};

/// Which keys of a chunk count, as seen from its first key.
struct ChunkMask {
  int begin = 0;  ///< keys that some row sees
  int end = 0;
  bool same_for_all = true;  ///< all rows see these, and nothing else
};

template <typename Config>
__device__ __forceinline__ ChunkMask chunk_mask(const SequenceWork& work, int first_key) {
  ChunkMask mask;
  mask.begin = work.begin - first_key;
  mask.end = work.end - first_key;
  mask.same_for_all = first_key >= work.all_begin && first_key + Config::kChunkKeys <= work.all_end;
  return mask;
}

template <typename Config>
class SliceState {
 public:
  static constexpr int kKeyTiles = Config::kChunkKeys / 16;
  static constexpr int kTiles = Config::kTiles;
  static constexpr int kSlabBytes = Config::kChunkKeys * 128;
  using T = typename Config::Element;

  float m[kTiles][2];  ///< the same in lanes of equal t
  float l[kTiles][2];  ///< of this lane's keys
  float o[Config::kDim / 16][kTiles][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      m[tile][0] = m[tile][1] = -infinity();
      l[tile][0] = l[tile][1] = 0.0f;
#pragma unroll
      for (int i = 0; i < Config::kDim / 16; ++i)
        o[i][tile][0] = o[i][tile][1] = o[i][tile][2] = o[i][tile][3] = 0.0f;
    }
  }

  /// scores_ = K Q^T of the chunk at shared-memory address `k`.
  __device__ __forceinline__ void multiply_keys(std::uint32_t k, const QueryFragments<Config>& q) {
#pragma unroll
    for (int kt = 0; kt < kKeyTiles; ++kt)
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
        scores_[kt][tile][0] = scores_[kt][tile][1] = scores_[kt][tile][2] = scores_[kt][tile][3] =
            0.0f;
    // Row lane % 16; 16-byte piece 2 i + lane / 16 of its slab, swizzled by the row.
    const int row = lane_index() % 16;
    const std::uint32_t base = k + row * 128;
    const std::uint32_t swizzle = ((lane_index() / 16) ^ (row & 7)) << 4;
#pragma unroll
    for (int i = 0; i < Config::kDim / 16; ++i) {
      const std::uint32_t column = base + (swizzle ^ ((i % 4) << 5)) + i / 4 * kSlabBytes;
#pragma unroll
      for (int kt = 0; kt < kKeyTiles; ++kt) {
        const FragmentA keys = load_matrices(column + kt * 16 * 128);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
          multiply_add<T>(scores_[kt][tile], keys, q.part[i][tile]);
      }
    }
  }

  /// Dot products -> scores, those outside the row's keys -inf. Rounded here for good: the maximum
  /// and the difference to it must see the same score.
  __device__ __forceinline__ void make_scores(const DecodeSm90Params& params,
                                              const SequenceWork& work, int first_row,
                                              int first_key, const ChunkMask& mask) {
    const AttentionProblem& p = params.problem;
#pragma unroll
    for (int kt = 0; kt < kKeyTiles; ++kt)
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          scores_[kt][tile][j] = __fmul_rn(scores_[kt][tile][j], p.softmax_scale);
    if (p.softcap > 0.0f) {
#pragma unroll
      for (int kt = 0; kt < kKeyTiles; ++kt)
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            scores_[kt][tile][j] = __fmul_rn(
                p.softcap, tanhf(__fmul_rn(scores_[kt][tile][j], params.inverse_softcap)));
    }
    if (mask.same_for_all) return;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int row = first_row + tile * 8 + lane_index() % 4 * 2 + side;
        int begin = mask.begin;
        int end = mask.end;
        if (!params.sees_all) {
          const KeyRange visible = visible_to_row(params, work, row);
          begin = static_cast<int>(visible.begin) - first_key;
          end = static_cast<int>(visible.end) - first_key;
        }
#pragma unroll
        for (int kt = 0; kt < kKeyTiles; ++kt) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int key = kt * 16 + half * 8 + lane_index() / 4;
            if (key < begin || key >= end) scores_[kt][tile][2 * half + side] = -infinity();
          }
        }
      }
    }
  }

  /// Scores -> weights; what was summed so far is scaled to the new maximum.
  __device__ __forceinline__ void make_weights() {
    bool moved = false;
    float rescale[kTiles][2];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        float top = m[tile][side];
#pragma unroll
        for (int kt = 0; kt < kKeyTiles; ++kt)
          top = fmaxf(top, fmaxf(scores_[kt][tile][side], scores_[kt][tile][2 + side]));
#pragma unroll
        for (int step = 4; step < kWarpSize; step *= 2)
          top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
        const float shift = top == -infinity() ? 0.0f : top;  // all so far are -inf or NaN
        const float factor = exp_fast(__fsub_rn(m[tile][side], shift));
        float sum = __fmul_rn(l[tile][side], factor);
#pragma unroll
        for (int kt = 0; kt < kKeyTiles; ++kt) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& score = scores_[kt][tile][2 * half + side];
            score = exp_fast(__fsub_rn(score, shift));
            sum = __fadd_rn(sum, score);
          }
        }
        m[tile][side] = top;
        l[tile][side] = sum;
        rescale[tile][side] = factor;
        moved = moved || factor != 1.0f;
      }
    }
    if (!__any_sync(kAllLanes, moved)) return;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int i = 0; i < Config::kDim / 16; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) o[i][tile][j] = __fmul_rn(o[i][tile][j], rescale[tile][j % 2]);
  }

  /// o += V^T P^T of the chunk at shared-memory address `v`.
  __device__ __forceinline__ void multiply_values(std::uint32_t v) {
    FragmentB weights[kKeyTiles][kTiles];
#pragma unroll
    for (int kt = 0; kt < kKeyTiles; ++kt)
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          weights[kt][tile].part[half] = transpose_matrix(
              pack<T>(scores_[kt][tile][2 * half], scores_[kt][tile][2 * half + 1]));
    // Matrices: keys 0 .. 7 and columns 0 .. 7, then columns 8 .. 15, then both of keys 8 .. 15.
    const int row = lane_index() % 8 + lane_index() / 16 * 8;
    const std::uint32_t base = v + row * 128;
    const std::uint32_t swizzle = ((lane_index() / 8 % 2) ^ (row & 7)) << 4;
#pragma unroll
    for (int i = 0; i < Config::kDim / 16; ++i) {
      const std::uint32_t column = base + (swizzle ^ ((i % 4) << 5)) + i / 4 * kSlabBytes;
#pragma unroll
      for (int kt = 0; kt < kKeyTiles; ++kt) {
        const FragmentA values = load_matrices_transposed(column + kt * 16 * 128);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
          multiply_add<T>(o[i][tile], values, weights[kt][tile]);
      }
    }
  }

  /// l of whole rows, in all lanes. A NaN score, which never wins the maximum, reaches m here.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        float& sum = l[tile][side];
#pragma unroll
        for (int step = 4; step < kWarpSize; step *= 2)
          sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, step));
        if (sum != sum && m[tile][side] != infinity()) m[tile][side] = sum;
      }
  }

  /// All that the slice says is NaN.
  __device__ __forceinline__ void poison() {
    const float nan = not_a_number();
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      m[tile][0] = m[tile][1] = l[tile][0] = l[tile][1] = nan;
#pragma unroll
      for (int i = 0; i < Config::kDim / 16; ++i)
        o[i][tile][0] = o[i][tile][1] = o[i][tile][2] = o[i][tile][3] = nan;
    }
  }

 private:
  __device__ __forceinline__ static KeyRange visible_to_row(const DecodeSm90Params& params,
                                                            const SequenceWork& work, int row) {
    const AttentionProblem& p = params.problem;
    if (row >= params.rows) return {0, 0};
    Sequence s;
    s.position = work.position;
    s.kv_len = work.kv_len;
    KeyRange range = visible_keys(p, s, params.group.divide(row));
    range.begin = detail::min64(range.begin, work.kv_len);
    range.end = detail::max64(range.end, 0);
    return range;
  }

  float scores_[kKeyTiles][kTiles][4];
};

/// Rows of V outside mask become zero: a weight of 0 times NaN would be NaN. Called by the warp
/// that owns the slot, before it reads it.
template <typename Config>
__device__ __forceinline__ void clear_values(unsigned char* slot, const ChunkMask& mask) {
  constexpr int kPieces = 8;  // of 16 bytes in a row of a slab
  constexpr int kSlabBytes = Config::kChunkKeys * 128;
  for (int at = lane_index(); at < Config::kChunkKeys * kPieces; at += kWarpSize) {
    const int key = at / kPieces;
    if (key >= mask.begin && key < mask.end) continue;
#pragma unroll
    for (int slab = 0; slab < Config::kSlabs; ++slab)
      *reinterpret_cast<uint4*>(slot + slab * kSlabBytes + at * 16) = make_uint4(0, 0, 0, 0);
  }
  fence_async_proxy();  // the next load into this slot comes after these stores
  __syncwarp();
}

}  // namespace tiledattn::cuda
