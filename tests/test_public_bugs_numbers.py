# SPDX-License-Identifier: Apache-2.0
"""Public bug reports about range, scale and logarithms, each with the right value."""

from __future__ import annotations

import math

import calls
import cases
import compare
import numpy as np
import pytest
import reference
import tiledattn as ta


def _as_pages(qkv, block_size=16):
    """Dense q with one query token, k, v of one sequence as the arguments of paged_attention."""
    q, k, v = qkv
    length = k.shape[1]
    blocks = -(-length // block_size)
    pools = [np.pad(x[0], ((0, blocks * block_size - length), (0, 0), (0, 0))) for x in (k, v)]
    pools = [pool.reshape(blocks, block_size, *pool.shape[1:]) for pool in pools]
    return q[:, 0], *pools, np.arange(blocks, dtype=np.int32)[None], np.array([length], np.int32)


def _all_ways(device, qkv, **kwargs):
    """(out, lse) of one query token by flash_attention, paged_attention and one tile: [1, 1, Hq, ...]."""
    yield calls.run_flash(device, qkv, **kwargs)
    q, k_pool, v_pool, table, lens = _as_pages(qkv)
    got = device.call(ta.paged_attention, q, k_pool, v_pool, table, lens, return_lse=True, **kwargs)
    yield tuple(x[:, None] for x in got)
    dims = ta.TiledAttentionDims(
        max_seqs=1,
        num_q_heads=q.shape[1],
        num_kv_heads=k_pool.shape[2],
        head_dim=q.shape[2],
        head_dim_v=v_pool.shape[3],
        block_size=16,
        tile_capacity=table.shape[1],
    )
    attn = ta.TiledAttention(dims, device=device.device, **kwargs)
    attn.begin_step(1)
    counts, valid = np.array([table.shape[1]], np.int32), (lens - 1) % 16 + 1
    device.call(attn.step_tile, q, k_pool, v_pool, table, counts, last_block_valid_slots=valid)
    yield tuple(x[:, None] for x in device.call(attn.finalize, return_lse=True))


def test_h19_very_low_scores(device, dtype):
    """flashinfer-ai/flashinfer#4267, #4450: all scores near -7e4; the row is V of the best key, not zero."""
    to = cases.NP_DTYPE[dtype]
    q = np.ones((1, 1, 1, 128), to)
    k = np.full((1, 64, 1, 128), -70000 / 128).astype(to)
    k[0, 0] = -65000 / 128
    v = cases.random(np.random.default_rng(0), (1, 64, 1, 128), dtype)
    top = float(k[0, 0, 0].astype(np.float64).sum())
    for out, lse in _all_ways(device, (q, k, v), softmax_scale=1.0):
        assert (out[0, 0, 0] == v[0, 0, 0]).all()
        assert lse.item() == pytest.approx(top, rel=1e-5)


@pytest.mark.parametrize("score", [1000.0, 3000.0, 4400.0, 5000.0, 10000.0, -1000.0, -10000.0])
def test_h20_softcap_of_large_scores(score, device, dtype):
    """vllm-project/vllm#56578: cap * tanh(x / cap) without overflow."""
    to = cases.NP_DTYPE[dtype]
    q, k = np.zeros((1, 1, 1, 16), to), np.zeros((1, 2, 1, 16), to)
    q[..., 0], k[0, 0, 0, 0] = 1, score
    v = cases.random(np.random.default_rng(0), (1, 2, 1, 16), dtype)
    want = reference.flash(q, k, v, softmax_scale=1.0, softcap=50.0)
    assert want.lse.item() == pytest.approx(50.0 if score > 0 else 0.0, abs=1e-6)
    for got in _all_ways(device, (q, k, v), softmax_scale=1.0, softcap=50.0):
        compare.result_close(got, want, dtype)


def test_h21_softcap_comes_before_the_mask(device, dtype):
    """Future keys have no weight at all.

    Dao-AILab/flash-attention#1025, onnx/onnx#7865, emmtrix/emx-onnx-cgen#731.
    """
    (q, k, v), _ = cases.Flash("", q_len=8, kv_len=8).make(dtype)
    for row in range(8):
        spiked = v.copy()
        spiked[:, row + 1 :] = 1e4
        got = calls.run_flash(device, (q, k, spiked), causal=True, softcap=1.0)
        plain = calls.run_flash(device, (q, k, v), causal=True, softcap=1.0)
        compare.same_bits(got[0][:, : row + 1], plain[0][:, : row + 1])
    compare.result_close(plain, reference.flash(q, k, v, causal=True, softcap=1.0), dtype)


@pytest.mark.parametrize("num_keys", [1, 3])
def test_h22_one_rounding_of_a_large_product(num_keys, device):
    """ROCm/aotriton#54: scores of 4e9 that are equal have equal weight."""
    to = cases.NP_DTYPE["bfloat16"]
    q, k = np.zeros((1, 1, 1, 64), to), np.zeros((1, num_keys, 1, 64), to)
    q[..., 5] = k[..., 5] = 133120
    assert float(q[0, 0, 0, 5]) == 133120
    v = cases.random(np.random.default_rng(0), (1, num_keys, 1, 64), "bfloat16")
    want = v.astype(np.float64).mean(axis=1, keepdims=True)
    for out, lse in _all_ways(device, (q, k, v), softmax_scale=0.25):
        compare.out_close(out, want, "bfloat16")
        assert lse.item() == pytest.approx(133120.0**2 / 4, rel=1e-6)


def test_h23_sums_beyond_half_precision(device):
    """llama.cpp#17746, #17875, #18614: 2048 equal keys with V = 64 in fp16 give exactly 64."""
    q, k = np.zeros((1, 1, 2, 64), np.float16), np.ones((1, 2048, 1, 64), np.float16)
    v = np.full((1, 2048, 1, 64), 64, np.float16)
    for out, lse in _all_ways(device, (q, k, v)):
        assert (out == 64).all()
        np.testing.assert_allclose(lse, math.log(2048), rtol=1e-6)


@pytest.mark.parametrize("scale", [0.01, 3 / 8, 0.0, -0.1])
def test_h24_the_caller_s_scale_is_used(scale, device, dtype):
    """flashinfer-ai/flashinfer#1072, #787: in the output and in the lse."""
    qkv, _ = cases.Flash("", batch=1, q_len=1, kv_len=40).make(dtype)
    want = reference.flash(*qkv, softmax_scale=scale)
    assert np.abs(want.lse - reference.flash(*qkv).lse).min() > 1e-2
    for got in _all_ways(device, qkv, softmax_scale=scale):
        compare.result_close(got, want, dtype)


def test_h25_nothing_is_remembered_between_calls(device, dtype):
    """flashinfer-ai/flashinfer#4014: equal shapes with another scale, window, mask or cap."""
    qkv, _ = cases.Flash("", q_len=40, kv_len=40).make(dtype)
    data = cases.Paged("", seq_lens=(40, 30), q_lens=4).make(dtype)
    variants = [
        {"softmax_scale": 0.1},
        {"softmax_scale": 0.3},
        {"softmax_scale": 0.3, "causal": True},
        {"softmax_scale": 0.3, "causal": True, "window": (3, None)},
        {"softmax_scale": 0.3, "causal": False, "window": (3, 2)},
        {"softmax_scale": 0.3, "softcap": 1.0},
        {"softmax_scale": 0.1},
    ]
    for kwargs in variants:
        compare.result_close(calls.run_flash(device, qkv, **kwargs), reference.flash(*qkv, **kwargs), dtype)
        compare.result_close(calls.run_paged(device, data, **kwargs), calls.want_paged(data, **kwargs), dtype)


def test_h26_lse_is_natural(device, dtype):
    """flashinfer-ai/flashinfer#2113, #4485: two equal keys of score 0 have lse ln 2."""
    to = cases.NP_DTYPE[dtype]
    qkv = np.zeros((1, 1, 1, 16), to), np.zeros((1, 2, 1, 16), to), np.ones((1, 2, 1, 16), to)
    for _, lse in _all_ways(device, qkv):
        assert lse.item() == pytest.approx(math.log(2.0), abs=1e-6)
