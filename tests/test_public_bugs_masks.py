# SPDX-License-Identifier: Apache-2.0
"""Public bug reports about empty rows, masks, windows and padding, each with the right value."""

from __future__ import annotations

import math
import re

import calls
import cases
import compare
import numpy as np
import pytest
import reference
import tiledattn as ta


def _zeros(dtype, *shape):
    return np.zeros(shape, cases.NP_DTYPE[dtype])


def _ones(dtype, *shape):
    return np.ones(shape, cases.NP_DTYPE[dtype])


def _one_tile(device, q, k_pool, v_pool, blocks, counts, valid, **kwargs):
    """One step of one tile: (out, lse)."""
    dims = ta.TiledAttentionDims(
        max_seqs=max(1, len(q)),
        num_q_heads=q.shape[-2],
        num_kv_heads=k_pool.shape[2],
        head_dim=q.shape[-1],
        head_dim_v=v_pool.shape[3],
        block_size=k_pool.shape[1],
        tile_capacity=blocks.shape[1],
        max_q_len=1 if q.ndim == 3 else q.shape[1],
    )
    attn = ta.TiledAttention(dims, device=device.device)
    attn.begin_step(len(q))
    device.call(attn.step_tile, q, k_pool, v_pool, blocks, counts, last_block_valid_slots=valid, **kwargs)
    return device.call(attn.finalize, return_lse=True)


def test_h01_causal_with_more_queries_than_keys(device, dtype):
    """flashinfer-ai/flashinfer#4452: rows that see nothing have lse -inf, not a finite sentinel."""
    q = cases.random(np.random.default_rng(0), (1, 5, 1, 64), dtype)
    out, lse = calls.run_flash(
        device, (q, _zeros(dtype, 1, 2, 1, 64), _ones(dtype, 1, 2, 1, 64)), causal=True
    )
    assert (out[0, :3] == 0).all()
    assert (out[0, 3:] == 1).all()
    assert np.isneginf(lse[0, :3]).all()
    assert lse[0, 3, 0] == 0.0
    assert lse[0, 4, 0] == pytest.approx(math.log(2.0), abs=1e-6)


def test_h02_merging_empty_states(device):
    """flashinfer-ai/flashinfer#4051: empty stays empty, full comes back bit for bit."""
    rng = np.random.default_rng(0)
    empty = np.zeros((1, 2, 2, 8), np.float32), np.full((1, 2, 2), -np.inf, np.float32)
    full = cases.random(rng, empty[0].shape, "float32"), cases.random(rng, empty[1].shape, "float32")
    compare.same_bits(device.call(ta.merge_attention, *empty, *empty), empty)
    compare.same_bits(device.call(ta.merge_attention, *empty, *full), full)
    compare.same_bits(device.call(ta.merge_attention, *full, *empty), full)
    data = cases.Tiled("", cases.Paged("", seq_lens=(0,)), tile_blocks=(1,)).make("float32")
    attn = calls.make_attention(device, data)
    attn.begin_step(1)
    calls.step(device, attn, data, data.tiles[0])
    merged = ta.merge_states([attn.state()] * 3)
    m, l, o = (calls.device_view(device, x) for x in (merged.m, merged.l, merged.o))
    assert np.isneginf(m).all()
    assert (l == 0).all()
    assert (o == 0).all()


def test_h03_tiles_of_length_zero_beside_a_normal_sequence(device, dtype):
    """vllm-project/vllm#39148: first 0 and -inf, second unaffected."""
    data = cases.Tiled("", cases.Paged("", seq_lens=(0, 40))).make(dtype)
    out, lse = calls.run_tiled(device, data)
    assert (out[0] == 0).all()
    assert np.isneginf(lse[0]).all()
    compare.result_close((out, lse), calls.want_tiled(data).finalize(), dtype)
    # Blocks that are named although no slot of them counts.
    data = cases.Tiled("", cases.Paged("", seq_lens=(16, 16)), tile_blocks=(1,)).make(dtype)
    tile = data.tiles[0]
    out, lse = _one_tile(device, *data.paged.args[:3], tile.blocks, tile.counts, np.array([0, 16], np.int32))
    assert (out[0] == 0).all()
    assert np.isneginf(lse[0]).all()
    assert np.isfinite(lse[1]).all()


