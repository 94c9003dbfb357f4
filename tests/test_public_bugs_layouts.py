# SPDX-License-Identifier: Apache-2.0
"""Public bug reports about strides, alignment, index types and state left behind, with the right values."""

from __future__ import annotations

import re

import arrays
import calls
import cases
import compare
import numpy as np
import pytest
import reference
import tiledattn as ta


@pytest.mark.parametrize("head_dim", [64, 256])
def test_h35_inputs_that_come_from_a_transpose(head_dim, device, dtype):
    """Dao-AILab/flash-attention#2665: views of (B, H, S, D) arrays give the bits of contiguous copies."""
    qkv, _ = cases.Flash("", q_len=20, kv_len=50, head_dim=head_dim).make(dtype)
    views = [device.array(np.ascontiguousarray(x.swapaxes(1, 2))).swapaxes(1, 2) for x in qkv]
    got = calls.run_flash(device, views, causal=True)
    compare.result_close(got, reference.flash(*qkv, causal=True), dtype)


def test_h36_k_and_v_of_different_strides(device, dtype):
    """flagos-ai/FlagAttention#45: k is every second token of a buffer, v contiguous; and the reverse."""
    (q, k, v), _ = cases.Flash("", q_len=9, kv_len=50).make(dtype)
    want = reference.flash(q, k, v)

    def spread(x):
        wide = np.full((x.shape[0], 2 * x.shape[1], *x.shape[2:]), np.nan, x.dtype)
        wide[:, ::2] = x
        return device.array(wide)[:, ::2]

    compare.result_close(calls.run_flash(device, (q, spread(k), v)), want, dtype)
    compare.result_close(calls.run_flash(device, (q, k, spread(v))), want, dtype)
    data = cases.Paged("", seq_lens=(40, 9)).make(dtype)
    want = calls.want_paged(data)
    compare.result_close(calls.run_paged(device, data._replace(k_pool=spread(data.k_pool))), want, dtype)
    compare.result_close(calls.run_paged(device, data._replace(v_pool=spread(data.v_pool))), want, dtype)


