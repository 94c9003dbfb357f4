# SPDX-License-Identifier: Apache-2.0
"""A drop-in for ``torch.nn.functional.scaled_dot_product_attention``."""

from __future__ import annotations

from torch import Tensor

from . import _functions
from ._arguments import check_tensors, flag, number


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend as ``torch.nn.functional.scaled_dot_product_attention`` does, forward only and without masks.

    Parameters
    ----------
    query, key, value
        ``[..., Hq, L, E]``, ``[..., Hk, S, E]`` and ``[..., Hk, S, Ev]``, bfloat16, float16 or float32, three
        dimensions or more. Errors of the library call them q, k and v.
    attn_mask
        None: arbitrary masks are refused.
    dropout_p
        0.
    is_causal
        Query ``i`` sees key ``j`` only where ``j <= i``: aligned top-left as torch does it, also where L and S
        differ. (`tiledattn.flash_attention` aligns bottom-right.)
    scale
        Factor of the scores; None means ``1 / sqrt(E)``.
    enable_gqa
        Let Hk be a divisor of Hq. Without it Hk is Hq or 1.

    Returns
    -------
    Tensor
        ``[..., Hq, L, Ev]`` of the type of query; in memory heads come after the sequence, so that
        ``.transpose(-3, -2)`` is contiguous.

    Raises
    ------
    TypeError
        For a wrong type of argument or element.
    ValueError
        For an attn_mask, a dropout, wrong shapes, or a tensor that requires grad.

    Examples
    --------
    >>> import torch
    >>> from tiledattn.torch import scaled_dot_product_attention
    >>> query = torch.ones(2, 4, 3, 8)
    >>> key = value = torch.ones(2, 2, 5, 8)
    >>> scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).shape
    torch.Size([2, 4, 3, 8])
    """
    if attn_mask is not None:
        raise ValueError(
            "attn_mask: got a mask; expected None: tiledattn takes causal masks, windows and lengths "
            "(tiledattn.torch.flash_attention), but no arbitrary mask"
        )
    if dropout_p != 0:
        raise ValueError(f"dropout_p: got {dropout_p}; expected 0: tiledattn computes the forward pass only")
    check_tensors(query=query, key=key, value=value)
    scale = None if scale is None else number(scale, "scale")
    is_causal, enable_gqa = flag(is_causal, "is_causal"), flag(enable_gqa, "enable_gqa")
    _check_shapes(query, key, value)
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if not enable_gqa and kv_heads not in (1, heads):
        raise ValueError(
            f"enable_gqa: got False with {heads} heads in query and {kv_heads} in key; expected True, or as many "
            "heads in both"
        )
    q, k, v = (_batched(x).transpose(1, 2) for x in (query, key, value))
    window: tuple[int | None, int | None] = (None, None)
    if is_causal:
        # Keys past the L-th are seen by no query. Without them S <= L. Where both are equal the library's own causal
        # mask is torch's; else query i is at key position i + S - L for it, and a window to the right of L - S gives
        # query i the keys 0 .. i.
        length = query.shape[-2]
        k, v = k[:, :length], v[:, :length]
        is_causal = k.shape[1] == length
        window = (None, None if is_causal else length - k.shape[1])
    out = _functions.flash_attention(q, k, v, causal=is_causal, window=window, softmax_scale=scale)
    out = out.transpose(1, 2)
    return out if query.dim() == 4 else out.reshape(*query.shape[:-1], value.shape[-1])


def _batched(x: Tensor) -> Tensor:
    """``[..., H, L, E]`` as ``[B, H, L, E]``."""
    if x.dim() == 4:
        return x
    return x.unsqueeze(0) if x.dim() == 3 else x.flatten(0, -4)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check shapes as the caller wrote them: the library sees other ones, in which some differences are gone."""
    q, k, v = query.shape, key.shape, value.shape
    if len(q) == len(k) == len(v) == 4 and (q[0], q[3]) == (k[0], k[3]) and k[:3] == v[:3]:
        return  # most calls, a microsecond earlier
    for name, shape in (("query", q), ("key", k), ("value", v)):
        if len(shape) < 3 or shape[:-3] != q[:-3]:
            raise ValueError(
                f"{name}: got shape {list(shape)}; expected {[*q[:-3], 'heads', 'sequence', 'head_dim']}"
            )
    if k[-1] != q[-1]:
        raise ValueError(f"key: got shape {list(k)}; expected {[*k[:-1], q[-1]]}, ending as in query")
    if v[:-1] != k[:-1]:
        raise ValueError(f"value: got shape {list(v)}; expected {[*k[:-1], v[-1]]}, as in key")
