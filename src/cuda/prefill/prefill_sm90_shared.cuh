// SPDX-License-Identifier: Apache-2.0
// Shared memory of the Hopper prefill kernel, and how its threads find their place in it.
#pragma once

#include <cstdint>

#include "common/mbarrier.cuh"
#include "common/wgmma.cuh"
#include "prefill/prefill_sm90_config.h"
#include "prefill/prefill_sm90_work.cuh"

namespace tiledattn::cuda {

/// Tiles of rows that a block may know of: short ones pass so quickly that q, K and V of the next
/// are loaded while results of the last still leave.
constexpr unsigned kWorkPlaces = 4;
/// The next tile of rows is asked for when this many tiles of keys are left to load: late, since a
/// tile that waits for one block cannot go to another that is free.
constexpr int kNotice = 3;

template <typename Config>
struct alignas(1024) PrefillSm90Shared {
  using T = typename Config::T;
  static constexpr int kKeyTile = Config::kKeys * Config::kSlabs * kSlabColumns;
  static constexpr int kRowTile = Config::kRows * Config::kSlabs * kSlabColumns;
  T v[Config::kStages][kKeyTile];
  T k[Config::kStages][kKeyTile];
  T q[Config::kQueryPlaces][kRowTile];
  T out[Config::kOwnOutput ? kRowTile : 8];
  float anchors[4 * Config::kConsumers];
  WorkTile work[kWorkPlaces];
  int repeat[kWorkPlaces];  ///< set by consumers: the tile must be done again
  MBarrier q_full[Config::kQueryPlaces];
  MBarrier q_empty[Config::kQueryPlaces];
  MBarrier k_full[Config::kStages];
  MBarrier k_empty[Config::kStages];
  MBarrier v_full[Config::kStages];
  MBarrier v_loaded[Config::kStages];  ///< values are there, but some must be cleared
  MBarrier v_empty[Config::kStages];
  MBarrier work_full[kWorkPlaces];
  MBarrier work_empty[kWorkPlaces];
  MBarrier work_wanted;

  __device__ void init_barriers(const PrefillSm90Params& params) {
    constexpr int kWarps = 4 * Config::kConsumers;  // each warp says for itself that it is done
    for (unsigned i = 0; i < Config::kQueryPlaces; ++i) {
      q_full[i].init(1);
      q_empty[i].init(kWarps);
    }
    for (unsigned i = 0; i < Config::kStages; ++i) {
      k_full[i].init(1);
      k_empty[i].init(kWarps);
      v_full[i].init(1);
      v_loaded[i].init(1);
      v_empty[i].init(kWarps);
    }
    for (unsigned i = 0; i < kWorkPlaces; ++i) {
      work_full[i].init(1);
      // Every lane that reads the work: of the consumers and of the warps that load pages or clear,
      // and the threads that load.
      const int others = params.page_rows > 0 ? 2 * 32 + 1 : params.clears_values ? 32 + 2 : 2;
      work_empty[i].init(32 * kWarps + others);
      repeat[i] = 0;
    }
    work_wanted.init(1);
    fence_barrier_init();
  }
};

/// A place in a ring of barriers and the parity of its phase, in one register. kPlaces is a power
/// of two.
template <unsigned kPlaces>
struct RingPlace {
  unsigned steps = 0;
  __device__ __forceinline__ unsigned index() const { return steps % kPlaces; }
  __device__ __forceinline__ unsigned parity() const { return steps / kPlaces % 2; }
  __device__ __forceinline__ void advance() { ++steps; }
};

// Numbered barriers of a block; 0 is __syncthreads().
constexpr int kFirstTurnBarrier = 1;
constexpr int kFirstOutputBarrier = 5;

// Of a consumer. Unsigned, so that the compiler need not think of negative threads.
__device__ __forceinline__ int consumer_lane() { return static_cast<int>(threadIdx.x % 32u); }
/// The warp's first of the warpgroup's rows.
__device__ __forceinline__ int consumer_warp_row() {
  return static_cast<int>(threadIdx.x % 128u / 32u * 16u);
}
__device__ __forceinline__ bool leads_consumer() { return threadIdx.x % 128u == 0; }

}  // namespace tiledattn::cuda
