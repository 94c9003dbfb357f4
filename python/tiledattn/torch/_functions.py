# SPDX-License-Identifier: Apache-2.0
"""The library's own functions as operators of torch: same arguments, same results, traceable."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._types import Window
from . import _ops
from ._arguments import (
    check_optional_tensors,
    check_tensors,
    flag,
    number,
    optional_integer,
    scales,
    score,
    text,
)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: Window = (None, None),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    layout: str = "bshd",
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """Attend to dense or packed keys and values; see `tiledattn.flash_attention` for the arguments.

    Runs on torch's current stream. ``torch.compile(fullgraph=True)`` traces it.

    Parameters
    ----------
    q, k, v
        ``[B, Sq, Hq, D]``, ``[B, Sk, Hk, D]`` and ``[B, Sk, Hk, Dv]`` (``layout="bhsd"``: heads before sequence;
        packed: ``[total, H, D]`` with both ``cu_seqlens``), bfloat16, float16 or float32.
    causal, softmax_scale, window, softcap, sinks, layout
        As there.
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        As there.
    out, lse
        Tensors for the results; None makes them.
    return_lse
        Return the log-sum-exp too, ``out.shape[:-1]`` float32.

    Returns
    -------
    out or (out, lse)
        ``q.shape[:-1] + (Dv,)`` of the type of q.

    Raises
    ------
    TypeError, ValueError
        As there; a tensor that requires grad is a ValueError.

    Examples
    --------
    >>> import torch
    >>> from tiledattn.torch import flash_attention
    >>> q = torch.ones(1, 3, 4, 8)
    >>> k = v = torch.ones(1, 5, 2, 8)
    >>> torch.compile(flash_attention, fullgraph=True, backend="eager")(q, k, v, causal=True).shape
    torch.Size([1, 3, 4, 8])
    """
    check_tensors(q=q, k=k, v=v)
    check_optional_tensors(
        sinks=sinks, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, out=out, lse=lse
    )
    arguments = (
        q,
        k,
        v,
        *score(causal, softmax_scale, window, softcap),
        sinks,
        text(layout, "layout"),
        cu_seqlens_q,
        cu_seqlens_k,
        optional_integer(max_seqlen_q, "max_seqlen_q"),
        optional_integer(max_seqlen_k, "max_seqlen_k"),
    )
    return_lse = flag(return_lse, "return_lse")
    if out is None and lse is None:
        return (_ops.flash_attention_lse if return_lse else _ops.flash_attention)(*arguments)
    return _fill(_ops.flash_attention_into, arguments, out, lse, return_lse)


def paged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    window: Window = (None, None),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """Attend to a paged KV cache; see `tiledattn.paged_attention` for the arguments.

    Runs on torch's current stream. ``torch.compile(fullgraph=True)`` traces it.

    Parameters
    ----------
    q
        ``[B, Hq, D]``, ``[B, Sq, Hq, D]``, or ragged ``[total_q, Hq, D]`` with ``cu_seqlens_q``.
    k_pool, v_pool
        ``[num_blocks, P, Hk, D]`` and ``[num_blocks, P, Hk, Dv]`` of the type of q, or both float8_e4m3fn or int8.
    block_table, seq_lens
        ``[B, max_blocks]`` and ``[B]``, int32 or int64.
    causal, softmax_scale, window, softcap, sinks, k_scale, v_scale, cu_seqlens_q, max_seqlen_q
        As there.
    out, lse
        Tensors for the results; None makes them.
    return_lse
        Return the log-sum-exp too, ``out.shape[:-1]`` float32.

    Returns
    -------
    out or (out, lse)
        ``q.shape[:-1] + (Dv,)`` of the type of q.

    Raises
    ------
    TypeError, ValueError, IndexError
        As there; a tensor that requires grad is a ValueError.

    Examples
    --------
    >>> import torch
    >>> from tiledattn.torch import paged_attention
    >>> pool = torch.ones(3, 16, 2, 8)
    >>> paged_attention(torch.ones(1, 4, 8), pool, pool, torch.tensor([[2, 0]]), torch.tensor([20])).shape
    torch.Size([1, 4, 8])
    """
    check_tensors(q=q, k_pool=k_pool, v_pool=v_pool, block_table=block_table, seq_lens=seq_lens)
    check_optional_tensors(sinks=sinks, cu_seqlens_q=cu_seqlens_q, out=out, lse=lse)
    arguments = (
        q,
        k_pool,
        v_pool,
        block_table,
        seq_lens,
        *score(causal, softmax_scale, window, softcap),
        sinks,
        cu_seqlens_q,
        optional_integer(max_seqlen_q, "max_seqlen_q"),
        *scales(k_scale, v_scale),
    )
    return_lse = flag(return_lse, "return_lse")
    if out is None and lse is None:
        return (_ops.paged_attention_lse if return_lse else _ops.paged_attention)(*arguments)
    return _fill(_ops.paged_attention_into, arguments, out, lse, return_lse)


def _fill(
    into: Any, arguments: tuple[Any, ...], out: Tensor | None, lse: Tensor | None, return_lse: bool
) -> Any:
    """Fill the results that the caller gave, and make the others."""
    q, v = arguments[0], arguments[2]
    if out is None:
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    if lse is None and return_lse:
        lse = out.new_empty(out.shape[:-1], dtype=torch.float32)
    into(out, lse, *arguments)
    return out if lse is None else (out, lse)


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, lse_base: float = math.e
) -> tuple[Tensor, Tensor]:
    """Combine two results of the same queries over disjoint keys; see `tiledattn.merge_attention`.

    Parameters
    ----------
    out_a, out_b
        ``[..., Dv]`` of one shape and type, made without sinks.
    lse_a, lse_b
        ``[...]`` float32; -inf where a side saw no key.
    lse_base
        Base of the logarithm in all lse, also in the result.

    Returns
    -------
    out, lse
        The result over all keys.

    Raises
    ------
    TypeError, ValueError
        As there; a tensor that requires grad is a ValueError.

    Examples
    --------
    >>> import torch
    >>> from tiledattn.torch import merge_attention
    >>> ones, zeros = torch.ones(2, 8), torch.zeros(2)
    >>> out, lse = merge_attention(ones, zeros, 3 * ones, zeros)
    >>> out[0, 0].item(), round(lse[0].item(), 4)
    (2.0, 0.6931)
    """
    check_tensors(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    out, lse = _ops.merge_attention(out_a, lse_a, out_b, lse_b, number(lse_base, "lse_base"))
    return out, lse


def write_kv(
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
) -> None:
    """Write the keys and values of tokens into a paged KV cache, in place; see `tiledattn.write_kv`.

    Parameters
    ----------
    k, v
        ``[tokens, Hk, D]`` and ``[tokens, Hk, Dv]``.
    k_pool, v_pool
        ``[num_blocks, P, Hk, D]`` and ``[num_blocks, P, Hk, Dv]`` of the same type, or both float8_e4m3fn or
        int8; written in place.
    slot_mapping
        ``[tokens]`` int32 or int64: ``block * P + offset``; a negative slot skips the token.
    k_scale, v_scale
        As there.

    Raises
    ------
    TypeError, ValueError, IndexError
        As there.

    Examples
    --------
    >>> import torch
    >>> from tiledattn.torch import write_kv
    >>> pool = torch.zeros(3, 16, 2, 8)
    >>> write_kv(torch.ones(1, 2, 8), torch.ones(1, 2, 8), pool, pool.clone(), torch.tensor([33]))
    >>> pool[2, 1, 0, 0].item()
    1.0
    """
    check_tensors(k=k, v=v, k_pool=k_pool, v_pool=v_pool, slot_mapping=slot_mapping)
    _ops.write_kv(k, v, k_pool, v_pool, slot_mapping, *scales(k_scale, v_scale))
