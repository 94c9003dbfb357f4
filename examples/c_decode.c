/* SPDX-License-Identifier: Apache-2.0
 * Tiled decode attention from C: two sequences, two query heads, KV in the blocks of a paged pool,
 * visited in tiles of two blocks.
 *
 * docs/cpp.md says how to build it against an installed tiledattn.
 */
#include <math.h>
#include <stdio.h>
#include <tiledattn/c_api.h>

enum { kSeqs = 2, kHeads = 2, kDim = 4, kBlockSize = 2, kBlocks = 6, kTile = 2 };

/* Each call returns a status; the message says which argument, what came and what was wanted. */
static int ok(tiledattn_status status, const char* what) {
  if (status == TILEDATTN_OK) return 1;
  fprintf(stderr, "%s: %s\n", what, tiledattn_last_error());
  return 0;
}

static tiledattn_tensor array(void* data, int32_t dtype, int32_t rank, const int64_t* shape) {
  const tiledattn_device cpu = {TILEDATTN_CPU, 0};
  return tiledattn_make_tensor(data, dtype, cpu, rank, shape);
}

int main(void) {
  /* Keys are all zero, so every key has the same weight and the result is the mean of V. */
  static float k_data[kBlocks * kBlockSize * kHeads * kDim];
  static float v_data[kBlocks * kBlockSize * kHeads * kDim];
  static float q_data[kSeqs * kHeads * kDim];
  static float out_data[kSeqs * kHeads * kDim];
  static float lse_data[kSeqs * kHeads];

  /* Which blocks a sequence has, and how many tokens: the last block may be part full. */
  const int32_t table[kSeqs][3] = {{4, 1, 5}, {2, 0, -1}};
  const int32_t num_blocks[kSeqs] = {3, 2};
  const int32_t lengths[kSeqs] = {5, 4};

  const int64_t pool_shape[] = {kBlocks, kBlockSize, kHeads, kDim};
  const int64_t q_shape[] = {kSeqs, kHeads, kDim};
  const int64_t tile_shape[] = {kSeqs, kTile};
  const tiledattn_tensor k_pool = array(k_data, TILEDATTN_FLOAT32, 4, pool_shape);
  const tiledattn_tensor v_pool = array(v_data, TILEDATTN_FLOAT32, 4, pool_shape);
  const tiledattn_tensor q = array(q_data, TILEDATTN_FLOAT32, 3, q_shape);
  const tiledattn_tensor out = array(out_data, TILEDATTN_FLOAT32, 3, q_shape);
  const tiledattn_tensor lse = array(lse_data, TILEDATTN_FLOAT32, 2, q_shape);
  const tiledattn_device cpu = {TILEDATTN_CPU, 0};
  tiledattn_dims dims = {0};
  tiledattn_attention* attention = NULL;
  int b, i, j, d, first, good;

  for (b = 0; b < kSeqs; ++b) { /* V of token j is j + 1 everywhere */
    for (j = 0; j < lengths[b]; ++j) {
      const int slot = table[b][j / kBlockSize] * kBlockSize + j % kBlockSize;
      for (d = 0; d < kHeads * kDim; ++d) v_data[slot * kHeads * kDim + d] = (float)(j + 1);
    }
  }

  dims.max_seqs = kSeqs;
  dims.num_q_heads = kHeads;
  dims.num_kv_heads = kHeads;
  dims.head_dim = kDim;
  dims.block_size = kBlockSize;
  dims.tile_capacity = kTile;
  if (!ok(tiledattn_create(&dims, &cpu, NULL, &attention), "create")) return 1;
  good = ok(tiledattn_begin_step(attention, kSeqs, NULL), "begin_step");

  for (first = 0; good && first < 3; first += kTile) {
    int32_t blocks[kSeqs][kTile], counts[kSeqs], slots[kSeqs];
    tiledattn_tile_args tile = {0};
    const tiledattn_tensor blocks_array = array(blocks, TILEDATTN_INT32, 2, tile_shape);
    const tiledattn_tensor counts_array = array(counts, TILEDATTN_INT32, 1, tile_shape);
    const tiledattn_tensor slots_array = array(slots, TILEDATTN_INT32, 1, tile_shape);
    for (b = 0; b < kSeqs; ++b) {
      const int left = num_blocks[b] - first;
      counts[b] = left < 0 ? 0 : left < kTile ? left : kTile;
      for (i = 0; i < counts[b]; ++i) blocks[b][i] = table[b][first + i];
      slots[b] =
          first + counts[b] == num_blocks[b] ? (lengths[b] - 1) % kBlockSize + 1 : kBlockSize;
    }
    tile.q = &q;
    tile.k_pool = &k_pool;
    tile.v_pool = &v_pool;
    tile.tile_blocks = &blocks_array;
    tile.tile_block_counts = &counts_array;
    tile.last_block_valid_slots = &slots_array;
    good = ok(tiledattn_step_tile(attention, &tile, NULL), "step_tile");
  }
  good = good && ok(tiledattn_finalize(attention, &out, &lse, NULL), "finalize");
  tiledattn_destroy(attention);
  if (!good) return 1;

  for (b = 0; b < kSeqs; ++b) {
    const float mean = (float)(lengths[b] + 1) / 2;
    printf("sequence %d: out %.3f (the mean of 1 to %d), lse %.4f (ln %d)\n", b,
           out_data[b * kHeads * kDim], lengths[b], lse_data[b * kHeads], lengths[b]);
    if (fabsf(out_data[b * kHeads * kDim] - mean) > 1e-5f) return 1;
    if (fabs(lse_data[b * kHeads] - log(lengths[b])) > 1e-5) return 1;
  }
  return 0;
}