def test_h04_lse_without_any_key(device, dtype):
    """Dao-AILab/flash-attention#978, deepseek-ai/FlashMLA#77: -inf, not +inf, so that it can be merged."""
    data = cases.Paged("", seq_lens=(0, 5)).make(dtype)
    out, lse = calls.run_paged(device, data)
    assert np.isneginf(lse[0]).all()
    assert (out[0] == 0).all()
    assert np.isfinite(lse[1]).all()
    q, k = cases.random(np.random.default_rng(0), (3, 4, 16), dtype), _ones(dtype, 2, 4, 16)
    cu = {"cu_seqlens_q": np.array([0, 1, 3]), "cu_seqlens_k": np.array([0, 0, 2])}
    _, lse = calls.run_flash(device, (q, k, k), cu)
    assert np.isneginf(lse[0]).all()
    assert np.isfinite(lse[1:]).all()


@pytest.mark.parametrize("causal", [False, True])
def test_h05_key_dimension_of_zero(causal, device, dtype):
    """Dao-AILab/flash-attention#2470: no crash; zeros and -inf."""
    q = cases.random(np.random.default_rng(0), (2, 3, 4, 64), dtype)
    out, lse = calls.run_flash(
        device, (q, _zeros(dtype, 2, 0, 2, 64), _zeros(dtype, 2, 0, 2, 64)), causal=causal
    )
    assert out.shape == q.shape
    assert (out == 0).all()
    assert np.isneginf(lse).all()


def test_h06_no_batch_or_no_rows(device, dtype):
    """Dao-AILab/flash-attention#2515: empty outputs of the right shape and type."""
    for shape in ((0, 1, 4, 64), (2, 0, 4, 64)):
        kv = _zeros(dtype, shape[0], 5, 2, 64)
        out, lse = calls.run_flash(device, (_zeros(dtype, *shape), kv, kv))
        assert out.shape == shape
        assert str(out.dtype) == dtype
        assert lse.shape == shape[:3]
    cu = {"cu_seqlens_q": np.zeros(3, np.int32), "cu_seqlens_k": np.array([0, 2, 5])}
    kv = _zeros(dtype, 5, 2, 64)
    out, lse = calls.run_flash(device, (_zeros(dtype, 0, 4, 64), kv, kv), cu)
    assert out.shape == (0, 4, 64)
    assert str(out.dtype) == dtype
    assert lse.shape == (0, 4)


@pytest.mark.parametrize("zero", ["batch", "q_len", "kv_len", "num_q_heads", "num_kv_heads", "head_dim"])
def test_h07_each_dimension_zero(zero, device, dtype):
    """pytorch/pytorch#141219: an empty result or a ValueError, never a signal."""
    sizes = {
        "batch": 2,
        "q_len": 3,
        "kv_len": 5,
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        zero: 0,
    }
    batch, q_len, kv_len, num_q_heads, num_kv_heads, head_dim = sizes.values()
    q = _zeros(dtype, batch, q_len, num_q_heads, head_dim)
    kv = _zeros(dtype, batch, kv_len, num_kv_heads, head_dim)
    if zero in ("batch", "q_len", "kv_len"):
        out, lse = calls.run_flash(device, (q, kv, kv))
        assert out.shape == q.shape
        assert (out == 0).all()
        assert lse.shape == q.shape[:3]
        return
    got, error = calls.outcome(ValueError, calls.run_flash, device, (q, kv, kv))
    if error:
        assert re.search(r"head.*\b0\b", str(error))
    else:
        assert got[0].shape == q.shape
        assert got[1].shape == q.shape[:3]


def test_h08_leading_key_blocks_fully_masked(device, dtype):
    """pytorch/pytorch#127055: a sliding mask that leaves whole leading blocks empty gives no NaN."""
    rng = np.random.default_rng(0)
    qkv = tuple(cases.random(rng, (1, 640, 1, 4), dtype) for _ in range(3))
    got = calls.run_flash(device, qkv, window=(10, 0))
    compare.result_close(got, reference.flash(*qkv, window=(10, 0)), dtype)


@pytest.mark.parametrize("stale", [1e30, np.nan])
def test_h09_rows_without_keys_are_written(stale, device, dtype):
    """flashinfer-ai/flashinfer#1533: what the output buffer held does not show."""
    rng = np.random.default_rng(0)
    q, k = cases.random(rng, (1, 6, 2, 64), dtype), cases.random(rng, (1, 3, 2, 64), dtype)
    out = device.full(q.shape, stale, "float32")
    lse = device.full(q.shape[:3], stale, "float32")
    calls.run_flash(device, (q, k, k), causal=True, out=out, lse=lse)
    out, lse = device.numpy(out), device.numpy(lse)
    assert (out[0, :3] == 0).all()
    assert np.isneginf(lse[0, :3]).all()
    compare.out_close(out, reference.flash(q, k, k, causal=True).out, dtype)


