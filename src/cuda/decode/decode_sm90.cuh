// SPDX-License-Identifier: Apache-2.0
// Decode on Hopper: a persistent kernel that reads K and V once, at the memory's rate, in one
// launch. docs/kernels/decode.md draws the schedule.
//
// A block is two teams of four warps. A team takes a run of groups of keys (decode_cut.h) that it
// finds from the lengths; in each group each warp attends to its slice. A warp's keys come through
// its own slots in shared memory by TMA, which runs ahead over groups and sequences, so that loads
// never wait for sums (decode_sm90_ring.cuh). Sums are in decode_sm90_slice.cuh, what becomes of
// them in decode_sm90_fold.cuh. Lengths and block ids are checked where they are read; a fault
// makes the rows of its sequence NaN.
//
// Barriers: one __syncthreads() where parameters are copied, and a pair while shares are found,
// where there are more than a few sequences; from then on only those of a team: two for each pass
// of a fold, two at the end for heads that are shared with other teams, one before a result enters
// the state. A warp waits for nobody else's loads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/dependents.cuh"
#include "common/launch.cuh"
#include "common/mbarrier.cuh"
#include "common/tma.cuh"
#include "decode/decode_sm90.h"
#include "decode/decode_sm90_fold.cuh"
#include "decode/decode_sm90_ring.cuh"
#include "decode/decode_sm90_slice.cuh"
#include "decode/decode_sm90_work.cuh"

namespace tiledattn::cuda {

template <typename T, int kDim_, int kRows_>
struct DecodeSm90Config {
  using Element = T;
  static constexpr int kDim = kDim_;    ///< columns of K and V, zeros beyond the head's own
  static constexpr int kRows = kRows_;  ///< query rows, at most, that share each K and V
  static constexpr int kTiles = (kRows + 7) / 8;  ///< of 8 rows
  static constexpr int kTeams = 2;
  static constexpr int kWarps = kTeams * kDecodeTeamWarps;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kChunkKeys = decode_chunk_keys(kDim, sizeof(T));
  static constexpr int kRowBytes = decode_box_bytes(kDim, sizeof(T));
  static constexpr int kSlabColumns = kRowBytes / static_cast<int>(sizeof(T));
  static constexpr int kSlabs = (kDim + kSlabColumns - 1) / kSlabColumns;
  static constexpr int kSlabBytes = kChunkKeys * kRowBytes;
  static constexpr int kSlotBytes = kSlabs * kSlabBytes;
  /// K and V of a chunk for each warp, 128 KB in all: 64 KB in flight saturate the memory, the rest
  /// covers what is being read by a warp. With more in flight some SMs are much faster than others.
  static constexpr int kSlots = 2;
  /// Columns that a fold handles at once: what the ring leaves free bounds its buffer.
  static constexpr int kPassColumns = kDim == 192 ? 96 : kDim < 128 ? kDim : 128 / kTiles;
};

template <typename Config>
struct alignas(1024) DecodeSm90Shared {
  unsigned char ring[Config::kWarps][Config::kSlots][Config::kSlotBytes];
  SliceBuffers<Config> slices[Config::kTeams];
  Share shares[Config::kWarps];  ///< of the warp's team; first.work is that of the sequence at hand
  LoadCursor cursors[Config::kWarps];
  FindBuffers<Config::kTeams, Config::kWarps> find;
  MBarrier full[Config::kWarps][Config::kSlots];
  WarpScales<Config> scales[Config::kWarps];
  HeadTotals<Config> totals[HeadTotals<Config>::kUsed ? Config::kThreads : 1];
  /// A copy of the kernel's parameters, for what is called and not inlined.
  alignas(DecodeSm90Params) unsigned char params_bytes[sizeof(DecodeSm90Params)];

