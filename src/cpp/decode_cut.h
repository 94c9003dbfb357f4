// SPDX-License-Identifier: Apache-2.0
// How the Hopper decode kernel cuts a sequence. Pure functions for the host and the device.
//
// A sequence's keys lie in chunks at fixed places. Consecutive chunks form a group: the work of one
// team of warps, each of which takes a slice of consecutive chunks. Slices are folded in the order
// of keys, and so are groups. All of it follows from the visible keys of the sequence and the
// number of KV heads alone, so the bits of a sequence do not depend on its company.
#pragma once

#include <cstdint>

#include "problem.h"

namespace tiledattn {

/// Warps of a team: slices of a group.
constexpr int kDecodeTeamWarps = 4;
/// Query rows that one tensor-core tile holds.
constexpr std::int64_t kDecodeTileRows = 8;
/// A KV head of one sequence has at most this many groups; one of up to kShortDecodeChunks chunks
/// has at most kMaxShortDecodeGroups.
constexpr int kMaxDecodeGroups = 64;
constexpr int kMaxShortDecodeGroups = 32;
constexpr int kShortDecodeChunks = 512;
/// All KV heads of one sequence together should have so many groups: one for each SM, or, once
/// groups are long, one for each team.
constexpr unsigned kDecodeGroupsForSms = 128;
constexpr unsigned kDecodeGroupsForTeams = 256;
/// A round is a chunk for each warp. Groups of more rounds are long.
constexpr unsigned kLongDecodeRounds = 8;

struct DecodeCut {
  int first_chunk = 0;   ///< in units of chunks from key 0
  int num_chunks = 0;    ///< 0: nothing is visible; there still is one (empty) group
  int group_chunks = 1;  ///< of each group but the last, which may have fewer
  int num_groups = 1;
};

/// Chunks first .. end - 1.
struct ChunkRange {
  int begin = 0;
  int end = 0;
};

namespace detail {
template <typename Int>
TILEDATTN_HOST_DEVICE Int ceil_div(Int a, Int b) {
  return (a + b - 1) / b;
}
}  // namespace detail

/// Keys of a chunk, whose elements have `item_bytes` 1 or 2: one slot of a warp's ring holds K or V
/// of them.
TILEDATTN_HOST_DEVICE constexpr int decode_chunk_keys(std::int64_t dim, std::int64_t item_bytes) {
  return (dim <= 64 ? 64 : dim <= 128 ? 32 : 16) * (item_bytes == 1 ? 2 : 1);
}

/// Bytes of a key that stand together in a slot, and in a TMA box.
TILEDATTN_HOST_DEVICE constexpr int decode_box_bytes(std::int64_t dim, std::int64_t item_bytes) {
  return dim <= 64 && item_bytes == 1 ? 64 : 128;
}

/// The chunks of each group of a sequence with `num_chunks`. One sequence alone should give every
/// SM something to do, long ones every team; but a group costs a partial result, so it is as large
/// as that allows.
TILEDATTN_HOST_DEVICE int decode_group_chunks(int num_chunks, std::int64_t num_kv_heads) {
  const auto chunks = static_cast<unsigned>(num_chunks);
  // With more heads than this a group is the whole sequence.
  const unsigned heads = num_kv_heads < kDecodeGroupsForTeams ? static_cast<unsigned>(num_kv_heads)
                                                              : kDecodeGroupsForTeams;
  const std::uint64_t all = std::uint64_t{chunks} * heads;
  auto rounds = static_cast<unsigned>(
      detail::ceil_div(all, std::uint64_t{kDecodeTeamWarps * kDecodeGroupsForSms}));
  if (rounds > kLongDecodeRounds) {
    rounds = static_cast<unsigned>(
        detail::ceil_div(all, std::uint64_t{kDecodeTeamWarps * kDecodeGroupsForTeams}));
    if (rounds < kLongDecodeRounds) rounds = kLongDecodeRounds;
  }
  const unsigned fewest =
      num_chunks <= kShortDecodeChunks
          ? detail::ceil_div(chunks, unsigned{kDecodeTeamWarps * kMaxShortDecodeGroups})
          : detail::ceil_div(chunks, unsigned{kDecodeTeamWarps * kMaxDecodeGroups});
  if (rounds < fewest) rounds = fewest;
  // More rounds than the sequence has are as good as just enough.
  const unsigned most = detail::ceil_div(chunks, unsigned{kDecodeTeamWarps});
  if (rounds > most) rounds = most;
  return static_cast<int>(rounds < 1 ? 1 : rounds) * kDecodeTeamWarps;
}

/// The most groups of any sequence of up to `num_chunks` chunks.
TILEDATTN_HOST_DEVICE int max_decode_groups(std::int64_t num_chunks, std::int64_t num_kv_heads) {
  const std::int64_t heads =
      detail::max64(1, detail::min64(num_kv_heads, std::int64_t{kDecodeGroupsForTeams}));
  const bool long_groups =  // of more than kLongDecodeRounds rounds
      num_chunks > std::int64_t{kDecodeTeamWarps * kDecodeGroupsForSms * kLongDecodeRounds} / heads;
  const std::int64_t wanted = detail::ceil_div(
      std::int64_t{long_groups ? kDecodeGroupsForTeams : kDecodeGroupsForSms}, heads);
  const std::int64_t limit =
      num_chunks <= kShortDecodeChunks ? kMaxShortDecodeGroups : kMaxDecodeGroups;
  const std::int64_t smallest = detail::ceil_div(num_chunks, std::int64_t{kDecodeTeamWarps});
  return static_cast<int>(detail::max64(1, detail::min64(wanted, detail::min64(limit, smallest))));
}

/// The cut of a sequence of which keys begin .. end - 1 are visible to some query token.
TILEDATTN_HOST_DEVICE DecodeCut cut_for_decode(int begin, int end, int chunk_keys,
                                               std::int64_t num_kv_heads) {
  DecodeCut cut;
  if (begin >= end) return cut;
  const auto keys = static_cast<unsigned>(chunk_keys);
  cut.first_chunk = static_cast<int>(static_cast<unsigned>(begin) / keys);
  cut.num_chunks = static_cast<int>(static_cast<unsigned>(end - 1) / keys) + 1 - cut.first_chunk;
  cut.group_chunks = decode_group_chunks(cut.num_chunks, num_kv_heads);
  cut.num_groups = static_cast<int>(detail::ceil_div(static_cast<unsigned>(cut.num_chunks),
                                                     static_cast<unsigned>(cut.group_chunks)));
  return cut;
}

/// Chunks in group `group`.
TILEDATTN_HOST_DEVICE int chunks_of_group(const DecodeCut& cut, int group) {
  const int left = cut.num_chunks - group * cut.group_chunks;
  return left < cut.group_chunks ? left : cut.group_chunks;
}

/// The slice of warp `warp` in a group of `num_chunks`, counted from the group's first chunk.
TILEDATTN_HOST_DEVICE ChunkRange slice_of_group(int num_chunks, int warp) {
  const auto share = static_cast<int>(
      detail::ceil_div(static_cast<unsigned>(num_chunks), unsigned{kDecodeTeamWarps}));
  const int begin = warp * share;
  const int end = begin + share;
  return {begin < num_chunks ? begin : num_chunks, end < num_chunks ? end : num_chunks};
}

/// May the first chunk of `slice` in group `group` be loaded while the last `num_new` of the keys
/// before `end` are still being written? Not where the slice is empty: what its warp loads first is
/// then of another head or sequence.
TILEDATTN_HOST_DEVICE bool begins_with_old_keys(const DecodeCut& cut, int group,
                                                const ChunkRange& slice, int chunk_keys, int end,
                                                std::int64_t num_new) {
  if (slice.begin >= slice.end) return false;
  const int first_key = (cut.first_chunk + group * cut.group_chunks + slice.begin) * chunk_keys;
  return first_key + std::int64_t{chunk_keys} <= end - num_new;
}

/// What a group costs, in chunks: its own. Its fold takes no time of the memory, which reads ahead.
TILEDATTN_HOST_DEVICE int group_cost(const DecodeCut& cut, int group) {
  return chunks_of_group(cut, group);
}

/// What a head costs beside its groups, in chunks: a team that goes from one head to the next waits
/// for the counter, the partial results and the next queries.
constexpr int kDecodeHeadCost = 4;

/// What one KV head (and tile of rows) of a sequence costs.
TILEDATTN_HOST_DEVICE std::int64_t head_cost(const DecodeCut& cut) {
  return std::int64_t{cut.num_chunks} + kDecodeHeadCost;
}

/// All work stands in one line, sequence after sequence and group after group, as long as it costs;
/// what a head costs by itself comes after its groups.
/// Team `team` does the groups that begin at begin(team) .. begin(team + 1) - 1. Shares are equal
/// parts of the line, moved towards its begin by what a head costs: then a head that is the work of
/// n teams gives each as many groups, where it has a multiple of n.
struct DecodeShares {
  std::int64_t each = 0;  ///< total_cost / num_teams
  std::int64_t rest = 0;  ///< total_cost % num_teams
  std::int64_t num_teams = 1;

