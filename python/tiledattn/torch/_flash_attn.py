# SPDX-License-Identifier: Apache-2.0
"""Drop-ins for the functions of the package flash-attn, with its argument names, layouts and meanings.

What they do not support (dropout, ALiBi, rotary embedding, left padding of a cache) is refused by name; what changes
nothing in a forward pass (``deterministic``, ``num_splits``) is accepted and ignored: results are always
deterministic. Errors of the library itself use its own names: ``window`` for ``window_size``, ``seq_lens`` for
``cache_seqlens``, ``k_pool`` for ``k_cache``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._types import Window
from . import _functions
from ._arguments import check_optional_tensors, check_tensors, integer

#: ``(left, right)`` as flash-attn writes it: a negative number is no bound.
WindowSize = tuple[int, int]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attend as flash-attn's ``flash_attn_func`` does, forward only.

    Parameters
    ----------
    q, k, v
        ``[B, Sq, Hq, D]``, ``[B, Sk, Hk, D]`` and ``[B, Sk, Hk, Dv]``, bfloat16, float16 or float32.
    dropout_p
        0.
    softmax_scale
        Factor of the scores; None means ``1 / sqrt(D)``.
    causal
        Query ``i`` sees key ``j`` only where ``j <= i + Sk - Sq``: aligned bottom-right.
    window_size
        ``(left, right)``: a query at key position ``p`` sees ``p - left .. p + right``; -1 is no bound.
    softcap
        Scores become ``softcap * tanh(score / softcap)``; 0 switches it off.
    alibi_slopes
        None.
    deterministic
        Ignored: results always are.
    return_attn_probs
        Return ``(out, softmax_lse, S_dmask)``, the last one empty, as flash-attn does without dropout.

    Returns
    -------
    out or (out, softmax_lse, S_dmask)
        ``[B, Sq, Hq, Dv]``, and ``[B, Hq, Sq]`` float32, natural logarithm.

    Raises
    ------
    TypeError
        For a wrong type of argument or element.
    ValueError
        For an argument that is not supported, a wrong shape, or a tensor that requires grad.

    Examples
    --------
    >>> import torch
    >>> from tiledattn.torch import flash_attn_func
    >>> q = torch.ones(2, 3, 4, 8)
    >>> k = v = torch.ones(2, 5, 2, 8)
    >>> flash_attn_func(q, k, v, causal=True, window_size=(2, -1)).shape
    torch.Size([2, 3, 4, 8])
    """
    _refuse_others(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    result = _functions.flash_attention(
        q,
        k,
        v,
        causal=causal,
        softmax_scale=softmax_scale,
        window=_window(window_size),
        softcap=softcap,
        return_lse=return_attn_probs,
    )
    return _with_probs(result) if return_attn_probs else result


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attend as flash-attn's ``flash_attn_varlen_func`` does, forward only.

    Parameters
    ----------
    q
        ``[total_q, Hq, D]``.
    k, v
        ``[total_k, Hk, D]`` and ``[total_k, Hk, Dv]``; with a block_table ``[num_blocks, P, Hk, D]`` and
        ``[num_blocks, P, Hk, Dv]``, any P.
    cu_seqlens_q, cu_seqlens_k
        ``[B + 1]`` int32 or int64: where each sequence begins, and the total.
    max_seqlen_q, max_seqlen_k
        Lengths that no sequence exceeds.
    block_table
        ``[B, max_blocks]`` int32 or int64: block ids of each sequence.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
        As in `flash_attn_func`.

    Returns
    -------
    out or (out, softmax_lse, S_dmask)
        ``[total_q, Hq, Dv]``, and ``[Hq, total_q]`` float32, natural logarithm.

    Raises
    ------
    TypeError
        For a wrong type of argument or element.
    ValueError
        For an argument that is not supported, a wrong shape, or a tensor that requires grad. A window without
        causal over a block_table is not supported for several query tokens.

    Examples
    --------
    >>> import torch
    >>> from tiledattn.torch import flash_attn_varlen_func
    >>> q, k = torch.ones(3, 4, 8), torch.ones(7, 2, 8)
    >>> cu_q, cu_k = torch.tensor([0, 1, 3]), torch.tensor([0, 5, 7])
    >>> flash_attn_varlen_func(q, k, k, cu_q, cu_k, 2, 5, causal=True).shape
    torch.Size([3, 4, 8])
    """
    _refuse_others(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    check_tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    check_optional_tensors(block_table=block_table)
    max_seqlen_q = integer(max_seqlen_q, "max_seqlen_q")
    options: dict[str, Any] = {
        "causal": causal,
        "softmax_scale": softmax_scale,
        "window": _window(window_size),
        "softcap": softcap,
    }
    if block_table is None:
        result = _functions.flash_attention(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            return_lse=return_attn_probs,
            **options,
        )
    elif max_seqlen_q <= 1 or _positions_matter(options):
        result = _functions.paged_attention(
            q,
            k,
            v,
            block_table,
            cu_seqlens_k.diff(),
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            return_lse=return_attn_probs,
            **options,
        )
    else:
        sequence_of = _sequence_of_token(cu_seqlens_q, q.shape[0])
        result = _functions.paged_attention(
            q,
            k,
            v,
            block_table[sequence_of],
            cu_seqlens_k.diff()[sequence_of],
            cu_seqlens_q=torch.arange(q.shape[0] + 1, device=q.device, dtype=torch.int32),
            max_seqlen_q=1,
            return_lse=return_attn_probs,
            **options,
        )
    return _with_probs(result) if return_attn_probs else result


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Append to a KV cache in place and attend to it, as flash-attn's ``flash_attn_with_kvcache`` does.

    Parameters
    ----------
    q
        ``[B, Sq, Hq, D]``.
    k_cache, v_cache
        ``[cache_batch, S, Hk, D]`` and ``[cache_batch, S, Hk, Dv]``; with a block_table ``[num_blocks, P, Hk, D]`` and
        ``[num_blocks, P, Hk, Dv]``, any P.
    k, v
        ``[B, Snew, Hk, D]`` and ``[B, Snew, Hk, Dv]``: written into the cache after its first ``cache_seqlens``
        tokens, and attended to with them. Both or neither.
    cache_seqlens
        Tokens in the cache before the call: an int, or ``[B]`` int32 or int64. None means S, without a
        block_table and without k and v.
    cache_batch_idx
        ``[B]`` int32 or int64: which row of the cache each sequence uses; None means its own. Without a
        block_table.
    block_table
        ``[B, max_blocks]`` int32 or int64: block ids of each sequence.
    softmax_scale, causal, window_size, softcap
        As in `flash_attn_func`; the last query token is at the position of the last key.
    rotary_cos, rotary_sin, cache_leftpad, alibi_slopes
        None.
    rotary_interleaved, num_splits
        Ignored: there is no rotary embedding, and the library decides how keys are cut by their number alone.
    return_softmax_lse
        Return ``(out, softmax_lse)``.

    Returns
    -------
    out or (out, softmax_lse)
        ``[B, Sq, Hq, Dv]``, and ``[B, Hq, Sq]`` float32, natural logarithm.

    Raises
    ------
    TypeError
        For a wrong type of argument or element.
    ValueError
        For an argument that is not supported, a wrong shape, or a tensor that requires grad.
    IndexError
        For a block id outside the cache, or new tokens for which it has no room. On a GPU these are found
        later: see `tiledattn.check`.

    Examples
    --------
    >>> import torch
    >>> from tiledattn.torch import flash_attn_with_kvcache
    >>> k_cache, v_cache = torch.zeros(2, 2, 16, 2, 8).unbind()
    >>> q, k = torch.ones(2, 1, 4, 8), torch.ones(2, 1, 2, 8)
    >>> out = flash_attn_with_kvcache(q, k_cache, v_cache, k, k, cache_seqlens=torch.tensor([0, 3]), causal=True)
    >>> out.shape, k_cache[1, 3, 0, 0].item()
    (torch.Size([2, 1, 4, 8]), 1.0)
    """
    _refuse_others(
        rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_leftpad=cache_leftpad, alibi_slopes=alibi_slopes
    )
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    check_optional_tensors(k=k, v=v, cache_batch_idx=cache_batch_idx, block_table=block_table)
    if (k is None) != (v is None):
        raise ValueError(f"{'k' if k is None else 'v'}: got None; expected both k and v, or neither")
    if q.dim() != 4:
        raise ValueError(f"q: got shape {list(q.shape)}; expected [batch, seqlen, heads, head_dim]")
    table = _table(q, k_cache, cache_batch_idx, block_table)
    seq_lens, shortest = _lengths(q, k_cache, cache_seqlens, block_table, appends=k is not None)
    if k is not None and v is not None:
        _check_room(table, seq_lens, shortest, k.shape[1], k_cache)
        slots = _free_slots(table, seq_lens, k.shape[1], k_cache)
        _functions.write_kv(k.flatten(0, 1), v.flatten(0, 1), k_cache, v_cache, slots)
        seq_lens = seq_lens + k.shape[1]
        shortest += k.shape[1]

    options: dict[str, Any] = {
        "causal": causal,
        "softmax_scale": softmax_scale,
        "window": _window(window_size),
        "softcap": softcap,
    }
    q_len = q.shape[1]
    if q_len <= max(shortest, 1) or _positions_matter(options):
        result = _functions.paged_attention(
            q, k_cache, v_cache, table, seq_lens, return_lse=return_softmax_lse, **options
        )
        return (result[0], result[1].transpose(1, 2)) if return_softmax_lse else result
    out, lse = _functions.paged_attention(
        q.flatten(0, 1),
        k_cache,
        v_cache,
        table.repeat_interleave(q_len, 0),
        seq_lens.repeat_interleave(q_len, 0),
        return_lse=True,
        **options,
    )
    out, lse = out.unflatten(0, q.shape[:2]), lse.unflatten(0, q.shape[:2])
    return (out, lse.transpose(1, 2)) if return_softmax_lse else out


def _refuse_others(dropout_p: float = 0.0, **arguments: object) -> None:
    if dropout_p != 0:
        raise ValueError(f"dropout_p: got {dropout_p}; expected 0: tiledattn computes the forward pass only")
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(
                f"{name}: got {type(value).__name__}; expected None: tiledattn does not support it"
            )


def _window(window_size: Any) -> Window:
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise TypeError(f"window_size: got {window_size!r}; expected (left, right), both integers")
    left, right = (integer(side, "window_size") for side in window_size)
    return (None if left < 0 else left, None if right < 0 else right)


def _positions_matter(options: dict[str, Any]) -> bool:
    """Tell whether what a query sees depends on its position.

    In a paged cache the library shows nothing to query tokens from before a sequence that is shorter than its query;
    flash-attn shows them all that mask and window allow. Both agree under a causal mask. Without mask and window the
    callers treat each token as a sequence of its own, which has no such tokens. A window alone cannot be put so.
    """
    if options["causal"]:
        return True
    if options["window"] != (None, None):
        raise ValueError(
            f"window_size: got {options['window']} (None is no bound) without causal for several query tokens of a "
            "cache; expected causal=True, no window, or one query token"
        )
    return False


def _with_probs(result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    out, lse = result
    return out, lse.transpose(-1, -2), out.new_empty(0)


def _sequence_of_token(cu_seqlens: Tensor, total: int) -> Tensor:
    """For each packed token the sequence that it belongs to; tokens past the last one count to it."""
    tokens = torch.arange(total, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence_of = torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True)
    return sequence_of.clamp(max=cu_seqlens.shape[0] - 2)


def _table(q: Tensor, k_cache: Tensor, cache_batch_idx: Tensor | None, block_table: Tensor | None) -> Tensor:
    """Return the block table; a cache without one is a pool whose blocks are whole sequences."""
    if block_table is not None:
        if cache_batch_idx is not None:
            raise ValueError("cache_batch_idx: got a tensor beside a block_table; expected only one of them")
        return block_table
    if cache_batch_idx is not None:
        return cache_batch_idx.unsqueeze(1)
    if q.shape[0] > k_cache.shape[0]:
        raise ValueError(
            f"k_cache: got {k_cache.shape[0]} sequences; expected at least the {q.shape[0]} of q"
        )
    return torch.arange(q.shape[0], device=q.device, dtype=torch.int32).unsqueeze(1)


def _lengths(
    q: Tensor,
    k_cache: Tensor,
    cache_seqlens: int | Tensor | None,
    block_table: Tensor | None,
    *,
    appends: bool,
) -> tuple[Tensor, int]:
    """Tokens in the cache as a tensor, and a number that none of them is below."""
    if isinstance(cache_seqlens, Tensor):
        return cache_seqlens, 0
    if cache_seqlens is None:
        if block_table is not None or appends:
            beside = "a block_table" if block_table is not None else "k and v"
            raise ValueError(f"cache_seqlens: got None with {beside}; expected an int or a tensor [B]")
        cache_seqlens = k_cache.shape[1]
    cache_seqlens = integer(cache_seqlens, "cache_seqlens")
    return torch.full((q.shape[0],), cache_seqlens, device=q.device, dtype=torch.int32), cache_seqlens


def _check_room(table: Tensor, seq_lens: Tensor, shortest: int, count: int, pool: Tensor) -> None:
    """Refuse new tokens beyond the table under the caller's own names, as far as the host knows the lengths."""
    room = table.shape[1] * pool.shape[1] - count
    lengths = [shortest]
    if seq_lens.device.type == "cpu" and seq_lens.dim() == 1 and not torch.compiler.is_compiling():
        lengths = seq_lens.tolist()
    for sequence, length in enumerate(lengths):
        if not 0 <= length <= room:
            raise IndexError(
                f"cache_seqlens: sequence {sequence}: got {length}; expected 0 to {room}, "
                f"so that the cache has room for {count} more"
            )


def _free_slots(table: Tensor, seq_lens: Tensor, count: int, pool: Tensor) -> Tensor:
    """Slots of the next ``count`` tokens of each sequence; one past the pool where the table has no more columns."""
    num_blocks, block_size = pool.shape[:2]
    positions = seq_lens.to(torch.int64).unsqueeze(1) + torch.arange(count, device=seq_lens.device)
    columns = positions.div(block_size, rounding_mode="floor")
    has_room = (columns >= 0) & (columns < table.shape[1])
    blocks = table.to(torch.int64).gather(1, columns.clamp(0, max(table.shape[1] - 1, 0)))
    slots = blocks * block_size + positions.remainder(block_size)
    return slots.where(has_room & (blocks >= 0), num_blocks * block_size).flatten()
