# SPDX-License-Identifier: Apache-2.0
"""The judge is judged: hand-worked cases, its own paths against each other, and torch in float64."""

from __future__ import annotations

import math

import cases
import numpy as np
import pytest
import reference


def _random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def test_two_keys_by_hand():
    q = np.ones((1, 1, 1, 1))
    k = np.array([0.0, math.log(3.0)]).reshape(1, 2, 1, 1)
    v = np.array([4.0, 8.0]).reshape(1, 2, 1, 1)
    got = reference.flash(q, k, v)
    assert got.out.item() == pytest.approx(7.0, abs=1e-14)
    assert got.lse.item() == pytest.approx(math.log(4.0), abs=1e-14)
    assert got.max_score == pytest.approx(math.log(3.0))


def test_sink_by_hand():
    q, k = np.zeros((1, 1, 1, 1)), np.zeros((1, 1, 1, 1))
    v = np.full((1, 1, 1, 1), 4.0)
    got = reference.flash(q, k, v, sinks=np.array([math.log(3.0)]))
    assert got.out.item() == pytest.approx(1.0)
    assert got.lse.item() == pytest.approx(math.log(4.0))
    empty = reference.flash(q, k[:, :0], v[:, :0], sinks=np.array([0.25]))
    assert empty.out.item() == 0.0
    assert empty.lse.item() == 0.25


def test_softcap_by_hand():
    q, k = np.full((1, 1, 1, 1), 3.0), np.full((1, 1, 1, 1), 2.0)
    got = reference.flash(q, k, k, softcap=1.5, softmax_scale=0.5)
    assert got.lse.item() == pytest.approx(1.5 * math.tanh(3.0 / 1.5))


def test_causal_is_bottom_right():
    assert reference.visible([3, 4], range(5), True).astype(int).tolist() == [
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
    ]
    got = reference.flash(np.zeros((1, 3, 1, 1)), np.zeros((1, 2, 1, 1)), np.ones((1, 2, 1, 1)), causal=True)
    assert got.out.ravel().tolist() == [0.0, 1.0, 1.0]
    assert got.lse.ravel().tolist() == [-np.inf, 0.0, math.log(2.0)]


def test_window_includes_both_ends():
    assert reference.visible([2], range(5), False, (1, 1)).astype(int).tolist() == [[0, 1, 1, 1, 0]]
    assert reference.visible([2], range(5), False, (0, None)).astype(int).tolist() == [[0, 0, 1, 1, 1]]


@pytest.mark.parametrize("causal", [False, True])
def test_against_torch_float64(causal):
    torch = pytest.importorskip("torch")
    q, k, v = _random(2, 5, 6, 8), _random(2, 9, 3, 8, seed=1), _random(2, 9, 3, 7, seed=2)
    got = reference.flash(q, k, v, causal=causal, softmax_scale=0.3)
    mask = torch.from_numpy(reference.visible(np.arange(5) + 4, np.arange(9), causal))
    qt, kt, vt = (torch.from_numpy(x).transpose(1, 2) for x in (q, k, v))
    kt, vt = kt.repeat_interleave(2, 1), vt.repeat_interleave(2, 1)
    want = torch.nn.functional.scaled_dot_product_attention(qt, kt, vt, mask, scale=0.3).transpose(1, 2)
    np.testing.assert_allclose(got.out, want.numpy(), rtol=1e-12, atol=1e-12)
    scores = (qt @ kt.transpose(2, 3) * 0.3).masked_fill(~mask, -math.inf)
    np.testing.assert_allclose(got.lse, torch.logsumexp(scores, -1).transpose(1, 2).numpy(), rtol=1e-12)


def test_layouts_and_packing_agree():
    q, k, v = _random(2, 5, 4, 8), _random(2, 7, 2, 8, seed=1), _random(2, 7, 2, 8, seed=2)
    dense = reference.flash(q, k, v, causal=True)
    heads_first = reference.flash(*(x.swapaxes(1, 2) for x in (q, k, v)), causal=True, layout="bhsd")
    packed = reference.flash_packed(
        *(x.reshape(-1, *x.shape[2:]) for x in (q, k, v)), [0, 5, 10], [0, 7, 14], causal=True
    )
    np.testing.assert_array_equal(heads_first.out.swapaxes(1, 2), dense.out)
    np.testing.assert_array_equal(packed.out.reshape(dense.out.shape), dense.out)
    np.testing.assert_array_equal(packed.lse.reshape(dense.lse.shape), dense.lse)


@pytest.mark.parametrize("case", cases.TILED, ids=str)
def test_tiles_agree_with_pages(case):
    data = case.make("float32")
    judge = reference.Tiled(**data.options)
    for tile in data.tiles:
        judge.step_tile(*data.step_args(tile), **data.step_kwargs(tile))
    got = judge.finalize()
    want = reference.paged(*data.paged.args, **{**data.paged.kwargs, "causal": case.positions})
    np.testing.assert_allclose(got.out, want.out, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("case", cases.PAGED, ids=str)
@pytest.mark.parametrize("garbage", ["nan", "inf", "bytes"])
def test_unused_slots_never_count(case, garbage):
    dirty, clean = case.make("float32", garbage=garbage), case.make("float32", garbage="zero")
    got, want = (reference.paged(*data.args, **data.kwargs) for data in (dirty, clean))
    np.testing.assert_array_equal(got.out, want.out)
    np.testing.assert_array_equal(got.lse, want.lse)
    assert np.isfinite(got.out).all()


def test_merge_of_halves_is_the_whole():
    q, k, v = _random(1, 3, 2, 4), _random(1, 10, 1, 4, seed=1), _random(1, 10, 1, 4, seed=2)
    whole = reference.flash(q, k, v)
    a, b = (reference.flash(q, k[:, part], v[:, part]) for part in (slice(0, 4), slice(4, 10)))
    out, lse = reference.merge_attention(a.out, a.lse, b.out, b.lse)
    np.testing.assert_allclose(out, whole.out, rtol=1e-12)
    np.testing.assert_allclose(lse, whole.lse, rtol=1e-12)
    _, lse2 = reference.merge_attention(a.out, a.lse / math.log(2), b.out, b.lse / math.log(2), lse_base=2)
    np.testing.assert_allclose(lse2 * math.log(2), whole.lse, rtol=1e-12)


def test_used_nan_and_infinities():
    q, k, v = np.ones((1, 1, 1, 1)), np.zeros((1, 3, 1, 1)), np.ones((1, 3, 1, 1))
    for bad in (np.nan, np.inf):
        used = k.copy()
        used[0, 1] = bad
        assert np.isnan(reference.flash(q, used, v).out).all()
    minus = k.copy()
    minus[0, 1] = -np.inf
    assert reference.flash(q, minus, v).lse.item() == pytest.approx(math.log(2.0))
