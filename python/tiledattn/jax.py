# SPDX-License-Identifier: Apache-2.0
"""The library inside JAX: functions for `jax.jit`, `jax.vmap` and `jax.shard_map`, on the CPU and on GPUs.

They take the arguments of the functions of the same name in `tiledattn`, run as custom calls of XLA on its own stream
and return new arrays. Numbers and flags are Python values, fixed when a function is traced. Forward only: JAX refuses
to differentiate them. What is wrong with the arrays is found when the call runs and raised by JAX as its own error,
with the library's text. NumPy arrays may be given too; 64-bit ones only with ``jax_enable_x64``, or where they hold
integers of 32 bits. Those given to a function that `jax.jit` made JAX changes by itself, before this module sees them.

Importing this module imports JAX, 0.6 or later.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from . import _core
from ._types import Window

__all__ = ["flash_attention", "merge_attention", "paged_attention", "write_kv"]


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
    return_lse: bool = False,
) -> Any:
    """Attend to dense or packed keys and values; see `tiledattn.flash_attention` for the arguments.

    Parameters
    ----------
    q, k, v
        ``[B, Sq, Hq, D]``, ``[B, Sk, Hk, D]`` and ``[B, Sk, Hk, Dv]`` (``layout="bhsd"``: heads before sequence;
        packed: ``[total, H, D]`` with both ``cu_seqlens``), bfloat16, float16 or float32.
    causal, softmax_scale, window, softcap, sinks, layout
        As there.
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        As there.
    return_lse
        Return the log-sum-exp too, ``out.shape[:-1]`` float32.

    Returns
    -------
    out or (out, lse)
        ``q.shape[:-1] + (Dv,)`` of the type of q.

    Raises
    ------
    TypeError
        For an argument that is no array, and a number or flag that is none.
    ValueError
        For an array with a wrong number of dimensions, an unknown layout, or numbers that JAX does not keep.
    jax.errors.JaxRuntimeError or ValueError
        For all else, when the call runs: JAX chooses.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import tiledattn.jax
    >>> q = jnp.ones((1, 3, 4, 8))
    >>> k = v = jnp.ones((1, 5, 2, 8))
    >>> jax.jit(tiledattn.jax.flash_attention)(q, k, v).shape
    (1, 3, 4, 8)
    """
    if layout not in ("bshd", "bhsd"):
        raise ValueError(f'layout: got "{layout}"; expected "bshd" or "bhsd"')
    rank = 4 if cu_seqlens_q is None else 3
    operands = {
        "q": (q, rank),
        "k": (k, rank),
        "v": (v, rank),
        "sinks": (sinks, 1),
        "cu_seqlens_q": (cu_seqlens_q, 1),
        "cu_seqlens_k": (cu_seqlens_k, 1),
    }
    options = {
        **_score_options(causal, softmax_scale, window, softcap),
        "heads_first": np.bool_(layout == "bhsd"),
        "max_seqlen_q": _integer(max_seqlen_q, "max_seqlen_q"),
        "max_seqlen_k": _integer(max_seqlen_k, "max_seqlen_k"),
    }
    return_lse = _core.flag(return_lse, "return_lse")
    out, lse = _call("flash_attention", operands, v, options)
    return (out, lse) if return_lse else out


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
    return_lse: bool = False,
) -> Any:
    """Attend to a paged KV cache; see `tiledattn.paged_attention` for the arguments.

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
    return_lse
        Return the log-sum-exp too, ``out.shape[:-1]`` float32.

    Returns
    -------
    out or (out, lse)
        ``q.shape[:-1] + (Dv,)`` of the type of q.

    Raises
    ------
    TypeError
        For an argument that is no array, and a number or flag that is none.
    ValueError
        For an array with a wrong number of dimensions, or numbers that JAX does not keep.
    jax.errors.JaxRuntimeError or ValueError
        For all else, when the call runs: JAX chooses. On a GPU wrong block ids and lengths make the result of their
        sequence NaN, and the next call raises them.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import tiledattn.jax
    >>> pool = jnp.ones((3, 16, 2, 8))
    >>> table, lens = jnp.array([[2, 0]]), jnp.array([20])
    >>> tiledattn.jax.paged_attention(jnp.ones((1, 4, 8)), pool, pool, table, lens).shape
    (1, 4, 8)
    """
    rank = 4 if cu_seqlens_q is None and getattr(q, "ndim", 0) == 4 else 3
    operands = {
        "q": (q, rank),
        "k_pool": (k_pool, 4),
        "v_pool": (v_pool, 4),
        "block_table": (block_table, 2),
        "seq_lens": (seq_lens, 1),
        "sinks": (sinks, 1),
        "k_scale": _scale("k_scale", k_scale),
        "v_scale": _scale("v_scale", v_scale),
        "cu_seqlens_q": (cu_seqlens_q, 1),
    }
    options = {
        **_score_options(causal, softmax_scale, window, softcap),
        "max_seqlen_q": _integer(max_seqlen_q, "max_seqlen_q"),
    }
    return_lse = _core.flag(return_lse, "return_lse")
    out, lse = _call("paged_attention", operands, v_pool, options)
    return (out, lse) if return_lse else out


def merge_attention(
    out_a: Array, lse_a: Array, out_b: Array, lse_b: Array, *, lse_base: float = math.e
) -> tuple[Array, Array]:
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
    TypeError
        For an argument that is no array, and a number or flag that is none.
    ValueError
        For an array with a wrong number of dimensions, or numbers that JAX does not keep.
    jax.errors.JaxRuntimeError or ValueError
        For all else, when the call runs: JAX chooses.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import tiledattn.jax
    >>> ones, zeros = jnp.ones((2, 8)), jnp.zeros(2)
    >>> out, lse = tiledattn.jax.merge_attention(ones, zeros, 3 * ones, zeros)
    >>> float(out[0, 0]), round(float(lse[0]), 4)
    (2.0, 0.6931)
    """
    rank = getattr(out_a, "ndim", 0)
    operands = {
        "out_a": (out_a, rank),
        "lse_a": (lse_a, rank - 1),
        "out_b": (out_b, rank),
        "lse_b": (lse_b, rank - 1),
    }
    return _call(
        "merge_attention", operands, out_a, {"lse_base": np.float64(_core.number(lse_base, "lse_base"))}
    )


