// SPDX-License-Identifier: Apache-2.0
#include "stream/stream_plan.h"

#include <algorithm>
#include <map>
#include <string>

#include "check_tensor.h"
#include "problem.h"

namespace tiledattn {

namespace {

std::string part_name(std::size_t sequence, std::size_t part) {
  return "sequences[" + std::to_string(sequence) + "].parts[" + std::to_string(part) + "]";
}

void check_source_size(const std::string& argument, const TileSource& source, const char* size,
                       std::int64_t got, std::int64_t want) {
  if (got == want) return;
  refuse(argument, "source '" + source.name() + "' with " + size + " " + std::to_string(got),
         std::to_string(want) + " as in dims");
}

void check_part(const std::string& argument, const KvPart& part, const TiledAttentionDims& dims) {
  if (!part.source) refuse(argument, "no source", "a TileSource");
  const TileGeometry geometry = part.source->describe();
  const TileSizes& sizes = geometry.sizes;
  const auto check = [&](const char* size, std::int64_t got, std::int64_t want) {
    check_source_size(argument, *part.source, size, got, want);
  };
  check("block_size", sizes.block_size, dims.block_size);
  check("num_kv_heads", sizes.num_kv_heads, dims.num_kv_heads);
  check("head_dim", sizes.head_dim, dims.head_dim);
  check("head_dim_v", geometry.value_dim(), dims.value_dim());
  for (std::size_t i = 0; i < part.blocks.size(); ++i) {
    const std::int64_t block = part.blocks[i];
    if (block >= 0 && block < sizes.num_blocks) continue;
    throw IndexError(argument + ".blocks[" + std::to_string(i) + "]: got block " +
                     std::to_string(block) + "; source '" + part.source->name() + "' has 0 to " +
                     std::to_string(sizes.num_blocks - 1));
  }
}

bool same_part(const KvPart& a, const KvPart& b) {
  return a.source->key() == b.source->key() && a.position == b.position && a.blocks == b.blocks;
}

bool same_sequence(const StreamSequence& a, const StreamSequence& b) {
  if (&a == &b) return true;
  return a.length == b.length &&
         std::equal(a.parts.begin(), a.parts.end(), b.parts.begin(), b.parts.end(), same_part);
}

/// Positions begin .. end - 1 that some query token sees.
KeyRange seen(const StreamSequence& sequence, std::int64_t q_position, std::int64_t q_len,
              const Window& window, bool causal) {
  KeyRange range{0, sequence.length};
  if (!causal) return range;
  if (window.left) range.begin = std::max<std::int64_t>(0, q_position - *window.left);
  range.end = std::min(range.end, q_position + q_len);
  return range;
}

/// The tiles of one sequence, in the order of keys.
std::vector<TilePiece> cut(const StreamSequence& sequence, std::int64_t index,
                           const TiledAttentionDims& dims, const KeyRange& range) {
  std::vector<TilePiece> tiles;
  for (std::size_t p = 0; p < sequence.parts.size(); ++p) {
    const KvPart& part = sequence.parts[p];
    const auto num_blocks = static_cast<std::int64_t>(part.blocks.size());
    for (std::int64_t first = 0; first < num_blocks; first += dims.tile_capacity) {
      const std::int64_t position = part.position + first * dims.block_size;
      if (position >= range.end) break;
      // Blocks wholly behind the sequence's end hold nothing.
      const std::int64_t in_use =
          (sequence.length - position + dims.block_size - 1) / dims.block_size;
      const std::int64_t count = std::min({dims.tile_capacity, num_blocks - first, in_use});
      if (position + count * dims.block_size <= range.begin) continue;
      tiles.push_back({index, static_cast<std::int64_t>(p), first, count, position, 0});
    }
  }
  return tiles;
}

/// The launches of one round: one tile each of some sequences.
class Round {
 public:
  Round(std::vector<TileLaunch>& launches,
        const std::function<std::int64_t(const TileSource&)>& capacity)
      : launches_(launches), capacity_(capacity) {}

  void add(TileSource& source, const TilePiece& piece) {
    const auto open = open_.find(source.key());
    if (open != open_.end()) {
      TileLaunch& launch = launches_[open->second];
      if (launch.num_blocks + piece.count <= capacity_(source)) {
        launch.pieces.push_back(piece);
        launch.num_blocks += piece.count;
        return;
      }
    }
    open_[source.key()] = launches_.size();
    launches_.push_back({&source, {piece}, piece.count, 1});
  }

