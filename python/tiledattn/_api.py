# SPDX-License-Identifier: Apache-2.0
"""The functions: attention in one call, merging, writing into a paged cache, and facts about the machine."""

from __future__ import annotations

import math
from typing import Any

from . import _core
from ._types import Array, DeviceLike, StreamLike, Support, Window, Workspace


def _compiled(workspace: Workspace) -> _core.Workspace:
    if not isinstance(workspace, Workspace):
        raise TypeError(f"workspace: expected a Workspace or None, got {type(workspace).__name__}")
    return workspace._core


def flash_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: Window = (None, None),
    softcap: float = 0.0,
    sinks: Array | None = None,
    layout: str = "bshd",
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    return_lse: bool = False,
    check: bool = False,
    workspace: Workspace | None = None,
    stream: StreamLike = None,
) -> Any:
    """Attend to dense or packed keys and values.

    Parameters
    ----------
    q, k, v
        ``[B, Sq, Hq, D]``, ``[B, Sk, Hk, D]`` and ``[B, Sk, Hk, Dv]`` (``layout="bhsd"``: heads before
        sequence; packed: ``[total, H, D]`` with both ``cu_seqlens``), of one type: bfloat16, float16 or
        float32. Hk divides Hq.
    causal
        Query ``i`` sees key ``j`` only where ``j <= i + Sk - Sq``: aligned bottom-right.
    softmax_scale
        Factor of the scores; None means ``1 / sqrt(D)``.
    window
        ``(left, right)``: a query at key position ``p`` sees keys ``p - left .. p + right``, both ends
        included; None is no bound.
    softcap
        Scores become ``softcap * tanh(score / softcap)``; 0 switches it off.
    sinks
        ``[Hq]`` float32: one extra logit for each query head, without a value.
    layout
        ``"bshd"`` or ``"bhsd"``.
    cu_seqlens_q, cu_seqlens_k
        ``[B + 1]`` int32 or int64: where each packed sequence begins, and the total.
    max_seqlen_q, max_seqlen_k
        Hints: lengths that no packed sequence exceeds; None means the packed total.
    out
        ``q.shape[:-1] + (Dv,)`` of the type of q, or float32; None makes one in the framework of q.
    lse
        ``out.shape[:-1]`` float32.
    return_lse
        Make and return the log-sum-exp, natural logarithm, too.
    check
        Wait, and raise what the device found in ``cu_seqlens``.
    workspace
        Scratch memory to use instead of the library's own.
    stream
        Stream to launch on; None means the current stream of the framework of q. Must be None on the CPU.

    Returns
    -------
    out or (out, lse)
        A row that sees no key is 0, with lse -inf.

    Raises
    ------
    TypeError
        For a wrong type of argument or element.
    ValueError
        For wrong shapes and values, arrays on two devices, or a torch tensor that requires grad or has a
        tangent: forward only.

    References
    ----------
    Dao, Fu, Ermon, Rudra and Re, "FlashAttention: Fast and Memory-Efficient Exact Attention with
    IO-Awareness", arXiv:2205.14135.

    Examples
    --------
    >>> import numpy as np, tiledattn as ta
    >>> q = np.ones((1, 3, 4, 8), np.float32)
    >>> k = v = np.ones((1, 5, 2, 8), np.float32)
    >>> out, lse = ta.flash_attention(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    ((1, 3, 4, 8), (1, 3, 4))
    """
    return _core.flash_attention(
        q,
        k,
        v,
        causal,
        softmax_scale,
        window,
        softcap,
        sinks,
        layout,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        out,
        lse,
        return_lse,
        check,
        None if workspace is None else _compiled(workspace),
        stream,
    )


