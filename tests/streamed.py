# SPDX-License-Identifier: Apache-2.0
"""What the tests of streaming share: a source that misbehaves on demand, sequences, the same tiles by hand."""

from __future__ import annotations

import threading

import cases
import numpy as np
import tiledattn as ta

LONG = cases.Paged("", seq_lens=(90, 0, 41, 77, 5), block_size=4)
TILE = 3


class ReadSource:
    """The pools of a case as packed bytes; raises, waits or returns short when told to."""

    name = "bytes"

    def __init__(self, k_pool, v_pool, layout="hnd", **scales):
        num_blocks, block_size, num_kv_heads, head_dim = k_pool.shape
        self.geometry = ta.TileGeometry(
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            head_dim_v=v_pool.shape[3],
            dtype=str(k_pool.dtype),
            layout=layout,
            **scales,
        )
        self.bytes = np.zeros((num_blocks, self.geometry.block_bytes), np.uint8)
        for view, pool in zip(self.geometry.views(self.bytes), (k_pool, v_pool), strict=True):
            view[...] = pool
        self.before_read = lambda blocks: None
        self.short_by = 0
        self.threads = set()

    def describe(self):
        return self.geometry

    def read(self, blocks, buffer):
        self.threads.add(threading.get_ident())
        assert buffer.shape == (len(blocks), self.geometry.block_bytes)
        assert blocks.dtype == np.int64
        self.before_read(blocks)
        buffer[...] = self.bytes[blocks]
        return buffer.nbytes - self.short_by


class GoneError(Exception):
    pass


def fail_at(block, error):
    def before_read(blocks):
        if block in blocks:
            raise error

    return before_read


def make_source(kind, device, data, **scales):
    k_pool, v_pool = data.k_pool, data.v_pool
    if kind == "read":
        return ReadSource(k_pool, v_pool, **scales)
    carrier = device if kind == "device" else None
    pools = [carrier.array(pool) if carrier else np.array(pool) for pool in (k_pool, v_pool)]
    return ta.PoolSource(*pools, name=kind, **scales)


def sequences_of(data, source):
    block_size = data.k_pool.shape[1]
    return [
        ta.StreamSequence(int(length), ta.KvPart(source, table[: -(-int(length) // block_size)]))
        for table, length in zip(data.block_table, data.seq_lens, strict=True)
    ]


def make_streaming(device, data, tile=TILE, **options):
    q = data.q
    dims = ta.TiledAttentionDims(
        max_seqs=max(1, len(q)),
        num_q_heads=q.shape[-2],
        num_kv_heads=data.k_pool.shape[2],
        head_dim=q.shape[-1],
        head_dim_v=data.v_pool.shape[3],
        block_size=data.k_pool.shape[1],
        tile_capacity=tile,
        max_q_len=q.shape[1] if q.ndim == 4 else 1,
    )
    score = {key: value for key, value in data.score.items() if key != "causal"}
    if score["sinks"] is not None:
        score["sinks"] = device.array(score["sinks"])
    settings = {"scratch_bytes": 1 << 21, "poison_scratch": True, **score, **options}
    return ta.StreamingAttention(dims, device=device.device, **settings)


def small(device, kind="read", **options):
    """LONG in float32 with a streamer and its sequences."""
    data = LONG.make("float32")
    source = make_source(kind, device, data)
    return data, source, make_streaming(device, data, **options), sequences_of(data, source)


def attend(device, streaming, data, sequences, **kwargs):
    return device.call(streaming.attend, data.q, sequences, return_lse=True, **kwargs)


def tiles_by_hand(device, data, tile, num_seqs):
    """The tiles of the streamer through TiledAttention, one after the other."""
    attn = ta.TiledAttention(make_streaming(device, data, tile).dims, device=device.device)
    attn.begin_step(num_seqs)
    blocks = -(-int(max(data.seq_lens)) // data.k_pool.shape[1])
    for part in cases.cut(data, (tile,) * -(-blocks // tile)):
        args = (*data.args[:3], part.blocks, part.counts)
        device.call(attn.step_tile, *args, last_block_valid_slots=part.valid_slots)
    return device.call(attn.finalize, return_lse=True)
