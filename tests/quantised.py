# SPDX-License-Identifier: Apache-2.0
"""Quantised KV for the tests: stored pools, their scales in every shape, and what they stand for."""

from __future__ import annotations

from typing import NamedTuple

import calls
import ml_dtypes
import numpy as np
import reference

KV_DTYPES = ("float8_e4m3fn", "int8")
STORED = {"float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn), "int8": np.dtype(np.int8)}
LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}
# The shapes that a scale may have; "one" is a 0-d array.
SCALES = ("number", "one", "head", "block", "slot")


class Quantised(NamedTuple):
    """``data`` is a cases.PagedArrays with stored pools; ``real`` the same with what they stand for, float64."""

    data: object
    real: object
    scales: dict

    def run(self, device, **kwargs):
        return calls.run_paged(device, self.data, **self.scales, **kwargs)

    def want(self, **kwargs):
        return calls.want_paged(self.real, **kwargs)


def stored_values(rng, shape, kv_dtype):
    """Elements over most of the range of the type."""
    if kv_dtype == "int8":
        return rng.integers(-127, 128, shape).astype(np.int8)
    return (rng.standard_normal(shape) * 30).astype(STORED[kv_dtype])


def make_scale(rng, pool, shape):
    """A scale of one of SCALES for a pool [num_blocks, P, Hk, D], so that values are around 1."""
    size = {"number": (), "one": (), "head": (2,), "block": (0, 2), "slot": (0, 1, 2)}[shape]
    usual = 1 / 70 if pool.dtype == np.int8 else 1 / 30
    scale = (usual * rng.uniform(0.5, 1.5, [pool.shape[axis] for axis in size])).astype(np.float32)
    return float(scale) if shape == "number" else scale


def spread(scale):
    """A scale in the shape [num_blocks or 1, P or 1, Hk or 1, 1]."""
    scale = np.asarray(scale, np.float32)
    where = {0: (), 1: (2,), 2: (0, 2), 3: (0, 1, 2)}[scale.ndim]
    shape = [1, 1, 1, 1]
    for size, axis in zip(scale.shape, where, strict=True):
        shape[axis] = size
    return scale.reshape(shape)


def dequantise(pool, scale):
    return pool.astype(np.float64) * spread(scale).astype(np.float64)


def quantise(values, scale, kv_dtype):
    """What write_kv stores of values [..., Hk, D], with a scale that broadcasts against them."""
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = values.astype(np.float32) / np.asarray(scale, np.float32)
    if kv_dtype == "int8":
        return np.clip(np.rint(np.nan_to_num(quotient, nan=0.0)), -127, 127).astype(np.int8)
    return np.clip(quotient, -448, 448).astype(STORED[kv_dtype])


def make(case, dtype, kv_dtype, k_shape="head", v_shape=None, seed=0):
    """A cases.Paged over a quantised cache. What is never to be seen is NaN, or has a scale of NaN."""
    data = case.make(dtype, seed)
    rng = np.random.default_rng(seed + 1)
    used = np.zeros(data.k_pool.shape[:2], bool)
    for b, length in enumerate(data.seq_lens):
        for position in range(length):
            used[data.block_table[b, position // used.shape[1]], position % used.shape[1]] = True
    pools, scales = [], []
    for pool, shape in ((data.k_pool, k_shape), (data.v_pool, v_shape or k_shape)):
        stored = stored_values(rng, pool.shape, kv_dtype)
        if pool is data.v_pool and pool.shape[-1] < 16:
            stored = np.abs(stored)  # as cases.random_values
        stored.view(np.uint8)[~used] = 0x7F
        scale = make_scale(rng, stored, shape)
        if shape == "slot":
            scale[~used] = np.nan
        if shape == "block":
            scale[~used.any(axis=1)] = np.nan
        pools.append(stored)
        scales.append(scale)
    with np.errstate(invalid="ignore"):
        real = [dequantise(pool, scale) for pool, scale in zip(pools, scales, strict=True)]
    return Quantised(
        data._replace(k_pool=pools[0], v_pool=pools[1]),
        data._replace(k_pool=real[0], v_pool=real[1]),
        {"k_scale": scales[0], "v_scale": scales[1]},
    )


def run_tiled(device, tiled, dtype, kv_dtype, shape):
    """A cases.Tiled over a quantised cache: (out, lse) and what they should be."""
    made = make(tiled.paged, dtype, kv_dtype, shape)
    data = tiled.make(dtype)
    attn = calls.make_attention(device, data)
    judge = reference.Tiled(**data.options)
    attn.begin_step(len(made.data.q))
    for tile in data.tiles:
        kwargs = data.step_kwargs(tile)
        device.call(attn.step_tile, *made.data[:3], tile.blocks, tile.counts, **kwargs, **made.scales)
        judge.step_tile(*made.real[:3], tile.blocks, tile.counts, **kwargs)
    return device.call(attn.finalize, return_lse=True), judge.finalize()
