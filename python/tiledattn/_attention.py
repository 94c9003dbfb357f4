# SPDX-License-Identifier: Apache-2.0
"""Decode attention over a KV cache that is visited tile by tile."""

from __future__ import annotations

from typing import NoReturn

from . import _core
from ._state import State, compiled_state
from ._types import Array, DeviceLike, StreamLike, TiledAttentionDims, Window


class TiledAttention:
    """Exact attention over a KV cache of which only a tile of blocks is at hand at a time.

    One decoding step is `begin_step`, then `step_tile` for each tile, then `finalize`. Between the calls the
    object holds the running state ``(m, l, o)`` of each sequence and query head; its buffers are made here,
    once.

    Parameters
    ----------
    dims
        All sizes.
    device
        ``"cpu"``, ``"cuda"``, ``"cuda:1"``; None means the best device present.
    softmax_scale
        Factor of the scores; None means ``1 / sqrt(head_dim)``.
    softcap
        Scores become ``softcap * tanh(score / softcap)``; 0 switches it off.
    window
        ``(left, right)``: a query at position ``p`` sees keys ``p - left .. p + right``; None is no bound.
        Needs positions in `step_tile`.
    sinks
        ``[Hq]`` float32 on the device: one extra logit for each query head, without a value. Copied here.

    Raises
    ------
    TypeError
        For arguments of a wrong type.
    ValueError
        For values out of range or a device that is not there.
    MemoryError
        When the buffers do not fit.

    Notes
    -----
    One object for each thread is safe; calls of one object from two threads run one after the other. On a GPU
    no call waits and none allocates device memory; all can be captured in a CUDA graph.

    References
    ----------
    Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867; Dao et al.,
    "FlashAttention", arXiv:2205.14135; Kwon et al., "PagedAttention", arXiv:2309.06180.

    Examples
    --------
    >>> import numpy as np, tiledattn as ta
    >>> dims = ta.TiledAttentionDims(
    ...     max_seqs=1, num_q_heads=4, num_kv_heads=2, head_dim=8, block_size=4, tile_capacity=3)
    >>> attn = ta.TiledAttention(dims, device="cpu")
    >>> q = np.ones((1, 4, 8), np.float32)
    >>> pool = np.ones((3, 4, 2, 8), np.float32)
    >>> blocks, counts = np.array([[2, 0, 1]]), np.array([3])
    >>> attn.begin_step(1)
    >>> for _ in range(2):
    ...     attn.step_tile(q, pool, pool, blocks, counts)
    >>> out, lse = attn.finalize(return_lse=True)
    >>> out.shape, float(out[0, 0, 0])
    ((1, 4, 8), 1.0)
    """

    __slots__ = ("__weakref__", "_core", "_dims")

    def __init__(
        self,
        dims: TiledAttentionDims,
        *,
        device: DeviceLike = None,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        window: Window = (None, None),
        sinks: Array | None = None,
    ) -> None:
        if not isinstance(dims, TiledAttentionDims):
            raise TypeError(f"dims: expected TiledAttentionDims, got {type(dims).__name__}")
        self._dims = dims
        self._core = _core.TiledAttention(dims._compiled(), device, softmax_scale, softcap, window, sinks)

    def begin_step(self, num_seqs: int, *, stream: StreamLike = None) -> None:
        """Start a step with an empty state.

        Parameters
        ----------
        num_seqs
            Sequences of this step, 0 to ``dims.max_seqs``.
        stream
            Where a graph is captured: its stream, so that the step counts as inside the capture. The work
            itself goes to the stream of the next call that has arrays.

        Raises
        ------
        ValueError
            For a number out of range, or a stream on the CPU.
        """
        self._core.begin_step(num_seqs, stream)

    def step_tile(
        self,
        q: Array,
        k_pool: Array,
        v_pool: Array,
        tile_blocks: Array,
        tile_block_counts: Array,
        *,
        last_block_valid_slots: Array | int | None = None,
        kv_positions: Array | None = None,
        q_positions: Array | None = None,
        k_scale: Array | float | None = None,
        v_scale: Array | float | None = None,
        out: Array | None = None,
        lse: Array | None = None,
        early_start: bool = False,
        check: bool = False,
        stream: StreamLike = None,
    ) -> Array | tuple[Array, Array] | None:
        """Fold one tile of KV blocks into the state.

        Parameters
        ----------
        q
            ``[B, Hq, D]``, or ``[B, Sq, Hq, D]`` with ``Sq <= max_q_len``; bfloat16, float16 or float32. The
            first tile of a step fixes ``Sq``, the type and the framework.
        k_pool, v_pool
            ``[num_blocks, P, Hk, D]`` and ``[num_blocks, P, Hk, Dv]`` of the type of q, or both
            float8_e4m3fn or int8; any outer strides.
        tile_blocks
            ``[B, T']`` int32 or int64 with ``T' <= tile_capacity``: block ids, in the order of the sequence.
        tile_block_counts
            ``[B]`` int32 or int64: how many entries of the row are used; 0 where a sequence has nothing in
            this tile.
        last_block_valid_slots
            Slots of the last used block that count, 0 to P: None for all, one number, or ``[B]`` int32 or
            int64.
        kv_positions, q_positions
            None, or both ``[B]`` int32 or int64: position of the tile's first slot, and of the first query
            token. Query token ``i`` then sees keys at or before ``q_positions + i`` and inside the window
            only.
        k_scale, v_scale
            Scales of quantised pools: a float, or float32 ``[Hk]``, ``[num_blocks, Hk]`` or
            ``[num_blocks, P, Hk]`` on the device of q. A stored element counts as itself times its scale. None
            means 1 for float8_e4m3fn; int8 needs a scale. Other pools take none.
        out
            ``q.shape[:-1] + (Dv,)`` of the type of q, or float32. Given: this is the last tile, and the
            result is written in the same launch.
        lse
            ``out.shape[:-1]`` float32, with ``out``.
        early_start
            Your word that everything but q and the last ``Sq`` keys that each sequence sees of its tile was
            written before the kernel that runs before this call in its stream began; see `paged_attention`.
        check
            Wait, and raise what the device found in ids, counts, slots and positions.
        stream
            Stream to launch on; None means the current stream of the framework of q.

        Returns
        -------
        None, out or (out, lse)
            Whatever was given.

        Raises
        ------
        TypeError
            For a wrong type of argument or element.
        ValueError
            For wrong shapes and values, arrays on two devices, or a stream on the CPU.
        IndexError
            For a block id outside the pool. On a GPU the next call raises it, `check` or ``check=True`` at
            once; until the next step that sequence's results are NaN.
        """
        return self._core.step_tile(
            q,
            k_pool,
            v_pool,
            tile_blocks,
            tile_block_counts,
            last_block_valid_slots,
            kv_positions,
            q_positions,
            k_scale,
            v_scale,
            out,
            lse,
            early_start,
            check,
            stream,
        )

    def finalize(
        self,
        *,
        out: Array | None = None,
        lse: Array | None = None,
        return_lse: bool = False,
        stream: StreamLike = None,
    ) -> Array | tuple[Array, Array]:
        """Make the result of the tiles so far; the state stays, and more tiles may follow.

        Parameters
        ----------
        out
            ``q.shape[:-1] + (Dv,)`` of the type of q or float32. None makes one in the framework of q; before
            the first tile that is a float32 NumPy array, and on a GPU an error.
        lse
            ``out.shape[:-1]`` float32.
        return_lse
            Make and return the log-sum-exp, natural logarithm, too.
        stream
            Stream to launch on; None means that of the last `step_tile`.

        Returns
        -------
        out or (out, lse)
            ``o / l``, 0 for a row without keys; and ``m + ln l``, which is -inf there. Sinks are counted in
            both.
        """
        return self._core.finalize(out, lse, return_lse, stream)

    def check(self) -> None:
        """Wait for the last call, and raise what the device found in its arguments.

        Raises
        ------
        IndexError, ValueError
            What was found; also a ValueError in a graph capture, which cannot wait.
        """
        self._core.check()

    def state(self, *, stream: StreamLike = None) -> State:
        """Copy the state of this step's sequences.

        Parameters
        ----------
        stream
            Stream to copy on; None means that of the last call.
        """
        return State._of(self._core.state(stream))

    def load_state(self, state: State, *, stream: StreamLike = None) -> None:
        """Start a step over ``state.num_seqs`` sequences from a state on this device.

        Parameters
        ----------
        state
            From an object with the same ``num_q_heads``, ``head_dim_v`` and ``max_q_len``.
        stream
            Stream to copy on; None means that of the last call. The step's calls on other streams are ordered
            after it.

        Raises
        ------
        ValueError
            When sizes or devices differ, or it holds more than ``max_seqs`` sequences.
        """
        self._core.load_state(compiled_state(state, "state"), stream)

    @property
    def m(self) -> Array:
        """Live view of the running maxima ``[max_seqs, Hq]`` (``max_q_len > 1``: ``[max_seqs, max_q_len, Hq]``).

        It belongs to no library: ``np.asarray(attn.m)``, ``torch.from_dlpack(attn.m)`` or ``cupy.from_dlpack(attn.m)``
        make an array of it without a copy.
        """
        return self._core.m

    @property
    def l(self) -> Array:
        """Live view of the sums of weights, shaped like ``m``."""
        return self._core.l

    @property
    def o(self) -> Array:
        """Live view of the weighted sums of values, not normalised: the shape of ``m`` and ``Dv``."""
        return self._core.o

    @property
    def dims(self) -> TiledAttentionDims:
        """The sizes that the object was made with."""
        return self._dims

    @property
    def num_seqs(self) -> int:
        """Sequences of the current step."""
        return int(self._core.num_seqs)

    @property
    def device(self) -> str:
        """Name of the device: ``"cpu"`` or ``"cuda:0"``."""
        return str(self._core.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers of the object."""
        return int(self._core.nbytes)

    def paged_strides(self) -> tuple[int, int, int]:
        """``(block, token, kv_head)`` strides, in elements, of a pool ``[num_blocks, P, Hk, D]``."""
        return self._dims.paged_strides()

    def scratch_pool_strides(self) -> tuple[int, int, int]:
        """``(block, token, kv_head)`` strides, in elements, of K or V in a pool ``[slot, K|V, Hk, P, D]``."""
        return self._dims.scratch_pool_strides()

    def __copy__(self) -> NoReturn:
        raise TypeError(
            "TiledAttention cannot be copied: copy its state(), and load_state() it into another object"
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__copy__()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "TiledAttention cannot be pickled: pickle its state(), and load_state() it into another object"
        )

    def __repr__(self) -> str:
        return f"TiledAttention({self._dims}, device={self.device!r})"
