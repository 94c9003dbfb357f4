// SPDX-License-Identifier: Apache-2.0
// Who does what in the Hopper decode kernel, found on the device from the lengths alone.
//
// The work stands in one line (decode_cut.h): sequence after sequence, in it head after head (a KV
// head and a tile of rows), in it group after group. Each team takes what begins in its share.
// Where a share begins is found by the whole block: each thread adds up the costs of some
// sequences, a scan over the block gives where they begin, and the thread that holds the place
// looks closer.
//
// Everything here takes the kernel's own parameters and is inlined: they then are operands of
// instructions, where a function called with their address would load each of them from memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/softmax_state.cuh"
#include "decode/decode_sm90.h"
#include "decode_cut.h"
#include "problem.h"

namespace tiledattn::cuda {

/// What the kernel needs of one sequence.
struct SequenceWork {
  DecodeCut cut;
  int begin = 0;  ///< keys that some query token sees
  int end = 0;
  int all_begin = 0;  ///< keys that all of them see
  int all_end = 0;
  int kv_len = 0;
  bool faulty = false;        ///< its lengths or positions are wrong: nothing of it is read
  std::int64_t position = 0;  ///< of query token 0
};

template <int kChunkKeys>
__device__ __forceinline__ SequenceWork sequence_work(const DecodeSm90Params& params, int b) {
  const AttentionProblem& p = params.problem;
  SequenceWork work;
  Sequence s;
  if (params.short_lengths) {  // what the general case would do, in a few instructions
    const auto* const lengths = static_cast<const std::int32_t*>(p.seq_lens.data);
    work.kv_len = __ldg(lengths + b * p.seq_lens.row_stride);
    work.faulty = static_cast<unsigned>(work.kv_len) > params.max_len;
  } else {
    work.faulty = check_sequence(p, b).found();
    if (!work.faulty) s = sequence_at(p, b);
    work.kv_len = static_cast<int>(s.kv_len);
    work.position = s.position;
  }
  if (work.faulty) {
    work.kv_len = 0;
    return work;
  }
  work.end = work.all_end = work.kv_len;
  if (!params.sees_all) {
    const KeyRange first = visible_keys(p, s, 0);
    const KeyRange last = visible_keys(p, s, s.q_len - 1);
    const auto inside = [&](std::int64_t key) {
      return static_cast<int>(detail::min64(detail::max64(key, 0), s.kv_len));
    };
    work.begin = inside(first.begin);
    work.end = inside(last.end);
    work.all_begin = inside(last.begin);
    work.all_end = inside(first.end);
  }
  work.cut = cut_for_decode(work.begin, work.end, kChunkKeys, p.num_kv_heads);
  return work;
}

/// A place in the line: the group at which a team (or the loads of a warp) stands.
struct GroupPlace {
  int seq = 0;
  int head = 0;
  int group = 0;
  std::int64_t left = 0;  ///< from the group's begin to the end of the team's share

  __device__ bool done() const { return left <= 0; }

  /// To the next group. `cut` is that of `seq`. True where the next one is of another sequence.
  __device__ __forceinline__ bool advance(const DecodeSm90Params& params, const DecodeCut& cut) {
    left -= group_cost(cut, group);
    if (++group < cut.num_groups) return false;
    group = 0;
    if (++head < params.heads_per_seq) return false;
    head = 0;
    ++seq;
    return left > 0;
  }
};

struct Cursor : GroupPlace {
  SequenceWork work;  ///< of `seq`

