# SPDX-License-Identifier: Apache-2.0
"""What the portable kernel takes and Hopper's do not: blocks of any size, rows of odd strides; and the cases of the
other kernels' tests.

A call that it cannot take would run on the plain kernel; tests/cpp/test_plan.cpp says which calls it takes.
"""

from __future__ import annotations

import calls
import cases
import compare
import numpy as np
import pytest
import reference
import tiledattn as ta

pytestmark = pytest.mark.gpu

HALF = ("bfloat16", "float16")
SIXTEEN = pytest.mark.parametrize("dtype", HALF)
CAUSAL = cases.Score(causal=True)


@pytest.fixture(autouse=True)
def portable(gpu, monkeypatch):
    monkeypatch.setenv("TILEDATTN_CUDA_KERNELS", "portable")
    for operation, job in (("paged_attention", "decode"), ("flash_attention", "prefill")):
        assert ta.supports(operation, device="cuda").kernel == f"cuda_{job}_portable"


@SIXTEEN
@pytest.mark.parametrize("case", cases.PAGED, ids=str)
def test_paged(case, dtype, gpu):
    data = case.make(dtype)
    compare.result_close(calls.run_paged(gpu, data), calls.want_paged(data), dtype)


@SIXTEEN
@pytest.mark.parametrize("case", cases.TILED, ids=str)
def test_tiles(case, dtype, gpu):
    data = case.make(dtype)
    compare.result_close(calls.run_tiled(gpu, data), calls.want_tiled(data).finalize(), dtype)


@SIXTEEN
@pytest.mark.parametrize("case", cases.FLASH, ids=str)
def test_flash(case, dtype, gpu):
    qkv, score = case.make(dtype)
    compare.result_close(calls.run_flash(gpu, qkv, score), reference.flash(*qkv, **score), dtype)


@SIXTEEN
@pytest.mark.parametrize("block_size", [1, 3, 7, 20, 100, 333])
@pytest.mark.parametrize("q_lens", [None, 5, 40, (7, 0, 130, 1)], ids=str)
@pytest.mark.parametrize("garbage", ["nan", "inf"])
def test_any_block_size(garbage, q_lens, block_size, dtype, gpu):
    case = cases.Paged("", (700, 9, 301, 64), q_lens, block_size, 8, 2, 128)
    data = case.make(dtype, garbage=garbage)
    compare.result_close(calls.run_paged(gpu, data), calls.want_paged(data), dtype)
    ta.check(gpu.device)


@SIXTEEN
@pytest.mark.parametrize("head_dim", [8, 64, 72, 96, 104, 128, 136, 192, 200, 256])
@pytest.mark.parametrize("gqa_ratio", [1, 3, 8, 40])
def test_ragged_head_dims_and_groups(gqa_ratio, head_dim, dtype, gpu):
    score = cases.Score(True, (150, 0), 20.0, True)
    case = cases.Paged("", (300, 33, 1, 170), (70, 33, 1, 5), 16, 2 * gqa_ratio, 2, head_dim, score=score)
    data = case.make(dtype)
    compare.result_close(calls.run_paged(gpu, data), calls.want_paged(data), dtype)


def test_ragged_bits_do_not_depend_on_company(gpu):
    q_lens, seq_lens = (7, 1, 164, 2, 30), (2500, 1, 700, 64, 130)
    data = cases.Paged("", seq_lens, q_lens, 16, 6, 2, 128).make("bfloat16")
    got = calls.run_paged(gpu, data)
    calls.check_ragged_alone(gpu, data, got)
    for _ in range(20):
        compare.same_bits(calls.run_paged(gpu, data), got, "again")


