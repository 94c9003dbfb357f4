# SPDX-License-Identifier: Apache-2.0
"""Public bug reports about sizes, heads, pages and 64-bit offsets, each with the right value."""

from __future__ import annotations

import math

import calls
import cases
import compare
import numpy as np
import pytest
import reference
import tiledattn as ta


def _sparse_pool(path, shape):
    """A float16 pool of zeros in a file that holds only the pages that are written."""
    with path.open("wb") as file:
        file.truncate(math.prod(shape) * 2)
    return np.asarray(np.memmap(path, np.float16, "r+", shape=shape))


def test_h27_page_offsets_are_64_bit(cpu, tmp_path):
    """flashinfer-ai/flashinfer#3130: page 1,100,000 of 16,384 elements each, beyond 2^34 elements."""
    shape = (1_100_001, 16, 8, 128)
    k_pool, v_pool = (_sparse_pool(tmp_path / name, shape) for name in "kv")
    rng = np.random.default_rng(0)
    high = [1_100_000, 262_144, 131_072]
    for pool in (k_pool, v_pool):
        pool[high] = cases.random(rng, (3, *shape[1:]), "float16")
    q = cases.random(rng, (1, 16, 128), "float16")
    table, lens = np.array([high], np.int32), np.array([40], np.int32)
    want = reference.paged(q, k_pool, v_pool, table, lens)
    assert np.abs(want.out).min(axis=(0, 2)).max() < 10
    assert want.out.any()
    got = ta.paged_attention(q, k_pool, v_pool, table, lens, return_lse=True)
    compare.result_close(got, want, "float16")
    dims = ta.TiledAttentionDims(
        max_seqs=1, num_q_heads=16, num_kv_heads=8, head_dim=128, block_size=16, tile_capacity=3
    )
    attn = ta.TiledAttention(dims, device="cpu")
    attn.begin_step(1)
    attn.step_tile(q, k_pool, v_pool, table, np.array([3], np.int32), last_block_valid_slots=8)
    compare.result_close(attn.finalize(return_lse=True), want, "float16")
    k, v = cases.random(rng, (1, 8, 128), "float16"), cases.random(rng, (1, 8, 128), "float16")
    ta.write_kv(k, v, k_pool, v_pool, np.array([1_100_000 * 16 + 7]))
    compare.same_bits((k_pool[1_100_000, 7], v_pool[1_100_000, 7]), (k[0], v[0]))


HEADS = [(28, 4), (14, 2), (40, 8), (24, 4), (64, 4), (71, 1)]


@pytest.mark.parametrize("heads", HEADS, ids=lambda h: f"{h[0]}_{h[1]}")
def test_h30_any_ratio_of_heads(heads, device, dtype):
    """flashinfer-ai/flashinfer#996, #3563, #4316: every divisor works."""
    sizes = {"num_q_heads": heads[0], "num_kv_heads": heads[1], "head_dim": 32}
    data = cases.Paged("", seq_lens=(40, 3), **sizes).make(dtype)
    compare.result_close(calls.run_paged(device, data), calls.want_paged(data), dtype)
    data = cases.Tiled("", cases.Paged("", seq_lens=(40, 3), **sizes)).make(dtype)
    compare.result_close(calls.run_tiled(device, data), calls.want_tiled(data).finalize(), dtype)
    qkv, _ = cases.Flash("", q_len=5, kv_len=40, **sizes).make(dtype)
    compare.result_close(calls.run_flash(device, qkv, causal=True), reference.flash(*qkv, causal=True), dtype)


def test_h31_groups_of_seven_across_tile_edges(device, dtype):
    """flashinfer-ai/flashinfer#1148, #1614: 28 and 4 heads, every query length from 1 to 40."""
    case = cases.Flash("", batch=1, q_len=40, kv_len=97, num_q_heads=28, num_kv_heads=4, head_dim=32)
    (q, k, v), _ = case.make(dtype)
    want = reference.flash(q, k, v, causal=True)
    for q_len in range(1, 41):
        got = calls.run_flash(device, (q[:, -q_len:].copy(), k, v), causal=True)
        part = reference.Result(want.out[:, -q_len:], want.lse[:, -q_len:], want.max_score)
        compare.result_close(got, part, dtype)


@pytest.mark.parametrize("head_dim", [56, 80, 96, 20, 1])
def test_h32_head_dims_of_no_round_size(head_dim, device, dtype):
    """flashinfer-ai/flashinfer#4299: right, next to guards that no read may reach and no write may touch."""
    qkv, _ = cases.Flash("", q_len=9, kv_len=70, head_dim=head_dim).make(dtype)
    want = reference.flash(*qkv, causal=True)
    guarded = []
    for x in qkv:
        wide = np.full((*x.shape[:3], head_dim + 16), np.nan, x.dtype)
        wide[..., 8:-8] = x
        guarded.append(device.array(wide)[..., 8:-8])
    out = device.full((*qkv[0].shape[:3], head_dim + 16), 7.0, dtype)
    _, lse = calls.run_flash(device, guarded, causal=True, out=out[..., 8:-8])
    got = device.numpy(out).copy()
    compare.result_close((got[..., 8:-8], lse), want, dtype)
    assert (got[..., :8] == 7.0).all()
    assert (got[..., -8:] == 7.0).all()
    data = cases.Tiled("", cases.Paged("", seq_lens=(40, 3), head_dim=head_dim)).make(dtype)
    compare.result_close(calls.run_tiled(device, data), calls.want_tiled(data).finalize(), dtype)


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_h33_large_heads_over_small_pages(block_size, device, dtype):
    """flashinfer-ai/flashinfer#3022: head dim 256, shuffled pages of 16 and 32."""
    data = cases.Paged("", seq_lens=(200,), head_dim=256, block_size=block_size).make(dtype)
    compare.result_close(calls.run_paged(device, data), calls.want_paged(data), dtype)
    tiled = cases.Tiled(
        "", cases.Paged("", seq_lens=(200,), head_dim=256, block_size=block_size), tile_blocks=(5, 8)
    )
    data = tiled.make(dtype)
    compare.result_close(calls.run_tiled(device, data), calls.want_tiled(data).finalize(), dtype)


@pytest.mark.parametrize("length", [65536, 65537, 65600])
def test_h34_more_than_65536_keys(length, device):
    """pytorch/pytorch#162588: the last key counts, and so does the first."""
    q, k = np.zeros((1, 1, 1, 16), np.float32), np.zeros((1, length, 1, 16), np.float32)
    q[..., 0] = 1.0
    v = np.zeros((1, length, 1, 16), np.float32)
    v[0, :, 0, 0] = np.arange(length)
    v[0, :, 0, 1] = 1.0
    for chosen in (length - 1, 65535, 0, None):
        k[...] = 0
        if chosen is not None:
            k[0, chosen, 0, 0] = 60.0
        want = reference.flash(q, k, v, softmax_scale=1.0)
        compare.result_close(calls.run_flash(device, (q, k, v), softmax_scale=1.0), want, "float32")
        blocks = -(-length // 64)
        pools = [
            np.pad(x[0], ((0, blocks * 64 - length), (0, 0), (0, 0))).reshape(blocks, 64, 1, 16)
            for x in (k, v)
        ]
        table, lens = np.arange(blocks, dtype=np.int32)[None], np.array([length], np.int32)
        got = device.call(
            ta.paged_attention, q[:, 0], *pools, table, lens, softmax_scale=1.0, return_lse=True
        )
        compare.result_close(tuple(x[:, None] for x in got), want, "float32")
