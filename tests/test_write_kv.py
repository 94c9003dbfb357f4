# SPDX-License-Identifier: Apache-2.0
"""write_kv: tokens into the slots of a paged cache, and nothing else."""

from __future__ import annotations

import cases
import compare
import numpy as np
import pytest
import quantised
import tiledattn as ta


def _make(dtype, tokens=9, seed=0, head_dim=24, head_dim_v=40):
    rng = np.random.default_rng(seed)
    k, v = (cases.random(rng, (tokens, 2, d), dtype) for d in (head_dim, head_dim_v))
    pools = [np.full((6, 8, 2, d), np.nan, cases.NP_DTYPE[dtype]) for d in (head_dim, head_dim_v)]
    slots = rng.permutation(48)[:tokens]
    slots[::4] = -1
    return k, v, *pools, slots


def _want(k, v, k_pool, v_pool, slots):
    k_pool, v_pool = k_pool.copy(), v_pool.copy()
    for token, slot in enumerate(slots):
        if slot >= 0:
            k_pool[slot // 8, slot % 8] = k[token]
            v_pool[slot // 8, slot % 8] = v[token]
    return k_pool, v_pool


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_writes_the_named_slots_alone(index_dtype, device, dtype):
    k, v, k_pool, v_pool, slots = _make(dtype)
    want = _want(k, v, k_pool, v_pool, slots)
    pools = device.array(k_pool.copy()), device.array(v_pool.copy())
    device.call(ta.write_kv, k, v, *pools, slots.astype(index_dtype))
    compare.same_bits(tuple(map(device.numpy, pools)), want)


def test_frameworks(carrier):
    if carrier.name == "jax":
        k, v, k_pool, v_pool, slots = map(carrier.array, _make("float32"))
        with pytest.raises((TypeError, ValueError), match="k_pool"):
            ta.write_kv(k, v, k_pool, v_pool, slots)
        return
    k, v, k_pool, v_pool, slots = _make("float16")
    want = _want(k, v, k_pool, v_pool, slots)
    pools = carrier.array(k_pool.copy()), carrier.array(v_pool.copy())
    carrier.call(ta.write_kv, k, v, *pools, slots)
    compare.same_bits(tuple(map(carrier.numpy, pools)), want)


def test_strided_sources_and_pools(device, dtype):
    k, v, k_pool, v_pool, slots = _make(dtype, head_dim=32, head_dim_v=32)
    qkv = device.array(np.concatenate([k, v], axis=1))
    both = device.array(np.stack([k_pool, v_pool], axis=1).swapaxes(2, 3).copy())
    views = ta.scratch_pool_views(both)
    ta.write_kv(qkv[:, :2], qkv[:, 2:], *views, device.array(slots))
    want = np.stack(_want(k, v, k_pool, v_pool, slots), axis=1).swapaxes(2, 3)
    compare.same_bits(device.numpy(both), want)


def test_no_tokens(device):
    k, v, k_pool, v_pool, slots = _make("float32", tokens=0)
    pools = device.array(k_pool.copy()), device.array(v_pool.copy())
    device.call(ta.write_kv, k, v, *pools, slots)
    compare.same_bits(tuple(map(device.numpy, pools)), (k_pool, v_pool))


@pytest.mark.parametrize("bad", [48, 10**9])
def test_slot_outside_the_pool_on_the_cpu(bad, cpu):
    k, v, k_pool, v_pool, slots = _make("float32")
    slots[3] = bad
    before = k_pool.copy(), v_pool.copy()
    with pytest.raises(IndexError, match=rf"slot_mapping.*3.*{bad}|slot_mapping.*{bad}.*3"):
        ta.write_kv(k, v, k_pool, v_pool, slots)
    compare.same_bits((k_pool, v_pool), before)


@pytest.mark.gpu
def test_slot_outside_the_pool_on_the_gpu(gpu):
    k, v, k_pool, v_pool, slots = _make("float32")
    want = _want(k, v, k_pool, v_pool, np.where(np.arange(9) == 3, -1, slots))
    slots[3] = 48
    pools = gpu.array(k_pool.copy()), gpu.array(v_pool.copy())
    gpu.call(ta.write_kv, k, v, *pools, slots)
    with pytest.raises(IndexError, match="slot_mapping"):
        ta.check(gpu.device)
    ta.check(gpu.device)
    compare.same_bits(tuple(map(gpu.numpy, pools)), want)


def test_errors_name_the_argument(cpu):
    k, v, k_pool, v_pool, slots = _make("float32")
    for bad, error, name in [
        ((k[:, :1], v, k_pool, v_pool, slots), ValueError, "k"),
        ((k, v[..., :3], k_pool, v_pool, slots), ValueError, "v"),
        ((k, v, k_pool, v_pool[:3], slots), ValueError, "v_pool"),
        ((k, v, k_pool, v_pool, slots[:-1]), ValueError, "slot_mapping"),
        ((k, v, k_pool, v_pool, slots.astype(np.float32)), TypeError, "slot_mapping"),
        ((k.astype(np.float16), v, k_pool, v_pool, slots), TypeError, "k"),
    ]:
        with pytest.raises(error, match=name):
            ta.write_kv(*bad)
    frozen = k_pool.copy()
    frozen.flags.writeable = False
    with pytest.raises((TypeError, ValueError), match=r"k_pool.*read-only|k_pool.*writ"):
        ta.write_kv(k, v, frozen, v_pool, slots)


# Quantised pools.


def _quantised(dtype, kv_dtype, shape):
    k, v, _, _, slots = _make(dtype)
    rng = np.random.default_rng(1)
    pools = [quantised.stored_values(rng, (6, 8, 2, x.shape[-1]), kv_dtype) for x in (k, v)]
    scales = [quantised.make_scale(rng, pool, shape) for pool in pools]
    want = [pool.copy() for pool in pools]
    for x, pool, scale in zip((k, v), want, scales, strict=True):
        each = np.broadcast_to(quantised.spread(scale), (6, 8, 2, 1))
        for token, slot in enumerate(slots):
            if slot >= 0:
                at = slot // 8, slot % 8
                pool[at] = quantised.quantise(x[token], each[at], kv_dtype)
    return (k, v, *pools, slots), scales, want


@pytest.mark.parametrize("shape", quantised.SCALES)
@pytest.mark.parametrize("kv_dtype", quantised.KV_DTYPES)
def test_quantises(kv_dtype, shape, device, dtype):
    (k, v, k_pool, v_pool, slots), (k_scale, v_scale), want = _quantised(dtype, kv_dtype, shape)
    pools = device.array(k_pool.copy()), device.array(v_pool.copy())
    device.call(ta.write_kv, k, v, *pools, slots, k_scale=k_scale, v_scale=v_scale)
    compare.same_bits(tuple(map(device.numpy, pools)), tuple(want))


@pytest.mark.parametrize("kv_dtype", quantised.KV_DTYPES)
def test_what_is_written_is_what_attention_reads(kv_dtype, device):
    """Every code that write_kv makes, times the scale, is the value again."""
    codes = np.arange(256, dtype=np.uint8).view(quantised.STORED[kv_dtype])
    if kv_dtype == "int8":
        codes[128] = 0  # -128 is read, but never written
    values = (codes.astype(np.float32) * np.float32(0.75)).reshape(1, 1, 256)
    pools = [device.array(np.zeros((1, 1, 1, 256), codes.dtype)) for _ in range(2)]
    slots = np.zeros(1, np.int32)
    device.call(ta.write_kv, values, values, *pools, slots, k_scale=0.75, v_scale=0.75)
    for pool in pools:
        stored = device.numpy(pool).reshape(-1)
        nan = np.isnan(codes.astype(np.float32))
        compare.same_bits(stored[~nan], codes[~nan])
        assert np.isnan(stored[nan].astype(np.float32)).all()


def _special_values(kv_dtype):
    """Values beyond the range, between two codes, at ties, below the smallest code, and those that are no numbers."""
    codes = np.arange(255, dtype=np.uint8).view(quantised.STORED[kv_dtype]).astype(np.float32)
    codes = np.unique(codes[np.isfinite(codes)])
    ties = (codes[1:] + codes[:-1]) / 2
    below, above = np.nextafter(ties, np.float32(-np.inf)), np.nextafter(ties, np.float32(np.inf))
    largest = quantised.LARGEST[kv_dtype]
    outside = [largest * 1.02, largest * 1.07, 1e30, 3e38, np.inf, np.nan, 1e-30, 1e-45, 0.0]
    outside = np.array([*outside, *(-x for x in outside)], np.float32)
    return np.concatenate([codes, ties, below, above, outside]).astype(np.float32)


@pytest.mark.parametrize("kv_dtype", quantised.KV_DTYPES)
def test_rounding_saturation_and_nan(kv_dtype, device):
    values = _special_values(kv_dtype).reshape(1, 1, -1)
    want = quantised.quantise(values, 1.0, kv_dtype)
    assert (
        np.abs(want.astype(np.float32))[~np.isnan(want.astype(np.float32))].max()
        == quantised.LARGEST[kv_dtype]
    )
    pools = [device.array(np.zeros((1, 1, 1, values.size), want.dtype)) for _ in range(2)]
    device.call(ta.write_kv, values, values, *pools, np.zeros(1, np.int32), k_scale=1.0, v_scale=1.0)
    for pool in pools:
        got = device.numpy(pool).reshape(-1).astype(np.float32)
        np.testing.assert_array_equal(got, want.reshape(-1).astype(np.float32))
        if kv_dtype == "int8":
            assert (got[np.isnan(values).reshape(-1)] == 0).all()
        else:
            assert np.isnan(got[np.isnan(values).reshape(-1)]).all()


@pytest.mark.parametrize("kv_dtype", quantised.KV_DTYPES)
def test_a_scale_of_zero_stores_zeros(kv_dtype, device):
    """What a caller who scales by the largest value of a head gets for a head of zeros."""
    k = np.array([[[0.0, -3.0, 1.0, 0.0]], [[0.0, 1.0, 2.0, 3.0]]], np.float32)
    pools = [device.array(np.ones((1, 2, 1, 4), quantised.STORED[kv_dtype])) for _ in range(2)]
    scale = np.array([[[0.0], [1.0]]], np.float32)
    device.call(ta.write_kv, k, k, *pools, np.array([0, 1]), k_scale=scale, v_scale=scale)
    for pool in pools:
        np.testing.assert_array_equal(device.numpy(pool)[0, :, 0].astype(np.float32), [[0] * 4, [0, 1, 2, 3]])


@pytest.mark.parametrize("kv_dtype", quantised.KV_DTYPES)
def test_quantises_into_a_scratch_pool(kv_dtype, device):
    (k, v, k_pool, v_pool, slots), (k_scale, v_scale), want = _quantised("bfloat16", kv_dtype, "slot")
    k_pool, want[0] = k_pool[..., :24], want[0][..., :24]
    v, v_pool, want[1] = v[..., :24], v_pool[..., :24], want[1][..., :24]
    both = device.array(np.stack([k_pool, v_pool], axis=1).swapaxes(2, 3).copy())
    views = ta.scratch_pool_views(both)
    arrays = [device.array(np.ascontiguousarray(x)) for x in (k, v)]
    scales = {"k_scale": device.array(k_scale), "v_scale": device.array(v_scale)}
    ta.write_kv(*arrays, *views, device.array(slots), **scales)
    compare.same_bits(device.numpy(both), np.stack(want, axis=1).swapaxes(2, 3))


def test_quantising_errors(device):
    k, v, k_pool, v_pool, slots = _make("float32")
    int8 = [np.zeros(pool.shape, np.int8) for pool in (k_pool, v_pool)]
    ones = {"k_scale": 1.0, "v_scale": 1.0}
    for args, scales, error, words in [
        ((k, v, *int8, slots), {}, ValueError, "k_scale.*None.*int8"),
        ((k, v, *int8, slots), {"k_scale": 1.0}, ValueError, "v_scale.*None.*int8"),
        ((k, v, k_pool, v_pool, slots), ones, ValueError, "k_scale.*float32.*None"),
        ((k, v, int8[0], v_pool, slots), ones, TypeError, "v_pool.*float32.*int8"),
        ((k, v, *int8, slots), {**ones, "v_scale": np.ones(3, np.float32)}, ValueError, r"v_scale.*\[3\]"),
        ((k.astype(np.int8), v, *int8, slots), ones, TypeError, "k: .*int8"),
    ]:
        before = [pool.copy() for pool in args[2:4]]
        with pytest.raises(error, match=words):
            device.call(ta.write_kv, *args, **scales)
        compare.same_bits(tuple(args[2:4]), tuple(before))
