# SPDX-License-Identifier: Apache-2.0
"""Where the KV blocks of a `StreamingAttention` come from, and which of them make a sequence."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from . import _core
from ._arrays import host_array, numpy_dtype
from ._types import Array

Bytes: TypeAlias = NDArray[np.uint8]
BlockIds: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class TileGeometry:
    """How a source keeps its KV blocks: K, then V, without gaps.

    Parameters
    ----------
    num_blocks
        Blocks of the source; their ids are 0 to ``num_blocks - 1``.
    block_size
        Tokens in a block.
    num_kv_heads, head_dim
        Sizes of K.
    dtype
        ``"bfloat16"``, ``"float16"`` or ``"float32"``, the type of q; or ``"float8_e4m3fn"`` or ``"int8"``.
    head_dim_v
        Size of a head in V; None means ``head_dim``.
    layout
        ``"hnd"``: K and V of a block are ``[num_kv_heads, block_size, head_dim]``; ``"nhd"``: tokens come
        before heads.
    k_scale, v_scale
        Numbers > 0 that elements of the last two types are multiplied with. None means 1 for float8_e4m3fn;
        int8 needs both.

    Raises
    ------
    TypeError, ValueError
        For a wrong size, type or layout, by name.

    Examples
    --------
    >>> import tiledattn as ta
    >>> geometry = ta.TileGeometry(
    ...     num_blocks=100, block_size=16, num_kv_heads=8, head_dim=128, dtype="float16")
    >>> geometry.block_bytes
    65536
    """

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    head_dim_v: int | None = None
    layout: str = "hnd"
    k_scale: float | None = None
    v_scale: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_dim_v", int(self._compiled().head_dim_v))

    def _compiled(self) -> _core.TileGeometry:
        return _core.TileGeometry(
            self.num_blocks,
            self.block_size,
            self.num_kv_heads,
            self.head_dim,
            self.head_dim_v,
            self.dtype,
            self.layout,
            self.k_scale,
            self.v_scale,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of K and V of one block."""
        return int(self._compiled().block_bytes)

    def views(self, blocks: Bytes) -> tuple[NDArray[Any], NDArray[Any]]:
        """Give the K and V in the bytes of some blocks, as views.

        Parameters
        ----------
        blocks
            ``[n, block_bytes]`` uint8, such as the buffer of `TileSource.read`.

        Returns
        -------
        k, v
            ``[n, block_size, num_kv_heads, head_dim]`` and ``[..., head_dim_v]``, whatever the layout.
        """
        values = blocks.view(numpy_dtype(self.dtype))
        k_size = self.block_size * self.num_kv_heads * self.head_dim
        tokens_first = (len(blocks), self.block_size, self.num_kv_heads)
        heads_first = (len(blocks), self.num_kv_heads, self.block_size)
        v_dim = self.head_dim if self.head_dim_v is None else self.head_dim_v
        parts = []
        for part, dim in ((values[:, :k_size], self.head_dim), (values[:, k_size:], v_dim)):
            if self.layout == "nhd":
                parts.append(part.reshape(*tokens_first, dim))
            else:
                parts.append(part.reshape(*heads_first, dim).swapaxes(1, 2))
        return parts[0], parts[1]


class TileSource(Protocol):
    """What a user writes to fetch KV blocks from anywhere: a file, a network, a compressed store.

    A class with these two methods is a source; it need not inherit from this one. Its functions are called
    from the `StreamingAttention`'s own threads, several at a time; they can call anything but its `attend`,
    `prefetch` and `discard`. An attribute ``name`` is what errors call
    it (by default the name of its class). A method ``pin(blocks)``, where there is one, is called before the
    blocks are read, and what it returns is kept until they are no longer needed: free or overwrite no block
    while that object lives.

    Examples
    --------
    >>> import numpy as np, tiledattn as ta
    >>> class Zeros:
    ...     def describe(self):
    ...         return ta.TileGeometry(
    ...             num_blocks=8, block_size=4, num_kv_heads=2, head_dim=8, dtype="float32")
    ...     def read(self, blocks, buffer):
    ...         buffer[:] = 0
    ...         return buffer.nbytes
    >>> sequence = ta.StreamSequence(30, ta.KvPart(Zeros(), np.arange(8)))
    """

    def describe(self) -> TileGeometry:
        """Say how blocks are kept; the same answer each time."""

    def read(self, blocks: BlockIds, buffer: Bytes) -> int:
        """Fill `buffer` with these blocks, in this order.

        Parameters
        ----------
        blocks
            ``[n]`` int64: block ids; not writable.
        buffer
            ``[n, block_bytes]`` uint8, to be written: row ``i`` is of ``blocks[i]``.

        Returns
        -------
        int
            Bytes that were filled. Fewer than the buffer has are an error of the call that needs them, as is
            an exception.
        """


