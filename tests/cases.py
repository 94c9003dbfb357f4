# SPDX-License-Identifier: Apache-2.0
"""The problems of the tests, as data; ``make`` turns a case into NumPy arrays.

What must never be observable is poisoned: unused slots, unnamed blocks and unused table entries hold garbage.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from arrays import NP_DTYPE

UNUSED_BLOCK_IDS = (-1, 10**9, 2**31 - 1, -(2**31))
NO_WINDOW = (None, None)


def random(rng, shape, dtype, scale=1.0):
    return (rng.standard_normal(shape) * scale).astype(NP_DTYPE[dtype])


def random_lengths(seed, count, longest):
    """As many short sequences as long ones, and an empty one."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.uniform(0, np.log(longest), count)).astype(int)
    lengths[rng.integers(count)] = 0
    return tuple(int(n) for n in lengths)


def random_values(rng, shape, dtype):
    """V. Rows of few elements get one sign: else some sum to nearly zero, where no relative bound holds."""
    v = random(rng, shape, dtype)
    return np.abs(v) if shape[-1] < 16 else v


def poison(array, kind="nan"):
    """Fill with what a stale cache may hold: NaN, infinity, or 0x7f in every byte."""
    if kind == "bytes":
        array.view(np.uint8)[...] = 0x7F
    else:
        array[...] = {"nan": np.nan, "inf": np.inf, "zero": 0.0}[kind]


@dataclass(frozen=True)
class Score:
    """How scores are made; ``kwargs`` are arguments of the functions and of the reference alike."""

    causal: bool = False
    window: tuple = NO_WINDOW
    softcap: float = 0.0
    sinks: bool = False
    softmax_scale: float | None = None

    def kwargs(self, rng, num_q_heads):
        sinks = rng.standard_normal(num_q_heads).astype(np.float32) if self.sinks else None
        return {
            "causal": self.causal,
            "window": self.window,
            "softcap": self.softcap,
            "sinks": sinks,
            "softmax_scale": self.softmax_scale,
        }


@dataclass(frozen=True)
class Flash:
    """Dense attention."""

    name: str
    batch: int = 2
    q_len: int = 33
    kv_len: int = 65
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None
    score: Score = field(default_factory=Score)
    spread: float = 1.0  # of q: larger means sharper rows

    def __str__(self):
        return self.name

    def make(self, dtype, seed=0):
        """q, k, v and the keyword arguments."""
        rng = np.random.default_rng(seed)
        head_dim_v = self.head_dim_v or self.head_dim
        q = random(rng, (self.batch, self.q_len, self.num_q_heads, self.head_dim), dtype, self.spread)
        k = random(rng, (self.batch, self.kv_len, self.num_kv_heads, self.head_dim), dtype)
        v = random_values(rng, (self.batch, self.kv_len, self.num_kv_heads, head_dim_v), dtype)
        return (q, k, v), self.score.kwargs(rng, self.num_q_heads)