def write_kv(
    k: Array,
    v: Array,
    k_pool: Array,
    v_pool: Array,
    slot_mapping: Array,
    *,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
) -> tuple[Array, Array]:
    """Write the keys and values of tokens into a paged KV cache; see `tiledattn.write_kv`.

    JAX arrays do not change, so the written pools are results. Inside a function compiled with ``donate_argnums`` for
    the pools they keep their memory and only the tokens are written; otherwise XLA copies the pools first.

    Parameters
    ----------
    k, v
        ``[T, Hk, D]`` and ``[T, Hk, Dv]``.
    k_pool, v_pool
        ``[num_blocks, P, Hk, D]`` and ``[num_blocks, P, Hk, Dv]`` of the types of k and v, or both float8_e4m3fn or
        int8.
    slot_mapping
        ``[T]``, int32 or int64: ``block * P + position``; negative: the token is skipped.
    k_scale, v_scale
        As there.

    Returns
    -------
    k_pool, v_pool
        With the tokens in their slots.

    Raises
    ------
    TypeError
        For an argument that is no array, and a number or flag that is none.
    ValueError
        For an array with a wrong number of dimensions, or numbers that JAX does not keep.
    jax.errors.JaxRuntimeError or ValueError
        For all else, when the call runs: JAX chooses. On a GPU a wrong slot is skipped, and the next call raises it.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import tiledattn.jax
    >>> pool, token = jnp.zeros((3, 16, 2, 8)), jnp.ones((1, 2, 8))
    >>> write = jax.jit(tiledattn.jax.write_kv, donate_argnums=(2, 3))
    >>> k_pool, v_pool = write(token, token, pool, pool.copy(), jnp.array([33]))
    >>> float(k_pool.sum()), float(k_pool[2, 1].sum())
    (16.0, 16.0)
    """
    operands: dict[str, tuple[Array | None, int]] = {
        "k": (k, 3),
        "v": (v, 3),
        "k_pool": (k_pool, 4),
        "v_pool": (v_pool, 4),
        "slot_mapping": (slot_mapping, 1),
        "k_scale": _scale("k_scale", k_scale),
        "v_scale": _scale("v_scale", v_scale),
    }
    arrays, names = _given(operands)
    _register()
    k_pool, v_pool = _write(*arrays, operands=names)
    return k_pool, v_pool


def _call(
    operation: str, operands: dict[str, tuple[Array | None, int]], v: Array, options: dict[str, Any]
) -> tuple[Array, Array]:
    """Run a handler; the first operand is the one whose shape and type the results have, but for the last of v."""
    arrays, names = _given(operands)
    _register()
    out, lse = _run(
        *arrays,
        operation=operation,
        operands=names,
        head_dim_v=v.shape[-1],
        options=tuple((name, value) for name, value in options.items() if value is not None),
    )
    return out, lse


_OPTIONAL = {"sinks", "cu_seqlens_q", "cu_seqlens_k", "k_scale", "v_scale"}


