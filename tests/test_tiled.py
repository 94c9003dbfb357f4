# SPDX-License-Identifier: Apache-2.0
"""TiledAttention: the state and the result after any tiles are those of attention over their keys."""

from __future__ import annotations

import calls
import cases
import compare
import numpy as np
import pytest
import reference
import tiledattn as ta

DECODE = cases.Tiled("decode", cases.Paged("", seq_lens=(1, 40, 96)))


@pytest.mark.parametrize("case", cases.TILED, ids=str)
def test_result_and_state_match_reference(case, device, dtype):
    data = case.make(dtype)
    attn = calls.make_attention(device, data)
    attn.begin_step(len(data.paged.q))
    for done, tile in enumerate(data.tiles, start=1):
        calls.step(device, attn, data, tile)
        if done in (1, len(data.tiles)):
            judge = calls.want_tiled(data, done)
            compare.state_close(
                calls.state_arrays(device, attn, len(data.paged.q)), judge.state, dtype, judge.max_score
            )
    want = calls.want_tiled(data).finalize()
    compare.result_close(device.call(attn.finalize, return_lse=True), want, dtype)


@pytest.mark.parametrize("num_q_heads", [2, 6, 8], ids="gqa{}".format)
@pytest.mark.parametrize("kv_len", [1, 60, 4096, 32768])
def test_decode_on_the_cpu_is_precise(kv_len, num_q_heads, cpu, dtype):
    """Whatever the type, a result that is not rounded yet is off by 2e-6 at most."""
    paged = cases.Paged("", seq_lens=(kv_len,), num_q_heads=num_q_heads, num_kv_heads=2, head_dim=128)
    data = cases.Tiled("", paged, tile_blocks=(-(-kv_len // paged.block_size),)).make(dtype)
    attn = calls.make_attention(cpu, data)
    attn.begin_step(1)
    calls.step(cpu, attn, data, data.tiles[0])
    _, l, o = calls.state_arrays(cpu, attn, 1)
    want = calls.want_tiled(data).finalize().out
    error = np.linalg.norm(o / l[..., None] - want) / np.linalg.norm(want)
    assert error <= 2e-6


def test_frameworks(carrier):
    for dtype in carrier.dtypes:
        data = DECODE.make(dtype)
        compare.result_close(calls.run_tiled(carrier, data), calls.want_tiled(data).finalize(), dtype)


def test_state_before_the_first_tile(device):
    data = DECODE.make("float32")
    attn = calls.make_attention(device, data)
    for _ in range(2):
        attn.begin_step(3)
        m, l, o = calls.state_arrays(device, attn, 3)
        assert m.shape == l.shape == (3, 4)
        assert o.shape == (3, 4, 64)
        assert m.dtype == l.dtype == o.dtype == np.float32
        assert np.isneginf(m).all()
        assert not l.any()
        assert not o.any()
        calls.step(device, attn, data, data.tiles[0])


def test_finalize_leaves_the_state_and_more_tiles_may_follow(device):
    data = DECODE.make("float32")
    attn = calls.make_attention(device, data)
    attn.begin_step(3)
    for done, tile in enumerate(data.tiles, start=1):
        calls.step(device, attn, data, tile)
        before = calls.state_arrays(device, attn, 3)
        first = device.call(attn.finalize, return_lse=True)
        again = device.call(attn.finalize, return_lse=True)
        compare.same_bits(calls.state_arrays(device, attn, 3), before)
        compare.same_bits(first, again)
        compare.result_close(first, calls.want_tiled(data, done).finalize(), "float32")


def test_out_with_the_last_tile(device, dtype):
    data = cases.Tiled("", cases.Paged("", seq_lens=(0, 40, 96), score=cases.Score(sinks=True))).make(dtype)
    attn = calls.make_attention(device, data)
    attn.begin_step(3)
    out, lse = device.full((3, 4, 64), np.nan, dtype), device.full((3, 4), np.nan, "float32")
    for tile in data.tiles[:-1]:
        calls.step(device, attn, data, tile)
    arrays = [device.array(x) for x in data.step_args(data.tiles[-1])]
    attn.step_tile(*arrays, last_block_valid_slots=device.array(data.tiles[-1].valid_slots), out=out, lse=lse)
    want = calls.want_tiled(data).finalize()
    compare.result_close((device.numpy(out), device.numpy(lse)), want, dtype)
    compare.state_close(
        calls.state_arrays(device, attn, 3), calls.want_tiled(data).state, dtype, want.max_score
    )


def test_finalize_into_out(device, dtype):
    """float32 or the type of q, any outer strides; nothing beside it is touched."""
    data = DECODE.make(dtype)
    attn = calls.make_attention(device, data)
    attn.begin_step(3)
    for tile in data.tiles:
        calls.step(device, attn, data, tile)
    want = calls.want_tiled(data).finalize()
    for out_dtype in {dtype, "float32"}:
        wide = device.full((3, 8, 70), 7.0, out_dtype)
        attn.finalize(out=wide[:, ::2, 3:67])
        got = device.numpy(wide).copy()
        compare.out_close(got[:, ::2, 3:67], want.out, dtype, want.max_score)
        got[:, ::2, 3:67] = 7.0
        assert (got == 7.0).all(), "finalize wrote beside out"


def test_valid_slots_as_number_or_none(device):
    data = cases.Tiled("", cases.Paged("", seq_lens=(20, 36)), tile_blocks=(3,)).make(
        "float32", garbage="zero"
    )
    tile = data.tiles[0]
    for given in (None, 4, 0, 16, np.array([4, 16], np.int64)):
        attn = calls.make_attention(device, data)
        attn.begin_step(2)
        calls.step(device, attn, data, tile, last_block_valid_slots=given)
        judge = reference.Tiled(**data.options)
        judge.step_tile(*data.step_args(tile), given)
        compare.result_close(device.call(attn.finalize, return_lse=True), judge.finalize(), "float32")


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_tables_of_either_type_and_any_row_stride(device, index_dtype):
    data = DECODE.make("float32")
    want = calls.want_tiled(data).finalize()
    attn = calls.make_attention(device, data)
    attn.begin_step(3)
    for tile in data.tiles:
        wide = np.full((3, tile.blocks.shape[1] + 5), 10**6, index_dtype)
        wide[:, 1 : 1 + tile.blocks.shape[1]] = tile.blocks
        table = device.array(wide)[:, 1 : 1 + tile.blocks.shape[1]]
        q, k_pool, v_pool = (device.array(x) for x in data.paged.args[:3])
        counts, valid = (device.array(x.astype(index_dtype)) for x in (tile.counts, tile.valid_slots))
        attn.step_tile(q, k_pool, v_pool, table, counts, last_block_valid_slots=valid)
    compare.result_close(device.call(attn.finalize, return_lse=True), want, "float32")


def test_query_before_the_keys_of_a_tile_sees_none(device):
    """Keys at positions 32 and on; queries at 30 to 33 see 0, 0, 1, 2 of them."""
    rng = np.random.default_rng(0)
    q = cases.random(rng, (1, 4, 2, 16), "float32")
    pool = cases.random(rng, (3, 16, 1, 16), "float32")
    dims = ta.TiledAttentionDims(
        max_seqs=1, num_q_heads=2, num_kv_heads=1, head_dim=16, block_size=16, tile_capacity=1, max_q_len=4
    )
    attn = ta.TiledAttention(dims, device=device.device)
    attn.begin_step(1)
    one = np.array([1], np.int32)
    args = (q, pool, pool, np.array([[2]], np.int32), one)
    at = {"kv_positions": one * 32, "q_positions": one * 30}
    device.call(attn.step_tile, *args, **at)
    judge = reference.Tiled()
    judge.step_tile(*args, **at)
    out, lse = device.call(attn.finalize, return_lse=True)
    compare.result_close((out, lse), judge.finalize(), "float32")
    assert np.isneginf(lse[0, :2]).all()
    assert not out[0, :2].any()
    compare.out_close(out[0, 2], np.repeat(pool[2, :1, 0].astype(float), 2, 0), "float32")


@pytest.mark.parametrize("kernels", ["best", "portable", "plain"])
@pytest.mark.parametrize(
    ("q_position", "kv_position"), [(2**32 + 40, 0), (0, 2**32 - 10), (2**59, 0), (0, 2**59)]
)
def test_positions_far_apart_see_nothing(q_position, kv_position, kernels, device, dtype, monkeypatch):
    """Nor is a block id read that no query reaches, here one outside the pool."""
    monkeypatch.setenv("TILEDATTN_CUDA_KERNELS", kernels)
    rng = np.random.default_rng(0)
    q, pool = cases.random(rng, (1, 1, 2, 64), dtype), cases.random(rng, (2, 16, 1, 64), dtype)
    dims = ta.TiledAttentionDims(
        max_seqs=1, num_q_heads=2, num_kv_heads=1, head_dim=64, block_size=16, tile_capacity=3
    )
    attn = ta.TiledAttention(dims, device=device.device, window=(5, 0))
    attn.begin_step(1)
    at = {"kv_positions": np.array([kv_position]), "q_positions": np.array([q_position])}
    blocks = np.array([[0, 1, 10**6]], np.int32)
    device.call(attn.step_tile, q, pool, pool, blocks, np.array([3], np.int32), **at)
    out, lse = device.call(attn.finalize, return_lse=True)
    ta.check(device.device)
    assert not out.astype(np.float32).any()
    assert np.isneginf(lse).all()


def test_shorter_query_than_max_q_len(device):
    for q_len in (1, 2):
        data = cases.Tiled("", cases.Paged("", seq_lens=(20, 40), q_lens=q_len), positions=True).make(
            "float32"
        )
        got = calls.run_tiled(device, data, dims={"max_q_len": 3, "max_seqs": 5, "tile_capacity": 9})
        compare.result_close(got, calls.want_tiled(data).finalize(), "float32")


def test_one_object_over_steps_of_other_sizes_and_types(device):
    """Nothing of an earlier step is left: not its batch, query length, type or tiles."""
    big = cases.Tiled("", cases.Paged("", seq_lens=(96, 40, 5), q_lens=3))
    attn = calls.make_attention(device, big.make("float32"))
    plans = [
        ((96, 40, 5), 3, "float32"),
        ((7,), 1, "bfloat16"),
        ((33, 2), 2, "float16"),
        ((96, 40, 5), 3, "bfloat16"),
    ]
    for seed, (seq_lens, q_len, dtype) in enumerate(plans):
        data = cases.Tiled("", cases.Paged("", seq_lens=seq_lens, q_lens=q_len)).make(dtype, seed)
        attn.begin_step(len(seq_lens))
        for tile in data.tiles:
            calls.step(device, attn, data, tile)
        compare.result_close(
            device.call(attn.finalize, return_lse=True), calls.want_tiled(data).finalize(), dtype
        )


@pytest.mark.parametrize("later_tiles", [0, 1])
def test_a_nan_reaches_every_part_of_the_state(later_tiles, device, dtype):
    """m = max s_j and l, o of a row with a NaN score are NaN, also when right tiles follow."""
    data = cases.Tiled("", cases.Paged("", seq_lens=(70, 70)), tile_blocks=(2, 3)).make(dtype)
    block = data.tiles[0].blocks[0, 1]
    data.paged.k_pool[block, 3] = np.nan
    attn = calls.make_attention(device, data)
    attn.begin_step(2)
    for tile in data.tiles[: 1 + later_tiles]:
        calls.step(device, attn, data, tile)
    got, want = calls.state_arrays(device, attn, 2), calls.want_tiled(data, 1 + later_tiles)
    assert all(np.isnan(part[0]).all() and np.isfinite(part[1]).all() for part in got)
    compare.state_close(got, want.state, dtype, want.finalize().max_score)


def test_a_step_without_tiles(device):
    """Nothing seen: zeros and -inf, or the sink."""
    data = cases.Tiled("", cases.Paged("", seq_lens=(5, 9), score=cases.Score(sinks=True))).make("float32")
    attn = calls.make_attention(device, data)
    attn.begin_step(2)
    calls.step(device, attn, data, data.tiles[0])
    attn.begin_step(2)
    out, lse = device.full((2, 4, 64), np.nan, "float32"), device.full((2, 4), np.nan, "float32")
    attn.finalize(out=out, lse=lse)
    assert not device.numpy(out).any()
    compare.same_bits(device.numpy(lse), np.stack([data.paged.score["sinks"]] * 2))


def test_step_of_no_sequences(device):
    data = cases.Tiled("", cases.Paged("", seq_lens=()), tile_blocks=(2,)).make("float16")
    attn = calls.make_attention(device, data)
    attn.begin_step(0)
    calls.step(device, attn, data, data.tiles[0])
    out, lse = device.call(attn.finalize, return_lse=True)
    assert out.shape == (0, 4, 64)
    assert out.dtype == np.float16
    assert lse.shape == (0, 4)


def test_scratch_pool_layout(device, dtype):
    """[slot, K|V, Hk, P, D] pools through views without copying."""
    data = DECODE.make(dtype)
    k_pool, v_pool = data.paged.k_pool, data.paged.v_pool
    scratch = np.stack([k_pool, v_pool], axis=1).swapaxes(2, 3).copy()
    pool = device.array(scratch)
    k_view, v_view = ta.scratch_pool_views(pool)
    assert tuple(k_view.shape) == tuple(v_view.shape) == k_pool.shape
    compare.same_bits(device.numpy(k_view), k_pool)
    compare.same_bits(device.numpy(v_view), v_pool)
    attn = calls.make_attention(device, data)
    attn.begin_step(3)
    for tile in data.tiles:
        q, blocks, counts, valid = map(
            device.array, (data.paged.q, tile.blocks, tile.counts, tile.valid_slots)
        )
        attn.step_tile(q, k_view, v_view, blocks, counts, last_block_valid_slots=valid)
    compare.result_close(
        device.call(attn.finalize, return_lse=True), calls.want_tiled(data).finalize(), dtype
    )


def test_strides_of_the_standard_layouts(cpu):
    attn = calls.make_attention(
        cpu, cases.Tiled("", cases.Paged("", head_dim=32, block_size=8)).make("float32")
    )
    assert tuple(attn.paged_strides()) == (8 * 2 * 32, 2 * 32, 32)
    assert tuple(attn.scratch_pool_strides()) == (2 * 2 * 8 * 32, 32, 8 * 32)


def test_dims():
    dims = ta.TiledAttentionDims(
        max_seqs=4, num_q_heads=32, num_kv_heads=8, head_dim=128, block_size=16, tile_capacity=64
    )
    rows = 4 * 32
    assert (dims.m_bytes, dims.l_bytes, dims.o_bytes) == (rows * 4, rows * 4, rows * 128 * 4)
    assert dims.state_bytes == rows * 130 * 4
    assert dims.output_bytes == rows * 128 * 2
    assert dims.gqa_ratio == 4
    assert dims.max_q_len == 1
    assert dims.block_size == 16
    assert dims.tile_capacity == 64
    wide = ta.TiledAttentionDims(
        max_seqs=4,
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=128,
        block_size=16,
        tile_capacity=64,
        max_q_len=3,
        head_dim_v=64,
    )
    assert wide.m_bytes == 3 * rows * 4
    assert wide.o_bytes == 3 * rows * 64 * 4


def test_object_tells_its_sizes(device):
    data = cases.Tiled("", cases.Paged("", q_lens=2)).make("float32")
    attn = calls.make_attention(device, data)
    assert attn.dims.max_q_len == 2
    assert attn.dims.num_q_heads == 4
    assert attn.nbytes >= attn.dims.state_bytes
    shapes = [calls.device_view(device, x).shape for x in (attn.m, attn.l, attn.o)]
    assert shapes == [(3, 2, 4), (3, 2, 4), (3, 2, 4, 64)]


def test_default_device_is_the_best_present():
    dims = ta.TiledAttentionDims(
        max_seqs=1, num_q_heads=1, num_kv_heads=1, head_dim=8, block_size=8, tile_capacity=1
    )
    attn = ta.TiledAttention(dims)
    best = "cuda" if ta.info()["num_cuda_devices"] else "cpu"
    assert str(attn.device).startswith(best)


def _small(device, **dims):
    sizes = {
        "max_seqs": 2,
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "block_size": 4,
        "tile_capacity": 2,
    }
    return ta.TiledAttention(ta.TiledAttentionDims(**(sizes | dims)), device=device.device)


def _tile(device, q, seed=0):
    rng = np.random.default_rng(seed)
    pool = rng.standard_normal((3, 4, 2, 8)).astype(np.float32)
    table = np.zeros((len(q), 1), np.int32)
    given = (q.astype(np.float32), pool, pool, table, np.ones(len(q), np.int32))
    return [device.array(x) for x in given]


def test_a_tile_without_query_tokens_fixes_the_step(device):
    attn = _small(device, max_q_len=3)
    attn.begin_step(2)
    attn.step_tile(*_tile(device, np.ones((2, 0, 4, 8))))
    assert device.numpy(attn.finalize()).shape == (2, 0, 4, 8)
    with pytest.raises(ValueError, match="q: got 2 query tokens; expected 0"):
        attn.step_tile(*_tile(device, np.ones((2, 2, 4, 8))))


def test_a_kept_view_shows_a_new_step(cpu):
    attn = _small(cpu)
    view = np.asarray(attn.m)
    attn.begin_step(2)
    attn.step_tile(*_tile(cpu, np.ones((2, 4, 8))))
    assert np.isfinite(view).all()
    attn.begin_step(2)
    assert (view == -np.inf).all()


def test_a_step_keeps_its_framework(cpu):
    torch = pytest.importorskip("torch")
    attn = _small(cpu)
    attn.begin_step(1)
    given = _tile(cpu, np.ones((1, 4, 8)))
    attn.step_tile(*given)
    with pytest.raises(TypeError, match="q: comes from torch"):
        attn.step_tile(*map(torch.from_numpy, given))