FLASH = [
    Flash("one_key", q_len=1, kv_len=1),
    Flash("decode", q_len=1, kv_len=257),
    Flash("square_edges", batch=1, q_len=128, kv_len=128),
    Flash("square_past_edges", batch=1, q_len=129, kv_len=129, score=Score(causal=True)),
    Flash("causal", score=Score(causal=True)),
    Flash("causal_square", q_len=97, kv_len=97, score=Score(causal=True)),
    Flash("causal_more_queries", q_len=40, kv_len=17, score=Score(causal=True)),
    Flash("window_both_sides", q_len=70, kv_len=90, score=Score(window=(7, 3))),
    Flash("window_left_causal", q_len=150, kv_len=150, score=Score(causal=True, window=(20, None))),
    Flash("window_right_only", q_len=50, kv_len=30, score=Score(window=(None, 5))),
    Flash("window_wide", score=Score(window=(1000, 1000))),
    Flash("window_zero", q_len=20, kv_len=40, score=Score(window=(0, 0))),
    Flash("softcap", score=Score(softcap=2.0), spread=4.0),
    Flash("sinks", score=Score(sinks=True)),
    Flash("everything", q_len=61, kv_len=113, score=Score(True, (30, 0), 3.0, True, 0.3)),
    Flash("scale_negative", score=Score(softmax_scale=-0.2)),
    Flash("scale_zero", score=Score(softmax_scale=0.0)),
    Flash("sharp", spread=6.0),
    Flash("gqa_7", num_q_heads=28, num_kv_heads=4, q_len=19, kv_len=45, score=Score(causal=True)),
    Flash("mqa", num_q_heads=9, num_kv_heads=1, q_len=12),
    Flash("mha", num_q_heads=3, num_kv_heads=3),
    Flash("d32", head_dim=32),
    Flash("d80", head_dim=80),
    Flash("d96", head_dim=96, score=Score(causal=True)),
    Flash("d128", head_dim=128, batch=1, q_len=65, kv_len=200, score=Score(causal=True)),
    Flash("d256", head_dim=256, batch=1),
    Flash("d_odd", head_dim=37, head_dim_v=51),
    Flash("dv_smaller", head_dim=96, head_dim_v=64),
    Flash("dv_larger", head_dim=64, head_dim_v=256),
    Flash("d1", head_dim=1),
    Flash("long", batch=1, q_len=3, kv_len=3001, num_q_heads=2, num_kv_heads=1),
]


