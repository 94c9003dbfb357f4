# SPDX-License-Identifier: Apache-2.0
"""Keys and values of one sequence in a file: a region for each layer, blocks of tokens in each region.

A block is ``[K|V, num_kv_heads, block_size, head_dim]`` float16, one run of bytes, which is the layout of a
slot of a scratch pool (`tiledattn.scratch_pool_views`). The blocks of a layer lie in the order of the
sequence, so a tile of neighbouring blocks is one read.
"""

from __future__ import annotations

import tempfile
from io import FileIO
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from tiledattn.demo.errors import DemoError
from tiledattn.demo.weights import FloatArray

HalfArray = NDArray[np.float16]

FLOAT16_MAX = float(np.finfo(np.float16).max)


class KvFile:
    """A pool of KV blocks for each layer, in a file that is never held in memory as a whole.

    Parameters
    ----------
    path
        A new file to create and keep, or None for a temporary one that goes with the object.
    num_layers, num_blocks, block_size, num_kv_heads, head_dim
        Sizes; `num_blocks` is the number of blocks of each layer.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> None:
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_shape = (2, num_kv_heads, block_size, head_dim)
        self.block_bytes = int(np.prod(self.block_shape)) * np.dtype(np.float16).itemsize
        self._name = f"a temporary file in {tempfile.gettempdir()}" if path is None else str(path)
        self._file = _open_new(path)
        # The file is sparse: space is taken as blocks are written.
        self._file.truncate(num_layers * num_blocks * self.block_bytes)

    def __enter__(self) -> KvFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; a temporary one is removed."""
        self._file.close()

    def blocks_for(self, tokens: int) -> int:
        """Say how many blocks of a layer hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def write(self, layer: int, position: int, k: FloatArray, v: FloatArray) -> None:
        """Store keys and values of the tokens at `position` and after it, rounded to float16.

        Parameters
        ----------
        k, v
            ``[tokens, num_kv_heads, head_dim]``.
        """
        for name, values in (("k", k), ("v", v)):
            largest = float(np.max(np.abs(values), initial=0.0))
            if not largest <= FLOAT16_MAX:
                raise ValueError(f"{name}: layer {layer} holds {largest:g}, which float16 cannot store")
        first, offset = divmod(position, self.block_size)
        blocks = np.zeros((self.blocks_for(offset + len(k)), *self.block_shape), np.float16)
        if offset:
            self.read(layer, first, blocks[:1])
        block, slot = np.divmod(np.arange(offset, offset + len(k)), self.block_size)
        blocks[block, 0, :, slot] = k
        blocks[block, 1, :, slot] = v
        self._seek(layer, first, len(blocks))
        self._write_all(blocks.reshape(-1).view(np.uint8).data)

    def read(self, layer: int, first_block: int, into: HalfArray) -> None:
        """Fill `into`, ``[blocks, 2, num_kv_heads, block_size, head_dim]``, from `first_block` on."""
        if into.shape[1:] != self.block_shape or into.dtype != np.float16 or not into.flags.c_contiguous:
            raise ValueError(
                f"into: {into.dtype} of shape {into.shape}, "
                f"wanted contiguous float16 [blocks, *{self.block_shape}]"
            )
        self._seek(layer, first_block, len(into))
        self._read_all(into.reshape(-1).view(np.uint8).data)

    def read_tokens(self, layer: int, tokens: int) -> tuple[HalfArray, HalfArray]:
        """Give the first `tokens` keys and values of a layer, each ``[tokens, num_kv_heads, head_dim]``."""
        blocks = np.empty((self.blocks_for(tokens), *self.block_shape), np.float16)
        self.read(layer, 0, blocks)
        block, slot = np.divmod(np.arange(tokens), self.block_size)
        return blocks[block, 0, :, slot], blocks[block, 1, :, slot]

    def _seek(self, layer: int, first_block: int, count: int) -> None:
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer: {layer}, wanted 0..{self.num_layers - 1}")
        if first_block < 0 or first_block + count > self.num_blocks:
            raise IndexError(
                f"block: {first_block}..{first_block + count - 1}, "
                f"but the file has {self.num_blocks} in each layer"
            )
        self._file.seek((layer * self.num_blocks + first_block) * self.block_bytes)

    # One system call may move less than was asked for.

    def _read_all(self, into: memoryview) -> None:
        done = 0
        while done < len(into):
            count = self._file.readinto(into[done:])
            if not count:
                raise OSError(f"KV file: {self._name} ended {len(into) - done} bytes early")
            done += count

    def _write_all(self, data: memoryview) -> None:
        done = 0
        while done < len(data):
            try:
                done += self._file.write(data[done:])
            except OSError as error:
                raise OSError(error.errno, f"KV file: {error.strerror}", self._name) from error


def _open_new(path: Path | None) -> FileIO:
    if path is None:
        return tempfile.TemporaryFile(prefix="tiledattn-kv-", buffering=0)
    try:
        return path.open("x+b", buffering=0)
    except FileExistsError:
        raise DemoError(f"--kv-file: got {path}, which exists; expected a new file") from None
