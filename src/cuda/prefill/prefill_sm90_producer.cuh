// SPDX-License-Identifier: Apache-2.0
// Warpgroup 0 of the Hopper prefill kernel: one thread finds work, two load it, and one warp clears
// values behind the end of a packed sequence or of a segment. prefill_sm90_pages.cuh loads paged K
// and V.
#pragma once

#include <cstdint>

#include "common/tma.cuh"
#include "prefill/prefill_sm90_shared.cuh"

namespace tiledattn::cuda {

/// One thread: finds the next tile of rows when it is wanted and a place is free.
template <typename Config>
__device__ __forceinline__ void find_all_work(const PrefillSm90Params& params,
                                              PrefillSm90Shared<Config>& shared) {
  // Takes back what consumers have asked for at a place, which they have left.
  const auto take_repeat = [&](unsigned place) {
    if (shared.repeat[place] == 0) return false;
    shared.repeat[place] = 0;
    return true;
  };
  std::int32_t index = static_cast<std::int32_t>(blockIdx.x);
  bool more = true;
  unsigned pauses = 0;
  for (RingPlace<kWorkPlaces> place;; place.advance()) {
    const bool first = place.steps == 0;
    if (!first) shared.work_wanted.wait((place.steps - 1) % 2);
    WorkTile& work = shared.work[place.index()];
    shared.work_empty[place.index()].wait(place.parity() ^ 1);
    if (take_repeat(place.index())) {
      work.repeat();
    } else {
      if (more && !first)
        index = static_cast<std::int32_t>(gridDim.x) + atomicAdd(params.counters, 1);
      work = find_work<Config>(params, index);
      more = !work.none();
      // Tiles at the other places may have to be repeated, which only their end will tell.
      if (!more && pauses < kWorkPlaces - 1) work.head = WorkTile::kPause;
    }
    pauses = work.pause() ? pauses + 1 : 0;
    const bool none = work.none();
    shared.work_full[place.index()].arrive();
    if (none) break;
  }
  // The last block leaves the counters as it found them.
  __threadfence();
  if (atomicAdd(params.counters + 1, 1) == static_cast<std::int32_t>(gridDim.x) - 1) {
    params.counters[0] = 0;
    params.counters[1] = 0;
  }
}

/// One thread: q, as soon as a tile of rows is known. K and V go through rings that are free only
/// shortly before the tile begins; in turn with them, q would come late.
template <typename Config>
__device__ __forceinline__ void load_queries(const PrefillSm90Params& params,
                                             PrefillSm90Shared<Config>& shared) {
  using T = typename Config::T;
  RingPlace<Config::kQueryPlaces> queries;
  for (RingPlace<kWorkPlaces> place;; place.advance()) {
    shared.work_full[place.index()].wait(place.parity());
    const WorkTile& work = shared.work[place.index()];
    if (work.none()) break;
    if (!work.pause()) {
      const auto slab_at = [&](int slab) {
        return BoxAt{slab * kSlabColumns, work.q_row, work.head, work.batch};
      };
      if constexpr (Config::kQueryPlaces == 1) {
#pragma unroll
        for (int slab = 0; slab < Config::kSlabs; ++slab) prefetch_box(params.q, slab_at(slab));
      }
      MBarrier& q_full = shared.q_full[queries.index()];
      shared.q_empty[queries.index()].wait(queries.parity() ^ 1);
      q_full.arrive_expecting(PrefillSm90Shared<Config>::kRowTile * sizeof(T));
#pragma unroll
      for (int slab = 0; slab < Config::kSlabs; ++slab) {
        load_box(shared.q[queries.index()] + slab * Config::kRows * kSlabColumns, params.q,
                 slab_at(slab), q_full);
      }
      queries.advance();
    }
    shared.work_empty[place.index()].arrive();
  }
}

template <typename Config>
__device__ __forceinline__ void load_keys(typename Config::T* to, const CUtensorMap& map,
                                          MBarrier& full, MBarrier& empty, unsigned parity,
                                          const WorkTile& work, int tile) {
  empty.wait(parity ^ 1);
  full.arrive_expecting(PrefillSm90Shared<Config>::kKeyTile * sizeof(typename Config::T));
#pragma unroll
  for (int slab = 0; slab < Config::kSlabs; ++slab) {
    load_box(to + slab * Config::kKeys * kSlabColumns, map,
             {slab * kSlabColumns, work.key_row + tile * Config::kKeys, work.kv_head, work.batch},
             full);
  }
}

/// One thread: the key tiles from the last to the first, each one's keys ahead of the values of the
/// tile before.
template <typename Config>
__device__ __forceinline__ void load_all_keys(const PrefillSm90Params& params,
                                              PrefillSm90Shared<Config>& shared) {
  RingPlace<Config::kStages> keys;
  RingPlace<Config::kStages> values;
  const auto load_k = [&](const WorkTile& work, int tile) {
    const unsigned i = keys.index();
    load_keys<Config>(shared.k[i], params.k, shared.k_full[i], shared.k_empty[i], keys.parity(),
                      work, tile);
    keys.advance();
  };
  const auto load_v = [&](const WorkTile& work, int tile) {
    const unsigned i = values.index();
    const bool clears = work.clears(tile);
    load_keys<Config>(shared.v[i], params.v, clears ? shared.v_loaded[i] : shared.v_full[i],
                      shared.v_empty[i], values.parity(), work, tile);
    values.advance();
  };
  for (RingPlace<kWorkPlaces> place;; place.advance()) {
    shared.work_full[place.index()].wait(place.parity());
    const WorkTile& work = shared.work[place.index()];
    if (work.none()) break;
    int tile = work.end - 1;
    const int ask_at = min(tile, work.begin + kNotice);
    if (work.has_keys()) load_k(work, tile);
#pragma unroll 1
    for (; tile > work.begin; --tile) {
      if (tile == ask_at) shared.work_wanted.arrive();
      load_k(work, tile - 1);
      load_v(work, tile);
    }
    if (ask_at <= work.begin) shared.work_wanted.arrive();  // at most one tile of keys
    if (work.has_keys()) load_v(work, tile);
    shared.work_empty[place.index()].arrive();
  }
}

/// A warp: values of a tile past the last key, or before every window, are another's or garbage,
/// and 0 * NaN would let them in. Clears them once they are there, then says that the tile is full.
/// (Consumers could do so, but a branch there makes ptxas forget that places in rings, and with
/// them the descriptors of matrix products, are the same for all threads.)
template <typename Config>
class ValueClearer {
 public:
  __device__ __forceinline__ void clear(PrefillSm90Shared<Config>& shared, const WorkTile& work,
                                        int tile, unsigned stage) {
    shared.v_loaded[stage].wait(parities_ >> stage & 1);
    parities_ ^= 1u << stage;
    if (tile == 0) clear_rows(shared, stage, 0, work.unseen);
    clear_rows(shared, stage, min(Config::kKeys, work.num_keys - tile * Config::kKeys),
               Config::kKeys);
    fence_async_proxy();
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.v_full[stage].arrive();
  }

