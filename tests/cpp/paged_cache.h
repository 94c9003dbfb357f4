// SPDX-License-Identifier: Apache-2.0
// A paged KV cache for tests, and a whole step of tiled decode over it.
#pragma once

#include <algorithm>

#include "reference.h"

namespace test {

/// KV of some sequences, in blocks that lie anywhere in the pool. Slots past a length and blocks
/// that no sequence has are NaN: reading one shows.
struct PagedCache {
  Host k;  ///< [num_blocks, block_size, num_kv_heads, head_dim]
  Host v;
  std::vector<std::int64_t> lengths;
  std::vector<std::vector<std::int64_t>> tables;

  struct Sizes {
    std::int64_t block_size = 4;
    std::int64_t num_kv_heads = 2;
    std::int64_t head_dim = 16;
    std::int64_t head_dim_v = 16;
    DType dtype = DType::float32;
  };

  PagedCache(Random& random, const std::vector<std::int64_t>& of, const Sizes& sizes)
      : lengths(of) {
    std::int64_t num_blocks = 3;  // which nobody has
    for (const std::int64_t length : lengths) num_blocks += blocks_of(length, sizes.block_size);
    k = Host({num_blocks, sizes.block_size, sizes.num_kv_heads, sizes.head_dim}, kNan);
    v = Host({num_blocks, sizes.block_size, sizes.num_kv_heads, sizes.head_dim_v}, kNan);
    const std::vector<std::int64_t> order = random.permutation(num_blocks);
    std::size_t next = 0;
    for (const std::int64_t length : lengths) {
      tables.emplace_back();
      for (std::int64_t i = 0; i < blocks_of(length, sizes.block_size); ++i) {
        tables.back().push_back(order[next++]);
      }
      for (std::int64_t j = 0; j < length; ++j) fill_token(random, tables.back(), j);
    }
    k = rounded(k, sizes.dtype);
    v = rounded(v, sizes.dtype);
  }

  static std::int64_t blocks_of(std::int64_t length, std::int64_t block_size) {
    return (length + block_size - 1) / block_size;
  }
  std::int64_t block_size() const { return k.shape[1]; }
  std::int64_t num_seqs() const { return static_cast<std::int64_t>(lengths.size()); }
  std::int64_t max_blocks() const {
    std::int64_t most = 0;
    for (const std::int64_t length : lengths)
      most = std::max(most, blocks_of(length, block_size()));
    return most;
  }
  Host keys(std::size_t b) const { return gather(k, tables[b], lengths[b]); }
  Host values(std::size_t b) const { return gather(v, tables[b], lengths[b]); }

  /// Position in k.values of the first element of token j of sequence b.
  std::int64_t slot(std::size_t b, std::int64_t j) const {
    return tables[b][static_cast<std::size_t>(j / block_size())] * block_size() + j % block_size();
  }

  /// The block table [num_seqs, width] and the lengths; unused entries are no block ids.
  Array block_table(Device device, DType dtype = DType::int32, std::int64_t width = 0) const {
    width = std::max(width, max_blocks());
    std::vector<std::int64_t> entries;
    for (const std::vector<std::int64_t>& table : tables) {
      entries.insert(entries.end(), table.begin(), table.end());
      entries.resize(entries.size() + static_cast<std::size_t>(width) - table.size(), -7777);
    }
    return indices({num_seqs(), width}, entries, device, dtype);
  }

  /// Position of the first of q_len tokens whose last is at the last key; never before the start.
  std::int64_t q_position(std::size_t b, std::int64_t q_len) const {
    return std::max<std::int64_t>(lengths[b] - q_len, 0);
  }

  /// q is [num_seqs, q_len, num_q_heads, head_dim]. The last token is at the last key; or, with
  /// `positions`, the first one at q_position.
  Result reference(const Host& q, const Rules& rules, bool positions = false) const {
    Result result;
    for (std::size_t b = 0; b < lengths.size(); ++b) {
      std::optional<std::int64_t> position;
      if (positions) position = q_position(b, q.shape[1]);
      result.append(
          attend(element(q, static_cast<std::int64_t>(b)), keys(b), values(b), rules, position));
    }
    return result;
  }