  TILEDATTN_HOST_DEVICE std::int64_t begin(std::int64_t team) const {
    // Both products of the second term are small.
    const std::int64_t at =
        each * team + static_cast<int>(rest * team) / static_cast<int>(num_teams);
    return team == num_teams ? at : detail::max64(at - kDecodeHeadCost, 0);
  }
};

TILEDATTN_HOST_DEVICE DecodeShares share_out(std::int64_t total_cost, std::int64_t num_teams) {
  return {total_cost / num_teams, total_cost % num_teams, num_teams};
}

/// How many of `num_teams` to use for so many heads, where nothing is known of their lengths: with
/// equal ones each team then has whole heads, or a part of one. No more than a few are left out.
TILEDATTN_HOST_DEVICE std::int64_t even_teams(std::int64_t num_heads, std::int64_t num_teams) {
  constexpr std::int64_t kLeftOut = 32;  // one of so many
  const std::int64_t even =
      num_heads < num_teams ? num_teams / num_heads * num_heads
                            : detail::ceil_div(num_heads, detail::ceil_div(num_heads, num_teams));
  return num_teams - even <= num_teams / kLeftOut ? even : num_teams;
}

/// Teams of one launch, so that their square is an int.
constexpr std::int64_t kMaxDecodeTeams = 32768;

/// The team that does the group beginning at `at` < total_cost.
TILEDATTN_HOST_DEVICE std::int64_t team_of(std::int64_t total_cost, std::int64_t at,
                                           std::int64_t num_teams) {
  const std::int64_t team = ((at + kDecodeHeadCost + 1) * num_teams - 1) / total_cost;
  return detail::min64(team, num_teams - 1);
}

/// Products of a total cost and a number of teams stay within 64 bits up to here.
constexpr std::int64_t kMaxDecodeCost = std::int64_t{1} << 48;

/// The first group of one head that begins `offset` or later after the head's begin: num_groups
/// when none does. `offset` is at most head_cost(cut).
TILEDATTN_HOST_DEVICE int first_group_from(const DecodeCut& cut, std::int64_t offset) {
  const auto from = static_cast<unsigned>(offset);
  const auto group =
      static_cast<int>(detail::ceil_div(from, static_cast<unsigned>(cut.group_chunks)));
  return group < cut.num_groups ? group : cut.num_groups;
}

/// Query rows of one KV head that are handled together.
TILEDATTN_HOST_DEVICE std::int64_t decode_rows_together(std::int64_t rows, std::int64_t dim) {
  return rows <= kDecodeTileRows || dim > 128 ? kDecodeTileRows : 2 * kDecodeTileRows;
}

}  // namespace tiledattn
