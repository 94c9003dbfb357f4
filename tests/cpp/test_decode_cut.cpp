// SPDX-License-Identifier: Apache-2.0
// How the Hopper decode kernel cuts sequences and deals them out, as its teams do it on the device.
#include "decode_cut.h"

#include <algorithm>
#include <vector>

#include "check.h"

using namespace tiledattn;

namespace {

const std::vector<int> kLengths{1,     31,    32,     33,      127,    128,  129,
                                500,   1024,  1025,   4096,    8192,   9999, 16384,
                                16385, 32768, 131072, 1 << 20, 1 << 26};

struct Group {
  std::size_t seq;
  int head;
  int number;
  std::int64_t begin;  // in the line of all work
};

/// The groups that begin at `from` .. `end` - 1, found the way the kernel finds them.
std::vector<Group> groups_between(const std::vector<DecodeCut>& cuts, int heads, std::int64_t from,
                                  std::int64_t end) {
  std::vector<Group> groups;
  std::int64_t base = 0;
  std::size_t seq = 0;
  while (seq < cuts.size() && from >= base + head_cost(cuts[seq]) * heads)
    base += head_cost(cuts[seq++]) * heads;
  if (seq == cuts.size()) return groups;
  int head = static_cast<int>((from - base) / head_cost(cuts[seq]));
  std::int64_t head_begin = base + head * head_cost(cuts[seq]);
  int group = first_group_from(cuts[seq], from - head_begin);
  for (;;) {
    for (; group < cuts[seq].num_groups; ++group) {
      const std::int64_t begin = head_begin + std::int64_t{group} * cuts[seq].group_chunks;
      if (begin >= end) return groups;
      groups.push_back({seq, head, group, begin});
    }
    group = 0;
    head_begin += head_cost(cuts[seq]);
    if (++head < heads) continue;
    head = 0;
    if (++seq == cuts.size()) return groups;
  }
}

}  // namespace

TEST(groups_and_slices_cover_all_chunks_in_order) {
  for (const int chunk_keys : {16, 32, 64}) {
    for (const int num_kv_heads : {1, 2, 8, 32, 200}) {
      for (const int begin : {0, 1, 40}) {
        for (const int length : kLengths) {
          const DecodeCut cut = cut_for_decode(begin, begin + length, chunk_keys, num_kv_heads);
          CHECK(cut.first_chunk * chunk_keys <= begin);
          CHECK((cut.first_chunk + 1) * chunk_keys > begin);
          CHECK((cut.first_chunk + cut.num_chunks) * std::int64_t{chunk_keys} >= begin + length);
          CHECK((cut.first_chunk + cut.num_chunks - 1) * std::int64_t{chunk_keys} < begin + length);
          CHECK(cut.num_groups <= max_decode_groups(cut.num_chunks, num_kv_heads));
          std::int64_t cost = 0;
          int next = 0;
          for (int group = 0; group < cut.num_groups; ++group) {
            const int chunks = chunks_of_group(cut, group);
            CHECK(chunks >= 1 && chunks <= cut.group_chunks);
            CHECK(group * cut.group_chunks == next);
            int in_group = 0;
            for (int warp = 0; warp < kDecodeTeamWarps; ++warp) {
              const ChunkRange slice = slice_of_group(chunks, warp);
              CHECK(slice.begin == in_group && slice.end >= slice.begin);
              in_group = slice.end;
            }
            CHECK(in_group == chunks);
            next += chunks;
            cost += group_cost(cut, group);
          }
          CHECK(next == cut.num_chunks);
          CHECK(cost + kDecodeHeadCost == head_cost(cut));
        }
      }
    }
  }
}

TEST(no_warp_begins_with_a_new_key) {
  for (const int chunk_keys : {16, 32, 64, 128}) {
    for (const int begin : {0, 40}) {
      for (const int length : kLengths) {
        const int end = begin + length;
        const DecodeCut cut = cut_for_decode(begin, end, chunk_keys, 8);
        for (const int num_new : {0, 1, 5, 100}) {
          for (int group = 0; group < cut.num_groups; ++group) {
            for (int warp = 0; warp < kDecodeTeamWarps; ++warp) {
              const ChunkRange slice = slice_of_group(chunks_of_group(cut, group), warp);
              bool old = slice.begin < slice.end;
              if (old) {
                const int chunk = cut.first_chunk + group * cut.group_chunks + slice.begin;
                for (int key = chunk * chunk_keys; key < (chunk + 1) * chunk_keys; ++key)
                  old = old && key < end - num_new;
              }
              CHECK(begins_with_old_keys(cut, group, slice, chunk_keys, end, num_new) == old);
            }
          }
        }
      }
    }
  }
}

TEST(a_warp_without_a_slice_does_not_know_what_it_begins_with) {
  // Keys that no query sees: what a tile before the window leaves.
  const DecodeCut cut = cut_for_decode(4096, 4096, 32, 8);
  CHECK(!begins_with_old_keys(cut, 0, slice_of_group(chunks_of_group(cut, 0), 0), 32, 4096, 1));
}

TEST(nothing_visible_is_one_empty_group) {
  const DecodeCut cut = cut_for_decode(5, 5, 32, 8);
  CHECK(cut.num_chunks == 0 && cut.num_groups == 1);
  CHECK(chunks_of_group(cut, 0) == 0 && head_cost(cut) == kDecodeHeadCost);
}

