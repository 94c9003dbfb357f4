# SPDX-License-Identifier: Apache-2.0
"""What a `StreamingAttention` has moved, and how long it took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MIB = 2**20


@dataclass(frozen=True)
class TierStats:
    """What came from one tier.

    Attributes
    ----------
    tiles, bytes
        What was moved or, on the device of attention, read in place.
    seconds
        Time of reads or copies, added up over the threads; 0 where none are made.
    """

    tiles: int
    bytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes for each second; 0 where no time was taken."""
        return self.bytes / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class StreamStats:
    """Statistics of a `StreamingAttention`; ``str`` of it is a table.

    Attributes
    ----------
    calls, launches
        Calls of `attend` that ended well, and kernels launched for them.
    failed_tiles
        Tiles that a source did not deliver.
    prefetched_launches, dropped_launches
        Launches that were begun before their call; and those that were fetched in vain.
    seconds, stall_seconds
        Time inside `attend`, and the part of it spent waiting for a source or a copy.
    tiers
        By residency: ``"device"``, ``"pinned"``, ``"host"`` and ``"remote"``, which are sources written in
        Python.
    link
        Copies into GPU memory, whatever tier they came from. Of their launches one in fifteen is timed, and the
        others count as equally fast.

    Examples
    --------
    >>> import numpy as np, tiledattn as ta
    >>> dims = ta.TiledAttentionDims(
    ...     max_seqs=1, num_q_heads=4, num_kv_heads=2, head_dim=8, block_size=4, tile_capacity=2)
    >>> attn = ta.StreamingAttention(dims, device="cpu")
    >>> source = ta.PoolSource(*ta.scratch_pool_views(np.ones((4, 2, 2, 4, 8), np.float32)))
    >>> _ = attn.attend(np.ones((1, 4, 8), np.float32), [ta.StreamSequence(16, ta.KvPart(source, range(4)))])
    >>> attn.stats.tiers["host"].tiles, attn.stats.tiers["host"].bytes
    (2, 2048)
    """

    calls: int
    launches: int
    failed_tiles: int
    prefetched_launches: int
    dropped_launches: int
    seconds: float
    stall_seconds: float
    tiers: Mapping[str, TierStats]
    link: TierStats

    @classmethod
    def _of(cls, raw: dict[str, Any]) -> StreamStats:
        tiers = {name: TierStats(*tier) for name, tier in raw["tiers"].items()}
        return cls(**{**raw, "tiers": tiers, "link": TierStats(*raw["link"])})

    @property
    def link_use(self) -> float:
        """Share of the time inside `attend` in which a copy into GPU memory was under way."""
        return self.link.seconds / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        lines = [f"{'tier':8} {'tiles':>8} {'MiB':>10} {'seconds':>9} {'GB/s':>7}"]
        for name, tier in (*self.tiers.items(), ("link", self.link)):
            if tier.tiles:
                rate = f"{tier.rate / 1e9:7.1f}" if tier.seconds else f"{'-':>7}"
                lines.append(f"{name:8} {tier.tiles:8} {tier.bytes / MIB:10.1f} {tier.seconds:9.4f} {rate}")
        lines.append(
            f"{self.calls} calls, {self.launches} launches ({self.prefetched_launches} prefetched, "
            f"{self.dropped_launches} dropped), {self.failed_tiles} tiles failed"
        )
        time = f"{self.seconds:.4f} s in attend, {self.stall_seconds:.4f} s of them waiting"
        if self.link.tiles:  # copies into GPU memory; the CPU has none
            time += f"; the link was in use for {self.link_use:.0%} of the time"
        lines.append(time)
        return "\n".join(lines)
