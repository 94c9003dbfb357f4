# SPDX-License-Identifier: Apache-2.0
"""flash_attention: dense, heads first, packed."""

from __future__ import annotations

import calls
import cases
import compare
import numpy as np
import pytest
import reference
import tiledattn as ta


@pytest.mark.parametrize("case", cases.FLASH, ids=str)
def test_matches_reference(case, device, dtype):
    qkv, score = case.make(dtype)
    compare.result_close(calls.run_flash(device, qkv, score), reference.flash(*qkv, **score), dtype)


@pytest.mark.parametrize("name", ["causal", "everything", "dv_smaller"])
def test_heads_before_sequence(name, device, dtype):
    case = next(case for case in cases.FLASH if case.name == name)
    qkv, score = case.make(dtype)
    qkv = tuple(np.ascontiguousarray(x.swapaxes(1, 2)) for x in qkv)
    got = calls.run_flash(device, qkv, score, layout="bhsd")
    want = reference.flash(*qkv, layout="bhsd", **score)
    assert got[1].shape == got[0].shape[:-1] == want.lse.shape
    compare.result_close(got, want, dtype)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("q_len", [1, 11, 12, 64])
def test_products_of_one_sign_stay_precise(q_len, head_dim, device):
    """Long sums without cancellation, where rounding errors point the same way: large scores with equal elements."""
    worst = []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        q = np.full((1, q_len, 2, head_dim), 0.9, np.float32)
        level = rng.uniform(0.97, 1, (1, 70, 2, 1))
        k = np.broadcast_to(level, (1, 70, 2, head_dim)).astype(np.float32)
        v = rng.standard_normal(k.shape).astype(np.float32)
        options = {"softmax_scale": 30 / (0.9 * head_dim)}
        got = calls.run_flash(device, (q, k, v), options)[0]
        want = reference.flash(q, k, v, **options).out
        worst.append(np.linalg.norm(got - want) / np.linalg.norm(want))
    assert max(worst) <= 1e-5, worst


@pytest.mark.parametrize("weight", [1.0, 0.3])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("q_len", [1, 17])
def test_many_equal_values_stay_precise(q_len, packed, weight, device):
    """Sums over very many keys whose rounding errors all point the same way; the result is V itself."""
    kv_len = 2**18
    q, k = np.ones((1, q_len, 1, 8), np.float32), np.zeros((1, kv_len, 1, 8), np.float32)
    k[:, 0] = -np.log(weight) / 8  # then the other keys weigh that much beside the first one
    v = np.ones_like(k) * np.linspace(1.1, 1.8, 8, dtype=np.float32)
    lengths = {}
    if packed:
        q, k, v = q[0], k[0], v[0]
        lengths = {"cu_seqlens_q": np.array([0, q_len]), "cu_seqlens_k": np.array([0, kv_len])}
        lengths = {name: device.array(x) for name, x in lengths.items()}
    out, lse = calls.run_flash(device, (q, k, v), {"softmax_scale": 1.0}, **lengths)
    compare.out_close(out, np.broadcast_to(v[..., :1, :, :], out.shape), "float32")
    compare.lse_close(lse, np.full(lse.shape, np.log(kv_len - 1 + 1 / weight)))


@pytest.mark.parametrize("num_q_heads", [2, 6], ids=["mha", "gqa"])
@pytest.mark.parametrize("q_len", [3, 4, 11, 12, 13, 16, 17, 31, 48, 65])
def test_any_number_of_rows(q_len, num_q_heads, device, dtype):
    """Around the numbers of rows at which kernels change their way, and after which they pad."""
    score = cases.Score(True, (37, 4), 5.0, True, 0.3)
    case = cases.Flash("", 2, q_len, 70, num_q_heads, 2, head_dim=40, head_dim_v=72, score=score)
    qkv, score = case.make(dtype)
    compare.result_close(calls.run_flash(device, qkv, score), reference.flash(*qkv, **score), dtype)


@pytest.mark.parametrize("head_dims", [(1, 1), (3, 2), (5, 4), (7, 9), (33, 31), (40, 65)], ids=str)
@pytest.mark.parametrize("window", [(None, None), (13, 7), (4, 0)], ids=str)
def test_odd_head_dims(window, head_dims, device, dtype):
    """Rows and keys that pairs of elements and whole vectors do not divide."""
    score = cases.Score(window=window)
    case = cases.Flash("", 2, 45, 77, 2, 2, head_dim=head_dims[0], head_dim_v=head_dims[1], score=score)
    qkv, score = case.make(dtype)
    compare.result_close(calls.run_flash(device, qkv, score), reference.flash(*qkv, **score), dtype)


