# SPDX-License-Identifier: Apache-2.0
"""Decode attention over a KV cache on disk, read a tile at a time into a small scratch pool; NumPy alone.

    python examples/tiled_decode.py [tokens]

The cache is a file of blocks, each `[K|V, num_kv_heads, block_size, head_dim]`. The result is compared with
attention over the whole cache at once.
"""

from __future__ import annotations

import sys
import tempfile

import numpy as np
import tiledattn as ta

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
BLOCK_SIZE, TILE_CAPACITY = 16, 64


def main() -> None:
    given = sys.argv[1] if len(sys.argv) > 1 else "20000"
    if not given.isdecimal() or int(given) < 1:
        raise SystemExit(f"tokens: got {given}, wanted a number of at least 1")
    tokens = int(given)
    generator = np.random.default_rng(0)
    num_blocks = -(-tokens // BLOCK_SIZE)
    cache = generator.standard_normal((num_blocks, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM), dtype=np.float32)
    q = generator.standard_normal((1, NUM_Q_HEADS, HEAD_DIM), dtype=np.float32)

    dims = ta.TiledAttentionDims(
        max_seqs=1,
        num_q_heads=NUM_Q_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=BLOCK_SIZE,
        tile_capacity=TILE_CAPACITY,
    )
    attn = ta.TiledAttention(dims, device="cpu")
    scratch = np.empty((TILE_CAPACITY, *cache.shape[1:]), np.float32)
    k_pool, v_pool = ta.scratch_pool_views(scratch)
    tile_blocks = np.arange(TILE_CAPACITY, dtype=np.int32)[None]

    with tempfile.TemporaryFile() as file:
        cache.tofile(file)
        file.seek(0)
        attn.begin_step(1)
        for first in range(0, num_blocks, TILE_CAPACITY):
            count = min(TILE_CAPACITY, num_blocks - first)
            file.readinto(scratch[:count].reshape(-1).view(np.uint8).data)
            last_token = min(tokens, (first + count) * BLOCK_SIZE)
            attn.step_tile(
                q,
                k_pool,
                v_pool,
                tile_blocks,
                np.array([count], np.int32),
                last_block_valid_slots=last_token - (first + count - 1) * BLOCK_SIZE,
            )
        out = attn.finalize()

    block_table = np.arange(num_blocks, dtype=np.int32)[None]
    whole = ta.paged_attention(q, *ta.scratch_pool_views(cache), block_table, np.array([tokens], np.int32))
    error = np.linalg.norm(out - whole) / np.linalg.norm(whole)
    print(f"{tokens} tokens, cache {cache.nbytes / 2**20:.0f} MiB, scratch {scratch.nbytes / 2**20:.0f} MiB")
    print(f"difference from attention over the whole cache: {error:.1e} of its size")


if __name__ == "__main__":
    main()
