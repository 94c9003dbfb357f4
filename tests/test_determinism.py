# SPDX-License-Identifier: Apache-2.0
"""Equal bits: run after run, for any number of threads, and whatever surrounds a sequence."""

from __future__ import annotations

import calls
import cases
import compare
import numpy as np
import pytest
import tiledattn as ta

# Long enough to be cut into segments, short ones beside it; the order of the batch changes in the tests.
LENGTHS = (2500, 1, 700, 0, 130)


def _paged(dtype, q_lens=None, seq_lens=LENGTHS):
    return cases.Paged("", seq_lens=seq_lens, q_lens=q_lens, num_q_heads=6).make(dtype)


def _only(data, rows):
    """The same call over some sequences of the batch, in the order given."""
    return data._replace(q=data.q[rows], block_table=data.block_table[rows], seq_lens=data.seq_lens[rows])


@pytest.mark.parametrize("q_lens", [None, 3])
def test_paged_alone_or_in_company(q_lens, device, dtype):
    data = _paged(dtype, q_lens)
    out, lse = calls.run_paged(device, data)
    compare.same_bits(calls.run_paged(device, data), (out, lse))
    for b in range(len(LENGTHS)):
        compare.same_bits(
            calls.run_paged(device, _only(data, [b])), (out[[b]], lse[[b]]), f"sequence {b} alone"
        )
    order = [3, 0, 4, 2, 1, 0]
    compare.same_bits(calls.run_paged(device, _only(data, order)), (out[order], lse[order]))


def test_paged_other_blocks_and_wider_tables(device, dtype):
    data = _paged(dtype)
    want = calls.run_paged(device, data)
    moved = np.random.default_rng(1).permutation(len(data.k_pool))
    k_pool, v_pool = np.empty_like(data.k_pool), np.empty_like(data.v_pool)
    k_pool[moved], v_pool[moved] = data.k_pool, data.v_pool
    table = np.full((5, data.block_table.shape[1] + 40), -3, np.int32)
    for b, length in enumerate(LENGTHS):
        used = -(-length // 16)
        table[b, :used] = moved[data.block_table[b, :used]]
    bigger = [np.concatenate([pool, np.full_like(pool, np.nan)]) for pool in (k_pool, v_pool)]
    got = calls.run_paged(device, data._replace(k_pool=bigger[0], v_pool=bigger[1], block_table=table))
    compare.same_bits(got, want)


def test_ragged_alone_or_in_company(device, dtype):
    q_lens = (7, 1, 64, 2, 30)
    data = _paged(dtype, q_lens)
    got = calls.run_paged(device, data)
    calls.check_ragged_alone(device, data, got)
    compare.same_bits(calls.run_paged(device, data, max_seqlen_q=64), got, "with max_seqlen_q")


@pytest.mark.parametrize("q_lens", [16, 100, (100, 3, 30)], ids=["few", "many", "ragged"])
@pytest.mark.parametrize("heads", [2, 8])
def test_windows_longer_than_a_sequence(heads, q_lens, device, dtype):
    """A window between a sequence's length and the width of the table: others must not decide what it leaves out."""
    score = cases.Score(True, (511, 0))
    case = cases.Paged("", (500, 30, 200), q_lens, 16, 2 * heads, 2, 128, score=score)
    data = case.make(dtype, spare_columns=0)
    got = calls.run_paged(device, data)
    for more in (1, 40):
        table = np.pad(data.block_table, ((0, 0), (0, more)), constant_values=-7)
        compare.same_bits(calls.run_paged(device, data._replace(block_table=table)), got, f"{more} wider")


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("q_len", [1, 9, 16, 40])
def test_tables_around_one_segment(q_len, heads, device, dtype):
    """Room for more keys than any sequence has: 240, 256 and 272 slots, and many more."""
    data = cases.Paged("", (150, 0, 200), q_len, 16, 2 * heads, 2, 128).make(dtype, spare_columns=2)
    assert data.block_table.shape[1] == 15
    got = calls.run_paged(device, data)
    for more in (1, 2, 100):
        table = np.pad(data.block_table, ((0, 0), (0, more)), constant_values=-7)
        compare.same_bits(calls.run_paged(device, data._replace(block_table=table)), got, f"{more} wider")


@pytest.mark.parametrize("window", [(None, None), (450, 0), (450, None), (None, 450)])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_packed_windows_alone_or_in_company(causal, window, device, dtype):
    rng = np.random.default_rng(0)
    lengths = (400, 90, 300)
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    q, k, v = (cases.random(rng, (cu[-1], heads, 64), dtype) for heads in (4, 2, 2))
    score = cases.Score(causal, window).kwargs(None, 4)
    out, lse = calls.run_flash(device, (q, k, v), score, cu_seqlens_q=cu, cu_seqlens_k=cu)
    for b, length in enumerate(lengths):
        rows = slice(cu[b], cu[b + 1])
        one = np.array([0, length], np.int32)
        alone = calls.run_flash(
            device, (q[rows], k[rows], v[rows]), score, cu_seqlens_q=one, cu_seqlens_k=one
        )
        compare.same_bits(alone, (out[rows], lse[rows]), f"sequence {b} alone")


def test_tiled_whatever_the_object_holds(device, dtype):
    case = cases.Tiled("", cases.Paged("", seq_lens=(2500, 1, 700), num_q_heads=6), tile_blocks=(100, 30, 40))
    data = case.make(dtype)
    want = calls.run_tiled(device, data)
    compare.same_bits(calls.run_tiled(device, data), want, "again")
    compare.same_bits(calls.run_tiled(device, data, dims={"max_seqs": 17}), want, "max_seqs")
    compare.same_bits(calls.run_tiled(device, data, dims={"tile_capacity": 512}), want, "tile_capacity")
    compare.same_bits(calls.run_tiled(device, data, dims={"max_q_len": 1, "max_seqs": 3}), want)
    for order in ([0], [1], [2], [2, 0, 1, 0]):
        tiles = [cases.Tile(*(None if x is None else x[order] for x in tile)) for tile in data.tiles]
        part = data._replace(paged=data.paged._replace(q=data.paged.q[order]), tiles=tiles)
        compare.same_bits(calls.run_tiled(device, part), tuple(x[order] for x in want), f"sequences {order}")


@pytest.mark.parametrize("causal", [False, True])
def test_flash_alone_or_in_company(causal, device, dtype):
    (q, k, v), _ = cases.Flash("", batch=3, q_len=70, kv_len=1500).make(dtype)
    out, lse = calls.run_flash(device, (q, k, v), causal=causal)
    compare.same_bits(calls.run_flash(device, (q, k, v), causal=causal), (out, lse))
    for b in range(3):
        got = calls.run_flash(device, (q[[b]], k[[b]], v[[b]]), causal=causal)
        compare.same_bits(got, (out[[b]], lse[[b]]), f"sequence {b} alone")


def test_packed_alone_or_in_company(device, dtype):
    q_lens, kv_lens = (40, 1, 129), (40, 1200, 300)
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (q_lens, kv_lens))
    rng = np.random.default_rng(0)
    q, k, v = (cases.random(rng, (n, h, 64), dtype) for n, h in ((170, 4), (1540, 2), (1540, 2)))
    out, lse = calls.run_flash(device, (q, k, v), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True)
    for b in range(3):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        one = {
            "cu_seqlens_q": np.array([0, q_lens[b]]),
            "cu_seqlens_k": np.array([0, kv_lens[b]]),
            "causal": True,
        }
        compare.same_bits(calls.run_flash(device, (q[rows], k[keys], v[keys]), one), (out[rows], lse[rows]))