PACKED = {
    "mixed": ([5, 0, 33, 1], [7, 4, 33, 0]),
    "one": ([64], [129]),
    "decode": ([1, 1, 1], [40, 1, 257]),
    "more_queries": ([40, 3], [17, 2]),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_packed(name, causal, index_dtype, device, dtype):
    q_lens, kv_lens = PACKED[name]
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(n)]).astype(index_dtype) for n in (q_lens, kv_lens))
    rng = np.random.default_rng(0)
    q = cases.random(rng, (cu_q[-1], 6, 32), dtype)
    k = cases.random(rng, (cu_k[-1], 2, 32), dtype)
    v = cases.random(rng, (cu_k[-1], 2, 48), dtype)
    want = reference.flash_packed(q, k, v, cu_q, cu_k, causal=causal, window=(50, None))
    cu = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "causal": causal, "window": (50, None)}
    hints = {"max_seqlen_q": max(q_lens), "max_seqlen_k": max(kv_lens)}
    for extra in ({}, hints):
        compare.result_close(calls.run_flash(device, (q, k, v), cu, **extra), want, dtype)


def test_rows_after_the_last_packed_sequence_are_empty(device, dtype):
    """Padding of q behind cu_seqlens_q: zeros and -inf, whatever out held."""
    rng = np.random.default_rng(0)
    q, k = cases.random(rng, (9, 4, 16), dtype), cases.random(rng, (8, 2, 16), dtype)
    cu = {"cu_seqlens_q": np.array([0, 2, 6]), "cu_seqlens_k": np.array([0, 3, 7])}
    out, lse = device.full(q.shape, np.nan, dtype), device.full(q.shape[:2], np.nan, "float32")
    calls.run_flash(device, (q, k, k), cu, out=out, lse=lse)
    want = reference.flash_packed(q, k, k, [0, 2, 6], [0, 3, 7])
    compare.result_close((device.numpy(out), device.numpy(lse)), want, dtype)
    assert np.isneginf(device.numpy(lse)[6:]).all()


def test_frameworks(carrier):
    case = cases.Flash("", score=cases.Score(True, (30, 0), 3.0, True, 0.3))
    for dtype in carrier.dtypes:
        qkv, score = case.make(dtype)
        compare.result_close(calls.run_flash(carrier, qkv, score), reference.flash(*qkv, **score), dtype)


def test_return_lse_adds_the_lse_and_changes_nothing(device, dtype):
    qkv, score = cases.Flash("").make(dtype)
    out = calls.run_flash(device, qkv, score, return_lse=False)
    both = calls.run_flash(device, qkv, score)
    assert isinstance(both, tuple)
    assert both[1].dtype == np.float32
    compare.same_bits(out, both[0])


def test_out_and_lse_given(device, dtype):
    qkv, score = cases.Flash("", score=cases.Score(causal=True)).make(dtype)
    want = reference.flash(*qkv, **score)
    for out_dtype in {dtype, "float32"}:
        wide, lse = device.full((2, 33, 9, 64), 7.0, out_dtype), device.full((2, 33, 4), np.nan, "float32")
        calls.run_flash(device, qkv, score, out=wide[:, :, 2:6], lse=lse)
        got = device.numpy(wide).copy()
        compare.out_close(got[:, :, 2:6], want.out, dtype, want.max_score)
        compare.lse_close(device.numpy(lse), want.lse)
        got[:, :, 2:6] = 7.0
        assert (got == 7.0).all(), "flash_attention wrote beside out"


def _strided(device, x, kind):
    """The values of x in another layout on the device."""
    if kind == "transposed":
        return device.array(np.ascontiguousarray(x.swapaxes(1, 2))).swapaxes(1, 2)
    if kind == "every_second":
        wide = np.full((x.shape[0], 2 * x.shape[1], *x.shape[2:]), np.nan, x.dtype)
        wide[:, 1::2] = x
        return device.array(wide)[:, 1::2]
    if kind == "inner_slice":
        wide = np.full((*x.shape[:3], x.shape[3] + 5), np.nan, x.dtype)
        wide[..., 3:-2] = x
        return device.array(wide)[..., 3:-2]
    assert kind == "contiguous"
    return device.array(x)


