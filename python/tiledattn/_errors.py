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
    """

    source: str = ""
    sequence: int = 0
    position: int = 0
    num_blocks: int = 0
    wanted_bytes: int = 0
    got_bytes: int | None = None