def test_any_number_of_threads(cpu, dtype):
    paged = _paged(dtype)
    tiled = cases.Tiled("", cases.Paged("", seq_lens=(2500, 3)), tile_blocks=(100, 60)).make(dtype)
    qkv, score = cases.Flash("", q_len=70, kv_len=700).make(dtype)
    before = ta.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 7):
            ta.set_num_threads(threads)
            results.append(
                (calls.run_paged(cpu, paged), calls.run_tiled(cpu, tiled), calls.run_flash(cpu, qkv, score))
            )
    finally:
        ta.set_num_threads(before)
    for other in results[1:]:
        compare.same_bits(other, results[0])


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_row_that_sees_nothing_beside_one_that_sees_inf(value, cpu):
    """Query token 0 is before its sequence, token 1 sees a V that is not finite: nothing stays nothing, whether the
    table has room for several segments or not, and however many threads run."""
    q, k, v = np.ones((1, 2, 1, 8), np.float32), *np.zeros((2, 1, 16, 1, 8), np.float32)
    v[0, 0] = value
    before = ta.get_num_threads()
    try:
        for threads in (1, 2):
            ta.set_num_threads(threads)
            for width in (1, 32):
                table = np.zeros((1, width), np.int32)
                out = ta.paged_attention(q, k, v, table, np.array([1]), sinks=np.zeros(1, np.float32))
                assert not out[0, 0].any()
                assert not np.isfinite(out[0, 1]).any()
    finally:
        ta.set_num_threads(before)


@pytest.mark.parametrize("q_lens", [None, 3])
def test_heads_side_by_side_or_apart(q_lens, cpu, dtype):
    """The CPU takes several heads at once where they lie side by side: the same bits, tile by tile."""
    data = cases.Paged("", seq_lens=LENGTHS, q_lens=q_lens, num_q_heads=12, num_kv_heads=6).make(dtype)
    side_by_side = calls.run_paged(cpu, data)
    compare.result_close(side_by_side, calls.want_paged(data), dtype)
    apart = [np.ascontiguousarray(pool.swapaxes(1, 2)).swapaxes(1, 2) for pool in (data.k_pool, data.v_pool)]
    got = ta.paged_attention(data.q, *apart, data.block_table, data.seq_lens, return_lse=True)
    compare.same_bits(got, side_by_side)


def test_merging_is_deterministic_in_the_order_given(device):
    data = cases.Tiled("", cases.Paged("", seq_lens=(96, 40))).make("float32")
    states = []
    for tile in data.tiles:
        attn = calls.make_attention(device, data)
        attn.begin_step(2)
        calls.step(device, attn, data, tile)
        states.append(attn.state())
    first, again = ta.merge_states(states), ta.merge_states(states)
    for name in "mlo":
        compare.same_bits(*(calls.device_view(device, getattr(x, name)) for x in (first, again)))
