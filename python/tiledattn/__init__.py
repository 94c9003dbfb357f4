# SPDX-License-Identifier: Apache-2.0
"""Exact attention in tiles, for CPUs and GPUs.

`TiledAttention` attends to a KV cache that never has to be in memory as a whole, and `StreamingAttention`
fetches it too; `flash_attention` and `paged_attention` do it in one call. Arrays come from NumPy, torch,
CuPy, JAX or anything with ``__dlpack__``.
"""

from __future__ import annotations

from ._api import (
    check,
    flash_attention,
    get_num_threads,
    info,
    merge_attention,
    paged_attention,
    set_num_threads,
    supports,
    write_kv,
)
from ._arrays import scratch_pool_views
from ._attention import TiledAttention
from ._core import CancelledError, CudaError
from ._core import version as __version__
from ._errors import TileError
from ._sources import KvPart, PoolSource, StreamSequence, TileGeometry, TileSource
from ._state import State, merge_states
from ._stream_stats import StreamStats, TierStats
from ._streaming import StreamingAttention, StreamResult
from ._types import Support, TiledAttentionDims, Workspace

CudaError.__module__ = CancelledError.__module__ = TileError.__module__ = "tiledattn"

__all__ = [
    "CancelledError",
    "CudaError",
    "KvPart",
    "PoolSource",
    "State",
    "StreamResult",
    "StreamSequence",
    "StreamStats",
    "StreamingAttention",
    "Support",
    "TierStats",
    "TileError",
    "TileGeometry",
    "TileSource",
    "TiledAttention",
    "TiledAttentionDims",
    "Workspace",
    "__version__",
    "check",
    "flash_attention",
    "get_num_threads",
    "info",
    "merge_attention",
    "merge_states",
    "paged_attention",
    "scratch_pool_views",
    "set_num_threads",
    "supports",
    "write_kv",
]