  __device__ __forceinline__ const DecodeSm90Params& params() const {
    return *reinterpret_cast<const DecodeSm90Params*>(params_bytes);
  }
};

/// Where partial results of the head at which `at` stands go; anything where the team does the
/// whole head.
__device__ __forceinline__ int slot_of_head(const DecodeSm90Params& params, const GroupPlace& at,
                                            const Share& share) {
  if (params.slot_for_each_head) return at.seq * params.heads_per_seq + at.head;
  const DecodeCut& cut = share.first.work.cut;
  const int cost = cut.group_chunks;
  const bool whole = at.group == 0 && at.left > std::int64_t{cut.num_groups - 1} * cost;
  if (whole) return 0;
  const std::int64_t head_begin = share.end - at.left - std::int64_t{at.group} * cost;
  return static_cast<int>(team_of(share.total, head_begin, params.num_teams));
}

/// The work of a team, in lockstep only where groups are folded.
template <typename Config>
__device__ __forceinline__ void attend_share(const DecodeSm90Params& params,
                                             DecodeSm90Shared<Config>& shared,
                                             const TeamMember& member) {
  using Loads = RingLoads<Config>;
  const int warp = warp_index();
  const DecodeSm90Params& copy = shared.params();
  Share& share = shared.shares[warp];
  SequenceWork& work = share.first.work;  // of the sequence at hand
  SliceBuffers<Config>& buffers = shared.slices[member.team];
  MBarrier* const full = shared.full[warp];
  unsigned char* const keys = shared.ring[warp][Loads::kKeys];
  unsigned char* const values = shared.ring[warp][Loads::kValues];
  {
    const int team = static_cast<int>(blockIdx.x) * Config::kTeams + member.team;
    if (params.short_line) {
      Share found;
      if (params.few_seqs) {
        find_share_of_few<Config::kChunkKeys>(params, copy, team, found);
      } else {
        find_share_of_many<int, Config::kChunkKeys>(params, copy, team, shared.find, found);
      }
      if (lane_index() == 0) share = found;
      __syncwarp();
    } else {
      find_share_of_long_line<Config::kChunkKeys>(copy, team, shared.find, share);
    }
  }

  GroupPlace at = share.first;
  WarpScales<Config>& scales = shared.scales[warp];
  Loads loads(params, copy, share.first, member.warp, shared.cursors[warp], keys, full, scales);
  wait_for_predecessor();
  start_dependents();
  std::uint32_t parity = 0;  // of the barriers of both slots

  SliceState<Config> slice;
  HeadResult<Config> result(shared.totals + (HeadTotals<Config>::kUsed ? threadIdx.x : 0));
  const FoldPlace<Config> place(member);
  bool new_sequence = false;
  if (member.thread == 0) buffers.num_parts = 0;
  int part = 0;  // of the heads that are shared with other teams
#pragma unroll 1
  while (true) {
    HeadRows rows;
    if (!at.done()) {
      if (new_sequence) {
        const SequenceWork next = sequence_work<Config::kChunkKeys>(params, copy, at.seq);
        __syncwarp();  // all lanes are done with the last one
        if (lane_index() == 0) work = next;
        __syncwarp();
      }
      const int head = at.head;
      rows = rows_of_head<Config>(params, at.seq, head);
      QueryFragments<Config> queries;
      queries.load(params, rows);
      if constexpr (kQuantized<typename Config::Element>)
        begin_head<Config>(params.problem, rows.kv_head, queries, scales);
      result.begin(params, place, rows, at.group, slot_of_head(params, at, share));
      if (work.faulty && at.group == 0 && head == 0 && member.thread == 0)
        report_sequence(params.problem, at.seq);

      const int num_groups = work.cut.num_groups;
      int group;
      bool more;  // groups of this head
#pragma unroll 1
      do {
        group = at.group;
        slice.clear(scales);
        bool wrong = work.faulty;
        const ChunkRange chunks = slice_of_group(chunks_of_group(work.cut, group), member.warp);
        const int group_chunk = work.cut.first_chunk + group * work.cut.group_chunks;
#pragma unroll 1
        for (int chunk = chunks.begin; chunk < chunks.end; ++chunk) {
          const int first_key = (group_chunk + chunk) * Config::kChunkKeys;
          const ChunkMask mask = chunk_mask<Config>(work, first_key);
          wrong = wrong || loads.wrong();
          full[Loads::kKeys].wait(parity);
          slice.multiply_keys(shared_address(keys), queries);
          __syncwarp();  // all lanes have read the slot
          loads.template issue<Loads::kKeys>(params);
          loads.issue_scales(params, parity ^ 1);
          loads.wait_for_scales(params);
          slice.make_scores(params, work, rows.first_row, first_key, mask, scales, parity);
          slice.make_weights(params, mask, scales, parity);
          full[Loads::kValues].wait(parity);
          if (mask.begin > 0 || mask.end < Config::kChunkKeys) clear_values<Config>(values, mask);
          slice.multiply_values(shared_address(values));
          __syncwarp();
          loads.template issue<Loads::kValues>(params);
          parity ^= 1;
          loads.look_ahead(params);
        }
        slice.finish(params, scales);
        if (wrong) slice.poison();
        result.add_group(params, member, place, buffers, group, slice);
        new_sequence = at.advance(params, work.cut);
        more = group + 1 < num_groups && !at.done();
      } while (more);
      if (!result.end(params, member, place, buffers, rows.seq, head, group, num_groups)) continue;
    } else {  // all else is done: nobody has to wait for counters and partial results before
      if (part == 0) {
        loads.report(params);
        result.bring(params, member, buffers);
      }
      // Not `break`: what comes after the loop is far away, and its code would have to be fetched.
      if (part == buffers.num_parts) return;
      const HeadPart& shared_head = buffers.parts[part];
      const int first_count = buffers.first_counts[part];
      ++part;
      if (first_count == 0) continue;
      rows = rows_of_head<Config>(params, shared_head.seq, shared_head.head);
      result.begin(params, place, rows, shared_head.first_group, shared_head.slot);
      result.fold_head(params, place, first_count, shared_head.num_groups);
    }
    result.write(params, member, place, rows);
  }
}

/// Fills shared.params(), but for the tensor maps, where something reads it. Called by the whole
/// block.
template <typename Config>
__device__ __forceinline__ void copy_params(const DecodeSm90Params& params,
                                            DecodeSm90Shared<Config>& shared) {
  if (params.short_lengths && params.short_line) return;
  constexpr int kFirst = static_cast<int>(offsetof(DecodeSm90Params, problem)) / 4;
  constexpr int kEnd = static_cast<int>(sizeof(DecodeSm90Params)) / 4;
  const auto* const from = reinterpret_cast<const std::uint32_t*>(&params);
  auto* const to = reinterpret_cast<std::uint32_t*>(shared.params_bytes);
#pragma unroll 1
  for (int i = kFirst + static_cast<int>(threadIdx.x); i < kEnd; i += Config::kThreads)
    to[i] = from[i];
  __syncthreads();
}

/// Parameters come through a cache that is cold in each launch. The warps read a line each, all at
/// once, where otherwise all would wait for one line after the other. `sink` keeps the reads alive.
template <int kWarps>
__device__ __forceinline__ void touch_params(const DecodeSm90Params& params, std::int64_t* sink) {
  constexpr int kLineWords = 64 / 4;
  constexpr int kFirst = static_cast<int>(offsetof(DecodeSm90Params, problem)) / 64;
  constexpr int kLast = static_cast<int>(sizeof(DecodeSm90Params) - 1) / 64;
  const auto* const words = reinterpret_cast<const std::uint32_t*>(&params);
  std::uint32_t sum = 0;
#pragma unroll
  for (int line = kFirst; line <= kLast; line += kWarps) {
    const int mine = line + warp_index();
    sum ^= words[(mine < kLast ? mine : kLast) * kLineWords];
  }
  if (lane_index() == 0) sink[warp_index()] = sum;
  __syncwarp();
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    decode_sm90(const __grid_constant__ DecodeSm90Params params) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  DecodeSm90Shared<Config>& shared = *reinterpret_cast<DecodeSm90Shared<Config>*>(shared_bytes);
  touch_params<Config::kWarps>(params, shared.find.costs);
  copy_params(params, shared);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(params.k_map);
    prefetch_tensor_map(params.v_map);
  }
  if (lane_index() < Config::kSlots) shared.full[warp_index()][lane_index()].init(1);
  fence_barrier_init();
  if (!params.early_start) wait_for_predecessor();
  const TeamMember member{warp_index() / kDecodeTeamWarps, warp_index() % kDecodeTeamWarps,
                          static_cast<int>(threadIdx.x) % TeamMember::kThreads};
  attend_share<Config>(params, shared, member);

#endif
}

template <typename T, int kDim, int kRows>
void launch_decode_sm90_instance(const DecodeSm90Params& params, cudaStream_t stream) {
  using Config = DecodeSm90Config<T, kDim, kRows>;
  const std::int64_t blocks = (params.num_teams + Config::kTeams - 1) / Config::kTeams;
  launch(decode_sm90<Config>, "decode_sm90",
         {blocks, Config::kThreads, shared_bytes_of_sm90<DecodeSm90Shared<Config>>(), true}, params,
         stream);
}

}  // namespace tiledattn::cuda
