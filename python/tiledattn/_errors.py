# SPDX-License-Identifier: Apache-2.0
"""Errors that carry more than a text."""

from __future__ import annotations


class TileError(OSError):
    """A tile could not be had from its source; nothing was written.

    ``__cause__`` is what a source written in Python raised, if it did.

    Attributes
    ----------
    source
        Name of the source.
    sequence, position
        Which tile: index of its sequence, and position of its first key there.
    num_blocks
        Blocks of the tile.
    wanted_bytes, got_bytes
        Bytes of the tile, and bytes that came; None where the source failed with an error.

    Examples
    --------
    >>> import numpy as np, tiledattn as ta
    >>> class Short:
    ...     name = "short"
    ...     def describe(self):
    ...         return ta.TileGeometry(
    ...             num_blocks=2, block_size=4, num_kv_heads=2, head_dim=8, dtype="float32")
    ...     def read(self, blocks, buffer):
    ...         return 7
    >>> dims = ta.TiledAttentionDims(
    ...     max_seqs=1, num_q_heads=4, num_kv_heads=2, head_dim=8, block_size=4, tile_capacity=2)
    >>> attn = ta.StreamingAttention(dims, device="cpu")
    >>> try:
    ...     attn.attend(np.ones((1, 4, 8), np.float32), [ta.StreamSequence(8, ta.KvPart(Short(), [0, 1]))])
    ... except ta.TileError as error:
    ...     print(error.source, error.wanted_bytes, error.got_bytes)
    short 1024 7
    """

    source: str = ""
    sequence: int = 0
    position: int = 0
    num_blocks: int = 0
    wanted_bytes: int = 0
    got_bytes: int | None = None
