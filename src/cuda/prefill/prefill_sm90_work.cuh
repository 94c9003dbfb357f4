// SPDX-License-Identifier: Apache-2.0
// Work of the Hopper prefill kernel: tiles of query rows of one head, each with the keys that its
// rows see.
//
// Keys are counted from the first one that any token of the sequence sees, and cut into tiles from
// there: what lies before is never read, or, where it shares a piece of a paged block with that
// key, cleared. So a row's bits depend on its own sequence alone. Where a sequence is cut into
// segments, "the keys" of a tile of rows are those of one segment.
#pragma once

#include <cstdint>

#include "plan.h"
#include "prefill/prefill_sm90_config.h"
#include "prefill/row_tiles.cuh"
#include "problem.h"

namespace tiledattn::cuda {

/// One tile of rows, as the producer finds it and hands it to the consumers.
struct WorkTile {
  static constexpr std::int32_t kNone = -1;   ///< no more work
  static constexpr std::int32_t kPause = -2;  ///< perhaps no more: nothing to do here
  static constexpr std::int32_t kWhole = -1;  ///< not cut into segments

  std::int32_t head = kNone;  ///< of q, or what there is instead
  std::int32_t kv_head = 0;
  std::int32_t batch = 0;     ///< index of the outermost dimension of all arrays; 0 where packed
  std::int32_t sequence = 0;  ///< row of the table of blocks
  std::int32_t q_row = 0;     ///< of the first row in q, out and lse
  std::int32_t num_rows = 0;  ///< of the sequence from there on; may be more than the tile's
  std::int32_t key_row = 0;   ///< of key 0 in K and V
  std::int32_t num_keys = 0;  ///< of the sequence or segment
  /// Row r of the tile sees keys max(0, see_begin + r) .. min(num_keys, see_end + r) - 1.
  std::int32_t see_begin = 0;
  std::int32_t see_end = 0;
  // Tiles of keys, from the last to the first: begin <= full_begin <= full_end <= end.
  std::int32_t begin = 0;
  std::int32_t end = 0;
  std::int32_t full_begin = 0;  ///< every row sees all keys of tiles full_begin .. full_end - 1
  std::int32_t full_end = 0;

  /// The second time around, for rows with huge scores: no step takes the short way.
  bool again = false;
  std::int32_t segment = kWhole;  ///< of the sequence's keys: the rows' results are partial
  bool needs_clearing = false;    ///< the last tile of keys reaches beyond values that count
  std::int32_t unseen = 0;        ///< first keys of tile 0, before every window: to be cleared