def paged_attention(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    block_table: Array,
    seq_lens: Array,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    window: Window = (None, None),
    softcap: float = 0.0,
    sinks: Array | None = None,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    cu_seqlens_q: Array | None = None,
    max_seqlen_q: int | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    return_lse: bool = False,
    early_start: bool = False,
    check: bool = False,
    workspace: Workspace | None = None,
    stream: StreamLike = None,
) -> Any:
    """Attend to a paged KV cache.

    Parameters
    ----------
    q
        ``[B, Hq, D]``, ``[B, Sq, Hq, D]``, or ragged ``[total_q, Hq, D]`` with ``cu_seqlens_q``; bfloat16,
        float16 or float32. The last query token of a sequence is at position ``seq_lens - 1``.
    k_pool, v_pool
        ``[num_blocks, P, Hk, D]`` and ``[num_blocks, P, Hk, Dv]`` of the type of q, or both float8_e4m3fn or
        int8; any outer strides.
    block_table
        ``[B, max_blocks]`` int32 or int64: block ids of each sequence, in order. Entries past its length are
        not read.
    seq_lens
        ``[B]`` int32 or int64: keys of each sequence.
    causal
        A query token sees no key after its own position.
    softmax_scale
        Factor of the scores; None means ``1 / sqrt(D)``.
    window
        ``(left, right)``: a query at position ``p`` sees keys ``p - left .. p + right``; None is no bound.
    softcap
        Scores become ``softcap * tanh(score / softcap)``; 0 switches it off.
    sinks
        ``[Hq]`` float32: one extra logit for each query head, without a value.
    k_scale, v_scale
        Scales of quantised pools: a float, or float32 ``[Hk]``, ``[num_blocks, Hk]`` or
        ``[num_blocks, P, Hk]`` on the device of q. A stored element counts as itself times its scale. None
        means 1 for float8_e4m3fn; int8 needs a scale. Other pools take none.
    cu_seqlens_q
        ``[B + 1]`` int32 or int64: where the query tokens of each sequence begin, and the total.
    max_seqlen_q
        A hint: query tokens that no sequence exceeds.
    out
        ``q.shape[:-1] + (Dv,)`` of the type of q, or float32; None makes one in the framework of q.
    lse
        ``out.shape[:-1]`` float32.
    return_lse
        Make and return the log-sum-exp, natural logarithm, too.
    early_start
        Your word that everything but q and the last ``Sq`` keys of each sequence was written before the
        kernel that runs before this call in its stream began. Decode on Hopper then reads the first keys
        while that kernel ends, which hides some microseconds of each call; elsewhere it changes nothing.
        See docs/kernels/decode.md.
    check
        Wait, and raise what the device found in ids, lengths and ``cu_seqlens_q``.
    workspace
        Scratch memory to use instead of the library's own.
    stream
        Stream to launch on; None means the current stream of the framework of q. Must be None on the CPU.

    Returns
    -------
    out or (out, lse)
        A row that sees no key is 0, with lse -inf. A sequence shorter than its query leaves the leading
        tokens so.

    Raises
    ------
    TypeError
        For a wrong type of argument or element.
    ValueError
        For wrong shapes and values, or arrays on two devices.
    IndexError
        For a block id outside the pool. On a GPU the next function call on that device raises it,
        ``check=True`` at once, and the results of that sequence are NaN.

    References
    ----------
    Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
    arXiv:2309.06180.

    Examples
    --------
    >>> import numpy as np, tiledattn as ta
    >>> q = np.ones((1, 4, 8), np.float32)
    >>> pool = np.ones((3, 16, 2, 8), np.float32)
    >>> out = ta.paged_attention(q, pool, pool, np.array([[2, 0]]), np.array([20]))
    >>> out.shape
    (1, 4, 8)
    """
    return _core.paged_attention(
        q,
        k_pool,
        v_pool,
        block_table,
        seq_lens,
        causal,
        softmax_scale,
        window,
        softcap,
        sinks,
        k_scale,
        v_scale,
        cu_seqlens_q,
        max_seqlen_q,
        out,
        lse,
        return_lse,
        early_start,
        check,
        None if workspace is None else _compiled(workspace),
        stream,
    )


def merge_attention(
    out_a: Array,
    lse_a: Array,
    out_b: Array,
    lse_b: Array,
    *,
    lse_base: float = math.e,
    out: Array | None = None,
    lse: Array | None = None,
    stream: StreamLike = None,
) -> tuple[Array, Array]:
    """Combine two results of the same queries over disjoint keys, of this or another library.

    Parameters
    ----------
    out_a, out_b
        ``[..., Dv]`` of one shape and type: bfloat16, float16 or float32. Made without sinks.
    lse_a, lse_b
        ``[...]`` float32; -inf where a side saw no key: the other side then comes back bit for bit.
    lse_base
        Base of the logarithm in all lse, also in the result: a finite number over 1, such as 2 for libraries
        that use it.
    out, lse
        Arrays for the result; None makes them in the framework of ``out_a``.
    stream
        Stream to launch on; None means the current stream of the framework of ``out_a``. Must be None on the
        CPU.

    Returns
    -------
    out, lse
        The result over all keys.

    Raises
    ------
    TypeError
        For a wrong type of argument or element.
    ValueError
        For shapes or devices that differ, or a base that is no finite number over 1.

    References
    ----------
    Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867.

    Examples
    --------
    >>> import numpy as np, tiledattn as ta
    >>> ones, zeros = np.ones((2, 8), np.float32), np.zeros(2, np.float32)
    >>> out, lse = ta.merge_attention(ones, zeros, 3 * ones, zeros)
    >>> float(out[0, 0]), round(float(lse[0]), 4)
    (2.0, 0.6931)
    """
    out, lse = _core.merge_attention(out_a, lse_a, out_b, lse_b, lse_base, out, lse, stream)
    return out, lse