def _given(operands: dict[str, tuple[Array | None, int]]) -> tuple[list[Array], str]:
    """Return the arrays that are not None, and their names with their numbers of dimensions: "q:4 k:4"."""
    given: list[tuple[str, Any, int]] = [
        (name, array, rank)
        for name, (array, rank) in operands.items()
        if array is not None or name not in _OPTIONAL
    ]
    for name, array, rank in given:
        if not hasattr(array, "ndim"):
            raise TypeError(f"{name}: expected a JAX array, got {type(array).__name__}")
        if array.ndim != rank:
            raise ValueError(f"{name}: got shape {list(array.shape)}; expected {rank} dimensions")
        _check_is_kept(name, array)
    return [array for _, array, _ in given], " ".join(f"{name}:{rank}" for name, _, rank in given)


def _check_is_kept(name: str, array: Any) -> None:
    """Refuse what JAX would change unasked: from NumPy it takes 64-bit numbers as 32-bit ones, if need be others."""
    if not isinstance(array, np.ndarray | np.generic):
        return
    if not array.dtype.isnative:  # JAX reads the bytes as they lie
        raise TypeError(f"{name}: dtype is {array.dtype.str}; expected the byte order of this machine")
    if array.dtype.itemsize < 8:
        return
    kept = jax.dtypes.canonicalize_dtype(array.dtype)
    if kept == array.dtype:  # jax_enable_x64
        return
    if kept.kind not in "iu":
        raise TypeError(
            f"{name}: got {array.dtype}, which JAX would make {kept}; expected {kept} or a narrower type"
        )
    limits = np.iinfo(kept)
    for number in (array.min(), array.max()) if array.size else ():
        if not limits.min <= number <= limits.max:
            raise ValueError(
                f"{name}: got {number}, which JAX would make another number as {kept}; expected {limits.min} to "
                f"{limits.max}, or jax_enable_x64"
            )


# Compiled also where the caller does not: an eager call would trace the handler anew each time.
@functools.partial(jax.jit, static_argnames=("operation", "operands", "head_dim_v", "options"), inline=True)
def _run(
    q: Array,
    *others: Array,
    operation: str,
    operands: str,
    head_dim_v: int,
    options: tuple[tuple[str, Any], ...],
) -> Any:
    results = (
        jax.ShapeDtypeStruct((*q.shape[:-1], head_dim_v), q.dtype),
        jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32),
    )
    call = jax.ffi.ffi_call(f"tiledattn_{operation}", results, vmap_method="expand_dims")
    return call(q, *others, operands=operands, results=f"out:{q.ndim} lse:{q.ndim - 1}", **dict(options))


@functools.partial(jax.jit, static_argnames=("operands",), inline=True)
def _write(k: Array, v: Array, k_pool: Array, v_pool: Array, *others: Array, operands: str) -> Any:
    results = tuple(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in (k_pool, v_pool))
    # vmap makes one pool of each problem, also of one that they share: each gets its own written copy.
    call = jax.ffi.ffi_call(
        "tiledattn_write_kv", results, vmap_method="broadcast_all", input_output_aliases={2: 0, 3: 1}
    )
    return call(k, v, k_pool, v_pool, *others, operands=operands, results="k_pool:4 v_pool:4")


@functools.cache
def _register() -> None:
    """Hand the handlers to XLA, once: at first use, since XLA looks at them when its backends start."""
    for operation, by_platform in _core.jax_handlers().items():
        for platform, handler in by_platform.items():
            jax.ffi.register_ffi_target(f"tiledattn_{operation}", handler, platform=platform)


def _score_options(
    causal: bool, softmax_scale: float | None, window: Window, softcap: float
) -> dict[str, Any]:
    left, right = _core.window(window)
    scale = None if softmax_scale is None else np.float64(_core.number(softmax_scale, "softmax_scale"))
    return {
        "causal": np.bool_(_core.flag(causal, "causal")),
        "softmax_scale": scale,
        "window_left": _integer(left, "window"),
        "window_right": _integer(right, "window"),
        "softcap": np.float64(_core.number(softcap, "softcap")),
    }


def _scale(name: str, scale: Array | float | None) -> tuple[Array | None, int]:
    """Make an operand of a scale, with as many dimensions as it has."""
    if isinstance(scale, int | float | np.number) and not isinstance(scale, bool):
        limits = np.finfo(np.float32)
        if not float(limits.smallest_subnormal) <= scale <= float(limits.max):
            raise ValueError(f"{name}: got {scale}; expected a finite float32 number > 0")
        scale = jnp.float32(scale)
    return scale, getattr(scale, "ndim", 0)


def _integer(value: int | None, name: str) -> np.int64 | None:
    return None if value is None else np.int64(_core.integer(value, name))