  __device__ int num_chunks() const { return chunks_of_group(work.cut, group); }
};

/// Where a team begins.
struct Share {
  Cursor first;
  std::int64_t end;    ///< in the line
  std::int64_t total;  ///< length of the line
};

/// The place at which a share begins, given the sequence in which it does, which itself begins at
/// `base`. True where it is the begin of the next sequence. Int: a type for places in the line.
template <typename Int>
__device__ __forceinline__ bool find_in_sequence(const DecodeSm90Params& params, int b,
                                                 const SequenceWork& work, Int base, Int from,
                                                 Int end, Cursor& at) {
  const auto cost = static_cast<unsigned>(head_cost(work.cut));
  at.work = work;
  at.seq = b;
  at.head = static_cast<int>(static_cast<std::make_unsigned_t<Int>>(from - base) / cost);
  const Int head_begin = base + static_cast<Int>(at.head) * static_cast<Int>(cost);
  at.group = first_group_from(work.cut, from - head_begin);
  at.left = end - (head_begin + static_cast<Int>(at.group) * (work.cut.group_chunks + 1));
  if (at.group < work.cut.num_groups) return false;
  at.group = 0;
  at.left = end - (head_begin + static_cast<Int>(cost));
  if (++at.head < params.heads_per_seq) return false;
  at.head = 0;
  at.seq = b + 1;
  return true;
}

/// Fills shares[0 .. kTeams - 1] of this block. Called by the whole block; barriers inside, the
/// last one after `shares` is written. `sums` holds one number for each warp. Int: a type for
/// places in the line, which the host chooses by the most work there can be.
template <typename Int, int kChunkKeys, int kTeams, int kWarps>
__device__ __forceinline__ void find_shares(const DecodeSm90Params& params, Share* shares,
                                            std::int64_t* sums) {
  constexpr int kThreads = kWarps * kWarpSize;
  const int thread = static_cast<int>(threadIdx.x);
  const int num_seqs = static_cast<int>(params.problem.num_seqs);
  const int each = (num_seqs + kThreads - 1) / kThreads;
  const int first = thread * each < num_seqs ? thread * each : num_seqs;
  const int last = first + each < num_seqs ? first + each : num_seqs;

  SequenceWork work;
  int work_of = -1;  // the sequence looked at last
  Int mine = 0;
  Int begin = 0;
  Int total = 0;
  Int from = 0;
  Int end = 0;
  // Round 0 adds up; each later one looks for the begin of one team.
#pragma unroll 1
  for (int round = 0; round <= kTeams; ++round) {
    const bool looks = round > 0 && from >= begin && from < begin + mine && from < end;
    Int base = begin;
    bool found = false;
#pragma unroll 1
    for (int b = first; (round == 0 && b < last) || (looks && !found); ++b) {
      if (work_of != b) work = sequence_work<kChunkKeys>(params, b);
      work_of = b;
      const Int cost = static_cast<Int>(head_cost(work.cut)) * params.heads_per_seq;
      if (round == 0) {
        mine += cost;
        continue;
      }
      if (from >= base + cost) {
        base += cost;
        continue;
      }
      Share& share = shares[round - 1];
      share.end = end;
      share.total = total;
      Cursor at;
      if (from <= base) {  // the very begin, of this or of the last one's follower
        at.work = work;
        at.seq = b;
        at.left = end - base;
        found = true;
      } else {
        const bool next = find_in_sequence<Int>(params, b, work, base, from, end, at);
        found = !next || at.done();
        from = base += cost;  // where the next sequence begins, if it is that
      }
      share.first = at;
    }
    if (round == 0) {
      Int through = mine;
#pragma unroll
      for (int step = 1; step < kWarpSize; step *= 2) {
        const Int before = __shfl_up_sync(kAllLanes, through, step);
        if (lane_index() >= step) through += before;
      }
      if (lane_index() == kWarpSize - 1) sums[warp_index()] = through;
      if (thread < kTeams) shares[thread].first.left = 0;
      __syncthreads();
      begin = through - mine;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) {
        const Int sum = static_cast<Int>(sums[warp]);
        if (warp < warp_index()) begin += sum;
        total += sum;
      }
    }
    const int team = static_cast<int>(blockIdx.x) * kTeams + round;
    from = end = 0;
    if (round < kTeams && team < params.num_teams) {
      Int whole;
      if constexpr (sizeof(Int) == 4) {
        whole = params.teams.divide(total);
      } else {
        whole = total / params.num_teams;
      }
      const int rest = static_cast<int>(total - whole * params.num_teams);
      from = whole * team + params.teams.divide(rest * team);
      end = whole * (team + 1) + params.teams.divide(rest * (team + 1));
    }
  }
  __syncthreads();
}

}  // namespace tiledattn::cuda