class PoolSource:
    """KV blocks in arrays, in host memory or on a GPU.

    Where attention runs on the device of the arrays it reads them in place. On a GPU blocks in host memory
    are copied from there, in one copy for each run of neighbouring blocks.

    Parameters
    ----------
    k_pool, v_pool
        ``[num_blocks, P, Hk, D]`` and ``[num_blocks, P, Hk, Dv]``, bfloat16, float16, float32, float8_e4m3fn
        or int8, with strides such that K of a block (or K and V together) is one run of memory. The object
        keeps them alive.
    k_scale, v_scale
        As in `TileGeometry`.
    name
        What errors call it.
    pin
        Pin host memory for fast copies, when a GPU first uses it.

    Raises
    ------
    TypeError, ValueError
        For wrong arrays, by name.

    Examples
    --------
    >>> import numpy as np, tiledattn as ta
    >>> cache = np.zeros((100, 2, 8, 16, 128), np.float16)
    >>> source = ta.PoolSource(*ta.scratch_pool_views(cache))
    >>> source.num_blocks, source.residency
    (100, 'host')
    """

    __slots__ = ("__weakref__", "_compiled", "_pools")

    def __init__(
        self,
        k_pool: Array,
        v_pool: Array,
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        name: str = "pool",
        pin: bool = True,
    ) -> None:
        self._compiled = _core.PoolSource.of(k_pool, v_pool, name, pin, k_scale, v_scale)
        self._pools: tuple[Array, Array] = (k_pool, v_pool)

    @classmethod
    def allocate(cls, geometry: TileGeometry, *, name: str = "pool", pin: bool = True) -> PoolSource:
        """Make a pool in new host memory, on huge pages where the system has them.

        Parameters
        ----------
        geometry
            Sizes. The contents are undefined: fill `k_pool` and `v_pool`.
        name, pin
            As above.

        Raises
        ------
        MemoryError
            When there is not that much memory.
        """
        self = object.__new__(cls)
        self._compiled = _core.PoolSource.allocate(geometry._compiled(), name, pin)
        memory: Any = self._compiled.bytes()
        self._pools = geometry.views(memory)
        return self

    @property
    def k_pool(self) -> Array:
        """K of all blocks: ``[num_blocks, P, Hk, D]``."""
        return self._pools[0]

    @property
    def v_pool(self) -> Array:
        """V of all blocks: ``[num_blocks, P, Hk, Dv]``."""
        return self._pools[1]

    @property
    def name(self) -> str:
        """What errors call it."""
        return str(self._compiled.name)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return int(self._compiled.num_blocks)

    @property
    def block_bytes(self) -> int:
        """Bytes of K and V of one block."""
        return int(self._compiled.block_bytes)

    @property
    def residency(self) -> str:
        """Where the blocks are: ``"device"``, ``"pinned"`` or ``"host"``."""
        return str(self._compiled.residency)

    def evict(self, blocks: Iterable[int]) -> list[int]:
        """Take blocks out of use, but for those that a call is reading.

        Parameters
        ----------
        blocks
            Block ids.

        Returns
        -------
        list of int
            The blocks that were taken. Their memory is yours to overwrite; attention to them raises a
            `TileError` until `restore`. The others are in use, or were evicted before.

        Raises
        ------
        IndexError
            For an id that the pool does not have.
        """
        return [int(block) for block in self._compiled.evict(_block_ids(blocks, "blocks").tolist())]

    def restore(self, blocks: Iterable[int]) -> None:
        """Put evicted blocks back into use, with what their memory holds now.

        Parameters
        ----------
        blocks
            Block ids.
        """
        self._compiled.restore(_block_ids(blocks, "blocks").tolist())

    def __repr__(self) -> str:
        return f"PoolSource(name={self.name!r}, num_blocks={self.num_blocks}, residency={self.residency!r})"


@dataclass(frozen=True, eq=False)
class KvPart:
    """Blocks of one source that hold keys of one sequence, in the order of the sequence.

    Parameters
    ----------
    source
        A `PoolSource`, or a `TileSource` of your own.
    blocks
        Block ids: a list, or an array of integers.
    position
        Position in the sequence of the first slot of the first block; None means right after the part before.
    """

    source: PoolSource | TileSource
    blocks: Array
    position: int | None = None


