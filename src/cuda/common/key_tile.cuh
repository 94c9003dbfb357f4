// SPDX-License-Identifier: Apache-2.0
// K or V of 32 keys, read from anywhere into shared memory as float32.
#pragma once

#include <cstdint>

#include "common/softmax_state.cuh"
#include "common/types.cuh"
#include "problem.h"

namespace tiledattn::cuda {

/// Keys in a tile: one for each lane.
constexpr int kTileKeys = kWarpSize;

/// Where an absent key is: its elements count as 0, so that a weight of 0 times it is 0.
constexpr std::int64_t kNoKey = INT64_MIN;

/// Element offsets of the keys of a tile. `first` is the tile's first key; keys outside `range` are
/// absent.
struct TileOffsets {
  std::int64_t k[kTileKeys];
  std::int64_t v[kTileKeys];
  float k_scale[kTileKeys];  ///< of quantised K and V
  float v_scale[kTileKeys];

  /// Work of the first two warps of a block. T is the type of K and V.
  template <typename T>
  __device__ void find(const AttentionProblem& p, const Sequence& s, std::int64_t kv_head,
                       const KeyRange& range, std::int64_t first) {
    const std::int64_t key = first + lane_index();
    const bool present = key >= range.begin && key < range.end;
    if (warp_index() == 0) k[lane_index()] = present ? key_offset(p, p.k, s, key, kv_head) : kNoKey;
    if (warp_index() == 1) v[lane_index()] = present ? key_offset(p, p.v, s, key, kv_head) : kNoKey;
    if constexpr (kQuantized<T>) {
      const KeyPlace place = present ? key_place(p, s, key) : KeyPlace{};
      const auto scale_of = [&](const ScaleView& scale) {
        return present ? scale.at(place.block, place.token, kv_head) : 1.0f;
      };
      if (warp_index() == 0) k_scale[lane_index()] = scale_of(p.k_scale);
      if (warp_index() == 1) v_scale[lane_index()] = scale_of(p.v_scale);
    }
  }
};

/// An element of a key, times the key's scale where T is quantised.
template <typename T>
__device__ __forceinline__ float dequantize(T x, const float* scales, int key) {
  if constexpr (kQuantized<T>) return __fmul_rn(to_float(x), scales[key]);
  return to_float(x);
}

/// tile[key][0 .. kDim) = elements 0 .. dim of each key, then zeros. Rows of the tile are kStride
/// floats apart.
template <typename T, int kDim, int kStride, int kThreads>
__device__ void load_key_tile(float* tile, const void* pool, const std::int64_t* offsets,
                              const float* scales, int dim, bool vector) {
  const T* const data = static_cast<const T*>(pool);
  const int thread = static_cast<int>(threadIdx.x);
  if (!vector) {
    for (int at = thread; at < kTileKeys * kDim; at += kThreads) {
      const int key = at / kDim;
      const int d = at % kDim;
      const std::int64_t offset = offsets[key];
      tile[key * kStride + d] =
          offset != kNoKey && d < dim ? dequantize(data[offset + d], scales, key) : 0.0f;
    }
    return;
  }

  constexpr int kItems = kVectorSize<T>;
  constexpr int kPieces = kDim / kItems;  // of a key; a power of two
  constexpr int kSteps = kTileKeys * kPieces / kThreads;
  constexpr int kBatch = kSteps < 4 ? kSteps : 4;  // loads in flight of one thread
  static_assert(kTileKeys * kPieces % kThreads == 0 && kSteps % kBatch == 0);
  for (int step = 0; step < kSteps; step += kBatch) {
    Vector<T> pieces[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = thread + (step + i) * kThreads;
      const int d = at % kPieces * kItems;
      const std::int64_t offset = offsets[at / kPieces];
      if (offset != kNoKey && d < dim)
        pieces[i].bits = *reinterpret_cast<const uint4*>(data + offset + d);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = thread + (step + i) * kThreads;
      const int key = at / kPieces;
      float* const to = tile + key * kStride + at % kPieces * kItems;
#pragma unroll
      for (int item = 0; item < kItems; item += 4) {
        *reinterpret_cast<float4*>(to + item) =
            make_float4(dequantize(pieces[i].items[item], scales, key),
                        dequantize(pieces[i].items[item + 1], scales, key),
                        dequantize(pieces[i].items[item + 2], scales, key),
                        dequantize(pieces[i].items[item + 3], scales, key));
      }
    }
  }
}

}  // namespace tiledattn::cuda