@pytest.mark.parametrize("q_kind", ["transposed", "inner_slice"])
@pytest.mark.parametrize("k_kind", ["contiguous", "every_second", "inner_slice"])
@pytest.mark.parametrize("v_kind", ["contiguous", "transposed"])
def test_any_outer_strides(q_kind, k_kind, v_kind, device, dtype):
    (q, k, v), score = cases.Flash("", q_len=9, kv_len=70).make(dtype)
    given = [_strided(device, x, kind) for x, kind in ((q, q_kind), (k, k_kind), (v, v_kind))]
    got = calls.run_flash(device, given, score)
    compare.result_close(got, reference.flash(q, k, v, **score), dtype)


def test_broadcast_and_reversed_views(cpu):
    """Outer strides of zero and below zero."""
    (q, k, v), score = cases.Flash("", batch=1, q_len=3, kv_len=20).make("float32")
    k3, v3 = np.broadcast_to(k, (3, *k.shape[1:])), np.broadcast_to(v, (3, *v.shape[1:]))
    q3 = np.repeat(q, 3, axis=0)[::-1]
    compare.result_close(
        calls.run_flash(cpu, (q3, k3, v3), score), reference.flash(q3, k3, v3, **score), "float32"
    )
    backwards = (q, k[:, ::-1], v[:, ::-1])
    compare.result_close(
        calls.run_flash(cpu, backwards, score), reference.flash(*backwards, **score), "float32"
    )


@pytest.mark.parametrize("zero", ["batch", "q_len", "kv_len"])
def test_zero_sizes(zero, device, dtype):
    qkv, score = cases.Flash("", **{zero: 0}).make(dtype)
    compare.result_close(calls.run_flash(device, qkv, score), reference.flash(*qkv, **score), dtype)


def test_scores_of_any_size(device):
    """No finite number stands for infinity: scores from -1e30 to 1e30."""
    rng = np.random.default_rng(0)
    for level in (-1e30, -1e5, 1e5, 1e30):
        q = np.full((1, 1, 1, 8), 0.0, np.float32)
        q[..., 0] = 1.0
        k = np.zeros((1, 40, 1, 8), np.float32)
        k[0, :, 0, 0] = level
        k[0, 7, 0, 0] = level * (1 - 0.01 * np.sign(level))
        v = cases.random(rng, (1, 40, 1, 8), "float32")
        got = calls.run_flash(device, (q, k, v), softmax_scale=1.0)
        want = reference.flash(q, k, v, softmax_scale=1.0)
        compare.out_close(got[0], want.out, "float32")
        np.testing.assert_allclose(got[1], want.lse, rtol=1e-6)


def test_used_nan_reaches_its_row_alone(device, dtype):
    (q, k, v), score = cases.Flash("", batch=2, q_len=4, kv_len=20).make(dtype)
    q[0, 2, 1] = np.nan
    v[1, 5, 0, 3] = np.nan
    want = reference.flash(q, k, v, **score)
    assert np.isnan(want.out[0, 2, 1]).all()
    assert np.isnan(want.out[1, :, :2, 3]).all()
    compare.result_close(calls.run_flash(device, (q, k, v), score), want, dtype)


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_infinite_scores(value, device):
    """A score of +inf makes its row NaN; one of -inf has no weight; only -inf is an empty row."""
    q, k = np.ones((1, 2, 1, 4), np.float32), np.zeros((1, 6, 1, 4), np.float32)
    v = cases.random(np.random.default_rng(0), (1, 6, 1, 4), "float32")
    q[0, 1] = -1.0
    k[0, 3, 0, 0] = value
    compare.result_close(calls.run_flash(device, (q, k, v)), reference.flash(q, k, v), "float32")
    k[..., 0] = -np.inf
    out, lse = calls.run_flash(device, (q[:, :1], k, v))
    assert not out.any()
    assert np.isneginf(lse).all()


@pytest.mark.gpu
def test_workspace_given(gpu):
    qkv, score = cases.Flash("", q_len=1, kv_len=5000).make("bfloat16")
    workspace = ta.Workspace(gpu.device)
    want = calls.run_flash(gpu, qkv, score)
    compare.same_bits(calls.run_flash(gpu, qkv, score, workspace=workspace), want)
