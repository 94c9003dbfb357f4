# SPDX-License-Identifier: Apache-2.0
"""paged_attention: decode, several query tokens, ragged queries; any block table."""

from __future__ import annotations

import calls
import cases
import compare
import numpy as np
import pytest
import reference
import tiledattn as ta


@pytest.mark.parametrize("case", cases.PAGED, ids=str)
def test_matches_reference(case, device, dtype):
    data = case.make(dtype)
    compare.result_close(calls.run_paged(device, data), calls.want_paged(data), dtype)


@pytest.mark.parametrize("garbage", ["inf", "bytes"])
@pytest.mark.parametrize("name", ["decode", "ragged", "empties", "decode_block_7"])
def test_other_garbage_in_unused_slots(name, garbage, device, dtype):
    data = next(case for case in cases.PAGED if case.name == name).make(dtype, garbage=garbage)
    compare.result_close(calls.run_paged(device, data), calls.want_paged(data), dtype)


def test_frameworks(carrier):
    for dtype in carrier.dtypes:
        data = cases.Paged(
            "", seq_lens=(9, 40), q_lens=3, score=cases.Score(True, (11, None), 5.0, True, 0.2)
        ).make(dtype)
        compare.result_close(calls.run_paged(carrier, data), calls.want_paged(data), dtype)


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_index_types_and_row_strides(index_dtype, device):
    data = cases.Paged("", seq_lens=(40, 9), q_lens=(3, 2)).make("float32")
    wide = np.full((2, data.block_table.shape[1] + 4), -5, index_dtype)
    wide[:, 2:-2] = data.block_table
    table = device.array(wide)[:, 2:-2]
    q, k_pool, v_pool = map(device.array, data.args[:3])
    got = calls.run_paged(
        device,
        data._replace(
            q=q,
            k_pool=k_pool,
            v_pool=v_pool,
            block_table=table,
            seq_lens=data.seq_lens.astype(index_dtype),
            cu_seqlens_q=data.cu_seqlens_q.astype(index_dtype),
        ),
        max_seqlen_q=3,
    )
    compare.result_close(got, calls.want_paged(data), "float32")


def test_strided_lengths(device):
    """seq_lens as every second element of a wider array."""
    data = cases.Paged("", seq_lens=(40, 9, 1)).make("float32")
    wide = np.full(6, 10**6, np.int32)
    wide[::2] = data.seq_lens
    got = calls.run_paged(device, data._replace(seq_lens=device.array(wide)[::2]))
    compare.result_close(got, calls.want_paged(data), "float32")


def test_pool_layouts(device, dtype):
    """Heads before tokens, K and V interleaved in one buffer, a pool inside a wider one."""
    data = cases.Paged("", seq_lens=(40, 9, 1), head_dim_v=64).make(dtype)
    want = calls.want_paged(data)
    k_pool, v_pool = data.k_pool, data.v_pool
    heads_first = [
        device.array(np.ascontiguousarray(x.swapaxes(1, 2))).swapaxes(1, 2) for x in (k_pool, v_pool)
    ]
    both = device.array(np.stack([k_pool, v_pool], axis=1))
    inside = device.array(np.pad(k_pool, ((0, 0), (1, 2), (0, 1), (3, 5))))
    for k, v in (
        heads_first,
        (both[:, 0], both[:, 1]),
        (inside[:, 1:-2, :-1, 3:-5], both[:, 1]),
        (heads_first[0], device.array(v_pool)),
    ):
        compare.result_close(calls.run_paged(device, data._replace(k_pool=k, v_pool=v)), want, dtype)


def test_sequences_may_share_blocks(device):
    """A common prefix stored once."""
    data = cases.Paged("", seq_lens=(40, 40)).make("float32")
    data.block_table[1, :2] = data.block_table[0, :2]
    compare.result_close(calls.run_paged(device, data), calls.want_paged(data), "float32")


def test_out_and_lse_given(device, dtype):
    data = cases.Paged("", seq_lens=(0, 40, 9)).make(dtype)
    want = calls.want_paged(data)
    for out_dtype in {dtype, "float32"}:
        wide, lse = device.full((3, 6, 70), 7.0, out_dtype), device.full((3, 4), np.nan, "float32")
        calls.run_paged(device, data, out=wide[:, 1:5, 2:66], lse=lse)
        got = device.numpy(wide).copy()
        compare.out_close(got[:, 1:5, 2:66], want.out, dtype, want.max_score)
        compare.lse_close(device.numpy(lse), want.lse)
        got[:, 1:5, 2:66] = 7.0
        assert (got == 7.0).all(), "paged_attention wrote beside out"


@pytest.mark.parametrize("q_lens", [None, 2, ()])
def test_no_sequences(q_lens, device, dtype):
    data = cases.Paged("", seq_lens=(), q_lens=q_lens).make(dtype)
    compare.result_close(calls.run_paged(device, data), calls.want_paged(data), dtype)


def test_no_query_tokens(device, dtype):
    data = cases.Paged("", seq_lens=(20, 3), q_lens=0).make(dtype)
    compare.result_close(calls.run_paged(device, data), calls.want_paged(data), dtype)


def test_agrees_with_tiles(device, dtype):
    case = cases.Tiled("", cases.Paged("", seq_lens=(40, 96), q_lens=3), positions=True)
    data = case.make(dtype)
    tiled, paged = calls.run_tiled(device, data), calls.run_paged(device, data.paged)
    want = calls.want_paged(data.paged)
    compare.result_close(tiled, want, dtype)
    compare.result_close(paged, want, dtype)


def test_whole_cache_named_by_the_table(device):
    """No spare column, no spare block: the last valid id and the last slot are read."""
    data = cases.Paged("", seq_lens=(32, 16)).make("float32", spare_blocks=0, spare_columns=0)
    assert data.block_table.shape == (2, 2)
    assert data.block_table.max() == len(data.k_pool) - 1
    compare.result_close(calls.run_paged(device, data), calls.want_paged(data), "float32")


def test_key_masked_from_every_query_is_not_observable(device):
    """Keys left of the window of all query tokens may hold NaN in K and V."""
    data = cases.Paged("", seq_lens=(60,), q_lens=3, score=cases.Score(True, (9, 0))).make("float32")
    want = calls.want_paged(data)
    for position in range(60 - 3 - 9):
        block, slot = data.block_table[0, position // 16], position % 16
        data.k_pool[block, slot] = data.v_pool[block, slot] = np.nan
    compare.result_close(calls.run_paged(device, data), want, "float32")
    assert np.isfinite(want.out).all()


def test_matches_flash_over_gathered_keys(cpu, dtype):
    data = cases.Paged("", seq_lens=(77,), q_lens=5).make(dtype)
    k, v = (reference.gather(pool, data.block_table[0], 77)[None] for pool in (data.k_pool, data.v_pool))
    dense = cpu.call(ta.flash_attention, data.q, k, v, causal=True, return_lse=True)
    compare.result_close(dense, calls.want_paged(data), dtype)
