# SPDX-License-Identifier: Apache-2.0
"""Types that appear in signatures, and small value classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from . import _core

#: An array of NumPy (also with ``ml_dtypes`` types), torch, CuPy, JAX, or anything with ``__dlpack__``.
Array: TypeAlias = Any

#: ``None``, a stream handle, or an object with ``cuda_stream``, ``ptr`` or ``__cuda_stream__``.
StreamLike: TypeAlias = Any

#: ``None``, ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or an object whose ``str`` is one of these (``torch.device``).
DeviceLike: TypeAlias = Any

#: ``(left, right)``; ``None`` is a side without a bound.
Window: TypeAlias = tuple[int | None, int | None]


@dataclass(frozen=True, kw_only=True)
class TiledAttentionDims:
    """Sizes of a `TiledAttention`; all its buffers follow from them.

    Parameters
    ----------
    max_seqs
        Sequences that a step can hold.
    num_q_heads, num_kv_heads
        Query heads, and KV heads that divide them.
    head_dim
        Size of a head in q and K, 1 to 256.
    block_size
        Tokens in a KV block.
    tile_capacity
        Blocks in a tile.
    max_q_len
        Query tokens of each sequence in a step.
    head_dim_v
        Size of a head in V and in the result, 1 to 256; None means ``head_dim``.

    Raises
    ------
    ValueError
        For a size out of range; the message names the field, its value and what is allowed.

    Examples
    --------
    >>> import tiledattn as ta
    >>> dims = ta.TiledAttentionDims(
    ...     max_seqs=4, num_q_heads=32, num_kv_heads=8, head_dim=128, block_size=16, tile_capacity=64)
    >>> dims.gqa_ratio, dims.o_bytes
    (4, 65536)
    """

    max_seqs: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    tile_capacity: int
    max_q_len: int = 1
    head_dim_v: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_dim_v", self._compiled().head_dim_v)

    def _compiled(self) -> _core.Dims:
        return _core.Dims(
            self.max_seqs,
            self.num_q_heads,
            self.num_kv_heads,
            self.head_dim,
            self.block_size,
            self.tile_capacity,
            self.max_q_len,
            self.head_dim_v,
        )

    @property
    def gqa_ratio(self) -> int:
        """Query heads that share one KV head."""
        return int(self._compiled().gqa_ratio)

    @property
    def m_bytes(self) -> int:
        """Bytes of the state's running maxima."""
        return int(self._compiled().m_bytes)

    @property
    def l_bytes(self) -> int:
        """Bytes of the state's sums of weights."""
        return int(self._compiled().l_bytes)

    @property
    def o_bytes(self) -> int:
        """Bytes of the state's weighted sums of values."""
        return int(self._compiled().o_bytes)

    @property
    def output_bytes(self) -> int:
        """Bytes of a 16-bit result."""
        return int(self._compiled().output_bytes)

    @property
    def state_bytes(self) -> int:
        """Bytes of m, l and o together."""
        return int(self._compiled().state_bytes)

    def paged_strides(self) -> tuple[int, int, int]:
        """``(block, token, kv_head)`` strides, in elements, of a pool ``[num_blocks, P, Hk, D]``."""
        block, token, kv_head = self._compiled().paged_strides()
        return block, token, kv_head

    def scratch_pool_strides(self) -> tuple[int, int, int]:
        """``(block, token, kv_head)`` strides, in elements, of K or V in a pool ``[slot, K|V, Hk, P, D]``."""
        block, token, kv_head = self._compiled().scratch_pool_strides()
        return block, token, kv_head


@dataclass(frozen=True)
class Support:
    """Answer of `supports`; true where the call can run.

    Attributes
    ----------
    supported
        Whether the call can run.
    kernel
        Name of the kernel that would run; empty where none can.
    reason
        Why the call cannot run; empty where it can.

    Examples
    --------
    >>> import tiledattn as ta
    >>> answer = ta.supports("flash_attention", device="cpu", head_dim=300)
    >>> bool(answer), answer.reason
    (False, 'head_dim: got head dimension 300; expected 1 to 256')
    """

    supported: bool
    kernel: str
    reason: str

    def __bool__(self) -> bool:
        return self.supported


class Workspace:
    """Scratch memory for one-shot calls on one device.

    A call without a workspace uses the library's own for its device and stream. Calls that share a workspace
    run one after the other.

    Parameters
    ----------
    device
        ``"cpu"``, ``"cuda"``, ``"cuda:1"``; None means the best device present.
    nbytes
        Bytes to reserve; None means the library's default.

    Raises
    ------
    ValueError
        For an unknown device or fewer bytes than 1.
    MemoryError
        When the device has not that much memory.

    Examples
    --------
    >>> import tiledattn as ta
    >>> ta.Workspace("cpu", 1 << 20).nbytes
    1048576
    """

    __slots__ = ("_core",)

    def __init__(self, device: DeviceLike = None, nbytes: int | None = None) -> None:
        self._core = _core.Workspace(device, nbytes)

    @property
    def device(self) -> str:
        """Name of the device: ``"cpu"`` or ``"cuda:0"``."""
        return str(self._core.device)

    @property
    def nbytes(self) -> int:
        """Bytes that the workspace holds."""
        return int(self._core.nbytes)

    def __repr__(self) -> str:
        return f"Workspace(device={self.device!r}, nbytes={self.nbytes})"