class StreamSequence:
    """The keys of one sequence, in one part or more.

    Parameters
    ----------
    length
        Keys of the sequence; slots from there on do not count.
    parts
        A `KvPart`, or several in the order of keys. They hold all keys, unless a part is given its position: keys that
        no part holds are then left out. No part at all: no keys.

    Raises
    ------
    TypeError
        For a source without `describe` and `read`, or ids that are no integers.
    ValueError
        For fewer blocks than the length needs, where no part has a position.

    Examples
    --------
    >>> import numpy as np, tiledattn as ta
    >>> cache = np.zeros((100, 2, 8, 16, 128), np.float16)
    >>> source = ta.PoolSource(*ta.scratch_pool_views(cache))
    >>> ta.StreamSequence(1000, ta.KvPart(source, range(63)))
    StreamSequence(length=1000, 63 blocks in 1 part)
    """

    __slots__ = ("_compiled", "length", "parts")

    def __init__(self, length: int, parts: KvPart | Sequence[KvPart] = ()) -> None:
        if not isinstance(parts, (KvPart, Iterable)):
            raise TypeError(f"parts: expected a KvPart or several, got {type(parts).__name__}")
        given = (parts,) if isinstance(parts, KvPart) else tuple(parts)
        self.length = length
        self._compiled = _core.StreamSequence(length)
        placed = []
        position = 0
        for i, part in enumerate(given):
            if not isinstance(part, KvPart):
                raise TypeError(f"parts[{i}]: expected a KvPart, got {type(part).__name__}")
            if part.position is not None:
                position = _position(part.position, f"parts[{i}].position")
            blocks = _block_ids(part.blocks, f"parts[{i}].blocks")
            source = _compiled_source(part.source)
            self._compiled.add(source, blocks.tolist(), position)
            placed.append(KvPart(part.source, blocks, position))
            position += len(blocks) * source.block_size
        # Who gives positions may leave keys out, and a sequence without parts has none.
        if placed and position < length and all(part.position is None for part in given):
            raise ValueError(
                f"parts: got blocks for {position} keys; expected at least length = {length} "
                "(to leave keys out give each KvPart its position)"
            )
        self.parts = tuple(placed)

    def __repr__(self) -> str:
        blocks = sum(len(part.blocks) for part in self.parts)
        parts = f"{len(self.parts)} part" + ("" if len(self.parts) == 1 else "s")
        return f"StreamSequence(length={self.length}, {blocks} blocks in {parts})"


def _position(position: Any, name: str) -> int:
    """Give a plain int: a NumPy one could wrap where the length of the part is added."""
    if isinstance(position, (bool, np.bool_)) or not hasattr(position, "__index__"):
        raise TypeError(f"{name}: expected an int, got {type(position).__name__}")
    try:
        return operator.index(position)
    except TypeError:  # an array of several elements has __index__ too
        raise TypeError(f"{name}: expected an int, got {type(position).__name__}") from None


def _block_ids(blocks: Any, name: str) -> BlockIds:
    if not hasattr(blocks, "__array__") and not isinstance(blocks, Iterable):
        raise TypeError(f"{name}: expected a list of block ids, got {type(blocks).__name__}")
    ids = host_array(blocks, name)
    if ids.size and ids.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got {ids.dtype}")
    if ids.ndim != 1:
        raise ValueError(f"{name}: got {ids.ndim} dimensions; expected a list of block ids")
    if ids.dtype == np.uint64 and ids.size and ids.max() > np.iinfo(np.int64).max:
        raise IndexError(f"{name}: got block {ids.max()}; expected a block of the source")
    return ids.astype(np.int64)


# The compiled side of each source written in Python by the source's id, while somebody uses it: it keeps the source
# alive, so no other object has that id.
_adapters: WeakValueDictionary[int, _core.PythonSource] = WeakValueDictionary()


def _compiled_source(source: PoolSource | TileSource) -> _core.TileSource:
    if isinstance(source, PoolSource):
        return source._compiled
    adapter = _adapters.get(id(source))
    if adapter is None:
        if not callable(getattr(source, "describe", None)) or not callable(getattr(source, "read", None)):
            raise TypeError(
                f"source: expected a PoolSource or an object with describe() and read(), "
                f"got {type(source).__name__}"
            )
        name = str(getattr(source, "name", type(source).__name__))
        adapter = _core.PythonSource(source, _geometry(source)._compiled(), name)
        _adapters[id(source)] = adapter
    return adapter


def _geometry(source: TileSource) -> TileGeometry:
    geometry = source.describe()
    if not isinstance(geometry, TileGeometry):
        raise TypeError(f"source: describe() returned {type(geometry).__name__}, not a TileGeometry")
    return geometry
