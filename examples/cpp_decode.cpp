// SPDX-License-Identifier: Apache-2.0
// One decode step over a KV cache that is never in memory as a whole: blocks are fetched tile by
// tile into a small scratch pool. The result is compared with attention over the whole cache.
//
// docs/cpp.md says how to build it against an installed tiledattn.
#include <tiledattn/tiledattn.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

using namespace tiledattn;

int main() {
  TiledAttentionDims dims;
  dims.max_seqs = 1;
  dims.num_q_heads = 32;
  dims.num_kv_heads = 8;
  dims.head_dim = 128;
  dims.block_size = 16;
  dims.tile_capacity = 32;  // 512 tokens at a time
  dims = dims.validated();
  const std::int64_t seq_len = 5000;
  const std::int64_t num_blocks = (seq_len + dims.block_size - 1) / dims.block_size;
  const Device cpu;

  // The cache, standing for a file: each block is [K|V, num_kv_heads, block_size, head_dim], the
  // layout of a slot of the scratch pool, so that a block is fetched in one piece.
  const PoolStrides strides = dims.scratch_pool_strides();
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  const auto random = [&](std::int64_t size) {
    std::vector<float> values(static_cast<std::size_t>(size));
    for (float& value : values) value = normal(generator);
    return values;
  };
  std::vector<float> cache = random(num_blocks * strides.block);
  std::vector<float> q = random(dims.num_q_heads * dims.head_dim);
  const Tensor q_tensor =
      make_tensor(q.data(), DType::float32, cpu, {1, dims.num_q_heads, dims.head_dim});

  // K and V of a pool of such slots, as the views [slots, block_size, num_kv_heads, head_dim].
  const auto pool_view = [&](float* pool, std::int64_t slots, std::int64_t offset) {
    Tensor view = make_tensor(pool + offset, DType::float32, cpu,
                              {slots, dims.block_size, dims.num_kv_heads, dims.head_dim});
    view.strides[0] = strides.block;
    view.strides[1] = strides.token;
    view.strides[2] = strides.kv_head;
    return view;
  };
  const std::int64_t v_offset = strides.block / 2;

  std::vector<float> scratch(static_cast<std::size_t>(dims.tile_capacity * strides.block));
  std::vector<std::int32_t> slots;
  for (std::int32_t slot = 0; slot < dims.tile_capacity; ++slot) slots.push_back(slot);

  TiledAttention attention(dims, cpu);
  attention.begin_step(1);
  int num_tiles = 0;
  for (std::int64_t first = 0; first < num_blocks; first += dims.tile_capacity, ++num_tiles) {
    auto count = static_cast<std::int32_t>(std::min(dims.tile_capacity, num_blocks - first));
    std::copy_n(cache.begin() + first * strides.block, count * strides.block, scratch.begin());

    TileArgs tile;
    tile.q = q_tensor;
    tile.k_pool = pool_view(scratch.data(), dims.tile_capacity, 0);
    tile.v_pool = pool_view(scratch.data(), dims.tile_capacity, v_offset);
    tile.tile_blocks = make_tensor(slots.data(), DType::int32, cpu, {1, dims.tile_capacity});
    tile.tile_block_counts = make_tensor(&count, DType::int32, cpu, {1});
    // The last block of the last tile may be part full.
    const std::int64_t end = (first + count) * dims.block_size;
    tile.last_block_valid_slots_all = dims.block_size - std::max<std::int64_t>(end - seq_len, 0);
    attention.step_tile(tile);
  }
  std::vector<float> out(q.size());
  attention.finalize(
      make_tensor(out.data(), DType::float32, cpu, {1, dims.num_q_heads, dims.head_dim}));

  // The same over the whole cache in one call.
  std::vector<float> whole(q.size());
  std::vector<std::int32_t> table;
  for (std::int32_t block = 0; block < num_blocks; ++block) table.push_back(block);
  std::int64_t length = seq_len;
  PagedArgs paged;
  paged.q = q_tensor;
  paged.k_pool = pool_view(cache.data(), num_blocks, 0);
  paged.v_pool = pool_view(cache.data(), num_blocks, v_offset);
  paged.block_table = make_tensor(table.data(), DType::int32, cpu, {1, num_blocks});
  paged.seq_lens = make_tensor(&length, DType::int64, cpu, {1});
  paged.out = make_tensor(whole.data(), DType::float32, cpu, {1, dims.num_q_heads, dims.head_dim});
  paged_attention(paged);

  float difference = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    difference = std::max(difference, std::fabs(out[i] - whole[i]));
  }
  std::printf("%lld tokens in %d tiles: scratch %lld KiB of %lld KiB, largest difference %.1e\n",
              static_cast<long long>(seq_len), num_tiles,
              static_cast<long long>(scratch.size() * sizeof(float) / 1024),
              static_cast<long long>(cache.size() * sizeof(float) / 1024),
              static_cast<double>(difference));
  return difference < 1e-5f ? 0 : 1;
}