def test_h37_q_from_a_fused_projection(device, dtype):
    """flashinfer-ai/flashinfer#1865: the output has its own strides; bytes around it stay."""
    (q, k, v), _ = cases.Flash("", q_len=20, kv_len=20).make(dtype)
    qkv = device.array(np.concatenate([q, k, v], axis=2))
    views = qkv[:, :, :4], qkv[:, :, 4:6], qkv[:, :, 6:]
    guarded = device.full((2 + q.size // 64 + 2, 64), 7.0, dtype)
    out = guarded[2:-2].reshape(q.shape)
    _, lse = calls.run_flash(device, views, causal=True, out=out)
    got = device.numpy(guarded).copy()
    compare.result_close((got[2:-2].reshape(q.shape), lse), reference.flash(q, k, v, causal=True), dtype)
    assert (got[:2] == 7.0).all()
    assert (got[-2:] == 7.0).all()
    # Without out: the result is contiguous whatever q's strides.
    compare.result_close(
        calls.run_flash(device, views, causal=True), reference.flash(q, k, v, causal=True), dtype
    )

    data = cases.Paged("", seq_lens=(40, 9)).make(dtype)
    fused = device.array(np.concatenate([data.q, data.q[:, :3] * 0], axis=1))[:, :4]
    guarded = device.full((12, 64), 7.0, dtype)
    _, lse = calls.run_paged(device, data._replace(q=fused), out=guarded[2:10].reshape(2, 4, 64))
    got = device.numpy(guarded).copy()
    compare.result_close((got[2:10].reshape(2, 4, 64), lse), calls.want_paged(data), dtype)
    assert (got[:2] == 7.0).all()
    assert (got[10:] == 7.0).all()


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_h38_an_innermost_stride_of_two(name, device, dtype):
    """pytorch/pytorch#187506: right, or an error that names the argument."""
    qkv = dict(zip("qkv", cases.Flash("").make(dtype)[0], strict=True))
    want = reference.flash(*qkv.values())
    wide = np.full((*qkv[name].shape[:3], 2 * qkv[name].shape[3]), np.nan, qkv[name].dtype)
    wide[..., ::2] = qkv[name]
    given = {**qkv, name: device.array(wide)[..., ::2]}
    got, error = calls.outcome(ValueError, calls.run_flash, device, given.values())
    if error:
        assert re.search(rf"\b{name}\b", str(error))
    else:
        compare.result_close(got, want, dtype)


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_h39_arrays_that_start_inside_a_buffer(offset, device, dtype):
    """pytorch/pytorch#183484: base addresses off every vector alignment."""
    (q, k, v), _ = cases.Flash("", q_len=9, kv_len=70).make(dtype)

    def shifted(x):
        flat = np.zeros(x.size + 8, x.dtype)
        flat[offset : offset + x.size] = x.ravel()
        return device.array(flat)[offset : offset + x.size].reshape(x.shape)

    got = calls.run_flash(device, [shifted(x) for x in (q, k, v)], out=shifted(np.zeros_like(q)))
    compare.result_close(got, reference.flash(q, k, v), dtype)
    data = cases.Paged("", seq_lens=(40, 9)).make(dtype)
    moved = data._replace(q=shifted(data.q), k_pool=shifted(data.k_pool), v_pool=shifted(data.v_pool))
    compare.result_close(calls.run_paged(device, moved), calls.want_paged(data), dtype)
    case = cases.Tiled("", cases.Paged("", seq_lens=(40, 9))).make(dtype)
    moved = case.paged._replace(q=shifted(case.paged.q), k_pool=shifted(case.paged.k_pool))
    attn = calls.make_attention(device, case)
    attn.begin_step(2)
    for tile in case.tiles:
        calls.step(device, attn, case._replace(paged=moved), tile)
    compare.result_close(
        device.call(attn.finalize, return_lse=True), calls.want_tiled(case).finalize(), dtype
    )


@pytest.mark.parametrize("index_dtype", ["int64", "int32", "uint32", "int16", "float32", "bool"])
def test_h40_index_types(index_dtype, device):
    """flashinfer-ai/flashinfer#725, #737, #1492: int32 and int64 are right, the rest a TypeError by name."""
    data = cases.Paged("", seq_lens=(40, 9)).make("float32")
    want = calls.want_paged(data)
    tiled = cases.Tiled("", cases.Paged("", seq_lens=(40, 9)), tile_blocks=(3,)).make("float32")
    tile = tiled.tiles[0]
    for name in ("block_table", "seq_lens"):
        changed = data._replace(**{name: np.maximum(getattr(data, name), 0).astype(index_dtype)})
        if index_dtype in ("int32", "int64"):
            wide = data._replace(**{name: getattr(data, name).astype(index_dtype)})
            compare.result_close(calls.run_paged(device, wide), want, "float32")
        else:
            with pytest.raises(TypeError, match=rf"{name}.*{index_dtype}"):
                calls.run_paged(device, changed)
    for field, name in (("blocks", "tile_blocks"), ("counts", "tile_block_counts")):
        changed = tile._replace(**{field: np.maximum(getattr(tile, field), 0).astype(index_dtype)})
        attn = calls.make_attention(device, tiled)
        attn.begin_step(2)
        if index_dtype in ("int32", "int64"):
            calls.step(device, attn, tiled, changed)
            got = device.call(attn.finalize, return_lse=True)
            compare.result_close(got, calls.want_tiled(tiled).finalize(), "float32")
        else:
            with pytest.raises(TypeError, match=rf"{name}.*{index_dtype}"):
                calls.step(device, attn, tiled, changed)


def test_h43_a_later_step_owes_nothing_to_an_earlier_one(device, dtype):
    """flashinfer-ai/flashinfer#1028: with mask, then without, fewer sequences, fewer blocks: as if fresh."""
    masked = cases.Tiled("", cases.Paged("", seq_lens=(96, 40, 70), q_lens=4), positions=True).make(dtype)
    plain = cases.Tiled("", cases.Paged("", seq_lens=(96, 40, 70), q_lens=4)).make(dtype)
    fewer = cases.Tiled("", cases.Paged("", seq_lens=(40,), q_lens=4)).make(dtype)
    shorter = cases.Tiled("", cases.Paged("", seq_lens=(7, 3), q_lens=4)).make(dtype)
    attn = calls.make_attention(device, masked)
    for data in (masked, plain, fewer, shorter, masked):
        attn.begin_step(len(data.paged.q))
        for tile in data.tiles:
            calls.step(device, attn, data, tile)
        got = device.call(attn.finalize, return_lse=True)
        compare.result_close(got, calls.want_tiled(data).finalize(), dtype)
        compare.same_bits(got, calls.run_tiled(device, data), "used object and fresh one")


@pytest.mark.parametrize("framework", ["numpy-cpu", "torch-cpu"])
def test_h40_unsigned_indices_of_each_framework(framework):
    """flashinfer-ai/flashinfer#1492: an unsigned table is refused wherever it comes from."""
    carrier = arrays.make_carrier(framework)
    data = cases.Paged("", seq_lens=(40, 9)).make("float32")
    table = np.maximum(data.block_table, 0).astype(np.uint8)
    with pytest.raises(TypeError, match=r"block_table.*uint8"):
        carrier.call(ta.paged_attention, *data.args[:3], table, data.seq_lens)
