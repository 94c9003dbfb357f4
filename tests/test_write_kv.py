# SPDX-License-Identifier: Apache-2.0
"""write_kv: tokens into the slots of a paged cache, and nothing else."""

from __future__ import annotations

import cases
import compare
import numpy as np
import pytest
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