@dataclass(frozen=True)
class Paged:
    """A paged cache. ``q_lens`` None: q is [B, Hq, D]; an int: [B, q_lens, Hq, D]; a tuple: ragged."""

    name: str
    seq_lens: tuple = (1, 40, 17)
    q_lens: int | tuple | None = None
    block_size: int = 16
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None
    score: Score = field(default_factory=lambda: Score(causal=True))
    spread: float = 1.0

    def __str__(self):
        return self.name

    def make(self, dtype, seed=0, garbage="nan", spare_blocks=5, spare_columns=2):
        rng = np.random.default_rng(seed)
        head_dim_v = self.head_dim_v or self.head_dim
        batch, block = len(self.seq_lens), self.block_size
        needed = [-(-n // block) for n in self.seq_lens]
        num_blocks = sum(needed) + spare_blocks
        k_pool = random(rng, (num_blocks, block, self.num_kv_heads, self.head_dim), dtype)
        v_pool = random_values(rng, (num_blocks, block, self.num_kv_heads, head_dim_v), dtype)
        ids = iter(rng.permutation(num_blocks))
        columns = max(needed, default=0) + spare_columns
        table = rng.choice(UNUSED_BLOCK_IDS, (batch, columns)).astype(np.int32)
        used = np.zeros((num_blocks, block), bool)
        for b, length in enumerate(self.seq_lens):
            for i in range(needed[b]):
                table[b, i] = next(ids)
                used[table[b, i], : length - i * block] = True
        for pool in (k_pool, v_pool):
            stale = np.empty_like(pool)
            poison(stale, garbage)
            pool[~used] = stale[~used]
        q, cu = self._queries(rng, dtype)
        kwargs = self.score.kwargs(rng, self.num_q_heads)
        return PagedArrays(q, k_pool, v_pool, table, np.array(self.seq_lens, np.int32), cu, kwargs)

    def _queries(self, rng, dtype):
        batch, heads = len(self.seq_lens), (self.num_q_heads, self.head_dim)
        if self.q_lens is None:
            return random(rng, (batch, *heads), dtype, self.spread), None
        if isinstance(self.q_lens, int):
            return random(rng, (batch, self.q_lens, *heads), dtype, self.spread), None
        cu = np.concatenate([[0], np.cumsum(self.q_lens)]).astype(np.int32)
        return random(rng, (int(cu[-1]), *heads), dtype, self.spread), cu


class PagedArrays(NamedTuple):
    q: np.ndarray
    k_pool: np.ndarray
    v_pool: np.ndarray
    block_table: np.ndarray
    seq_lens: np.ndarray
    cu_seqlens_q: np.ndarray | None
    score: dict

    @property
    def args(self):
        return self[:5]

    def alone(self, b):
        """Ragged queries: sequence ``b`` without the others, and the slice of its rows."""
        rows = slice(*self.cu_seqlens_q[b : b + 2])
        one = self._replace(
            q=self.q[rows],
            block_table=self.block_table[[b]],
            seq_lens=self.seq_lens[[b]],
            cu_seqlens_q=np.array([0, rows.stop - rows.start], np.int32),
        )
        return one, rows

    @property
    def kwargs(self):
        return self.score if self.cu_seqlens_q is None else {**self.score, "cu_seqlens_q": self.cu_seqlens_q}


PAGED = [
    Paged("decode"),
    Paged("decode_block_1", seq_lens=(1, 5), block_size=1),
    Paged("decode_block_7", seq_lens=(7, 8, 20), block_size=7),
    Paged("decode_block_128", seq_lens=(1, 64, 127, 128, 129), block_size=128),
    Paged("empties", seq_lens=(0, 17, 0, 1)),
    Paged("all_empty", seq_lens=(0, 0)),
    Paged("long", seq_lens=(3000, 5), num_q_heads=2, num_kv_heads=1),
    Paged("q_len_4", seq_lens=(4, 40, 17), q_lens=4),
    Paged("q_longer_than_sequence", seq_lens=(2, 5, 0), q_lens=5),
    Paged("q_len_3_not_causal", seq_lens=(9, 40), q_lens=3, score=Score(causal=False)),
    Paged("q_longer_not_causal", seq_lens=(2, 5, 0), q_lens=5, score=Score(causal=False)),
    Paged(
        "q_longer_ragged_not_causal",
        seq_lens=(2, 5, 9),
        q_lens=(6, 3, 1),
        score=Score(False, (0, 3), sinks=True),
    ),
    Paged("ragged", seq_lens=(40, 33, 1, 17), q_lens=(7, 33, 1, 0)),
    Paged(
        "ragged_all",
        seq_lens=(50, 70),
        q_lens=(50, 3),
        score=Score(True, (11, None), 5.0, True, 0.2),
    ),
    Paged("window", seq_lens=(100, 3), score=Score(True, (15, 0))),
    Paged("window_reaches_one_key", seq_lens=(100, 3), score=Score(True, (0, 0))),
    Paged("softcap", score=Score(True, softcap=1.5), spread=4.0),
    Paged("sinks", seq_lens=(0, 40), score=Score(True, sinks=True)),
    Paged("scale", score=Score(True, softmax_scale=0.7)),
    Paged("gqa_7", num_q_heads=28, num_kv_heads=4),
    Paged("mqa_71", num_q_heads=71, num_kv_heads=1),
    Paged("mha", num_q_heads=3, num_kv_heads=3),
    Paged("d256", head_dim=256, seq_lens=(200,)),
    Paged("d_odd", head_dim=37, head_dim_v=20),
    Paged("dv_smaller", head_dim=128, head_dim_v=64),
]


class Tile(NamedTuple):
    blocks: np.ndarray
    counts: np.ndarray
    valid_slots: np.ndarray
    kv_positions: np.ndarray


@dataclass(frozen=True)
class Tiled:
    """A paged case in tiles of ``tile_blocks`` blocks. ``positions``: causal by position, else all slots."""

    name: str
    paged: Paged
    tile_blocks: tuple = (2, 1, 3)
    positions: bool = False

    def __str__(self):
        return self.name

    @property
    def max_q_len(self):
        return self.paged.q_lens or 1

    def make(self, dtype, seed=0, **kwargs):
        arrays = self.paged.make(dtype, seed, **kwargs)
        assert sum(self.tile_blocks) * self.paged.block_size >= max(self.paged.seq_lens, default=0), (
            "tiles too few"
        )
        q_positions = np.maximum(arrays.seq_lens - self.max_q_len, 0) if self.positions else None
        return TiledArrays(arrays, cut(arrays, self.tile_blocks, self.positions), q_positions)


def cut(arrays, tile_blocks, positions=False):
    """Tiles of a paged cache: tile i holds the next ``tile_blocks[i]`` blocks of each sequence."""
    block = arrays.k_pool.shape[1]
    tiles, start = [], 0
    for width in tile_blocks:
        left = np.clip(arrays.seq_lens.astype(np.int64) - start * block, 0, width * block)
        counts = -(-left // block)
        valid = np.where(counts > 0, left - (counts - 1) * block, 0)
        blocks = np.full((len(left), width), -7, np.int32)
        have = arrays.block_table[:, start : start + width]
        blocks[:, : have.shape[1]] = have
        at = np.full(len(left), start * block, np.int32) if positions else None
        tiles.append(Tile(blocks, counts.astype(np.int32), valid.astype(np.int32), at))
        start += width
    return tiles


class TiledArrays(NamedTuple):
    paged: PagedArrays
    tiles: list
    q_positions: np.ndarray | None

    def step_args(self, tile):
        """Positional arguments of step_tile."""
        return (*self.paged.args[:3], tile.blocks, tile.counts)

    def step_kwargs(self, tile):
        return {
            "last_block_valid_slots": tile.valid_slots,
            "kv_positions": tile.kv_positions,
            "q_positions": self.q_positions,
        }

    def dims(self, **changes):
        """Keyword arguments of TiledAttentionDims."""
        q, k_pool, v_pool = self.paged[:3]
        sizes = {
            "max_seqs": max(1, len(q)),
            "num_q_heads": q.shape[-2],
            "num_kv_heads": k_pool.shape[2],
            "head_dim": q.shape[-1],
            "head_dim_v": v_pool.shape[3],
            "block_size": k_pool.shape[1],
            "tile_capacity": max((tile.blocks.shape[1] for tile in self.tiles), default=1),
            "max_q_len": q.shape[1] if q.ndim == 4 else 1,
        }
        return {**sizes, **changes}

    @property
    def options(self):
        """Keyword arguments of TiledAttention (causality comes from positions)."""
        return {key: value for key, value in self.paged.score.items() if key != "causal"}


TILED = [
    Tiled("decode", Paged("", seq_lens=(1, 40, 96))),
    Tiled("one_tile", Paged("", seq_lens=(40, 9)), tile_blocks=(3,)),
    Tiled("many_small_tiles", Paged("", seq_lens=(40, 150)), tile_blocks=(1,) * 10),
    Tiled("empties", Paged("", seq_lens=(0, 17, 0, 1))),
    Tiled("all_empty", Paged("", seq_lens=(0, 0))),
    Tiled("block_1", Paged("", seq_lens=(1, 6), block_size=1)),
    Tiled("block_7", Paged("", seq_lens=(30, 8), block_size=7)),
    Tiled("block_128", Paged("", seq_lens=(129, 600), block_size=128)),
    Tiled("long", Paged("", seq_lens=(3000, 70), num_q_heads=2, num_kv_heads=1), tile_blocks=(188,)),
    Tiled("softcap", Paged("", score=Score(softcap=1.5), spread=4.0)),
    Tiled("sinks", Paged("", seq_lens=(0, 40), score=Score(sinks=True))),
    Tiled("scale", Paged("", score=Score(softmax_scale=0.7))),
    Tiled("gqa_7", Paged("", num_q_heads=28, num_kv_heads=4)),
    Tiled("mqa_71", Paged("", num_q_heads=71, num_kv_heads=1)),
    Tiled("d256", Paged("", head_dim=256)),
    Tiled("d_odd", Paged("", head_dim=37, head_dim_v=20)),
    Tiled("dv_larger", Paged("", head_dim=64, head_dim_v=128)),
    Tiled("q_len_3_sees_all", Paged("", seq_lens=(40, 9), q_lens=3)),
    Tiled("positions", Paged("", seq_lens=(1, 40, 96)), positions=True),
    Tiled("positions_q_len_5", Paged("", seq_lens=(5, 40, 96), q_lens=5), positions=True),
    Tiled("window", Paged("", seq_lens=(90, 40, 96), q_lens=4, score=Score(True, (21, 0))), positions=True),
    Tiled(
        "everything",
        Paged("", seq_lens=(90, 40, 0), q_lens=2, score=Score(True, (33, None), 3.0, True, 0.3)),
        positions=True,
    ),
]