@SIXTEEN
@pytest.mark.parametrize("q_len", [1, 16, 60, 200])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_strides(head_dim, q_len, dtype, gpu):
    """Heads before tokens; rows inside wider ones, whose other elements are NaN; all heads of K the same."""
    (q, k, v), score = cases.Flash("", 2, q_len, 333, 6, 2, head_dim, score=CAUSAL).make(dtype)
    want = reference.flash(q, k, v, **score)
    swapped = [gpu.array(np.ascontiguousarray(x.swapaxes(1, 2))).swapaxes(1, 2) for x in (q, k, v)]
    wide = [
        gpu.array(np.pad(x, ((0, 0), (1, 2), (0, 1), (8, 16)), constant_values=np.nan))[:, 1:-2, :-1, 8:-16]
        for x in (q, k, v)
    ]
    odd = [gpu.array(np.pad(x, ((0, 0),) * 3 + ((0, 1),)))[..., :-1] for x in (q, k, v)]  # the plain kernel's
    for arrays in (swapped, wide, odd, (wide[0], swapped[1], wide[2])):
        compare.result_close(calls.run_flash(gpu, arrays, score), want, dtype)
    k[:, :, 1] = k[:, :, 0]
    shared = gpu.array(k[:, :, :1])
    both = shared.expand(-1, -1, 2, -1) if gpu.name == "torch" else gpu.array(k)
    compare.result_close(calls.run_flash(gpu, (q, both, v), score), reference.flash(q, k, v, **score), dtype)


@SIXTEEN
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("q_lens", [None, 9, 30])
def test_state_after_each_tile(q_lens, head_dim, dtype, gpu):
    """m is the true maximum, also where keys are cut among warps and rows among blocks."""
    paged = cases.Paged("", (1, 1500, 96, 0), q_lens, 7, 8, 2, head_dim, spread=2.0)
    data = cases.Tiled("", paged, (50, 100, 1, 70)).make(dtype)
    attn = calls.make_attention(gpu, data)
    num_seqs = len(data.paged.q)
    attn.begin_step(num_seqs)
    for i, tile in enumerate(data.tiles):
        calls.step(gpu, attn, data, tile)
        want = calls.want_tiled(data, i + 1)
        compare.state_close(calls.state_arrays(gpu, attn, num_seqs), want.state, dtype, want.max_score)


@pytest.mark.parametrize("q_lens", [None, 9, 60, (70, 3, 30)], ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_no_query_sees_is_never_observable(value, q_lens, gpu):
    """Keys before a window, beyond a length and in blocks that no table names."""
    score = cases.Score(True, (40, 0))
    data = cases.Paged("", (300, 70, 99), q_lens, 5, 8, 2, 128, score=score).make("bfloat16")
    want = calls.want_paged(data)
    first = (
        data.seq_lens - (np.diff(data.cu_seqlens_q) if data.cu_seqlens_q is not None else q_lens or 1) - 40
    )
    for b in range(3):
        for key in range(max(int(first[b]), 0)):
            block = data.block_table[b, key // 5]
            data.k_pool[block, key % 5] = data.v_pool[block, key % 5] = value
    compare.result_close(calls.run_paged(gpu, data), want, "bfloat16")


@pytest.mark.parametrize("q_lens", [None, 9, (70, 3, 30)], ids=str)
def test_faults(q_lens, gpu):
    good = cases.Paged("", (300, 70, 99), q_lens, 5, 8, 2, 128).make("float16")
    bad = good._replace(block_table=good.block_table.copy())
    bad.block_table[1, 3] = 10**6
    rows = [slice(b, b + 1) for b in range(3)]
    if good.cu_seqlens_q is not None:
        rows = [slice(*good.cu_seqlens_q[b : b + 2]) for b in range(3)]
    want = calls.run_paged(gpu, good)
    got = calls.run_paged(gpu, bad)
    with pytest.raises(IndexError, match=r"block_table.*1000000"):
        ta.check(gpu.device)
    assert all(np.isnan(x[rows[1]].astype(np.float32)).all() for x in got)
    for b in (0, 2):
        compare.same_bits(tuple(x[rows[b]] for x in got), tuple(x[rows[b]] for x in want), f"sequence {b}")
