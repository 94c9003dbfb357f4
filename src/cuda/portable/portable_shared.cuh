// SPDX-License-Identifier: Apache-2.0
// Shared memory of the portable kernel, and what a block works on.
#pragma once

#include <cstdint>

#include "plan.h"
#include "portable/portable.h"
#include "portable/portable_config.h"
#include "prefill/row_tiles.cuh"
#include "problem.h"

namespace tiledattn::cuda {

/// Rows first_row .. first_row + num_rows - 1 of a sequence and KV head: row = token * gqa_ratio +
/// head of the group. Keys keys_begin .. keys_end - 1 are those that some row sees.
struct PortableTile {
  Sequence sequence;
  std::int64_t segment = 0;
  int kv_head = 0;
  int first_row = 0;
  int num_rows = 0;
  int first_key = 0;  ///< of the first tile of keys; others follow
  int keys_begin = 0;
  int keys_end = 0;
};

/// A row of the tile. The keys that it sees are counted from the tile's first_key.
struct PortableRow {
  const void* q;     ///< null behind the last row
  std::int64_t out;  ///< its first element
  int token;
  int head;
  int begin;
  int end;
};

/// Where one key lies.
struct KeyRows {
  const void* k;
  const void* v;
};

template <typename T, typename Config>
struct PortableShared {
  /// Tiles of K and V in turns. Results leave through them.
  alignas(128) T slots[Config::kSlots][Config::kKeys][Config::kPitch];
  alignas(16) T q[Config::kOwnQ ? Config::kRows : 1][Config::kPitch];
  alignas(16) KeyRows keys[2][Config::kKeys];
  PortableRow rows[Config::kRows];
  float m[Config::kWarps * 16];
  float l[Config::kWarps * 16];
  PortableTile tile;
};

/// The tile of this block, found by one thread. Without rows: nothing to do. Tiles of keys begin
/// at the segment's first key, so that a row's bits do not depend on the rows beside it.
template <typename Config>
__device__ PortableTile find_tile(const PortableParams& params) {
  const AttendParams& call = params.attend;
  const AttentionProblem& p = call.problem;
  PortableTile tile;
  auto rest = static_cast<int>(blockIdx.x);
  const auto next_of = [&](const Divisor& count) {
    const int all = rest;
    rest = count.divide(all);
    return all - rest * static_cast<int>(count.value);
  };
  tile.segment = next_of(params.num_segments);
  int row_tile = next_of(params.num_row_tiles);
  tile.kv_head = next_of(params.num_kv_heads);
  std::int64_t i = rest;
  // Under a causal mask the last rows see most keys, so they go first.
  if (p.packed_q()) {
    i = find_sequence(call.flags, call.num_seqs, std::int64_t{row_tile});
    if (i == call.num_seqs) return {};
    row_tile = call.flags[i] - 1 - row_tile;
  } else {
    row_tile = static_cast<int>(params.num_row_tiles.value) - 1 - row_tile;
  }
  const Sequence s = sequence_at(p, call.first_seq + i);
  if (!p.packed_q() && call.flags != nullptr && call.flags[i] != 0) return {};

  const Divisor& group = params.gqa_ratio;
  tile.sequence = s;
  tile.first_row = row_tile * Config::kRows;
  const int rows = static_cast<int>(s.q_len) * static_cast<int>(group.value) - tile.first_row;
  tile.num_rows = rows < Config::kRows ? rows : Config::kRows;
  KeyRange segment = visible_keys(p, s, 0, s.q_len - 1);
  if (params.num_segments.value > 1) {
    if (tile.segment >= num_segments(segment.end - segment.begin, call.cut)) {
      tile.num_rows = 0;
      return tile;
    }
    segment = segment_range(segment, tile.segment, call.cut);
  }
  const KeyRange seen = visible_keys(p, s, group.divide(tile.first_row),
                                     group.divide(tile.first_row + tile.num_rows - 1));
  const KeyRange keys{detail::max64(segment.begin, seen.begin),
                      detail::min64(segment.end, seen.end)};
  if (keys.empty()) return tile;  // its bounds may be any positions, beyond 32 bits
  const auto origin = static_cast<int>(segment.begin);
  tile.keys_begin = static_cast<int>(keys.begin);
  tile.keys_end = static_cast<int>(keys.end);
  tile.first_key = origin + (tile.keys_begin - origin) / Config::kKeys * Config::kKeys;
  return tile;
}

/// Row `index` of the tile; rows behind the last one see what that sees.
template <typename T>
__device__ __forceinline__ PortableRow find_row(const PortableParams& params,
                                                const PortableTile& tile, int index) {
  const AttentionProblem& p = params.attend.problem;
  const Sequence& s = tile.sequence;
  const Divisor& group = params.gqa_ratio;
  const bool absent = index >= tile.num_rows;
  const int at = tile.first_row + (absent ? tile.num_rows - 1 : index);
  PortableRow row;
  row.token = group.divide(at);
  row.head = tile.kv_head * static_cast<int>(group.value) + group.remainder(at);
  const std::int64_t token = s.q_begin + row.token;
  row.q = absent ? nullptr
                 : static_cast<const T*>(p.q.data) + s.index * p.q.seq_stride +
                       token * p.q.token_stride + row.head * p.q.head_stride;
  row.out = p.out.row_offset(s.index, token, row.head);
  const KeyRange visible = visible_keys(p, s, row.token);
  const auto within = [&](std::int64_t key) {
    const std::int64_t low = detail::max64(key, tile.keys_begin);
    return static_cast<int>(detail::min64(low, tile.keys_end)) - tile.first_key;
  };
  row.begin = within(visible.begin);
  row.end = within(visible.end);
  return row;
}

}  // namespace tiledattn::cuda
