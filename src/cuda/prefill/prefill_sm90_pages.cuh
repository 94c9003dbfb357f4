// SPDX-License-Identifier: Apache-2.0
// Loads of the Hopper prefill kernel where K and V lie in the blocks of a paged cache: a warp each.
//
// A lane finds the rows of one block and asks TMA for them. Requests for so few rows keep the warp
// that makes them waiting, so K and V have one warp each.
#pragma once

#include <cstdint>

#include "common/tma.cuh"
#include "prefill/prefill_sm90_producer.cuh"
#include "prefill/prefill_sm90_shared.cuh"

namespace tiledattn::cuda {

/// Where a tile of K or V goes.
template <typename Config>
struct PagedPlace {
  typename Config::T* to;
  MBarrier& full;
  MBarrier& empty;
  unsigned parity;
};

/// A whole warp.
template <typename Config>
__device__ __forceinline__ void load_pages(const PrefillSm90Params& params, const CUtensorMap& map,
                                           const PagedPlace<Config>& place, const WorkTile& work,
                                           int tile) {
  const int lane = static_cast<int>(threadIdx.x % 32u);
  const int row = lane * params.page_rows;  // of the tile: this lane's first
  const bool present = row < Config::kKeys;
  const int key = tile * Config::kKeys + row;  // of those that count
  // Behind the last key: outside of the pool, which reads as zeros.
  BoxAt box{0, 0, work.kv_head, params.num_blocks};
  if (present && key < work.num_keys) {
    const int number = work.key_row + key;  // of the sequence
    const int column = params.block_size.divide(number);
    box.row = number - column * static_cast<int>(params.block_size.value);
    // On its way while the place is still in use.
    box.batch = static_cast<int>(params.attend.problem.table.at(work.sequence, column));
  }
  place.empty.wait(place.parity ^ 1);
  if (lane == 0)
    place.full.arrive_expecting(PrefillSm90Shared<Config>::kKeyTile * sizeof(typename Config::T));
  __syncwarp();
  if (present) {
#pragma unroll
    for (int slab = 0; slab < Config::kSlabs; ++slab) {
      box.column = slab * kSlabColumns;
      load_box(place.to + (slab * Config::kKeys + row) * kSlabColumns, map, box, place.full);
    }
  }
  __syncwarp();
}

/// A warp: K, the key tiles from the last to the first. Asks for the next work as well.
template <typename Config>
__device__ __forceinline__ void load_paged_keys(const PrefillSm90Params& params,
                                                PrefillSm90Shared<Config>& shared) {
  RingPlace<Config::kStages> keys;
  const bool first_lane = threadIdx.x % 32 == 0;
  for (RingPlace<kWorkPlaces> place;; place.advance()) {
    shared.work_full[place.index()].wait(place.parity());
    const WorkTile& work = shared.work[place.index()];
    if (work.none()) break;
    const int ask_at = min(work.end - 1, work.begin + kNotice);
    if (!work.has_keys() && first_lane) shared.work_wanted.arrive();
#pragma unroll 1
    for (int tile = work.end - 1; tile >= work.begin; --tile) {
      const unsigned i = keys.index();
      load_pages<Config>(params, params.k,
                         {shared.k[i], shared.k_full[i], shared.k_empty[i], keys.parity()}, work,
                         tile);
      keys.advance();
      if (tile == ask_at && first_lane) shared.work_wanted.arrive();
    }
    shared.work_empty[place.index()].arrive();
  }
}

/// A warp: V. What the sequence's last block has behind its end is cleared once the tile before is
/// asked for, and what its first one has before every window as soon as it is there.
template <typename Config>
__device__ __forceinline__ void load_paged_values(const PrefillSm90Params& params,
                                                  PrefillSm90Shared<Config>& shared) {
  RingPlace<Config::kStages> values;
  ValueClearer<Config> clearer;
  for (RingPlace<kWorkPlaces> place;; place.advance()) {
    shared.work_full[place.index()].wait(place.parity());
    const WorkTile& work = shared.work[place.index()];
    if (work.none()) break;
    const int last = work.end - 1;
    const unsigned last_stage = values.index();
#pragma unroll 1
    for (int tile = last; tile >= work.begin; --tile) {
      const unsigned i = values.index();
      const bool clears = work.clears(tile);
      load_pages<Config>(params, params.v,
                         {shared.v[i], clears ? shared.v_loaded[i] : shared.v_full[i],
                          shared.v_empty[i], values.parity()},
                         work, tile);
      values.advance();
      if (work.needs_clearing && tile == max(work.begin, last - 1))
        clearer.clear(shared, work, last, last_stage);
      if (clears && !(work.needs_clearing && tile == last)) clearer.clear(shared, work, tile, i);
    }
    shared.work_empty[place.index()].arrive();
  }
}

}  // namespace tiledattn::cuda
