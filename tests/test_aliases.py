# SPDX-License-Identifier: Apache-2.0
"""Results in the memory of what a call reads: refused where they certainly meet, except q itself."""

from __future__ import annotations

import compare
import numpy as np
import pytest
import reference
import tiledattn as ta

FLASH = (2, 40, 2, 16)  # the shape of q, k and v


def _random(*shape):
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


@pytest.fixture
def refused(device):
    """Calls a function, and checks that it refuses what `names` share and leaves all arrays as they were."""

    def call(names, function, *args, **kwargs):
        arrays = [x for x in (*args, *kwargs.values()) if device.is_array(x)]
        before = [device.numpy(x).copy() for x in arrays]
        with pytest.raises(ValueError, match=f"^{names[0]}: shares memory with {names[1]};"):
            function(*args, **kwargs)
        for x, was in zip(arrays, before, strict=True):
            np.testing.assert_array_equal(device.numpy(x), was)

    return call


def test_out_may_be_q(device):
    q, k, v = (_random(*FLASH) for _ in range(3))
    want = reference.flash(q, k, v).out
    out = device.array(q.copy())
    ta.flash_attention(out, device.array(k), device.array(v), out=out)
    compare.out_close(device.numpy(out), want, "float32")


def test_out_may_be_the_q_of_fused_projections(device):
    qkv = _random(2, 40, 3, 2, 16)
    want = reference.flash(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]).out
    fused = device.array(qkv.copy())
    q, k, v = (fused[:, :, i] for i in range(3))
    ta.flash_attention(q, k, v, out=q)
    got = device.numpy(fused)
    compare.out_close(got[:, :, 0], want, "float32")
    np.testing.assert_array_equal(got[:, :, 1:], qkv[:, :, 1:])


def test_out_beside_a_head_that_others_share(device):
    """K repeats one head of the fused array, and out is the two others: nothing meets."""
    fused = device.array(_random(1, 6, 3, 8))
    head = fused[:, :, :1]
    k = np.broadcast_to(head, (1, 6, 2, 8)) if device.name == "numpy" else head.expand(1, 6, 2, 8)
    q, v = device.array(_random(1, 6, 2, 8)), device.array(_random(1, 6, 2, 8))
    want = reference.flash(device.numpy(q), device.numpy(k), device.numpy(v)).out
    ta.flash_attention(q, k, v, out=fused[:, :, 1:])
    compare.out_close(device.numpy(fused)[:, :, 1:], want, "float32")


@pytest.mark.parametrize("name", ["k", "v"])
def test_out_in_k_or_v(name, device, refused):
    arrays = {key: device.array(_random(*FLASH)) for key in "qkv"}
    refused(("out", name), ta.flash_attention, *arrays.values(), out=arrays[name])


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_out_partly_in_an_input(name, device, refused):
    buffer = device.array(_random(3, *FLASH[1:]))
    arrays = {key: device.array(_random(*FLASH)) for key in "qkv"} | {name: buffer[:2]}
    refused(("out", name), ta.flash_attention, *arrays.values(), out=buffer[1:])


def test_lse_in_out_and_in_inputs(device, refused):
    q, k, v, out = (device.array(_random(*FLASH)) for _ in range(4))
    refused(("out", "lse"), ta.flash_attention, q, k, v, out=out, lse=out[..., 0])
    refused(("lse", "k"), ta.flash_attention, q, k, v, out=out, lse=k[..., 3])


def test_lengths_and_sinks_in_results(cpu, refused):
    q, k, v, out = (_random(10, 2, 16) for _ in range(4))
    lengths = out.reshape(-1)[:2].view(np.int32)
    lengths[:] = 0, 10
    cu = np.array([0, 10], np.int32)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        both = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, name: lengths}
        refused(("out", name), ta.flash_attention, q, k, v, **both, out=out)
    lse = np.zeros((10, 2), np.float32)
    both = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    refused(("lse", "sinks"), ta.flash_attention, q, k, v, **both, out=out, lse=lse, sinks=lse[3])


def test_paged(device, refused):
    q, out = (device.array(_random(2, 4, 16)) for _ in range(2))
    k_pool, v_pool = (device.array(_random(6, 8, 2, 16)) for _ in range(2))
    table = device.array(np.array([[0, 1, 2], [3, 4, 5]], np.int32))
    lens = device.array(np.array([24, 17], np.int32))
    args = (q, k_pool, v_pool, table, lens)
    in_pool = v_pool[5].reshape(-1)[:128].reshape(2, 4, 16)
    refused(("out", "v_pool"), ta.paged_attention, *args, out=in_pool)
    refused(("lse", "k_pool"), ta.paged_attention, *args, out=out, lse=k_pool[0, 0, :, :4])


@pytest.mark.parametrize("name", ["block_table", "seq_lens"])
def test_indices_of_a_paged_call_in_out(name, cpu, refused):
    """The ids are checked, then read again: written over in between, they could be anything."""
    q, out = (_random(2, 4, 16) for _ in range(2))
    pools = [_random(6, 8, 2, 16) for _ in range(2)]
    indices = {
        "block_table": np.array([[0, 1, 2], [3, 4, 5]], np.int32),
        "seq_lens": np.array([24, 17], np.int32),
    }
    inside = out.reshape(-1)[: indices[name].size].view(np.int32).reshape(indices[name].shape)
    inside[:] = indices[name]
    refused(("out", name), ta.paged_attention, q, *pools, *(indices | {name: inside}).values(), out=out)