@pytest.mark.timeout(60)
def test_h10_empty_requests_in_a_batch_return(device, dtype):
    """flashinfer-ai/flashinfer#1198: lengths [0, 17, 0, 1]."""
    data = cases.Paged("", seq_lens=(0, 17, 0, 1)).make(dtype)
    compare.result_close(calls.run_paged(device, data), calls.want_paged(data), dtype)
    lens = np.array([0, 0, 17, 17, 18], np.int32)
    q, k = (cases.random(np.random.default_rng(1), (18, 4, 16), dtype) for _ in range(2))
    got = calls.run_flash(device, (q, k, k), cu_seqlens_q=np.array([0, 1, 5, 6, 18]), cu_seqlens_k=lens)
    compare.result_close(got, reference.flash_packed(q, k, k, [0, 1, 5, 6, 18], lens), dtype)


@pytest.mark.parametrize("garbage", ["nan", "inf", "bytes"])
def test_h11_stale_slots_past_the_length(garbage, device, dtype):
    """Dao-AILab/flash-attention#1745, #2374: the same bits as with zeros there."""
    case = cases.Paged("", seq_lens=(1, 3), block_size=3)
    dirty, clean = (case.make(dtype, garbage=kind) for kind in (garbage, "zero"))
    compare.same_bits(calls.run_paged(device, dirty), calls.run_paged(device, clean))
    tiled = cases.Tiled("", case, tile_blocks=(1,))
    dirty, clean = (tiled.make(dtype, garbage=kind) for kind in (garbage, "zero"))
    compare.same_bits(calls.run_tiled(device, dirty), calls.run_tiled(device, clean))
    # Packed keys after the last sequence.
    rng = np.random.default_rng(0)
    q, k, v = (cases.random(rng, (n, 2, 16), dtype) for n in (2, 9, 9))
    cu = {"cu_seqlens_q": np.array([0, 1, 2]), "cu_seqlens_k": np.array([0, 1, 4])}
    want = calls.run_flash(device, (q, k, v), cu)
    for x in (k, v):
        stale = np.empty_like(x[4:])
        cases.poison(stale, garbage)
        x[4:] = stale
    compare.same_bits(calls.run_flash(device, (q, k, v), cu), want)


def test_h12_padding_lanes_do_not_count(device, dtype):
    """flashinfer-ai/flashinfer#3717: exactly 1 for every length."""
    lengths = (1, 16, 64, 255, 257)
    data = cases.Paged("", seq_lens=lengths, score=cases.Score(causal=False)).make(dtype, garbage="zero")
    data.q[...] = 0
    data.v_pool[...] = 1
    out, lse = calls.run_paged(device, data)
    assert (out == 1).all()
    np.testing.assert_allclose(lse, np.log(lengths)[:, None].repeat(4, 1), atol=1e-5)
    tiles = cases.cut(data, (20,))[0]
    out, _ = _one_tile(device, *data.args[:3], tiles.blocks, tiles.counts, tiles.valid_slots)
    assert (out == 1).all()


@pytest.mark.parametrize("length", [1, 64, 65, 129])
def test_h13_a_window_that_excludes_nothing_is_causal(length, device, dtype):
    """Dao-AILab/flash-attention#1133: windows of S - 1, S and no bound give what causal gives."""
    qkv, _ = cases.Flash("", q_len=length, kv_len=length).make(dtype)
    causal = calls.run_flash(device, qkv, causal=True)
    compare.result_close(causal, reference.flash(*qkv, causal=True), dtype)
    for left in (length - 1, length, None):
        compare.same_bits(calls.run_flash(device, qkv, window=(left, 0)), causal, f"window ({left}, 0)")