 private:
  __device__ __forceinline__ static void clear_rows(PrefillSm90Shared<Config>& shared,
                                                    unsigned stage, int begin, int end) {
    constexpr int kRowPieces = kSlabRowBytes / 16 * Config::kSlabs;
    char* const tile = reinterpret_cast<char*>(shared.v[stage]);
#pragma unroll 1
    for (int i = begin * kRowPieces + static_cast<int>(threadIdx.x % 32u); i < end * kRowPieces;
         i += 32) {
      const int row = i / kRowPieces;
      const int piece = i % kRowPieces;
      char* const at = tile + (piece / 8 * Config::kKeys + row) * kSlabRowBytes + piece % 8 * 16;
      *reinterpret_cast<uint4*>(at) = uint4{0, 0, 0, 0};
    }
  }

  unsigned parities_ = 0;  ///< a bit for each stage
};

/// One warp, for packed KV and for segments of dense KV.
template <typename Config>
__device__ __forceinline__ void clear_all(PrefillSm90Shared<Config>& shared) {
  RingPlace<Config::kStages> values;
  ValueClearer<Config> clearer;
  for (RingPlace<kWorkPlaces> place;; place.advance()) {
    shared.work_full[place.index()].wait(place.parity());
    const WorkTile& work = shared.work[place.index()];
    if (work.none()) break;
    if (work.needs_clearing) clearer.clear(shared, work, work.end - 1, values.index());
    values.steps += static_cast<unsigned>(work.end - work.begin);
    shared.work_empty[place.index()].arrive();
  }
}

}  // namespace tiledattn::cuda
