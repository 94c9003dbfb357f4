// SPDX-License-Identifier: Apache-2.0
// One warp's attention over its slice of a group, chunk by chunk, on tensor cores.
//
// Products are transposed, S^T = K Q^T and O^T = V^T P^T: K and V are the 16-row operand, and 8
// query rows fill the other, so nothing is wasted on the few rows of decode. With g = lane / 4 and
// t = lane % 4 a lane holds, for query rows 2t and 2t + 1 of each tile, the scores of keys g and
// g + 8 of each 16 and columns g and g + 8 of each 16 of the output (2g and 2g + 1 where the cache
// is of bytes: decode_sm90_element.cuh).
#pragma once

#include <cstdint>

#include "common/mma.cuh"
#include "common/softmax_state.cuh"
#include "common/tma.cuh"
#include "decode/decode_sm90_element.cuh"
#include "decode/decode_sm90_scales.cuh"
#include "decode/decode_sm90_work.cuh"

namespace tiledattn::cuda {

/// exp(x) for x <= 0, or NaN.
__device__ __forceinline__ float exp_fast(float x) {
  constexpr float kLog2E = 1.4426950408889634f;
  return exp2_fast(x * kLog2E);
}

/// Q of one head: row `tile * 8 + g`, as the second operand.
template <typename Config>
struct QueryFragments {
  FragmentB part[Config::kDim / 16][Config::kTiles];

  __device__ __forceinline__ void load(const DecodeSm90Params& params, const HeadRows& rows) {
    const AttentionProblem& p = params.problem;
#pragma unroll
    for (int tile = 0; tile < Config::kTiles; ++tile) {
      const int row = rows.first_row + tile * 8 + lane_index() / 4;
      const bool present = row < params.rows;
      const int token = params.group.divide(row);
      const int group = static_cast<int>(params.group.value);
      const int head = rows.kv_head * group + row - token * group;
      const auto* const q =
          static_cast<const std::uint16_t*>(p.q.data) +
          (present ? rows.seq * p.q.seq_stride + token * p.q.token_stride + head * p.q.head_stride
                   : 0);
#pragma unroll
      for (int i = 0; i < Config::kDim / 16; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int column = i * 16 + query_column<typename Config::Element>(half);
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
  static constexpr int kRowBytes = Config::kRowBytes;
  static constexpr int kSlabBytes = Config::kSlabBytes;
  using T = typename Config::Element;
  using Product = ProductType<T>;
  static constexpr int kLoads = Config::kDim * static_cast<int>(sizeof(T)) / 32;  // of a key's row
  static constexpr int kLoadsOfSlab = kRowBytes / 32;

  float m[kTiles][2];                     ///< the same in lanes of equal t
  float l[kTiles][2];                     ///< of this lane's keys
  float o[Config::kDim / 16][kTiles][4];  ///< in a unit: see change_unit()

  __device__ __forceinline__ void clear(WarpScales<Config>& scales) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if constexpr (kQuantized<T>) {
        scales.units[tile][0][lane_index()] = kSmallestUnit;
        scales.units[tile][1][lane_index()] = kSmallestUnit;
      }
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
    const std::uint32_t base = k + row * kRowBytes;
    const std::uint32_t swizzle = ((lane_index() / 16) ^ swizzle_of_row(row)) << 4;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const std::uint32_t column = place_of_load(base, swizzle, i);
#pragma unroll
      for (int kt = 0; kt < kKeyTiles; ++kt) {
        const FragmentA loaded = load_matrices(column + kt * 16 * kRowBytes);
#pragma unroll
        for (int step = 0; step < kStepsOfLoad<T>; ++step) {
          const FragmentA keys = key_operand<T>(loaded, step);
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile)
            multiply_add<Product>(scores_[kt][tile], keys,
                                  q.part[i * kStepsOfLoad<T> + step][tile]);
        }
      }
    }
  }

  /// Dot products -> scores, those outside the row's keys -inf. Rounded here for good: the maximum
  /// and the difference to it must see the same score. `slot`: of the scales of this chunk's keys.
  __device__ __forceinline__ void make_scores(const DecodeSm90Params& params,
                                              const SequenceWork& work, int first_row,
                                              int first_key, const ChunkMask& mask,
                                              const WarpScales<Config>& scales,
                                              std::uint32_t slot) {
    const AttentionProblem& p = params.problem;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float factors[2] = {p.softmax_scale, p.softmax_scale};
      if constexpr (kQuantized<T>) {
        factors[0] = scales.rows[tile * 8 + lane_index() % 4 * 2];
        factors[1] = scales.rows[tile * 8 + lane_index() % 4 * 2 + 1];
      }
#pragma unroll
      for (int kt = 0; kt < kKeyTiles; ++kt)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          scores_[kt][tile][j] = __fmul_rn(scores_[kt][tile][j], factors[j % 2]);
    }
    if constexpr (kQuantized<T>) {
      if (p.k_scale.by_key) multiply_by_keys(scales.k[slot], {0, Config::kChunkKeys});
    }
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