def write_kv(
    k: Array,
    v: Array,
    k_pool: Array,
    v_pool: Array,
    slot_mapping: Array,
    *,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    check: bool = False,
    stream: StreamLike = None,
) -> None:
    """Write the keys and values of tokens into a paged KV cache.

    Parameters
    ----------
    k, v
        ``[tokens, Hk, D]`` and ``[tokens, Hk, Dv]``; not in the memory of the pools: to copy within a pool, copy
        the tokens out first.
    k_pool, v_pool
        ``[num_blocks, P, Hk, D]`` and ``[num_blocks, P, Hk, Dv]`` of the same type, or both float8_e4m3fn or
        int8; written in place.
    slot_mapping
        ``[tokens]`` int32 or int64: ``block * P + offset``; a negative slot skips the token.
    k_scale, v_scale
        Scales of quantised pools, as in `paged_attention`. An element is stored as its value divided by its
        scale, rounded to nearest even. Beyond 448 (float8_e4m3fn) or 127 (int8) in magnitude it is that
        number; NaN stays NaN in float8_e4m3fn and becomes 0 in int8.
    check
        Wait, and raise what the device found in ``slot_mapping``.
    stream
        Stream to launch on; None means the current stream of the framework of k. Must be None on the CPU.

    Raises
    ------
    TypeError
        For a wrong type of argument or element.
    ValueError
        For wrong shapes, read-only pools, or arrays on two devices.
    IndexError
        For a slot outside the pool; on the CPU before anything is written.

    References
    ----------
    Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
    arXiv:2309.06180.

    Examples
    --------
    >>> import numpy as np, tiledattn as ta
    >>> pool = np.zeros((2, 4, 1, 8), np.float32)
    >>> tokens = np.ones((2, 1, 8), np.float32)
    >>> ta.write_kv(tokens, tokens, pool, pool.copy(), np.array([5, -1]))
    >>> pool.sum(axis=(2, 3)).tolist()
    [[0.0, 0.0, 0.0, 0.0], [0.0, 8.0, 0.0, 0.0]]
    """
    _core.write_kv(k, v, k_pool, v_pool, slot_mapping, k_scale, v_scale, check, stream)


def supports(
    operation: str,
    *,
    device: DeviceLike = None,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    num_q_heads: int = 1,
    num_kv_heads: int = 1,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    block_size: int = 16,
    q_len: int | None = None,
) -> Support:
    """Ask whether a device can run a call, by which kernel, and if not why.

    Arguments that are not asked for here are taken to be the defaults of the function, and arrays to be contiguous.

    Parameters
    ----------
    operation
        ``"flash_attention"``, ``"paged_attention"`` or ``"tiled_attention"``.
    device
        ``"cpu"``, ``"cuda"``, ``"cuda:1"``; None means the best device present.
    dtype
        Element type of q, by name.
    kv_dtype
        Element type of K and V: ``"float8_e4m3fn"`` or ``"int8"`` for a quantised cache; None means that of q.
    num_q_heads, num_kv_heads, head_dim, head_dim_v, block_size
        Sizes of the call; ``head_dim_v`` None means ``head_dim``.
    q_len
        Query tokens of each sequence; None means one, or many for ``flash_attention``.

    Returns
    -------
    Support
        True or false, with ``kernel`` and ``reason``.

    Raises
    ------
    ValueError
        For an operation, device or dtype that has no meaning.

    Examples
    --------
    >>> import tiledattn as ta
    >>> bool(ta.supports("flash_attention", device="cpu", head_dim=64))
    True
    """
    return Support(
        *_core.supports(
            operation,
            device,
            dtype,
            kv_dtype,
            num_q_heads,
            num_kv_heads,
            head_dim,
            head_dim_v,
            block_size,
            q_len,
        )
    )


def check(device: DeviceLike = None) -> None:
    """Wait for a device, and raise what it found in the arguments of earlier function calls.

    Parameters
    ----------
    device
        ``"cpu"``, ``"cuda"``, ``"cuda:1"``; None means the best device present.

    Raises
    ------
    ValueError, IndexError
        What a GPU found: a length, a count or a block id of an earlier call that no array holds. The CPU finds
        such things before a call writes anything, so there is nothing left to raise.
    CudaError
        If the device itself failed.

    Examples
    --------
    >>> import tiledattn as ta
    >>> ta.check("cpu")
    """
    _core.check(device)


def info() -> dict[str, Any]:
    """Tell what the build holds and the machine offers.

    Returns
    -------
    dict
        ``version``; ``cuda`` (toolkit and architectures of the kernels, empty without), ``no_cuda`` (why no
        GPU can be used, empty when one can), ``num_cuda_devices``, ``cuda_devices`` (their names);
        ``cpu_isa`` (the instruction set in use), ``cpu_isas`` (those that this machine has, best first),
        ``num_threads`` (of calls on the CPU).

    Examples
    --------
    >>> import tiledattn as ta
    >>> "scalar" in ta.info()["cpu_isas"]
    True
    """
    return dict(_core.info())


def set_num_threads(num_threads: int) -> None:
    """Set how many threads calls on the CPU use, the caller's own included. Results do not depend on it.

    Parameters
    ----------
    num_threads
        1 to 1024.

    Raises
    ------
    ValueError
        For any other number.

    Examples
    --------
    >>> import tiledattn as ta
    >>> before = ta.get_num_threads()
    >>> ta.set_num_threads(2)
    >>> ta.get_num_threads()
    2
    >>> ta.set_num_threads(before)
    """
    _core.set_num_threads(num_threads)


def get_num_threads() -> int:
    """Tell how many threads calls on the CPU use.

    Examples
    --------
    >>> import tiledattn as ta
    >>> ta.get_num_threads() >= 1
    True
    """
    return int(_core.get_num_threads())