TEST(groups_of_a_sequence_alone_suit_the_machine) {
  // 132 SMs, 264 teams. One group for each SM where groups are short, for each team later.
  CHECK(cut_for_decode(0, 1024, 32, 8).num_groups == 8);
  CHECK(cut_for_decode(0, 8192, 32, 8).num_groups == 16);
  CHECK(cut_for_decode(0, 32768, 32, 8).num_groups == 32);
  CHECK(cut_for_decode(0, 131072, 32, 8).num_groups == 32);
  CHECK(cut_for_decode(0, 8192, 32, 1).num_groups == 32);
}

TEST(more_keys_never_need_more_groups_than_planned) {
  for (const int num_kv_heads : {1, 2, 3, 4, 5, 8, 16, 64, 200, 300}) {
    int most = 1;
    for (int chunks = 1; chunks < 5000; ++chunks) {
      const int size = decode_group_chunks(chunks, num_kv_heads);
      CHECK(size % kDecodeTeamWarps == 0);
      most = std::max(most, (chunks + size - 1) / size);
      CHECK(most <= max_decode_groups(chunks, num_kv_heads));
    }
  }
  // No more than there are, or a workspace would hold slots for fewer teams.
  CHECK(max_decode_groups(1 << 20, 8) == 32 && max_decode_groups(512, 8) == 16);
  CHECK(max_decode_groups(1 << 20, 1) == kMaxDecodeGroups);
}

TEST(each_group_has_one_team_and_each_head_one_slot) {
  for (const int heads : {1, 3, 8}) {
    for (const std::int64_t num_teams : {1, 2, 7, 264}) {
      for (const std::vector<int>& lengths : {std::vector<int>{1024},
                                              {0},
                                              {0, 0, 5},
                                              {8192, 1, 0, 300},
                                              {131072, 1024, 1024, 1024},
                                              std::vector<int>(300, 64),
                                              std::vector<int>(5, 20000)}) {
        std::vector<DecodeCut> cuts;
        std::int64_t total = 0;
        for (const int length : lengths) {
          cuts.push_back(cut_for_decode(0, length, 32, heads));
          total += head_cost(cuts.back()) * heads;
        }
        std::vector<Group> all;
        const DecodeShares shares = share_out(total, num_teams);
        for (std::int64_t team = 0; team < num_teams; ++team) {
          for (const Group& group :
               groups_between(cuts, heads, shares.begin(team), shares.begin(team + 1))) {
            const std::int64_t head_begin =
                group.begin - std::int64_t{group.number} * cuts[group.seq].group_chunks;
            CHECK(team_of(total, group.begin, num_teams) == team);
            CHECK(team_of(total, head_begin, num_teams) <= team);
            all.push_back(group);
          }
        }
        std::size_t at = 0;
        for (std::size_t seq = 0; seq < cuts.size(); ++seq) {
          for (int head = 0; head < heads; ++head) {
            for (int number = 0; number < cuts[seq].num_groups; ++number, ++at) {
              CHECK(at < all.size());
              CHECK(all[at].seq == seq && all[at].head == head && all[at].number == number);
            }
          }
        }
        CHECK(at == all.size());
      }
    }
  }
}

TEST(equal_sequences_give_each_team_as_many_groups_and_no_head_to_more_than_it_needs) {
  struct Case {
    int num_seqs, length, heads, chunk_keys;
  };
  for (const Case& c : {Case{8, 1024, 8, 32},
                        {64, 1024, 8, 32},
                        {256, 1024, 8, 32},
                        {64, 8192, 8, 32},
                        {16, 8192, 8, 32},
                        {16, 4096, 32, 32},
                        {32, 8192, 1, 32},
                        {16, 8192, 8, 16},
                        {32, 4096, 2, 64}}) {
    const std::int64_t num_teams = even_teams(std::int64_t{c.num_seqs} * c.heads, 264);
    CHECK(num_teams == 256);
    const std::vector<DecodeCut> cuts(static_cast<std::size_t>(c.num_seqs),
                                      cut_for_decode(0, c.length, c.chunk_keys, c.heads));
    const std::int64_t total = head_cost(cuts[0]) * c.heads * c.num_seqs;
    const std::int64_t num_groups = std::int64_t{cuts[0].num_groups} * c.heads * c.num_seqs;
    const DecodeShares shares = share_out(total, num_teams);
    for (std::int64_t team = 0; team < num_teams; ++team) {
      const std::vector<Group> groups =
          groups_between(cuts, c.heads, shares.begin(team), shares.begin(team + 1));
      CHECK(static_cast<std::int64_t>(groups.size()) == num_groups / num_teams);
      // Whole heads, or a part of one.
      const auto in_head = static_cast<std::size_t>(cuts[0].num_groups);
      CHECK(groups.size() <= in_head ? groups.front().head == groups.back().head &&
                                           groups.front().seq == groups.back().seq
                                     : groups.front().number == 0 && groups.size() % in_head == 0);
    }
  }
  CHECK(even_teams(8, 264) == 264 && even_teams(1, 264) == 264 && even_teams(7, 264) == 259);
  CHECK(even_teams(150, 264) == 264 && even_teams(264, 264) == 264 && even_teams(265, 264) == 264);
}

TEST(shares_are_even) {
  for (const std::int64_t total : {std::int64_t{5}, std::int64_t{123456789}, kMaxDecodeCost}) {
    for (const std::int64_t num_teams : {std::int64_t{1}, std::int64_t{264}, kMaxDecodeTeams}) {
      const DecodeShares shares = share_out(total, num_teams);
      for (std::int64_t team = 1; team < num_teams; ++team) {
        const std::int64_t size = shares.begin(team) - shares.begin(team - 1);
        if (shares.begin(team - 1) > 0)
          CHECK(size == total / num_teams || size == total / num_teams + 1);
        CHECK(size >= 0);
      }
      CHECK(shares.begin(0) == 0 && shares.begin(num_teams) == total);
    }
  }
}
