# SPDX-License-Identifier: Apache-2.0
"""Decode attention over KV that is fetched while it is attended to."""

from __future__ import annotations

import atexit
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import WeakSet

from . import _core
from ._arrays import host_array
from ._errors import TileError
from ._sources import KvPart, StreamSequence
from ._state import State, compiled_state
from ._stream_stats import StreamStats
from ._types import Array, DeviceLike, StreamLike, TiledAttentionDims, Window


@dataclass(frozen=True)
class StreamResult:
    """What `StreamingAttention.attend` gives with ``on_error="partial"`` or ``return_state=True``.

    Attributes
    ----------
    out, lse
        The result; None where tiles are missing (then ``out`` and ``lse`` of the call are not written), and
        ``lse`` also where none was asked for.
    state
        Running state of all tiles that are in.
    missing
        For each sequence the parts that are missing, to be attended to with ``state=``; empty when nothing
        is.
    errors
        The error of each missing tile, in the order of launches.

    Examples
    --------
    >>> import numpy as np, tiledattn as ta
    >>> class Broken:
    ...     def describe(self):
    ...         return ta.TileGeometry(
    ...             num_blocks=8, block_size=4, num_kv_heads=2, head_dim=8, dtype="float32")
    ...     def read(self, blocks, buffer):
    ...         buffer[:] = 0
    ...         return 0 if 5 in blocks else buffer.nbytes
    >>> dims = ta.TiledAttentionDims(
    ...     max_seqs=1, num_q_heads=4, num_kv_heads=2, head_dim=8, block_size=4, tile_capacity=2)
    >>> attn = ta.StreamingAttention(dims, device="cpu")
    >>> sequence = ta.StreamSequence(32, ta.KvPart(Broken(), range(8)))
    >>> result = attn.attend(np.ones((1, 4, 8), np.float32), [sequence], on_error="partial")
    >>> result.complete, len(result.errors), result.errors[0].position
    (False, 1, 16)
    """

    out: Array | None
    lse: Array | None
    state: State | None
    missing: tuple[StreamSequence, ...] = ()
    errors: tuple[TileError, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every tile is in."""
        return not self.errors


class StreamingAttention:
    """Exact attention over KV in host memory, on another device or in any source, larger than the memory here.

    Tiles of ``dims.tile_capacity`` blocks of each sequence are fetched into a ring of scratch memory and
    folded by a `TiledAttention`, in the order of keys, while the next ones are on their way. The bits are
    those of the same tiles folded by hand.

    Parameters
    ----------
    dims
        All sizes, as for `TiledAttention`.
    device
        ``"cpu"``, ``"cuda"``, ``"cuda:1"``; None means the best device present.
    scratch_bytes
        Memory on the device for fetched tiles. It must hold ``num_slots`` tiles of one sequence; what is more
        lets several sequences share a launch.
    num_slots
        Parts of the scratch: one is in use, the others are being fetched.
    num_readers
        Threads that call `TileSource.read`. Of one sequence at most ``num_slots`` reads are under way at once.
    softmax_scale, softcap, window, sinks
        As for `TiledAttention`.
    poison_scratch
        Fill each slot with NaN before it is used, so that a missing wait would show. For tests.

    Raises
    ------
    TypeError, ValueError
        For wrong arguments, by name.
    MemoryError
        When the buffers do not fit.

    Notes
    -----
    One object for each thread is safe; calls of one object from several threads run one after the other. It
    cannot be captured in a CUDA graph: it waits for its sources. A source or a signal handler that calls
    `attend`, `prefetch` or `discard` of the object whose call it is in the middle of gets a ValueError.

    After ``os.fork`` the child can use an object on the CPU, without what was prefetched. An object that
    another thread was using at the time raises a ValueError there.

    References
    ----------
    Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867; Dao et al.,
    "FlashAttention", arXiv:2205.14135.

    Examples
    --------
    >>> import numpy as np, tiledattn as ta
    >>> dims = ta.TiledAttentionDims(
    ...     max_seqs=1, num_q_heads=4, num_kv_heads=2, head_dim=8, block_size=4, tile_capacity=3)
    >>> cache = np.ones((10, 2, 2, 4, 8), np.float32)
    >>> source = ta.PoolSource(*ta.scratch_pool_views(cache))
    >>> attn = ta.StreamingAttention(dims, device="cpu", scratch_bytes=1 << 16)
    >>> q = np.ones((1, 4, 8), np.float32)
    >>> out = attn.attend(q, [ta.StreamSequence(37, ta.KvPart(source, range(10)))])
    >>> out.shape, attn.stats.launches
    ((1, 4, 8), 4)
    """

    __slots__ = ("__weakref__", "_core", "_dims", "_scratch_bytes")

    def __init__(
        self,
        dims: TiledAttentionDims,
        *,
        device: DeviceLike = None,
        scratch_bytes: int = 24 << 20,
        num_slots: int = 3,
        num_readers: int = 4,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        window: Window = (None, None),
        sinks: Array | None = None,
        poison_scratch: bool = False,
    ) -> None:
        if not isinstance(dims, TiledAttentionDims):
            raise TypeError(f"dims: expected TiledAttentionDims, got {type(dims).__name__}")
        self._dims = dims
        self._scratch_bytes = scratch_bytes
        self._core = _core.StreamingAttention(
            dims._compiled(),
            device,
            scratch_bytes,
            num_slots,
            num_readers,
            poison_scratch,
            softmax_scale,
            softcap,
            window,
            sinks,
        )
        _live.add(self)

    def attend(
        self,
        q: Array,
        sequences: Sequence[StreamSequence],
        *,
        state: State | None = None,
        q_positions: Sequence[int] | Array | None = None,
        out: Array | None = None,
        lse: Array | None = None,
        return_lse: bool = False,
        return_state: bool = False,
        on_error: str = "raise",
        stream: StreamLike = None,
    ) -> Any:
        """Attend to all keys of the sequences.

        Returns when the sources are no longer read, but for what is prefetched; on a GPU the result is ready
        in the order of the stream.

        Parameters
        ----------
        q
            ``[B, Hq, D]``, or ``[B, Sq, Hq, D]`` with ``Sq <= max_q_len``, of the type of the sources.
        sequences
            ``B`` sequences.
        state
            Go on from this state, which stays as it is; None means from the empty one.
        q_positions
            ``B`` integers on the host: position of the first query token. Query token ``i`` then sees keys at
            or before its position only. None means that the last token is at the last key.
        out
            ``q.shape[:-1] + (Dv,)`` of the type of q or float32; None makes one.
        lse
            ``out.shape[:-1]`` float32, natural logarithm.
        return_lse
            Make and return the log-sum-exp too.
        return_state
            Return a `StreamResult` with the running state.
        on_error
            ``"raise"``: the first tile that fails ends the call. ``"partial"``: fold all others and return a
            `StreamResult` that tells which are missing.
        stream
            Stream to launch on; None means the current stream of the framework of q.

        Returns
        -------
        out, (out, lse) or StreamResult
            The last one with ``return_state=True`` or ``on_error="partial"``.

        Raises
        ------
        TileError
            A tile could not be had: names source, tile, bytes wanted and got. An `OSError`.
        CancelledError
            After `cancel`.
        TypeError, ValueError, IndexError
            For wrong arguments, by name. After any error the object can be used, and `out`, `lse` and `state`
            hold what they held.
        """
        if on_error not in ("raise", "partial"):
            raise ValueError(f"on_error: got {on_error!r}; expected 'raise' or 'partial'")
        compiled, sequences = _compiled_sequences(sequences)
        value, after, errors = self._core.attend(
            q,
            compiled,
            None if state is None else compiled_state(state, "state"),
            _integers(q_positions, "q_positions"),
            out,
            lse,
            return_lse,
            return_state,
            on_error == "partial",
            stream,
        )
        if on_error == "raise" and not return_state:
            return value
        has_lse = isinstance(value, tuple)
        return StreamResult(
            out=value[0] if has_lse else value,
            lse=value[1] if has_lse else None,
            state=None if after is None else State._of(after),
            missing=_missing(sequences, errors, self._dims.block_size),
            errors=tuple(errors),
        )

    def prefetch(
        self,
        sequences: Sequence[StreamSequence],
        *,
        q_len: int = 1,
        q_positions: Sequence[int] | Array | None = None,
    ) -> bool:
        """Begin to fetch what a later `attend` needs, such as the next layer's KV; returns at once.

        The blocks must have their contents now, and keep them: work that a GPU stream has yet to do on them
        is not waited for. Only what the ring has free slots for is fetched ahead. Calls of `attend` come in the
        order of their `prefetch`; one to other sequences, or one that fails after it has begun (not one whose
        arguments are refused), drops what was prefetched.

        Parameters
        ----------
        sequences
            What `attend` will be given.
        q_len
            Query tokens of each sequence in that call.
        q_positions
            As there.

        Returns
        -------
        bool
            False when as many calls as there are slots wait already; nothing is begun then.
        """
        compiled, _ = _compiled_sequences(sequences)
        return bool(self._core.prefetch(compiled, q_len, _integers(q_positions, "q_positions")))

    def discard(self) -> None:
        """Drop what was prefetched; waits for reads and copies under way."""
        self._core.discard()

    def cancel(self) -> bool:
        """End the `attend` that another thread is in; it raises `CancelledError`.

        Returns
        -------
        bool
            False when there is none, or when its tiles are all in: then it ends as if nothing had been said.
        """
        return bool(self._core.cancel())

    @property
    def stats(self) -> StreamStats:
        """What was moved so far, by tier, and the time it took; ``print`` shows a table."""
        return StreamStats._of(self._core.stats())

    def reset_stats(self) -> None:
        """Count from zero again."""
        self._core.reset_stats()

    @property
    def dims(self) -> TiledAttentionDims:
        """The sizes that the object was made with."""
        return self._dims

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the scratch ring."""
        return self._scratch_bytes

    @property
    def device(self) -> str:
        """Name of the device: ``"cpu"`` or ``"cuda:0"``."""
        return str(self._core.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers on the device, the scratch included."""
        return int(self._core.nbytes)

    def __copy__(self) -> NoReturn:
        raise TypeError("StreamingAttention cannot be copied: make another one")

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__copy__()

    def __reduce__(self) -> NoReturn:
        raise TypeError("StreamingAttention cannot be pickled: make another one there")

    def __repr__(self) -> str:
        return (
            f"StreamingAttention({self._dims}, device={self.device!r}, scratch_bytes={self._scratch_bytes})"
        )


def _compiled_sequences(
    sequences: Iterable[StreamSequence],
) -> tuple[list[_core.StreamSequence], tuple[StreamSequence, ...]]:
    """Give the compiled sequences, and the sequences themselves: a generator has them only once."""
    if not isinstance(sequences, Iterable):
        raise TypeError(f"sequences: expected a list of StreamSequence, got {type(sequences).__name__}")
    compiled, given = [], tuple(sequences)
    for i, sequence in enumerate(given):
        if not isinstance(sequence, StreamSequence):
            raise TypeError(f"sequences[{i}]: expected a StreamSequence, got {type(sequence).__name__}")
        compiled.append(sequence._compiled)
    return compiled, given


def _integers(values: Any, name: str) -> list[int] | None:
    if values is None:
        return None
    numbers = host_array(values, name)
    if numbers.size and numbers.dtype.kind not in "iuO":  # O: what is beyond 64 bits
        raise TypeError(f"{name}: expected integers, got {numbers.dtype}")
    listed: list[int] = numbers.reshape(-1).tolist()
    return listed


def _missing(
    sequences: Sequence[StreamSequence], errors: Sequence[TileError], block_size: int
) -> tuple[StreamSequence, ...]:
    if not errors:
        return ()
    parts: list[list[KvPart]] = [[] for _ in sequences]
    for error in sorted(errors, key=lambda error: error.position):
        for part in sequences[error.sequence].parts:
            first, rest = divmod(error.position - (part.position or 0), block_size)
            if rest == 0 and 0 <= first < len(part.blocks):
                blocks = part.blocks[first : first + error.num_blocks]
                parts[error.sequence].append(KvPart(part.source, blocks, error.position))
    return tuple(
        StreamSequence(sequence.length, left) for sequence, left in zip(sequences, parts, strict=True)
    )


# At exit no thread may be left that would call into a Python that is no more.
_live: WeakSet[StreamingAttention] = WeakSet()


@atexit.register
def _end_reads() -> None:
    for streaming in list(_live):
        streaming.cancel()
        streaming.discard()
