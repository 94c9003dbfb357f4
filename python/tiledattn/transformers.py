# SPDX-License-Identifier: Apache-2.0
"""The library as an attention implementation of Hugging Face transformers.

>>> import tiledattn.transformers
>>> tiledattn.transformers.register()

From then on ``attn_implementation="tiledattn"`` in ``from_pretrained``, ``from_config`` and
``set_attn_implementation`` lets a model's attention run here: causal, sliding-window and bidirectional attention,
padded batches, softcap and sinks. What a model needs beyond that is refused where it comes up, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from .torch import flash_attention


def register(name: str = "tiledattn", *, replace_sdpa: bool = False) -> None:
    """Make the library known to transformers.

    Parameters
    ----------
    name
        The ``attn_implementation`` to register.
    replace_sdpa
        Register it under ``"sdpa"`` too, for this process and every model that uses that name: the only way into
        continuous batching (``generate_batch``), which accepts no other name of a custom implementation.

    Examples
    --------
    >>> import tiledattn.transformers
    >>> tiledattn.transformers.register()
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    for registered in (name, "sdpa") if replace_sdpa else (name,):
        AttentionInterface.register(registered, attention)
        AttentionMaskInterface.register(registered, mask)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **_: Any,
) -> Tensor | None:
    """Tell `attention` which keys exist; transformers calls it once in each forward pass.

    Causal masks and windows are `attention`'s own arguments, so only padding and unused slots of a static cache remain.

    Parameters
    ----------
    batch_size, q_length, kv_length, q_offset, kv_offset
        Query token ``i`` is at position ``q_offset + i``, key ``j`` at ``kv_offset + j``.
    attention_mask
        ``[batch_size, positions]`` bool: False where a token is padding.
    local_size
        Size of a sliding window or a chunk.
    allow_is_causal_skip, allow_is_bidirectional_skip, use_vmap
        Whether transformers would let sdpa do without a mask: not where a model changes the usual pattern.
        ``allow_is_bidirectional_skip`` is None for causal masks.
    mask_function, device, config
        As transformers passes them.

    Returns
    -------
    None or Tensor
        ``[batch_size, W]`` bool: which of the first W keys exist; the others do not. None where all do. In a causal
        mask the last of the W is that of the last query token.

    Raises
    ------
    ValueError
        For a pattern that the library does not have.
    """
    causal = allow_is_bidirectional_skip is None
    # transformers also forbids the skip in single decoding steps over a static cache, where all keys are in the past
    # anyway; for sparse attention it does since the model adds to the mask.
    is_sparse = any("sparse" in kind for kind in getattr(config, "layer_types", None) or ())
    is_step = q_length == 1 and not is_sparse
    usual = (allow_is_causal_skip or is_step) if causal else allow_is_bidirectional_skip
    if use_vmap or not usual:
        _refuse(
            "mask_function",
            "a pattern of the model's own (packed sequences, blocks of image tokens or a custom function)",
            "a causal, sliding-window or bidirectional mask",
        )
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and local_size is not None and kv_offset + kv_length > local_size:
        _refuse("mask_function", f"chunks of {local_size} tokens", "a sliding window, or fewer tokens")

    padding = None if attention_mask is None else attention_mask.bool()
    if not causal:
        return padding if padding is not None and not _all(padding) else None
    if isinstance(q_offset, Tensor) and q_length == 1:
        # A static cache whose length is not known here. All keys up to the query's own exist; shapes stay the same.
        exists = (torch.arange(kv_length, device=device) + kv_offset <= q_offset).expand(batch_size, -1)
        if padding is not None:
            exists = exists & torch.nn.functional.pad(padding, (0, kv_length - padding.shape[1]))
        return exists
    total = int(q_offset) + q_length
    width = total - kv_offset
    if padding is None:
        whole = width == kv_length
        return None if whole else torch.ones(batch_size, width, dtype=torch.bool, device=device)
    if padding.shape[1] >= total:
        padding = padding[:, kv_offset:total]
    elif padding.shape[1] != width:  # generate() hands in what this function made before
        _refuse("attention_mask", f"{padding.shape[1]} positions", f"the {total} of cache and tokens")
    if width == kv_length and _all(padding):
        return None
    if local_size is not None and not torch.compiler.is_compiling() and _has_holes(padding):
        _refuse(
            "attention_mask",
            "padding between tokens, which a sliding window counts",
            "padding on the left or on the right alone",
        )
    return padding


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend for one layer of a model; transformers calls it.

    Parameters
    ----------
    module
        The attention layer; its ``is_causal`` counts where the argument is None.
    query, key, value
        ``[B, Hq, Sq, D]``, ``[B, Hk, Sk, D]`` and ``[B, Hk, Sk, Dv]``.
    attention_mask
        What `mask` gave.
    dropout
        0.
    scaling
        Factor of the scores; None means ``1 / sqrt(D)``.
    sliding_window
        Keys that a query sees on a side, its own included.
    softcap
        Scores become ``softcap * tanh(score / softcap)``; None switches it off.
    is_causal
        Whether a query sees only keys up to its own.
    s_aux
        ``[Hq]``: one extra logit for each query head, without a value (attention sinks).
    position_bias
        None.
    cu_seq_lens_q, cu_seq_lens_k
        ``[N + 1]``: where each of N sequences begins that are packed into a batch of one.

    Returns
    -------
    out, None
        ``[B, Sq, Hq, Dv]``; there are no attention weights. Rows of padding are 0.

    Raises
    ------
    ValueError
        For an argument that is not supported, by its name.
    """
    if dropout != 0:
        _refuse("dropout", str(dropout), "0: tiledattn computes the forward pass only")
    if position_bias is not None:
        _refuse("position_bias", type(position_bias).__name__, "None: tiledattn does not support it")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    side = None if sliding_window is None else sliding_window - 1
    options: dict[str, Any] = {
        "causal": causal,
        "softmax_scale": scaling,
        "window": (side, None if causal else side),
        "softcap": softcap or 0.0,
        "sinks": None if s_aux is None else s_aux.float(),
    }
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        # Positions follow from the lengths; whatever mask comes along says the same.
        options.update(
            causal=True, window=(side, None), cu_seqlens_q=cu_seq_lens_q, cu_seqlens_k=cu_seq_lens_k
        )
        return flash_attention(q[0], k[0], v[0], **options).unsqueeze(0), None
    if attention_mask is None:
        return flash_attention(q, k, v, **options), None
    if attention_mask.dim() != 2:
        _refuse("attention_mask", f"shape {list(attention_mask.shape)}", "[batch, positions]: padding alone")
    return _attend_to_existing(q, k, v, attention_mask, options), None


def _attend_to_existing(q: Tensor, k: Tensor, v: Tensor, exists: Tensor, options: dict[str, Any]) -> Tensor:
    """Attend to the keys that exist, without waiting for the device: packed, with what does not exist at the end."""
    width = exists.shape[1]
    order_k, cu_seqlens_k = _packing(exists)
    batch, q_len = q.shape[:2]
    # Query tokens that are padding are left out where positions count; a single one is never padding.
    if q_len > 1 and (options["causal"] or options["window"] != (None, None)):
        order_q, cu_seqlens_q = _packing(exists[:, width - q_len :])
    else:
        order_q = torch.arange(batch * q_len, device=q.device)
        cu_seqlens_q = q_len * torch.arange(batch + 1, device=q.device)
    out = flash_attention(
        q.flatten(0, 1)[order_q],
        k[:, :width].flatten(0, 1)[order_k],
        v[:, :width].flatten(0, 1)[order_k],
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=q_len,
        max_seqlen_k=width,
        **options,
    )
    unpacked = torch.empty_like(out).index_copy(0, order_q, out)
    return unpacked.unflatten(0, (batch, q_len))


def _packing(exists: Tensor) -> tuple[Tensor, Tensor]:
    """Find the order that puts existing tokens first, and where each sequence begins in it."""
    order = torch.argsort(exists.flatten().logical_not(), stable=True)
    lengths = exists.sum(dim=1, dtype=torch.int32)
    return order, torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _all(padding: Tensor) -> bool:
    """Tell whether nothing is padding; while tracing the answer is no, since it would depend on data."""
    return not torch.compiler.is_compiling() and bool(padding.all())


def _has_holes(padding: Tensor) -> bool:
    begins = padding[:, 0].int() + (padding[:, 1:] & ~padding[:, :-1]).sum(dim=1)
    return bool((begins > 1).any())


def _refuse(name: str, got: str, expected: str) -> NoReturn:
    raise ValueError(
        f"{name}: got {got}; expected {expected} (choose another attn_implementation, such as sdpa)"
    )