 private:
  void fill_token(Random& random, const std::vector<std::int64_t>& table, std::int64_t j) {
    const std::int64_t at =
        table[static_cast<std::size_t>(j / block_size())] * block_size() + j % block_size();
    const std::int64_t k_token = k.shape[2] * k.shape[3];
    const std::int64_t v_token = v.shape[2] * v.shape[3];
    for (std::int64_t i = 0; i < k_token; ++i) k[at * k_token + i] = random.normal();
    for (std::int64_t i = 0; i < v_token; ++i) v[at * v_token + i] = random.normal();
  }
};

/// How a step visits a cache.
struct Walk {
  std::vector<std::int64_t> cuts;  ///< blocks in each tile; together at least max_blocks
  bool positions = false;          ///< give kv_positions and q_positions
  DType index_type = DType::int32;
  std::int64_t spare_columns = 0;  ///< unused columns in each tile's table
};

/// The arrays of one tile.
struct Tile {
  Array blocks, counts, slots, kv_positions, q_positions;

  /// Blocks first .. first + count - 1 of each sequence, as far as it has them.
  Tile(const PagedCache& cache, std::int64_t first, std::int64_t count, std::int64_t q_len,
       Device device, const Walk& walk) {
    const std::int64_t width = count + walk.spare_columns;
    const std::int64_t block_size = cache.block_size();
    std::vector<std::int64_t> ids, used, last, kv_at, q_at;
    for (std::size_t b = 0; b < cache.lengths.size(); ++b) {
      const std::vector<std::int64_t>& table = cache.tables[b];
      const auto blocks = static_cast<std::int64_t>(table.size());
      const std::int64_t here = std::clamp<std::int64_t>(blocks - first, 0, count);
      for (std::int64_t i = 0; i < width; ++i) {
        ids.push_back(i < here ? table[static_cast<std::size_t>(first + i)] : 1 << 30);
      }
      used.push_back(here);
      const bool has_last = here > 0 && first + here == blocks;
      last.push_back(has_last ? cache.lengths[b] - (blocks - 1) * block_size : block_size);
      kv_at.push_back(first * block_size);
      q_at.push_back(cache.q_position(b, q_len));
    }
    const std::int64_t num_seqs = cache.num_seqs();
    blocks = indices({num_seqs, width}, ids, device, walk.index_type);
    counts = indices({num_seqs}, used, device, walk.index_type);
    slots = indices({num_seqs}, last, device, walk.index_type);
    kv_positions = indices({num_seqs}, kv_at, device, walk.index_type);
    q_positions = indices({num_seqs}, q_at, device, walk.index_type);
  }

  TileArgs args(const Tensor& q, const Tensor& k_pool, const Tensor& v_pool,
                const Walk& walk) const {
    TileArgs args;
    args.q = q;
    args.k_pool = k_pool;
    args.v_pool = v_pool;
    args.tile_blocks = blocks;
    args.tile_block_counts = counts;
    args.last_block_valid_slots = slots.tensor();
    if (walk.positions) {
      args.kv_positions = kv_positions.tensor();
      args.q_positions = q_positions.tensor();
    }
    return args;
  }
};

/// Folds the whole cache into `attention`, tile by tile. q: [B, Hq, D] or [B, q_len, Hq, D].
inline void step_through(TiledAttention& attention, const PagedCache& cache, const Tensor& q,
                         const Tensor& k_pool, const Tensor& v_pool, const Walk& walk) {
  const std::int64_t q_len = q.rank == 4 ? q.shape[1] : 1;
  std::int64_t first = 0;
  for (const std::int64_t count : walk.cuts) {
    const Tile tile(cache, first, count, q_len, attention.device(), walk);
    attention.step_tile(tile.args(q, k_pool, v_pool, walk));
    backend_for(attention.device()).synchronize(attention.device().index, {});
    first += count;
  }
}

/// Tiles of `size` blocks that cover `num_blocks`.
inline std::vector<std::int64_t> even_cuts(std::int64_t num_blocks, std::int64_t size) {
  return std::vector<std::int64_t>(
      static_cast<std::size_t>(std::max<std::int64_t>((num_blocks + size - 1) / size, 1)), size);
}

}  // namespace test
