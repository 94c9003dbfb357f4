// SPDX-License-Identifier: Apache-2.0
// Who does what in the Hopper decode kernel, found on the device from the lengths alone.
//
// The work stands in one line (decode_cut.h): sequence after sequence, in it head after head (a KV
// head and a tile of rows), in it group after group. Each team takes what begins in its share.
// Where a share begins is found by each warp alone, or by the whole block where there are many
// sequences: each thread adds up the costs of some, a scan gives where they begin, and all look
// closer at the place that one of them holds.
//
// Most of it takes the kernel's own parameters and is inlined: they then are operands of
// instructions, where a function called with their address would load each of them from memory.
// What is long is one function that is called, with a copy of them in shared memory: a
// launch begins with instructions that nobody has fetched yet, so each of them costs time.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/softmax_state.cuh"
#include "decode/decode_sm90.h"
#include "decode_cut.h"
#include "problem.h"

namespace tiledattn::cuda {

/// The keys of one sequence.
struct SequenceKeys {
  int begin = 0;  ///< that some query token sees
  int end = 0;
  int all_begin = 0;  ///< that all of them see
  int all_end = 0;
  int kv_len = 0;
  bool faulty = false;        ///< its lengths or positions are wrong: nothing of it is read
  std::int64_t position = 0;  ///< of query token 0
};

/// What the kernel needs of one sequence.
struct SequenceWork : SequenceKeys {
  DecodeCut cut;
};

/// With lengths and masks of any kind.
__device__ __forceinline__ SequenceKeys keys_of_sequence(const AttentionProblem& p, int b) {
  SequenceKeys keys;
  keys.faulty = check_sequence(p, b).found();
  if (keys.faulty) return keys;
  const Sequence s = sequence_at(p, b);
  const auto inside = [&](std::int64_t key) {
    return static_cast<int>(detail::min64(detail::max64(key, 0), s.kv_len));
  };
  const KeyRange first = visible_keys(p, s, 0);
  const KeyRange last = visible_keys(p, s, s.q_len - 1);
  keys.begin = inside(first.begin);
  keys.end = inside(last.end);
  keys.all_begin = inside(last.begin);
  keys.all_end = inside(first.end);
  keys.kv_len = static_cast<int>(s.kv_len);
  keys.position = s.position;
  return keys;
}

__device__ __noinline__ static SequenceKeys call_keys_of_sequence(const AttentionProblem& p,
                                                                  int b) {
  return keys_of_sequence(p, b);
}

/// `copy`: params in shared memory. kInline: for where a call would cost registers that are needed.
template <int kChunkKeys, bool kInline = false>
__device__ __forceinline__ SequenceWork sequence_work(const DecodeSm90Params& params,
                                                      const DecodeSm90Params& copy, int b) {
  SequenceWork work;
  if (params.short_lengths) {  // what the general case would find, in a few instructions
    const IndexView& lengths = params.problem.seq_lens;
    const int kv_len =
        __ldg(static_cast<const std::int32_t*>(lengths.data) + b * lengths.row_stride);
    work.faulty = static_cast<unsigned>(kv_len) > params.max_len;
    if (!work.faulty) work.end = work.all_end = work.kv_len = kv_len;
  } else {
    static_cast<SequenceKeys&>(work) =
        kInline ? keys_of_sequence(params.problem, b) : call_keys_of_sequence(copy.problem, b);
  }
  work.cut = cut_for_decode(work.begin, work.end, kChunkKeys, params.problem.num_kv_heads);
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
    left -= kDecodeHeadCost;
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

/// The rows of q of one head of the schedule: from first_row on, of those (token, head of the
/// group) that share a KV head.
struct HeadRows {
  int seq;
  int kv_head;
  int first_row;
};

template <typename Config>
__device__ __forceinline__ HeadRows rows_of_head(const DecodeSm90Params& params, int seq,
                                                 int head) {
  const int kv_head = params.row_tiles.divide(head);
  const int tile = head - kv_head * static_cast<int>(params.row_tiles.value);
  return {seq, kv_head, tile * Config::kTiles * 8};
}

/// What a team does: the groups that begin in its share of the line.
struct Share {
  Cursor first;
  std::int64_t end;    ///< in the line
  std::int64_t total;  ///< length of the line
};

/// As DecodeShares has it: sets share.end, and gives where the share of `team` begins. Int: a type
/// for places in the line.
template <typename Int>
__device__ __forceinline__ Int begin_of_share(const DecodeSm90Params& params, int team,
                                              Share& share) {
  if (team >= params.num_teams) return share.end = 0;  // a block may have one too many
  const Int total = static_cast<Int>(share.total);
  Int each;
  if constexpr (sizeof(Int) == 4) {
    each = params.teams.divide(total);
  } else {
    each = total / params.num_teams;
  }
  const int rest = static_cast<int>(total - each * params.num_teams);
  share.end = each * (team + 1) + params.teams.divide(rest * (team + 1));
  if (team + 1 < params.num_teams) share.end -= kDecodeHeadCost;
  const Int begin = each * team + params.teams.divide(rest * team) - kDecodeHeadCost;
  return begin > 0 ? begin : 0;
}

/// share.first.work is that of sequence `seq`, which begins in the line at `seq_begin`. The rest of
/// share.first becomes the group that begins `offset` or more after that. False where the sequence
/// has none.
template <typename Int>
__device__ __forceinline__ bool find_group(const DecodeSm90Params& params, int seq, Int seq_begin,
                                           Int offset, Share& share) {
  Cursor& at = share.first;
  const auto cost = static_cast<unsigned>(head_cost(at.work.cut));
  at.seq = seq;
  at.head = static_cast<int>(static_cast<std::make_unsigned_t<Int>>(offset) / cost);
  Int head_begin = static_cast<Int>(cost) * at.head;
  at.group = first_group_from(at.work.cut, offset - head_begin);
  if (at.group == at.work.cut.num_groups) {
    at.group = 0;
    ++at.head;
    head_begin += static_cast<Int>(cost);
  }
  at.left = share.end - seq_begin - head_begin - at.group * at.work.cut.group_chunks;
  return at.head < params.heads_per_seq;
}

/// The numbers of a struct of 32-bit words that lane `from` holds.
template <typename Words>
__device__ __forceinline__ Words broadcast(const Words& mine, int from) {
  constexpr int kWords = sizeof(Words) / 4;
  std::uint32_t words[kWords];
  memcpy(words, &mine, sizeof(Words));
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = __shfl_sync(kAllLanes, words[i], from);
  Words theirs;
  memcpy(&theirs, words, sizeof(Words));
  return theirs;
}

/// The sum of `x` over this lane and those before it.
template <typename Int>
__device__ __forceinline__ Int sum_of_lanes(Int x) {
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const Int before = __shfl_up_sync(kAllLanes, x, step);
    if (lane_index() >= step) x += before;
  }
  return x;
}

/// Finds the share of `team`, in all lanes of a warp, which asks nobody else: for no more sequences
/// than lanes, and a short line.
template <int kChunkKeys>
__device__ __forceinline__ void find_share_of_few(const DecodeSm90Params& params,
                                                  const DecodeSm90Params& copy, int team,
                                                  Share& share) {
  const int num_seqs = static_cast<int>(params.problem.num_seqs);
  Cursor& at = share.first;
  int seq = lane_index() < num_seqs ? lane_index() : num_seqs - 1;
  const SequenceWork mine = sequence_work<kChunkKeys>(params, copy, seq);
  const int cost = static_cast<int>(head_cost(mine.cut)) * params.heads_per_seq;
  int seq_begin = 0;
  share.total = cost;
  at.work = mine;
  if (num_seqs > 1) {
    const int seq_end = sum_of_lanes(lane_index() < num_seqs ? cost : 0);
    share.total = __shfl_sync(kAllLanes, seq_end, kWarpSize - 1);
    const int from = begin_of_share<int>(params, team, share);
    seq = __ffs(static_cast<int>(__ballot_sync(kAllLanes, from < seq_end))) - 1;
    seq_begin = __shfl_sync(kAllLanes, seq_end - cost, seq);
    at.work = broadcast(mine, seq);
  }
  const int from = begin_of_share<int>(params, team, share);
  if (find_group<int>(params, seq, seq_begin, from - seq_begin, share) || at.done()) return;
  at.head = 0;  // of the next sequence
  at.work = broadcast(mine, ++at.seq);
}

/// What the threads of a block tell each other in find_share_of_many().
template <int kTeams, int kWarps>
struct FindBuffers {
  std::int64_t costs[kWarps];   ///< of all the sequences of a warp
  std::int64_t begins[kTeams];  ///< of seqs[] in the line
  int seqs[kTeams];             ///< where the threads that hold the begins of shares start
};

/// Finds the share of `team`, one of this block's, in all threads of the block, of which each adds
/// up the costs of some sequences. Called by the whole block. Int: a type for places in the line.
template <typename Int, int kChunkKeys, int kTeams, int kWarps>
__device__ __forceinline__ void find_share_of_many(const DecodeSm90Params& params,
                                                   const DecodeSm90Params& copy, int team,
                                                   FindBuffers<kTeams, kWarps>& buffers,
                                                   Share& share) {
  constexpr unsigned kThreads = kWarps * kWarpSize;
  const int num_seqs = static_cast<int>(params.problem.num_seqs);
  const int each = static_cast<int>((static_cast<unsigned>(num_seqs) + kThreads - 1) / kThreads);
  const int thread = static_cast<int>(threadIdx.x);
  int seq = thread * each < num_seqs ? thread * each : num_seqs;
  const int last = seq + each < num_seqs ? seq + each : num_seqs;
  Int mine = 0;
#pragma unroll 1
  for (int b = seq; b < last; ++b)
    mine += static_cast<Int>(head_cost(sequence_work<kChunkKeys>(params, copy, b).cut));
  mine *= params.heads_per_seq;
  Int end = sum_of_lanes(mine);  // of this thread's sequences
  if (lane_index() == kWarpSize - 1) buffers.costs[warp_index()] = end;
  __syncthreads();
  share.total = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    if (warp == warp_index()) end += static_cast<Int>(share.total);
    share.total += buffers.costs[warp];
  }
  const int first_team = team / kTeams * kTeams;
#pragma unroll 1
  for (int i = 0; i < kTeams; ++i) {
    const Int from = begin_of_share<Int>(params, first_team + i, share);
    if (from < end - mine || from >= end) continue;
    buffers.seqs[i] = seq;
    buffers.begins[i] = end - mine;
  }
  __syncthreads();
  Int from = begin_of_share<Int>(params, team, share);
  Int seq_begin = static_cast<Int>(buffers.begins[team - first_team]);
  Cursor& at = share.first;
#pragma unroll 1
  for (seq = buffers.seqs[team - first_team]; seq_begin < share.end; ++seq) {
    at.work = sequence_work<kChunkKeys>(params, copy, seq);
    const Int seq_end = seq_begin + static_cast<Int>(head_cost(at.work.cut)) * params.heads_per_seq;
    if (from < seq_end) {
      const bool found = find_group<Int>(params, seq, seq_begin, from - seq_begin, share);
      if (found || at.done()) return;
      from = seq_end;
    }
    seq_begin = seq_end;
  }
  at.left = 0;
}

/// The same for a line of any length, which is rare, so it is not inlined. `share` is in shared
/// memory.
template <int kChunkKeys, int kTeams, int kWarps>
__device__ __noinline__ void find_share_of_long_line(const DecodeSm90Params& copy, int team,
                                                     FindBuffers<kTeams, kWarps>& buffers,
                                                     Share& share) {
  Share found;
  find_share_of_many<std::int64_t, kChunkKeys>(copy, copy, team, buffers, found);
  if (lane_index() == 0) share = found;
  __syncwarp();
}

}  // namespace tiledattn::cuda
