# SPDX-License-Identifier: Apache-2.0
"""Prefill over a paged cache on Hopper's own kernel: pages, lengths, garbage, faults, equal bits, replay."""

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
# Edges of tiles of keys and of rows, no keys, fewer keys than queries.
SEQ_LENS = (700, 0, 33, 128, 161, 9)
RAGGED = (130, 3, 33, 128, 1, 40)
# Cut into segments where few queries meet them: one, two or several.
LONG_LENS = (9001, 0, 4096, 300, 4097, 13000)
COMPANIES = pytest.mark.parametrize(
    ("seq_lens", "q_lens"),
    [(SEQ_LENS, 40), (SEQ_LENS, RAGGED), (LONG_LENS, 40)],
    ids=["dense", "ragged", "segments"],
)
HEAD_DIMS = [64, 96, 128, 192, 256]


@pytest.fixture(scope="module", autouse=True)
def hopper():
    """Elsewhere the portable kernel runs, which has tests of its own."""
    sizes = {"dtype": "bfloat16", "device": "cuda", "block_size": 8, "q_len": 17}
    if not ta.info()["num_cuda_devices"]:
        return
    if ta.supports("flash_attention", **sizes).kernel != "cuda_prefill_sm90":
        pytest.skip("the GPU has no Hopper kernels")
    assert ta.supports("paged_attention", **sizes).kernel == "cuda_prefill_sm90"


def _check(gpu, case, dtype, **made):
    data = case.make(dtype, **made)
    got = calls.run_paged(gpu, data)
    compare.result_close(got, calls.want_paged(data), dtype)
    ta.check(gpu.device)
    return data, got


@SIXTEEN
@pytest.mark.parametrize("block_size", [8, 16, 24, 40, 64, 80, 128, 256])
@pytest.mark.parametrize("q_lens", [40, RAGGED], ids=["dense", "ragged"])
@pytest.mark.parametrize("garbage", ["nan", "inf"])
def test_block_sizes(garbage, q_lens, block_size, dtype, gpu):
    _check(gpu, cases.Paged("", SEQ_LENS, q_lens, block_size, 8, 2, 128), dtype, garbage=garbage)


@SIXTEEN
@pytest.mark.parametrize("head_dim", [8, 64, 72, 96, 128, 136, 192, 256])
@pytest.mark.parametrize("q_lens", [40, 200, RAGGED], ids=["few", "dense", "ragged"])
def test_head_dims(q_lens, head_dim, dtype, gpu):
    _check(gpu, cases.Paged("", SEQ_LENS, q_lens, 16, 4, 2, head_dim), dtype)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (64, 128), (128, 64), (128, 256)])
def test_values_of_another_width(head_dim, head_dim_v, gpu):
    _check(gpu, cases.Paged("", SEQ_LENS, RAGGED, 16, 4, 2, head_dim, head_dim_v), "bfloat16")


@SIXTEEN
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    "score",
    [cases.Score(True, softcap=2.0), cases.Score(True, sinks=True), cases.Score(True, softmax_scale=-0.1)],
    ids=["softcap", "sinks", "negative_scale"],
)
def test_options(score, head_dim, dtype, gpu):
    _check(gpu, cases.Paged("", SEQ_LENS, RAGGED, 16, 4, 2, head_dim, score=score, spread=3.0), dtype)


