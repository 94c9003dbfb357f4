# SPDX-License-Identifier: Apache-2.0
"""The two attentions of the demo: over the prompt at once, and over the KV file tile by tile.

Both store K and V of the new tokens in the file first. K, V and q are float16; scores and results float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

import tiledattn as ta
from tiledattn.demo.arrays import DeviceArrays
from tiledattn.demo.kv_file import KvFile
from tiledattn.demo.weights import FloatArray


class PromptAttention:
    """Causal attention of a prompt from position 0 on, one layer's K and V in memory at a time."""

    def __init__(self, kv: KvFile, arrays: DeviceArrays) -> None:
        self._kv = kv
        self._arrays = arrays

    def __call__(self, layer: int, position: int, q: FloatArray, k: FloatArray, v: FloatArray) -> FloatArray:
        """Store K and V of the whole prompt and attend causally."""
        if position != 0:
            raise ValueError(f"position: {position}, but a prompt begins at 0")
        self._kv.write(layer, position, k, v)
        out = self._arrays.put(np.empty((1, *q.shape), np.float32))
        q16, k16, v16 = (self._arrays.put(x.astype(np.float16)[None]) for x in (q, k, v))
        ta.flash_attention(q16, k16, v16, causal=True, out=out)
        attended: FloatArray = self._arrays.get(out)[0]
        return attended


class StreamedAttention:
    """Attention of one new token over the KV file, read tile by tile into a small scratch pool.

    Parameters
    ----------
    kv
        The file.
    arrays
        Where the scratch pool and the running softmax state live.
    num_q_heads
        Query heads of a token.
    scratch_blocks
        Blocks of the scratch pool: the most that one tile holds.
    """

    def __init__(self, kv: KvFile, arrays: DeviceArrays, *, num_q_heads: int, scratch_blocks: int) -> None:
        _, num_kv_heads, block_size, head_dim = kv.block_shape
        self._kv = kv
        self._arrays = arrays
        self._attention = ta.TiledAttention(
            ta.TiledAttentionDims(
                max_seqs=1,
                num_q_heads=num_q_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                block_size=block_size,
                tile_capacity=scratch_blocks,
            ),
            device=arrays.device,
        )
        self.scratch_blocks = scratch_blocks
        self.device = arrays.device
        # On the CPU the scratch pool is the staging buffer itself: the file is read straight into it.
        self._staging = np.zeros((scratch_blocks, *kv.block_shape), np.float16)
        self._scratch = arrays.put(self._staging)
        self._k_pool, self._v_pool = ta.scratch_pool_views(self._scratch)
        # A tile's blocks are the first slots of the scratch pool, in order. Element n of `counts` is n: a
        # slice of it is the count of a tile, without a copy to the device.
        self._tile_blocks = arrays.put(np.arange(scratch_blocks, dtype=np.int32)[None])
        self._counts = arrays.put(np.arange(scratch_blocks + 1, dtype=np.int32))
        self._out = arrays.put(np.empty((1, num_q_heads, head_dim), np.float32))
        self.streamed_bytes = 0
        self.streamed_tiles = 0

    @property
    def scratch_bytes(self) -> int:
        """Size of the scratch pool."""
        return self._staging.nbytes

    def __call__(self, layer: int, position: int, q: FloatArray, k: FloatArray, v: FloatArray) -> FloatArray:
        """Store K and V of one token and attend to all tokens up to it, one tile after the other."""
        if len(q) != 1:
            raise ValueError(f"q: {len(q)} tokens, but one is decoded at a time")
        self._kv.write(layer, position, k, v)
        query = self._arrays.put(q.astype(np.float16))
        self._attention.begin_step(1)
        for tile in tiles(position + 1, self._kv.block_size, self.scratch_blocks):
            staged = self._staging[: tile.count]
            self._kv.read(layer, tile.first_block, staged)
            self._arrays.refill(self._scratch[: tile.count], staged)
            self._attention.step_tile(
                query,
                self._k_pool,
                self._v_pool,
                self._tile_blocks[:, : tile.count],
                self._counts[tile.count : tile.count + 1],
                last_block_valid_slots=tile.last_block_valid_slots,
            )
            self.streamed_bytes += staged.nbytes
            self.streamed_tiles += 1
        self._attention.finalize(out=self._out)
        return self._arrays.get(self._out)


@dataclass(frozen=True)
class Tile:
    """Neighbouring blocks of a sequence that are visited together."""

    first_block: int
    count: int
    last_block_valid_slots: int


def tiles(tokens: int, block_size: int, tile_capacity: int) -> Iterator[Tile]:
    """Cut a sequence of `tokens` tokens into tiles of at most `tile_capacity` blocks, in order."""
    for start in range(0, tokens, block_size * tile_capacity):
        in_tile = min(tokens - start, block_size * tile_capacity)
        count = -(-in_tile // block_size)
        yield Tile(start // block_size, count, in_tile - (count - 1) * block_size)