  __device__ bool none() const { return head == kNone; }
  __device__ bool pause() const { return head == kPause; }
  __device__ bool has_keys() const { return begin < end; }
  /// Does a tile of keys hold values that do not count?
  __device__ bool clears(std::int32_t tile) const {
    return (needs_clearing && tile == end - 1) || (unseen > 0 && tile == 0);
  }
  /// Rows row .. row + 63 of the tile alone: `end` and `full_end` as they would be for them. One
  /// tile of keys at least is theirs.
  template <typename Config>
  __device__ std::int32_t end_of_rows(std::int32_t row) const {
    const std::int32_t rows = min(64, num_rows - row);
    const std::int32_t end_seen = rows > 0 ? min(num_keys, see_end + row + rows - 1) : 0;
    return max(begin + 1, (end_seen + Config::kKeys - 1) / Config::kKeys);
  }
  template <typename Config>
  __device__ std::int32_t full_end_of_rows(std::int32_t row) const {
    return again ? full_end : max(begin, min(num_keys, see_end + row - 1) / Config::kKeys);
  }
  __device__ void repeat() {
    full_begin = full_end = begin;
    again = true;
  }
};

/// Keys begin .. end - 1 of the kv_len that a sequence has.
struct KeySpan {
  std::int32_t kv_len = 0;
  std::int32_t begin = 0;
  std::int32_t end = 0;
};

/// Rows first_row .. of a sequence: positions and key tiles.
template <typename Config>
__device__ __forceinline__ void set_rows(WorkTile& tile, const PrefillSm90Params& params,
                                         std::int32_t first_row, std::int32_t q_len,
                                         const KeySpan& keys) {
  const std::int32_t position = keys.kv_len - q_len;
  const std::int32_t first_visible = max(keys.begin, position - params.window_left);
  // A piece of a block is loaded as a whole. Without a window it begins where the keys do.
  const std::int32_t unseen =
      Config::kGeneral && params.page_rows > 0 ? first_visible % params.page_rows : 0;
  const std::int32_t first_key = first_visible - unseen;
  tile.num_rows = q_len - first_row;
  tile.key_row += first_key;
  tile.num_keys = keys.end - first_key;
  tile.see_begin = position + first_row - params.window_left - first_key;
  tile.see_end = position + first_row + params.window_right + 1 - first_key;

  constexpr std::int32_t kKeys = Config::kKeys;
  const std::int32_t last_row = min(Config::kRows, tile.num_rows) - 1;
  const std::int32_t first_seen = max(0, tile.see_begin);
  const std::int32_t end_seen = min(tile.num_keys, tile.see_end + last_row);
  if (end_seen <= first_seen) return;  // no row sees a key: no tiles of keys
  tile.begin = first_seen / kKeys;
  tile.end = (end_seen + kKeys - 1) / kKeys;
  tile.unseen = tile.begin == 0 ? unseen : 0;
  tile.needs_clearing = params.clears_values && tile.num_keys < tile.end * kKeys;
  const std::int32_t all_from = max(0, tile.see_begin + Config::kRows - 1);
  // One less than they could be: every row then has a maximum before the first tile without masks.
  const std::int32_t all_to = max(0, min(tile.num_keys, tile.see_end - 1));
  tile.full_end = max(tile.begin, all_to / kKeys);
  tile.full_begin = min(max(tile.begin, (all_from + kKeys - 1) / kKeys), tile.full_end);
}

/// The keys of a segment; all of them, as a whole, where the sequence has one segment alone. False
/// where it has no such segment. The rows together see all keys but those before the first window.
__device__ __forceinline__ bool take_segment(WorkTile& tile, const PrefillSm90Params& params,
                                             std::int32_t segment, KeySpan& keys) {
  const SegmentCut cut = params.attend.cut;
  const std::int32_t position =
      keys.kv_len - static_cast<std::int32_t>(params.attend.problem.q_len);
  const std::int32_t first_key = max(0, position - params.window_left);
  const std::int32_t num_keys = keys.kv_len - first_key;
  const std::int32_t count = num_segments(num_keys, cut);
  if (count <= 1) return segment == 0;
  if (segment >= count) return false;
  keys.begin = first_key + segment_begin(num_keys, segment, cut);
  keys.end = first_key + segment_begin(num_keys, segment + 1, cut);
  tile.segment = segment;
  return true;
}

/// Dense: heads go in sections, and within a section the tiles with most keys first, all heads of
/// them side by side.
template <typename Config>
__device__ __forceinline__ WorkTile dense_work(const PrefillSm90Params& params,
                                               std::int32_t index) {
  const AttentionProblem& p = params.attend.problem;
  WorkTile tile;
  if (index >= params.num_tiles) return tile;
  const std::int32_t num_q_heads = params.num_q_heads;
  const std::int32_t num_heads = static_cast<std::int32_t>(params.attend.num_seqs) * num_q_heads;
  const std::int32_t num_segments = static_cast<std::int32_t>(params.attend.max_segments);
  const std::int32_t section_tiles = params.section_heads * params.tiles_per_head * num_segments;
  const std::int32_t section = index / section_tiles;
  const std::int32_t rest = index - section * section_tiles;
  const std::int32_t first_head = section * params.section_heads;
  const std::int32_t heads = min(params.section_heads, num_heads - first_head);
  const std::int32_t place = rest / heads;
  const std::int32_t row_place = place / num_segments;
  const std::int32_t head = first_head + rest - place * heads;  // counted over the batch
  const std::int32_t i = head / num_q_heads;
  if (params.attend.flags != nullptr && params.attend.flags[i] != 0) {
    tile.head = WorkTile::kPause;  // a faulty sequence, whose rows are NaN already
    return tile;
  }
  tile.batch = static_cast<std::int32_t>(params.attend.first_seq) + i;
  tile.sequence = tile.batch;
  const auto kv_len = static_cast<std::int32_t>(params.page_rows > 0 ? p.seq_lens.at(tile.sequence)
                                                                     : p.dense_kv_len);
  KeySpan keys{kv_len, 0, kv_len};
  if (Config::kSplits && params.attend.split() &&
      !take_segment(tile, params, place - row_place * num_segments, keys)) {
    tile.head = WorkTile::kPause;
    return tile;
  }
  tile.head = head % num_q_heads;
  const std::int32_t first_row = (params.tiles_per_head - 1 - row_place) * Config::kRows;
  tile.q_row = first_row;
  set_rows<Config>(tile, params, first_row, static_cast<std::int32_t>(p.q_len), keys);
  return tile;
}

/// Packed: sequence by sequence, its last rows first, all heads side by side. params.flags holds
/// the number of row tiles up to and with each sequence.
template <typename Config>
__device__ __forceinline__ WorkTile packed_work(const PrefillSm90Params& params,
                                                std::int32_t index) {
  const AttentionProblem& p = params.attend.problem;
  const std::int32_t* const ends = params.attend.flags;
  const std::int32_t num_seqs = static_cast<std::int32_t>(params.attend.num_seqs);
  const std::int32_t num_q_heads = params.num_q_heads;
  WorkTile tile;
  const std::int32_t row_tile = index / num_q_heads;
  if (row_tile >= ends[num_seqs - 1]) return tile;
  const std::int32_t i = find_sequence(ends, num_seqs, row_tile);
  tile.head = index - row_tile * num_q_heads;
  const std::int32_t first_row = (ends[i] - 1 - row_tile) * Config::kRows;
  const std::int32_t q_begin = static_cast<std::int32_t>(p.cu_seqlens_q.at(i));
  tile.q_row = q_begin + first_row;
  tile.sequence = i;
  std::int32_t kv_len = 0;
  if (params.page_rows > 0) {
    kv_len = static_cast<std::int32_t>(p.seq_lens.at(i));
  } else {
    tile.key_row = static_cast<std::int32_t>(p.cu_seqlens_k.at(i));
    kv_len = static_cast<std::int32_t>(p.cu_seqlens_k.at(i + 1)) - tile.key_row;
  }
  set_rows<Config>(tile, params, first_row,
                   static_cast<std::int32_t>(p.cu_seqlens_q.at(i + 1)) - q_begin,
                   {kv_len, 0, kv_len});
  return tile;
}

template <typename Config>
__device__ __forceinline__ WorkTile find_work(const PrefillSm90Params& params, std::int32_t index) {
  const AttentionProblem& p = params.attend.problem;
  WorkTile tile =
      p.packed_q() ? packed_work<Config>(params, index) : dense_work<Config>(params, index);
  tile.kv_head = tile.head / params.gqa_ratio;
  return tile;
}

}  // namespace tiledattn::cuda