@SIXTEEN
@pytest.mark.parametrize("left", [0, 5, 30, 100, 333])
@pytest.mark.parametrize("block_size", [8, 40, 64, 256])
@pytest.mark.parametrize("q_lens", [40, RAGGED], ids=["dense", "ragged"])
def test_windows(q_lens, block_size, left, dtype, gpu):
    """Blocks that lie before every window have ids of no block; what shares a block with the first key that counts is
    NaN."""
    score = cases.Score(True, (left, 0), sinks=left == 5)
    data = cases.Paged("", SEQ_LENS, q_lens, block_size, 8, 2, 128, score=score).make(dtype)
    want = calls.want_paged(data)
    tokens = np.full(len(SEQ_LENS), q_lens) if isinstance(q_lens, int) else np.array(q_lens)
    for b, first in enumerate(data.seq_lens - tokens - left):
        for key in range(max(int(first), 0)):
            block = data.block_table[b, key // block_size]
            data.k_pool[block, key % block_size] = data.v_pool[block, key % block_size] = np.nan
        data.block_table[b, : max(int(first), 0) // block_size] = -1
    got = calls.run_paged(gpu, data)
    compare.result_close(got, want, dtype)
    ta.check(gpu.device)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("q_lens", [40, RAGGED], ids=["dense", "ragged"])
def test_windows_of_any_head_dim(q_lens, head_dim, gpu):
    """The same bits in any company."""
    score = cases.Score(True, (70, 0), 20.0)
    data, got = _check(gpu, cases.Paged("", SEQ_LENS, q_lens, 24, 4, 2, head_dim, score=score), "bfloat16")
    if data.cu_seqlens_q is not None:
        calls.check_ragged_alone(gpu, data, got)
    for _ in range(20):
        compare.same_bits(calls.run_paged(gpu, data), got, "again")


def test_windows_far_from_the_beginning(gpu):
    """Many keys before the window, whose table entries are not read."""
    score = cases.Score(True, (1023, 0))
    data = cases.Paged("", (9001, 300, 4096, 0, 13000), 40, 16, 4, 2, 128, score=score).make("bfloat16")
    want = calls.want_paged(data)
    for b, length in enumerate(data.seq_lens):
        data.block_table[b, : max(0, int(length) - 40 - 1023) // 16] = 10**6
    compare.result_close(calls.run_paged(gpu, data), want, "bfloat16")
    ta.check(gpu.device)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("q_len", [2100, 8200])
def test_long_sequences(q_len, head_dim, gpu):
    """Tall tiles; some rows are before the beginning of their sequence."""
    _check(gpu, cases.Paged("", (q_len, 300), q_len, 16, 1, 1, head_dim), "bfloat16")


@pytest.mark.parametrize(
    ("head_dim", "block_size"), [*((d, 16) for d in HEAD_DIMS), (192, 56), (192, 112), (256, 40), (256, 80)]
)
def test_few_queries_over_many_keys(head_dim, block_size, gpu):
    """Keys cut into segments, which may begin inside a block, of sequences that have one or several: the same bits
    alone, with a narrower table."""
    data, (out, lse) = _check(gpu, cases.Paged("", LONG_LENS, 40, block_size, 4, 2, head_dim), "bfloat16")
    for b, length in enumerate(LONG_LENS):
        one = data._replace(
            q=data.q[[b]],
            block_table=data.block_table[[b], : max(1, -(-length // block_size))],
            seq_lens=data.seq_lens[[b]],
        )
        compare.same_bits(calls.run_paged(gpu, one), (out[[b]], lse[[b]]), f"{length} keys alone")


def test_few_queries_whatever_the_workspace(gpu):
    """It says how many sequences go into a launch; one that does not hold any is refused."""
    data = cases.Paged("", (9001, 300, 4096, 0, 13000), 40, 16, 4, 2, 128).make("bfloat16")
    want = calls.run_paged(gpu, data)
    compare.result_close(want, calls.want_paged(data), "bfloat16")
    sequence = 40 * 4 * 4 * (128 + 2) * 4  # tokens, heads, segments of the table's keys, floats of a row
    for nbytes in (sequence + 260, 2 * sequence + 512, 4 * sequence + 512):
        got = calls.run_paged(gpu, data, workspace=ta.Workspace(gpu.device, nbytes))
        compare.same_bits(got, want, f"{nbytes} bytes")
    small = ta.Workspace(gpu.device, sequence + 259)
    with pytest.raises(ValueError, match=rf"workspace: has {sequence + 259} .* at least {sequence + 260}$"):
        calls.run_paged(gpu, data, workspace=small)


def test_many_sequences(gpu):
    """More tiles than multiprocessors; all kinds of lengths."""
    rng = np.random.default_rng(0)
    seq_lens = rng.integers(0, 400, 200)
    q_lens = tuple(int(rng.integers(0, n + 1)) for n in seq_lens)
    _check(gpu, cases.Paged("", tuple(map(int, seq_lens)), q_lens, 16, 8, 4, 128), "bfloat16")


def test_heads_before_tokens(gpu):
    """HND pools: the same bits as NHD."""
    if gpu.name != "torch":
        pytest.skip("needs torch for strides")
    data, want = _check(gpu, cases.Paged("", SEQ_LENS, RAGGED, 16, 8, 2, 128), "float16")
    pools = [gpu.array(np.ascontiguousarray(x.swapaxes(1, 2))).swapaxes(1, 2) for x in data[1:3]]
    rest = [gpu.array(x) for x in (data.block_table, data.seq_lens)]
    got = ta.paged_attention(
        gpu.array(data.q),
        *pools,
        *rest,
        cu_seqlens_q=gpu.array(data.cu_seqlens_q),
        return_lse=True,
        **data.score,
    )
    compare.same_bits(tuple(gpu.numpy(x) for x in got), want)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_bits_do_not_depend_on_company(head_dim, gpu):
    data, got = _check(gpu, cases.Paged("", SEQ_LENS, RAGGED, 16, 6, 2, head_dim), "bfloat16")
    calls.check_ragged_alone(gpu, data, got)
    for _ in range(20):
        compare.same_bits(calls.run_paged(gpu, data), got, "again")


def test_segments_again_and_in_random_company(gpu):
    """A sequence keeps its bits in every call, among whichever others and whatever the width of the table."""
    data, (out, lse) = _check(gpu, cases.Paged("", LONG_LENS, 40, 16, 2, 1, 64), "bfloat16")
    rng = np.random.default_rng(0)
    for _ in range(1000):
        some = rng.choice(len(LONG_LENS), rng.integers(1, 9))
        columns = -(-max(LONG_LENS[b] for b in some) // 16)
        width = max(1, int(rng.integers(columns, data.block_table.shape[1] + 1)))
        part = data._replace(
            q=data.q[some], block_table=data.block_table[some, :width], seq_lens=data.seq_lens[some]
        )
        compare.same_bits(calls.run_paged(gpu, part), (out[some], lse[some]), str(some))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@COMPANIES
@pytest.mark.parametrize("fault", ["block", "negative_block", "length"])
def test_faults(fault, seq_lens, q_lens, head_dim, gpu):
    """A faulty sequence becomes NaN, its neighbours keep their bits, also where it comes last or fills the batch."""
    good = cases.Paged("", seq_lens, q_lens, 16, 4, 2, head_dim).make("float16")
    want = calls.run_paged(gpu, good)
    if good.cu_seqlens_q is None:
        rows = [slice(b, b + 1) for b in range(len(seq_lens))]
    else:
        rows = [slice(*good.cu_seqlens_q[b : b + 2]) for b in range(len(seq_lens))]
    for wrong in ([0], [3], [5], [0, 2, 3, 4, 5]):
        bad = good._replace(block_table=good.block_table.copy(), seq_lens=good.seq_lens.copy())
        for b in wrong:
            if fault == "length":
                bad.seq_lens[b] = bad.block_table.shape[1] * 16 + 1
            else:
                bad.block_table[b, 0] = {"block": len(bad.k_pool), "negative_block": -1}[fault]
        got = calls.run_paged(gpu, bad)
        with pytest.raises(
            (IndexError, ValueError), match="seq_lens" if fault == "length" else "block_table"
        ):
            ta.check(gpu.device)
        for b in range(len(seq_lens)):
            if b in wrong:
                assert all(np.isnan(x[rows[b]].astype(np.float32)).all() for x in got)
            else:
                compare.same_bits(tuple(x[rows[b]] for x in got), tuple(x[rows[b]] for x in want), f"{b}")


@COMPANIES
def test_replay_follows_new_lengths_and_blocks(seq_lens, q_lens, gpu):
    if gpu.name != "torch":
        pytest.skip("needs torch for graphs")
    torch = gpu.torch
    data = cases.Paged("", seq_lens, q_lens, 16, 8, 2, 128).make("bfloat16", garbage="zero")
    args = [gpu.array(x) for x in data.args]
    kwargs = dict(data.score)
    if data.cu_seqlens_q is not None:
        kwargs["cu_seqlens_q"] = gpu.array(data.cu_seqlens_q)
    out = torch.empty_like(args[0])
    ta.paged_attention(*args, **kwargs, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ta.paged_attention(*args, **kwargs, out=out)
    rng = np.random.default_rng(0)
    for _ in range(3):
        table = rng.integers(0, len(data.k_pool), data.block_table.shape).astype(np.int32)
        lens = rng.integers(0, table.shape[1] * 16 + 1, len(seq_lens)).astype(np.int32)
        new = data._replace(block_table=table, seq_lens=lens)
        args[3].copy_(gpu.array(table))
        args[4].copy_(gpu.array(lens))
        graph.replay()
        torch.cuda.synchronize()
        compare.same_bits(gpu.numpy(out), calls.run_paged(gpu, new)[0])
        compare.result_close(calls.run_paged(gpu, new), calls.want_paged(new), "bfloat16")


@SIXTEEN
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("block_size", [8, 64])
def test_same_bits_as_packed_keys(block_size, head_dim, dtype, gpu):
    """Where keys lie does not change a bit: the same kernel reads them."""
    data, got = _check(gpu, cases.Paged("", SEQ_LENS, RAGGED, block_size, 4, 2, head_dim), dtype)
    rows = list(zip(data.block_table, data.seq_lens, strict=True))
    k, v = (
        np.concatenate([reference.gather(pool, blocks, int(n)) for blocks, n in rows]).astype(pool.dtype)
        for pool in data[1:3]
    )
    cu_k = np.concatenate([[0], np.cumsum(data.seq_lens)]).astype(np.int32)
    cu = {"cu_seqlens_q": data.cu_seqlens_q, "cu_seqlens_k": cu_k}
    compare.same_bits(calls.run_flash(gpu, (data.q, k, v), data.score, **cu), got)
