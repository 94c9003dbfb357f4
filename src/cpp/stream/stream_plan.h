// SPDX-License-Identifier: Apache-2.0
// Sequences -> launches: which blocks are fetched and folded together, in which order. Pure.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "tiledattn/streaming.h"

namespace tiledattn {

/// One tile: blocks first .. first + count - 1 of a part of a sequence.
struct TilePiece {
  std::int64_t sequence = 0;
  std::int64_t part = 0;
  std::int64_t first = 0;
  std::int64_t count = 0;
  std::int64_t position = 0;  ///< of the tile's first key
  std::int64_t round = 0;     ///< of its launch
  friend bool operator==(const TilePiece&, const TilePiece&) = default;
};

/// Tiles of one source. A round has at most one of each sequence, and one step_tile folds it.
struct TileLaunch {
  TileSource* source = nullptr;
  std::vector<TilePiece> pieces;  ///< round by round
  std::int64_t num_blocks = 0;
  std::int64_t num_rounds = 1;
};

/// A launch has at most so many rounds.
constexpr std::int64_t kMostRounds = 32;

/// What a plan depends on.
struct StreamRequest {
  StreamSequences sequences;
  std::int64_t q_len = 1;
  std::vector<std::int64_t> q_positions;  ///< [B]
};

/// Do both ask for the same tiles?
bool same_request(const StreamRequest& a, const StreamRequest& b);

/// Throws, naming sequence and part, what does not fit `dims`, `dtype` or a source.
void check_sequences(const StreamSequences& sequences, const TiledAttentionDims& dims);

/// The positions of the first query tokens; ValueError for one that is out of range.
std::vector<std::int64_t> check_q_positions(const StreamSequences& sequences, std::int64_t q_len,
                                            const std::vector<std::int64_t>& given);

/// Tiles of dims.tile_capacity blocks, cut by each sequence alone, without those that no query
/// token sees. Launches take the k-th tile of every sequence, then the next; `capacity` says how
/// many blocks of a source one launch can hold.
std::vector<TileLaunch> plan_stream(const StreamRequest& request, const TiledAttentionDims& dims,
                                    const Window& window, bool causal,
                                    const std::function<std::int64_t(const TileSource&)>& capacity);

/// Makes one launch of several in a row that need no scratch: as many rounds as have about
/// `launch_bytes` together. The order of tiles stays.
std::vector<TileLaunch> join_launches(const std::vector<TileLaunch>& launches,
                                      std::int64_t launch_bytes,
                                      const std::function<bool(const TileSource&)>& in_place);

}  // namespace tiledattn
