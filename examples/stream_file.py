# SPDX-License-Identifier: Apache-2.0
"""Decode over a KV cache in a file, under a limit of memory that the cache would break; NumPy alone, Linux.

    python examples/stream_file.py [MiB of KV]

A source of a few lines reads blocks from the file. Once everything else is in memory, the system is told to
refuse more than 64 MiB on top: to read the whole cache fails, to stream it works.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import tiledattn as ta

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 64
SCRATCH_BYTES = 24 << 20
LIMIT_BYTES = 64 << 20


class FileSource:
    """KV blocks, one after the other, in a file."""

    def __init__(self, path: Path, geometry: ta.TileGeometry) -> None:
        self.name = path.name
        self._file = path.open("rb", buffering=0)
        self._geometry = geometry

    def describe(self) -> ta.TileGeometry:
        return self._geometry

    def read(self, blocks: np.ndarray, buffer: np.ndarray) -> int:
        """Fill `buffer`; a run of neighbouring blocks is one system call."""
        filled = 0
        starts = np.flatnonzero(np.diff(blocks, prepend=blocks[0] - 2) != 1)
        for first, end in zip(starts, [*starts[1:], len(blocks)], strict=True):
            rows = buffer[first:end].reshape(-1)
            got = os.preadv(self._file.fileno(), [rows], int(blocks[first]) * buffer.shape[1])
            filled += got
            if got != rows.nbytes:
                break
        return filled


def write_cache(path: Path, geometry: ta.TileGeometry) -> None:
    """Write random blocks, a few at a time."""
    generator = np.random.default_rng(0)
    with path.open("wb") as file:
        for _ in range(geometry.num_blocks):
            values = geometry.block_bytes // 2
            generator.standard_normal(values, dtype=np.float32).astype(np.float16).tofile(file)


def limit_memory(more: int) -> None:
    """Let this process have only so many bytes more of memory of its own."""
    status = Path("/proc/self/status").read_text()
    now = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData:"))
    limit = now * 1024 + more
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def main() -> None:
    given = sys.argv[1] if len(sys.argv) > 1 else "256"
    if not given.isdecimal() or int(given) < 1:
        raise SystemExit(f"MiB of KV: got {given}, wanted a number of at least 1")
    mib = int(given)
    block_bytes = 2 * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM * 2
    geometry = ta.TileGeometry(
        num_blocks=mib * 2**20 // block_bytes,
        block_size=BLOCK_SIZE,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        dtype="float16",
    )
    dims = ta.TiledAttentionDims(
        max_seqs=1,
        num_q_heads=NUM_Q_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=BLOCK_SIZE,
        tile_capacity=SCRATCH_BYTES // 3 // geometry.block_bytes,
    )
    q = np.random.default_rng(1).standard_normal((1, NUM_Q_HEADS, HEAD_DIM)).astype(np.float16)
    attn = ta.StreamingAttention(dims, device="cpu", scratch_bytes=SCRATCH_BYTES)
    tokens = geometry.num_blocks * BLOCK_SIZE

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kv.bin"
        write_cache(path, geometry)
        source = FileSource(path, geometry)
        # The threads of the library, with their stacks, are there before the limit.
        attn.attend(q, [ta.StreamSequence(BLOCK_SIZE, ta.KvPart(source, [0]))])
        attn.reset_stats()

        limit_memory(LIMIT_BYTES)
        cache_bytes = path.stat().st_size
        if cache_bytes > LIMIT_BYTES:
            try:
                path.read_bytes()
            except MemoryError:
                print(f"reading all {cache_bytes >> 20} MiB at once: no memory, as it should be")
            else:
                raise SystemExit("the limit does not hold")
        begin = time.perf_counter()
        sequence = ta.StreamSequence(tokens, ta.KvPart(source, range(geometry.num_blocks)))
        out = attn.attend(q, [sequence])
        seconds = time.perf_counter() - begin

    assert np.isfinite(out).all()
    print(
        f"{tokens} tokens, {cache_bytes >> 20} MiB of KV through {SCRATCH_BYTES >> 20} MiB in {seconds:.2f} s"
    )
    print(attn.stats)


if __name__ == "__main__":
    main()