 private:
  std::vector<TileLaunch>& launches_;
  const std::function<std::int64_t(const TileSource&)>& capacity_;
  std::map<const void*, std::size_t> open_;
};

}  // namespace

bool same_request(const StreamRequest& a, const StreamRequest& b) {
  return a.q_len == b.q_len && a.q_positions == b.q_positions &&
         std::equal(a.sequences.begin(), a.sequences.end(), b.sequences.begin(), b.sequences.end(),
                    [](const auto& x, const auto& y) { return same_sequence(*x, *y); });
}

void check_sequences(const StreamSequences& sequences, const TiledAttentionDims& dims) {
  if (static_cast<std::int64_t>(sequences.size()) > dims.max_seqs) {
    refuse("sequences", std::to_string(sequences.size()),
           "at most dims.max_seqs = " + std::to_string(dims.max_seqs));
  }
  for (std::size_t b = 0; b < sequences.size(); ++b) {
    if (!sequences[b]) refuse("sequences[" + std::to_string(b) + "]", "null", "a sequence");
    const StreamSequence& sequence = *sequences[b];
    if (sequence.length < 0 || sequence.length > kMaxPosition) {
      refuse("sequences[" + std::to_string(b) + "].length", std::to_string(sequence.length),
             "0 to 2^60");
    }
    std::int64_t end = 0;
    for (std::size_t p = 0; p < sequence.parts.size(); ++p) {
      const KvPart& part = sequence.parts[p];
      const std::string argument = part_name(b, p);
      check_part(argument, part, dims);
      if (part.position < end || part.position > kMaxPosition) {
        refuse(argument + ".position", std::to_string(part.position),
               std::to_string(end) + " or more: parts come in the order of keys");
      }
      end = part.position + static_cast<std::int64_t>(part.blocks.size()) * dims.block_size;
    }
  }
}

std::vector<std::int64_t> check_q_positions(const StreamSequences& sequences, std::int64_t q_len,
                                            const std::vector<std::int64_t>& given) {
  if (!given.empty() && given.size() != sequences.size()) {
    refuse("q_positions", std::to_string(given.size()) + " numbers",
           std::to_string(sequences.size()) + ", one for each sequence");
  }
  std::vector<std::int64_t> positions(sequences.size());
  for (std::size_t b = 0; b < positions.size(); ++b) {
    const std::int64_t length = sequences[b]->length;
    positions[b] = given.empty() ? length - q_len : given[b];
    if (given.empty() && length == 0) positions[b] = 0;
    if (positions[b] >= 0 && positions[b] <= kMaxPosition) continue;
    if (!given.empty()) {
      refuse("q_positions[" + std::to_string(b) + "]", std::to_string(positions[b]), "0 to 2^60");
    }
    throw ValueError("q: has " + std::to_string(q_len) + " tokens, but sequences[" +
                     std::to_string(b) + "] only " + std::to_string(length) +
                     " keys; give q_positions");
  }
  return positions;
}

std::vector<TileLaunch> plan_stream(
    const StreamRequest& request, const TiledAttentionDims& dims, const Window& window, bool causal,
    const std::function<std::int64_t(const TileSource&)>& capacity) {
  std::vector<std::vector<TilePiece>> tiles;
  std::size_t most = 0;
  for (std::size_t b = 0; b < request.sequences.size(); ++b) {
    const StreamSequence& sequence = *request.sequences[b];
    const KeyRange range = seen(sequence, request.q_positions[b], request.q_len, window, causal);
    tiles.push_back(cut(sequence, static_cast<std::int64_t>(b), dims, range));
    most = std::max(most, tiles.back().size());
  }
  std::vector<TileLaunch> launches;
  for (std::size_t k = 0; k < most; ++k) {
    Round round(launches, capacity);
    for (std::size_t b = 0; b < tiles.size(); ++b) {
      if (k >= tiles[b].size()) continue;
      const TilePiece& piece = tiles[b][k];
      round.add(*request.sequences[b]->parts[static_cast<std::size_t>(piece.part)].source, piece);
    }
  }
  return launches;
}

std::vector<TileLaunch> join_launches(const std::vector<TileLaunch>& launches,
                                      std::int64_t launch_bytes,
                                      const std::function<bool(const TileSource&)>& in_place) {
  std::vector<TileLaunch> joined;
  for (const TileLaunch& launch : launches) {
    TileLaunch* const last = joined.empty() ? nullptr : &joined.back();
    const bool joins =
        last && last->source->key() == launch.source->key() && last->num_rounds < kMostRounds &&
        in_place(*launch.source) &&
        (last->num_blocks + launch.num_blocks) * launch.source->describe().block_bytes() <=
            launch_bytes;
    if (!joins) {
      joined.push_back(launch);
      continue;
    }
    for (TilePiece piece : launch.pieces) {
      piece.round = last->num_rounds;
      last->pieces.push_back(piece);
    }
    last->num_blocks += launch.num_blocks;
    ++last->num_rounds;
  }
  return joined;
}

}  // namespace tiledattn