def test_a_tile(device, refused):
    dims = ta.TiledAttentionDims(
        max_seqs=2, num_q_heads=4, num_kv_heads=2, head_dim=16, block_size=8, tile_capacity=3
    )
    attn = ta.TiledAttention(dims, device=device.device)
    attn.begin_step(2)
    q, out = (device.array(_random(2, 4, 16)) for _ in range(2))
    pools = [device.array(_random(6, 8, 2, 16)) for _ in range(2)]
    blocks = device.array(np.array([[0, 1, 2], [3, 4, 5]], np.int32))
    counts = device.array(np.array([3, 3], np.int32))
    in_pool = pools[0][5].reshape(-1)[:128].reshape(2, 4, 16)
    refused(("out", "k_pool"), attn.step_tile, q, *pools, blocks, counts, out=in_pool)
    refused(("lse", "q"), attn.step_tile, q, *pools, blocks, counts, out=out, lse=q[..., 1])
    attn.step_tile(q, *pools, blocks, counts)
    with pytest.raises(ValueError, match=r"^out: shares memory with lse;"):
        attn.finalize(out=out, lse=out[..., 0])


def test_the_state_of_the_object(torch_carrier):
    """Its views are given out; a result in them would change the state."""
    dims = ta.TiledAttentionDims(
        max_seqs=2, num_q_heads=4, num_kv_heads=2, head_dim=16, block_size=8, tile_capacity=3
    )
    attn = ta.TiledAttention(dims, device=torch_carrier.device)
    attn.begin_step(2)
    q = torch_carrier.array(_random(2, 4, 16))
    pools = [torch_carrier.array(_random(6, 8, 2, 16)) for _ in range(2)]
    blocks = torch_carrier.array(np.array([[0, 1, 2], [3, 4, 5]], np.int32))
    counts = torch_carrier.array(np.array([3, 3], np.int32))
    m, o = (torch_carrier.torch.from_dlpack(x) for x in (attn.m, attn.o))
    attn.step_tile(q, *pools, blocks, counts)
    want = torch_carrier.numpy(attn.finalize())
    with pytest.raises(ValueError, match=r"^out: shares memory with o;"):
        attn.finalize(out=o.reshape(2, 4, 16))
    with pytest.raises(ValueError, match=r"^lse: shares memory with m;"):
        attn.finalize(out=q.clone(), lse=m.reshape(2, 4))
    with pytest.raises(ValueError, match=r"^out: shares memory with o;"):
        attn.step_tile(q, *pools, blocks, counts, out=o.reshape(2, 4, 16))
    np.testing.assert_array_equal(torch_carrier.numpy(attn.finalize()), want)


def test_streaming(cpu, refused):
    q = _random(2, 4, 16)
    pools = [_random(6, 8, 2, 16) for _ in range(2)]
    dims = ta.TiledAttentionDims(
        max_seqs=2, num_q_heads=4, num_kv_heads=2, head_dim=16, block_size=8, tile_capacity=3
    )
    attn = ta.StreamingAttention(dims, device="cpu")
    sequences = [ta.StreamSequence(40, ta.KvPart(ta.PoolSource(*pools), range(5)))] * 2
    in_pool = pools[1][5].reshape(-1)[:128].reshape(2, 4, 16)
    refused(("out", "the pools of sequences"), attn.attend, q, sequences, out=in_pool)
    refused(("lse", "q"), attn.attend, q, sequences, out=_random(2, 4, 16), lse=q[..., 1])


def test_merge(device, refused):
    a, b = (device.array(_random(5, 4, 16)) for _ in range(2))
    lse_a, lse_b = (device.array(_random(5, 4)) for _ in range(2))
    larger = device.array(_random(6, 4, 16))
    refused(("out", "out_b"), ta.merge_attention, a, lse_a, larger[:5], lse_b, out=larger[1:], lse=lse_a)
    refused(("lse", "out_a"), ta.merge_attention, a, lse_a, b, lse_b, out=b, lse=a[..., 2])
    want = [device.numpy(x) for x in ta.merge_attention(a, lse_a, b, lse_b)]
    got = ta.merge_attention(a, lse_a, b, lse_b, out=a, lse=lse_a)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(device.numpy(x), y)


@pytest.mark.parametrize("name", ["k_pool", "v_pool"])
def test_tokens_in_the_pool_that_they_go_to(name, device, refused):
    pools = {key: device.array(_random(2, 4, 1, 8)) for key in ("k_pool", "v_pool")}
    tokens = pools[name][0, :3]
    other = device.array(_random(3, 1, 8))
    slots = device.array(np.array([1, 2, 3], np.int32))
    refused((name, "k"), ta.write_kv, tokens, other, *pools.values(), slots)
    refused((name, "v"), ta.write_kv, other, tokens, *pools.values(), slots)