  /// Scores -> weights; what was summed so far is scaled to the new maximum. `slot` is as for
  /// make_scores().
  __device__ __forceinline__ void make_weights(const DecodeSm90Params& params,
                                               const ChunkMask& mask, WarpScales<Config>& scales,
                                               std::uint32_t slot) {
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
    if constexpr (kQuantized<T>) {
      if (params.problem.v_scale.by_key) {
        multiply_by_keys(scales.v[slot], mask);
        moved = change_unit(scales, rescale) || moved;
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
              pack<Product>(scores_[kt][tile][2 * half], scores_[kt][tile][2 * half + 1]));
    // Matrices: 16 bytes of keys 0 .. 7, the next 16 bytes of them, then both of keys 8 .. 15.
    const int row = lane_index() % 8 + lane_index() / 16 * 8;
    const std::uint32_t base = v + row * kRowBytes;
    const std::uint32_t swizzle = ((lane_index() / 8 % 2) ^ swizzle_of_row(row)) << 4;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const std::uint32_t column = place_of_load(base, swizzle, i);
#pragma unroll
      for (int kt = 0; kt < kKeyTiles; ++kt) {
        const FragmentA loaded = load_matrices_transposed(column + kt * 16 * kRowBytes);
#pragma unroll
        for (int step = 0; step < kStepsOfLoad<T>; ++step) {
          const FragmentA values = value_operand<T>(loaded, step);
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile)
            multiply_add<Product>(o[i * kStepsOfLoad<T> + step][tile], values, weights[kt][tile]);
        }
      }
    }
  }

  /// l of whole rows, in all lanes, and o in its true unit. A NaN score, which never wins the
  /// maximum, reaches m here.
  __device__ __forceinline__ void finish(const DecodeSm90Params& params,
                                         const WarpScales<Config>& scales) {
    if constexpr (kQuantized<T>) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          float unit =
              params.problem.v_scale.by_key ? scales.units[tile][side][lane_index()] : scales.value;
          if (m[tile][side] == -infinity()) unit = 1.0f;  // no key was seen: nor is its scale
#pragma unroll
          for (int i = 0; i < Config::kDim / 16; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              float& x = o[i][tile][2 * half + side];
              x = __fmul_rn(x, unit);
            }
        }
    }
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
  /// What TMA's swizzle flips in the number of a 16-byte piece of a row.
  __device__ __forceinline__ static int swizzle_of_row(int row) {
    return kRowBytes == 128 ? row & 7 : row / 2 & 3;
  }
  __device__ __forceinline__ static std::uint32_t place_of_load(std::uint32_t base,
                                                                std::uint32_t swizzle, int i) {
    return base + (swizzle ^ ((i % kLoadsOfSlab) << 5)) + i / kLoadsOfSlab * kSlabBytes;
  }

  /// Multiplies scores or weights by a number of each key, 0 for those outside `mask`.
  __device__ __forceinline__ void multiply_by_keys(const float* scales, const ChunkMask& mask) {
#pragma unroll
    for (int kt = 0; kt < kKeyTiles; ++kt)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = kt * 16 + half * 8 + lane_index() / 4;
        const float scale = key >= mask.begin && key < mask.end ? scales[key] : 0.0f;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
          for (int side = 0; side < 2; ++side) {
            float& x = scores_[kt][tile][2 * half + side];
            x = __fmul_rn(x, scale);
          }
      }
  }

  /// Weights that hold scales may be of any size, and fp16 is not: each row has a unit, a power of
  /// two, which makes the largest of a chunk or of what is left of those before it nearly as large
  /// as fp16 can be. `rescale`, of the sums, comes to hold the change. True where that is not 1.
  __device__ __forceinline__ bool change_unit(WarpScales<Config>& scales,
                                              float (&rescale)[kTiles][2]) {
    constexpr float kLargestUnit = 0x1p114f;
    constexpr float kFromTop = 0x1p-14f;
    constexpr std::uint32_t kExponent = 0x7f800000;
    bool changed = false;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        float top = 0.0f;
#pragma unroll
        for (int kt = 0; kt < kKeyTiles; ++kt)
          top =
              fmaxf(top, fmaxf(fabsf(scores_[kt][tile][side]), fabsf(scores_[kt][tile][2 + side])));
#pragma unroll
        for (int step = 4; step < kWarpSize; step *= 2)
          top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
        float& unit_now = scales.units[tile][side][lane_index()];
        const float left = __fmul_rn(unit_now, rescale[tile][side]);
        const float wanted =
            fminf(fmaxf(fmaxf(left, __fmul_rn(top, kFromTop)), kSmallestUnit), kLargestUnit);
        const float unit = __uint_as_float(__float_as_uint(wanted) & kExponent);
        const float inverse = inverse_of_power(unit);
#pragma unroll
        for (int kt = 0; kt < kKeyTiles; ++kt)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& x = scores_[kt][tile][2 * half + side];
            x = __fmul_rn(x, inverse);
          }
        unit_now = unit;
        rescale[tile][side] = __fmul_rn(left, inverse);
        changed = changed || rescale[tile][side] != 1.0f;
      }
    return changed;
  }

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

  static constexpr float kSmallestUnit = 0x1p-110f;

  float scores_[kKeyTiles][kTiles][4];
};

/// Rows of V outside mask become zero: a weight of 0 times NaN would be NaN. Called by the warp
/// that owns the slot, before it reads it.
template <typename Config>
__device__ __forceinline__ void clear_values(unsigned char* slot, const ChunkMask& mask) {
  constexpr int kPieces = Config::kRowBytes / 16;  // in a row of a slab
  for (int at = lane_index(); at < Config::kChunkKeys * kPieces; at += kWarpSize) {
    const int key = at / kPieces;
    if (key >= mask.begin && key < mask.end) continue;
#pragma unroll
    for (int slab = 0; slab < Config::kSlabs; ++slab)
      *reinterpret_cast<uint4*>(slot + slab * Config::kSlabBytes + at * 16) =
          make_uint4(0, 0, 0, 0);
  }
  fence_async_proxy();  // the next load into this slot comes after these stores
  __syncwarp();
}

}  // namespace tiledattn::cuda