def test_h14_window_sides_include_their_ends(device, dtype):
    """huggingface/transformers#39408, zml/zml#763: left 0 sees one key, left 1 two."""
    n = 40
    q, k = _zeros(dtype, 1, n, 1, 8), _zeros(dtype, 1, n, 1, 8)
    v = np.broadcast_to(np.arange(n).reshape(1, n, 1, 1), (1, n, 1, 8)).astype(cases.NP_DTYPE[dtype])
    out, lse = calls.run_flash(device, (q, k, v), window=(0, 0))
    assert (out == v).all()
    assert (lse == 0).all()
    out, lse = calls.run_flash(device, (q, k, v), window=(1, 0))
    assert (out[0, 1:].astype(np.float32) == v[0, 1:].astype(np.float32) - 0.5).all()
    assert (out[0, 0] == 0).all()
    np.testing.assert_allclose(lse[0, 1:, 0], math.log(2.0), atol=1e-6)
    assert "both ends included" in " ".join(ta.flash_attention.__doc__.split())


def test_h15_causal_is_bottom_right(device, dtype):
    """Dao-AILab/flash-attention#282, pytorch/pytorch#103082, #108108, ml-explore/mlx#2835."""
    one_hot = np.eye(8, dtype=np.float32).astype(cases.NP_DTYPE[dtype])
    for q_len, kv_len in ((1, 7), (2, 5)):
        q, k = _zeros(dtype, 1, q_len, 1, 8), _zeros(dtype, 1, kv_len, 1, 8)
        out, _ = calls.run_flash(device, (q, k, one_hot[None, :kv_len, None]), causal=True)
        seen = out[0, :, 0, :kv_len] > 0
        assert seen.tolist() == np.tril(np.ones((q_len, kv_len), bool), kv_len - q_len).tolist()
        pool = np.zeros((1, 8, 1, 8), q.dtype)
        pool[0, :, 0] = one_hot
        table, lens = np.zeros((1, 1), np.int32), np.array([kv_len], np.int32)
        out = device.call(ta.paged_attention, q, np.zeros_like(pool), pool, table, lens, causal=True)
        assert (out[0, :, 0, :kv_len] > 0).tolist() == seen.tolist()


def test_h16_a_masked_key_may_hold_nan(device, dtype):
    """pytorch/pytorch#101967: a key that no query sees may be NaN, and K of one that some do not see."""
    qkv, _ = cases.Flash("", q_len=2, kv_len=5).make(dtype)
    q, k, v = qkv
    k[:, 1] = v[:, 1] = 0
    want = calls.run_flash(device, qkv, causal=True, window=(1, 0))
    k[:, 1] = v[:, 1] = np.nan
    compare.same_bits(calls.run_flash(device, (q, k, v), causal=True, window=(1, 0)), want)
    qkv, _ = cases.Flash("", q_len=5, kv_len=5).make(dtype)
    qkv[1][:, 4] = np.nan
    got = calls.run_flash(device, qkv, causal=True)
    assert np.isfinite(got[0][:, :4].astype(np.float32)).all()
    assert np.isnan(got[0][:, 4].astype(np.float32)).all()
    compare.result_close(got, reference.flash(*qkv, causal=True), dtype)


def test_h17_the_tail_of_a_large_block_is_not_valid(device, dtype):
    """pytorch/pytorch#159247: lengths around a block of 128."""
    data = cases.Paged("", seq_lens=(64, 1, 127, 129), block_size=128).make(dtype)
    compare.result_close(calls.run_paged(device, data), calls.want_paged(data), dtype)
    data = cases.Tiled(
        "", cases.Paged("", seq_lens=(64, 1, 127, 129), block_size=128), tile_blocks=(2,)
    ).make(dtype)
    compare.result_close(calls.run_tiled(device, data), calls.want_tiled(data).finalize(), dtype)


def test_h18_a_full_draft_mask_is_not_made_causal(device, dtype):
    """flashinfer-ai/flashinfer#4199: with causal off, three draft tokens all see all keys."""
    one_hot = np.eye(8, dtype=np.float32).astype(cases.NP_DTYPE[dtype])[None, :, None]
    q, k = _zeros(dtype, 1, 3, 1, 8), _zeros(dtype, 1, 8, 1, 8)
    results = [calls.run_flash(device, (q, k, one_hot))[0]]
    table, lens = np.zeros((1, 1), np.int32), np.array([8], np.int32)
    results.append(device.call(ta.paged_attention, q, k, one_hot, table, lens, causal=False))
    results.append(_one_tile(device, q, k, one_hot, table, np.array([1], np.int32), None)[0])
    for out in results:
        assert (out == np.float32(0.125)).all()
