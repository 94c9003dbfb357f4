// SPDX-License-Identifier: Apache-2.0
#include "stream/tile_table.h"

#include <algorithm>

namespace tiledattn {

std::int64_t TileTable::bytes(std::int64_t num_seqs, std::int64_t width) {
  return num_seqs * (width + kVectors) * static_cast<std::int64_t>(sizeof(std::int64_t));
}

void TileTable::fill(const TileLaunch& launch, const StreamRequest& request,
                     const std::vector<bool>& wanted, bool in_place, std::int64_t block_size) {
  num_seqs = static_cast<std::int64_t>(request.sequences.size());
  num_rounds = launch.num_rounds;
  width = 0;
  for (const TilePiece& piece : launch.pieces) width = std::max(width, piece.count);
  auto* const all = static_cast<std::int64_t*>(host.get());
  const std::int64_t round_size = num_seqs * (width + kVectors);
  std::fill_n(all, num_rounds * round_size, 0);
  for (std::int64_t round = 0; round < num_rounds; ++round) {
    std::copy(request.q_positions.begin(), request.q_positions.end(),
              all + round * round_size + num_seqs * (width + kVectors - 1));
  }
  std::int64_t place = 0;
  for (std::size_t i = 0; i < launch.pieces.size(); ++i) {
    const TilePiece& piece = launch.pieces[i];
    const std::int64_t first_place = place;
    place += piece.count;
    if (!wanted[i]) continue;
    std::int64_t* const ids = all + piece.round * round_size;
    std::int64_t* const counts = ids + num_seqs * width;
    std::int64_t* const valid_slots = counts + num_seqs;
    std::int64_t* const kv_positions = valid_slots + num_seqs;
    const StreamSequence& sequence = *request.sequences[static_cast<std::size_t>(piece.sequence)];
    const KvPart& part = sequence.parts[static_cast<std::size_t>(piece.part)];
    std::int64_t* const row = ids + piece.sequence * width;
    for (std::int64_t j = 0; j < piece.count; ++j) {
      row[j] = in_place ? part.blocks[static_cast<std::size_t>(piece.first + j)] : first_place + j;
    }
    counts[piece.sequence] = piece.count;
    const std::int64_t last_block = piece.position + (piece.count - 1) * block_size;
    valid_slots[piece.sequence] = std::min(block_size, sequence.length - last_block);
    kv_positions[piece.sequence] = piece.position;
  }
}

void TileTable::give(TileArgs& args, std::int64_t round, Device where, bool positions) const {
  auto* const ids = static_cast<std::int64_t*>(device) + round * num_seqs * (width + kVectors);
  std::int64_t* const vectors = ids + num_seqs * width;
  const auto vector = [&](std::int64_t index) {
    return make_tensor(vectors + index * num_seqs, DType::int64, where, {num_seqs});
  };
  args.tile_blocks = make_tensor(ids, DType::int64, where, {num_seqs, width});
  args.tile_block_counts = vector(0);
  args.last_block_valid_slots = vector(1);
  if (!positions) return;
  args.kv_positions = vector(2);
  args.q_positions = vector(3);
}

}  // namespace tiledattn
