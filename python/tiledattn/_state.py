# SPDX-License-Identifier: Apache-2.0
"""Running states as values: kept, moved, merged, packed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from . import _core
from ._types import Array, DeviceLike, StreamLike


class State:
    """Running softmax state of some sequences, as `TiledAttention.state` copies it.

    For keys ``j`` with scores ``s_j`` and values ``v_j``: ``m = max s_j``, ``l = sum exp(s_j - m)`` and
    ``o = sum exp(s_j - m) v_j``, in float32. Without keys it is ``(-inf, 0, 0)``.

    A state can be pickled; what comes back is on the CPU. It holds no sinks: they enter when a result is
    made.

    Examples
    --------
    >>> import tiledattn as ta
    >>> dims = ta.TiledAttentionDims(
    ...     max_seqs=2, num_q_heads=4, num_kv_heads=2, head_dim=8, block_size=4, tile_capacity=3)
    >>> attn = ta.TiledAttention(dims, device="cpu")
    >>> attn.begin_step(2)
    >>> state = attn.state()
    >>> state.num_seqs, state.o.shape
    (2, (2, 4, 8))
    >>> ta.State.unpack(state.pack()).num_seqs
    2
    """

    __slots__ = ("_compiled",)

    _compiled: _core.State

    def __init__(self) -> None:
        raise TypeError("State: made by TiledAttention.state(), merge_states() and State.unpack()")

    @classmethod
    def _of(cls, core: _core.State) -> State:
        state = object.__new__(cls)
        state._compiled = core
        return state

    @property
    def m(self) -> Array:
        """Running maxima ``[num_seqs, Hq]`` (``[num_seqs, max_q_len, Hq]`` where that is over 1).

        It belongs to no library: ``np.asarray(state.m)`` or ``torch.from_dlpack(state.m)`` make an array of it without
        a copy.
        """
        return self._compiled.m

    @property
    def l(self) -> Array:
        """Sums of weights, shaped like ``m``."""
        return self._compiled.l

    @property
    def o(self) -> Array:
        """Weighted sums of values, not normalised: the shape of ``m`` and ``Dv``."""
        return self._compiled.o

    @property
    def num_seqs(self) -> int:
        """Sequences that the state is of."""
        return int(self._compiled.num_seqs)

    @property
    def device(self) -> str:
        """Name of the device: ``"cpu"`` or ``"cuda:0"``."""
        return str(self._compiled.device)

    @property
    def nbytes(self) -> int:
        """Bytes of m, l and o."""
        return int(self._compiled.nbytes)

    def to(self, device: DeviceLike) -> State:
        """Copy the state to a device; waits for the copy where one side is the CPU.

        Parameters
        ----------
        device
            ``"cpu"``, ``"cuda"``, ``"cuda:1"``; None means the best device present.

        Raises
        ------
        ValueError
            When there is no such device.
        """
        return State._of(self._compiled.to(device))

    def finalize(self, *, sinks: Array | None = None, stream: StreamLike = None) -> tuple[Array, Array]:
        """Make the result of all keys in the state; the state stays as it is.

        Parameters
        ----------
        sinks
            ``[Hq]`` float32 on the state's device: one extra logit for each query head.
        stream
            Stream to launch on; None means the one that made the state. It is ordered after that one.

        Returns
        -------
        out, lse
            ``o / l`` and ``m + ln l``, float32: NumPy arrays on the CPU, on a GPU arrays for any consumer of
            DLPack.
        """
        out, lse = self._compiled.finalize(sinks, stream)
        return out, lse

    def pack(self) -> bytes:
        """Write the state as bytes: a small header with a version, then m, l and o as float32."""
        return bytes(self._compiled.pack())

    @staticmethod
    def unpack(data: bytes, *, device: DeviceLike = "cpu") -> State:
        """Read what `pack` wrote.

        Parameters
        ----------
        data
            The bytes.
        device
            Where the state is put.

        Raises
        ------
        ValueError
            When the bytes are not a whole packed state of a known version.
        """
        return State._of(_core.State.unpack(data, device))

    def __copy__(self) -> State:
        return self.to(self.device)

    def __deepcopy__(self, memo: object) -> State:
        return self.to(self.device)

    def __reduce__(self) -> tuple[object, ...]:
        return State.unpack, (self.pack(),)

    def __repr__(self) -> str:
        return f"State(num_seqs={self.num_seqs}, o={list(self.o.shape)}, device={self.device!r})"


def compiled_state(state: object, name: str) -> _core.State:
    """Give the compiled part of an argument; object.__new__ makes a State without one."""
    if not isinstance(state, State):
        raise TypeError(f"{name}: expected a State, got {type(state).__name__}")
    if not hasattr(state, "_compiled"):
        raise TypeError(f"{name}: got a State that holds nothing; expected one of TiledAttention.state()")
    return state._compiled


def merge_states(states: Sequence[State], *, stream: StreamLike = None) -> State:
    """Combine states of the same queries over disjoint keys.

    Parameters
    ----------
    states
        One state or more, of equal sizes and on one device. They are merged in this order, which should be
        the order of their keys; an empty state changes no bit.
    stream
        Stream to launch on; None means the one that made the first state. It is ordered after those of all.

    Returns
    -------
    State
        The state over all keys.

    Raises
    ------
    TypeError
        For anything but a sequence, or an entry that is not a State.
    ValueError
        When there is none, sizes or devices differ, or a stream is given on the CPU.

    References
    ----------
    Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867.

    Examples
    --------
    >>> import tiledattn as ta
    >>> dims = ta.TiledAttentionDims(
    ...     max_seqs=1, num_q_heads=1, num_kv_heads=1, head_dim=8, block_size=4, tile_capacity=3)
    >>> state = ta.TiledAttention(dims, device="cpu").state()
    >>> ta.merge_states([state, state]).num_seqs
    0
    """
    if not isinstance(states, Iterable):
        raise TypeError(f"states: expected a sequence of State, got {type(states).__name__}")
    cores = []
    for i, state in enumerate(states):
        cores.append(compiled_state(state, f"states[{i}]"))
    return State._of(_core.merge_states(cores, stream))
