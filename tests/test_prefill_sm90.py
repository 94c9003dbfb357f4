# SPDX-License-Identifier: Apache-2.0
"""The fast prefill kernels: tails, masks, options, strides, packed sequences, special values, equal bits.

Every case runs on the kernel that is chosen, which is Hopper's on a Hopper GPU, and on the portable one.
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

CAUSAL = cases.Score(causal=True)
# batch, q heads, KV heads, q tokens, keys: edges of tiles of 64, 80, 128 and 192; more tiles than SMs.
SHAPES = [
    (1, 1, 1, 128, 128),
    (1, 1, 1, 193, 161),
    (1, 4, 1, 500, 777),
    (2, 2, 1, 300, 900),
    (1, 2, 2, 700, 400),
    (1, 2, 2, 300, 20),
    (1, 2, 1, 17, 1),
    (2, 2, 2, 65, 81),
    (2, 50, 25, 260, 260),
]
OPTIONS = {
    "window": cases.Score(window=(100, 50)),
    "window_left": cases.Score(causal=True, window=(70, None)),
    "window_right": cases.Score(window=(None, 40)),
    "window_zero": cases.Score(window=(0, 0)),
    "softcap": cases.Score(softcap=2.0),
    "softcap_50": cases.Score(causal=True, softcap=50.0),
    "sinks": cases.Score(causal=True, sinks=True),
    "scale_negative": cases.Score(softmax_scale=-0.1),
    "scale_zero": cases.Score(softmax_scale=0.0),
    "everything": cases.Score(True, (300, 3), 30.0, True, 0.2),
}
HALF = ("bfloat16", "float16")
# Tighter than what callers are promised: errors of normal inputs.
EXPECTED_ERROR = {"bfloat16": 2.5e-3, "float16": 3.5e-4}


NO_OPTION = cases.Score()


@pytest.fixture(autouse=True, params=["best", "portable"])
def kernels(request, monkeypatch):
    """Which kernels the calls of a test use."""
    monkeypatch.setenv("TILEDATTN_CUDA_KERNELS", request.param)
    return request.param


def _flash(shape, head_dim, score=NO_OPTION, head_dim_v=None, spread=1.0):
    batch, num_q_heads, num_kv_heads, q_len, kv_len = shape
    return cases.Flash(
        "", batch, q_len, kv_len, num_q_heads, num_kv_heads, head_dim, head_dim_v, score, spread
    )


def _check(gpu, case, dtype, tight=True, **kwargs):
    qkv, score = case.make(dtype)
    got = calls.run_flash(gpu, qkv, score, **kwargs)
    want = reference.flash(*qkv, **score)
    compare.result_close(got, want, dtype)
    size = np.linalg.norm(want.out)
    if tight and size:
        error = np.linalg.norm(np.asarray(got[0], np.float64) - want.out) / size
        assert error <= EXPECTED_ERROR[dtype]


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HALF)
def test_shapes(shape, causal, head_dim, dtype, gpu):
    _check(gpu, _flash(shape, head_dim, cases.Score(causal=causal)), dtype)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("shape", [(2, 4, 2, 200, 350), (1, 2, 2, 300, 170), (1, 2, 2, 30, 700)], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", HALF)
def test_options(option, shape, head_dim, dtype, gpu):
    _check(gpu, _flash(shape, head_dim, OPTIONS[option], spread=3.0), dtype, tight=False)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "shape",
    [(1, 2, 1, 2100, 2100), (1, 1, 1, 2305, 3001), (1, 1, 1, 2048, 300), (1, 1, 1, 8200, 700)],
    ids=str,
)
@pytest.mark.parametrize("dtype", HALF)
def test_long_sequences(shape, causal, head_dim, dtype, gpu):
    """Tall tiles, whose upper rows do not see the last tiles of keys; with more queries than keys most are empty."""
    _check(gpu, _flash(shape, head_dim, cases.Score(causal=causal)), dtype)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize(
    "score",
    [cases.Score(), CAUSAL, cases.Score(True, (6000, None), 20.0, True), cases.Score(softmax_scale=-0.1)],
    ids=["full", "causal", "window_softcap_sinks", "negative_scale"],
)
@pytest.mark.parametrize("q_len", [20, 300])
def test_few_queries_over_many_keys(q_len, score, head_dim, gpu):
    """Keys cut into segments: results, and bits that neither the batch nor its place in it change."""
    qkv, score = _flash((3, 2, 1, q_len, 9001), head_dim, score, spread=2.0).make("bfloat16")
    got = calls.run_flash(gpu, qkv, score)
    compare.result_close(got, reference.flash(*qkv, **score), "bfloat16")
    alone = calls.run_flash(gpu, [x[1:2] for x in qkv], score)
    compare.same_bits(alone, tuple(x[1:2] for x in got))


def test_huge_scores_in_one_segment(gpu):
    (q, k, v), _ = _flash((1, 2, 2, 100, 9000), 64).make("bfloat16")
    k[:, 5000] = 1e15
    compare.result_close(calls.run_flash(gpu, (q, k, v)), reference.flash(q, k, v), "bfloat16")


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_values_behind_a_segment(head_dim, gpu):
    """The last tile of a segment may hold values of the next one, for which it has no weight: 0 * inf is NaN."""
    (q, k, v), _ = _flash((1, 2, 2, 100, 9000), head_dim).make("bfloat16")
    v[:, [4096, 8192], :, 3] = np.inf
    for causal in (False, True):
        got = calls.run_flash(gpu, (q, k, v), causal=causal)
        compare.result_close(got, reference.flash(q, k, v, causal=causal), "bfloat16")


def test_a_row_with_nan_in_one_segment(gpu):
    """It is NaN, and the rows that do not see that key are not."""
    (q, k, v), _ = _flash((1, 2, 2, 100, 9000), 64).make("bfloat16")
    q[:, 7] = np.nan
    k[:, 8950] = np.nan  # seen from row 50 on
    got = calls.run_flash(gpu, (q, k, v), causal=True)
    compare.result_close(got, reference.flash(q, k, v, causal=True), "bfloat16")


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("rise", [3.0, 20.0, 100.0, 1e4])
def test_scores_that_rise_towards_the_first_key(rise, causal, head_dim, gpu):
    """Keys are read from the last to the first: each tile has maxima far above those before it, more for some rows."""
    tokens = 2500
    (q, k, v), _ = _flash((1, 1, 1, tokens, tokens), head_dim).make("bfloat16")
    q[..., 0] = np.arange(tokens).reshape(1, -1, 1) % 7 / 8
    k[..., 0] = np.arange(tokens)[::-1].reshape(1, -1, 1) * (rise / 64)
    got = calls.run_flash(gpu, (q, k, v), causal=causal, softmax_scale=0.25)
    compare.result_close(got, reference.flash(q, k, v, causal=causal, softmax_scale=0.25), "bfloat16")


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (64, 128), (128, 256), (8, 16)])
def test_values_of_another_width(head_dim, head_dim_v, gpu):
    _check(gpu, _flash((1, 2, 1, 200, 300), head_dim, CAUSAL, head_dim_v), "bfloat16")


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_float32_result(head_dim, gpu):
    qkv, score = _flash((2, 2, 1, 150, 200), head_dim, CAUSAL).make("bfloat16")
    out = gpu.full((2, 150, 2, head_dim), np.nan, "float32")
    got, lse = ta.flash_attention(*(gpu.array(x) for x in qkv), causal=True, out=out, return_lse=True)
    want = reference.flash(*qkv, **score)
    compare.out_close(gpu.numpy(got), want.out, "bfloat16", want.max_score)
    compare.lse_close(gpu.numpy(lse), want.lse)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_nothing_beside_the_arrays_is_read_or_written(head_dim, gpu):
    """All arrays are parts of larger ones that hold NaN, or a number that must stay."""
    (q, k, v), score = _flash((2, 2, 1, 150, 210), head_dim, CAUSAL).make("bfloat16")

    def inside(x, filling):
        big = np.full((x.shape[0], x.shape[1] + 3, x.shape[2] + 1, x.shape[3] + 16), filling, x.dtype)
        big[:, 1:-2, :-1, 8:-8] = x
        return gpu.array(big)

    def part(big):
        return big[:, 1:-2, :-1, 8:-8]

    out = inside(np.zeros_like(q), 77.0)
    ta.flash_attention(*(part(inside(x, np.nan)) for x in (q, k, v)), causal=True, out=part(out))
    got = gpu.numpy(out).astype(np.float64)
    compare.out_close(part(got), reference.flash(q, k, v, **score).out, "bfloat16")
    part(got)[...] = 77.0
    assert (got == 77.0).all()


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_values_arrive_where_they_belong(head_dim, gpu):
    """One-hot values: each column of the result is the weight of some keys."""
    (q, k, _), _ = _flash((1, 1, 1, 300, 300), head_dim).make("bfloat16")
    v = np.zeros_like(k)
    v[0, np.arange(300), 0, np.arange(300) % head_dim] = 1.0
    out, _ = calls.run_flash(gpu, (q, k * 2, v))
    assert np.abs(out.astype(np.float64) - reference.flash(q, k * 2, v).out).max() < 6e-3


def _packed(rng, q_lens, kv_lens, head_dim, dtype, spare=9):
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (q_lens, kv_lens))
    q = cases.random(rng, (cu_q[-1] + 5, 4, head_dim), dtype)
    k, v = (cases.random(rng, (cu_k[-1] + spare, 2, head_dim), dtype) for _ in range(2))
    k[cu_k[-1] :], v[cu_k[-1] :] = np.nan, np.nan
    return (q, k, v), cu_q, cu_k


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize(
    "score",
    [cases.Score(), CAUSAL, cases.Score(True, (40, None), 20.0)],
    ids=["full", "causal", "window_softcap"],
)
@pytest.mark.parametrize("dtype", HALF)
def test_packed(score, head_dim, dtype, gpu):
    """Sequences of length 0, tails inside tiles, rows after the last sequence, NaN in the neighbours."""
    q_lens, kv_lens = (5, 0, 33, 1, 270, 129, 64), (7, 4, 33, 0, 300, 129, 31)
    (q, k, v), cu_q, cu_k = _packed(np.random.default_rng(0), q_lens, kv_lens, head_dim, dtype)
    broken = 2
    q[cu_q[broken] : cu_q[broken + 1]] = k[cu_k[broken] : cu_k[broken + 1]] = np.nan
    v[cu_k[broken] : cu_k[broken + 1]] = np.nan
    options = score.kwargs(None, 4) if not score.sinks else {}
    out, lse = calls.run_flash(gpu, (q, k, v), options, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    for b in range(len(q_lens)):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        if b == broken:
            assert np.isnan(out[rows].astype(np.float32)).all()
            continue
        if q_lens[b] == 0:
            continue
        want = reference.flash(q[None, rows], k[None, keys], v[None, keys], **options)
        compare.result_close((out[None, rows], lse[None, rows]), want, dtype)
        one = {"cu_seqlens_q": np.array([0, q_lens[b]]), "cu_seqlens_k": np.array([0, kv_lens[b]])}
        alone = calls.run_flash(gpu, (q[rows], k[keys], v[keys]), options, **one)
        compare.same_bits(alone, (out[rows], lse[rows]), f"sequence {b} alone")
    assert not out[cu_q[-1] :].astype(np.float32).any()
    assert np.isneginf(lse[cu_q[-1] :]).all()


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", HALF)
def test_huge_scores(head_dim, dtype, gpu):
    """Softmax of scores around 1e30 (as far as the type goes), with ties at the maximum."""
    big = {"bfloat16": 1e15, "float16": 3e4}[dtype]
    rng = np.random.default_rng(0)
    q = np.zeros((1, 200, 1, head_dim), cases.NP_DTYPE[dtype])
    k = np.zeros((1, 300, 1, head_dim), cases.NP_DTYPE[dtype])
    q[0, :100, 0, 0], q[0, 100:, 0, 0] = big, -big
    k[0, :, 0, 0] = rng.standard_normal(300) * (big / 8)
    k[0, [70, 270], 0, 0] = k[..., 0].max()
    v = cases.random(rng, (1, 300, 1, head_dim), dtype)
    compare.result_close(
        calls.run_flash(gpu, (q, k, v), softmax_scale=1.0),
        reference.flash(q, k, v, softmax_scale=1.0),
        dtype,
    )


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_huge_scores_in_every_other_head(head_dim, gpu):
    """Each block has many tiles of rows, half of which it does twice; the last ones too."""
    shape, big = (1, 260, 300, head_dim), 1e15
    rng = np.random.default_rng(0)
    q, k, v = (cases.random(rng, shape, "bfloat16") for _ in range(3))
    q[:, :, ::2], k[:, :, ::2] = 0, 0
    q[:, :, ::2, 0] = big
    k[:, :, ::2, 0] = rng.standard_normal((1, 260, 150)) * (big / 8)
    for causal in (False, True):
        got = calls.run_flash(gpu, (q, k, v), causal=causal, softmax_scale=0.125)
        want = reference.flash(q, k, v, causal=causal, softmax_scale=0.125)
        compare.result_close(got, want, "bfloat16")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_infinite_scores(head_dim, gpu):
    q = np.zeros((1, 40, 1, head_dim), cases.NP_DTYPE["bfloat16"])
    k = np.zeros((1, 200, 1, head_dim), cases.NP_DTYPE["bfloat16"])
    v = cases.random(np.random.default_rng(0), k.shape, "bfloat16")
    q[0, :20, 0, 0], q[0, 20:, 0, 0] = 1.0, -1.0
    k[0, 33, 0, 0] = np.inf
    compare.result_close(calls.run_flash(gpu, (q, k, v)), reference.flash(q, k, v), "bfloat16")
    k[..., 0] = -np.inf
    out, lse = calls.run_flash(gpu, (q[:, :20], k, v))
    assert not out.astype(np.float32).any()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize(
    ("head_dim", "q_len", "causal"),
    [(64, 400, False), (64, 2100, True), (128, 400, True), (128, 2100, False), (256, 300, True)],
)
def test_same_bits_again_alone_and_replayed(head_dim, q_len, causal, gpu):
    if gpu.name != "torch":
        pytest.skip("needs torch for graphs")
    torch = gpu.torch
    (q, k, v), _ = _flash((3, 8, 8, q_len, q_len), head_dim).make("bfloat16")
    want = calls.run_flash(gpu, (q, k, v), causal=causal)
    for _ in range(20):
        compare.same_bits(calls.run_flash(gpu, (q, k, v), causal=causal), want)
    alone = calls.run_flash(gpu, (q[1:2], k[1:2], v[1:2]), causal=causal)
    compare.same_bits(alone, tuple(x[1:2] for x in want))
    arrays = [gpu.array(x) for x in (q * 0, k, v)]
    out = torch.empty_like(arrays[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ta.flash_attention(*arrays, causal=causal, out=out)
    arrays[0].copy_(gpu.array(q))
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        compare.same_bits(gpu.numpy(out), want[0])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_calls_in_a_row_wait_for_each_other(head_dim, gpu):
    """A launch may begin while the one before it ends; here each reads what the one before wrote."""
    if gpu.name != "torch":
        pytest.skip("needs torch to wait between calls")
    torch = gpu.torch
    (q, k, v), _ = _flash((5, 40, 40, 130, 130), head_dim).make("bfloat16")
    q, k, v = (gpu.array(x) for x in (q, k, v))

    def chain(wait):
        x = q
        for _ in range(20):
            x = ta.flash_attention(x, k, v, causal=True)
            wait()
        return gpu.numpy(x)

    want = chain(torch.cuda.synchronize)
    for _ in range(10):
        compare.same_bits(chain(lambda: None), want)


def test_replay_follows_new_lengths(gpu):
    if gpu.name != "torch":
        pytest.skip("needs torch for graphs")
    torch = gpu.torch
    rng = np.random.default_rng(0)
    q, k, v = (cases.random(rng, (400, 4, 128), "bfloat16") for _ in range(3))
    arrays = [gpu.array(x) for x in (q, k, v)]
    cu = gpu.array(np.array([0, 100, 250, 400], np.int32))
    out = torch.empty_like(arrays[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ta.flash_attention(*arrays, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu, out=out)
    for lengths in ([0, 1, 1, 400], [0, 399, 399, 399], [0, 0, 200, 400]):
        new = np.array(lengths, np.int32)
        cu.copy_(gpu.array(new))
        graph.replay()
        torch.cuda.synchronize()
        want = calls.run_flash(gpu, (q, k, v), causal=True, cu_seqlens_q=new, cu_seqlens_k=new)
        compare.same_bits(gpu.numpy(out), want[0])


def test_plain_kernels_can_be_asked_for(gpu, monkeypatch):
    monkeypatch.setenv("TILEDATTN_CUDA_KERNELS", "plain")
    assert ta.supports("flash_attention", device=gpu.device).kernel == "cuda_prefill_plain"
    _check(gpu, _flash((1, 2, 1, 100, 150), 128, CAUSAL), "bfloat16")
