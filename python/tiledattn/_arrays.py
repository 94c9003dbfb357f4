# SPDX-License-Identifier: Apache-2.0
"""Arrays in the caller's framework: what the compiled part calls to make results.

A framework is imported only where one of its own arrays came in, so importing it costs nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ._types import Array


def empty(framework: str, shape: tuple[int, ...], dtype: str, device: str) -> Array:
    """Make an uninitialised array in C order.

    Parameters
    ----------
    framework
        ``"numpy"``, ``"torch"`` or ``"cupy"``.
    shape, dtype, device
        As the framework names them: ``(4, 8)``, ``"bfloat16"``, ``"cuda:0"``.
    """
    if framework == "torch":
        import torch

        return torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    if framework == "cupy":
        import cupy

        with cupy.cuda.Device(int(device.removeprefix("cuda:"))):
            return cupy.empty(shape, numpy_dtype(dtype))
    return np.empty(shape, numpy_dtype(dtype))


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of this name; bfloat16 and float8_e4m3fn come from ml_dtypes."""
    if name not in ("bfloat16", "float8_e4m3fn"):
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise TypeError(
            f"out: a {name} NumPy array needs the package ml_dtypes (pip install ml_dtypes); or pass out="
        ) from None
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


def host_array(values: Any, name: str) -> np.ndarray[Any, Any]:
    """Give what is read on the host, such as block ids, as a NumPy array.

    Parameters
    ----------
    values
        An array of any library, or anything that can be iterated over.
    name
        What errors call it.

    Raises
    ------
    TypeError
        For a masked array.
    ValueError
        For what has no shape.
    """
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError(f"{name}: is a masked array, whose mask would be ignored; expected a plain array")
    is_list = isinstance(values, Iterable) and not hasattr(values, "__array__")
    try:
        return np.asarray(list(values) if is_list else values)
    except ValueError as error:  # lists in lists, of different lengths
        raise ValueError(f"{name}: {error}") from None


def to_jax(array: np.ndarray[Any, Any]) -> Array:
    """Turn a fresh NumPy array into a JAX array on the CPU."""
    import jax

    return jax.device_put(array, jax.devices("cpu")[0])


def scratch_pool_views(pool: Array) -> tuple[Array, Array]:
    """Split a scratch pool into the K and V pools that `TiledAttention.step_tile` and `paged_attention` take.

    Parameters
    ----------
    pool
        ``[num_slots, 2, Hk, P, D]``: for each slot K, then V, with heads before tokens.

    Returns
    -------
    k_pool, v_pool
        Two ``[num_slots, P, Hk, D]`` views of the same memory (JAX, which has no views, copies).

    Raises
    ------
    TypeError
        For anything but an array.
    ValueError
        When the pool does not have five dimensions, the second of size 2.

    Examples
    --------
    >>> import numpy as np, tiledattn as ta
    >>> pool = np.zeros((10, 2, 8, 16, 128), np.float16)
    >>> k_pool, v_pool = ta.scratch_pool_views(pool)
    >>> k_pool.shape, np.shares_memory(pool, v_pool)
    ((10, 16, 8, 128), True)
    """
    if not (hasattr(pool, "shape") and hasattr(pool, "swapaxes")):
        raise TypeError(f"pool: expected an array (NumPy, torch, CuPy or JAX), got {type(pool).__name__}")
    shape = list(pool.shape)
    if len(shape) != 5 or shape[1] != 2:
        raise ValueError(
            f"pool: got shape {shape}; expected [num_slots, 2, num_kv_heads, block_size, head_dim]"
        )
    return pool[:, 0].swapaxes(1, 2), pool[:, 1].swapaxes(1, 2)
