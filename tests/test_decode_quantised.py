# SPDX-License-Identifier: Apache-2.0
"""Decode over quantised caches on a GPU, with q of 16 bits: by the plain kernel and by the one that is chosen.

On Hopper that is cuda_decode_sm90. Values are judged by the float64 reference, never by another kernel.
"""

from __future__ import annotations

import itertools

import calls
import cases
import compare
import numpy as np
import pytest
import quantised
import reference
import tiledattn as ta
from arrays import NP_DTYPE

pytestmark = pytest.mark.gpu

KV_DTYPES, SCALES = quantised.KV_DTYPES, quantised.SCALES
HALF_TYPES = ("bfloat16", "float16")
SIXTEEN = pytest.mark.parametrize("dtype", HALF_TYPES)
EACH_KV = pytest.mark.parametrize("kv_dtype", KV_DTYPES)


def _is_hopper():
    return "sm_90" in ta.info()["cuda_devices"][0] and "sm_90a" in ta.info()["cuda"]


@pytest.fixture(params=["plain", "best"])
def kernels(request, monkeypatch):
    """Which kernels the calls of a test use."""
    monkeypatch.setenv("TILEDATTN_CUDA_KERNELS", request.param)
    return request.param


@pytest.fixture
def best_kernels(monkeypatch):
    """The ones that are chosen where nothing else is asked for."""
    monkeypatch.setenv("TILEDATTN_CUDA_KERNELS", "best")
    return "best"


def _check_kernel(gpu, kernels, kv_dtype, dtype, case, operation="paged_attention"):
    """The case runs where the test means it to."""
    answer = ta.supports(
        operation,
        device=gpu.device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        num_q_heads=case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        head_dim_v=case.head_dim_v,
        block_size=case.block_size,
    )
    hopper = kernels == "best" and _is_hopper()
    assert answer.kernel == ("cuda_decode_sm90" if hopper else "cuda_decode_plain"), answer


CASES = [
    *(
        cases.Paged(f"d{d}_dv{dv}_g{g}", cases.random_lengths(d + g, 5, 3000), None, 16, 2 * g, 2, d, dv)
        for d, dv, g in [
            (64, 64, 4),
            (64, 64, 12),
            (96, 96, 4),
            (128, 128, 1),
            (128, 128, 8),
            (128, 128, 20),
            (192, 192, 4),
            (192, 128, 8),
            (256, 256, 12),
            (128, 64, 3),
            (64, 128, 5),
            (48, 80, 4),
            (144, 240, 3),
            (16, 16, 4),
        ]
    ),
    *(
        cases.Paged(f"block_{block}_d{d}", cases.random_lengths(block, 6, 1500), None, block, 8, 2, d)
        for block, d in itertools.product((8, 24, 32, 64, 128, 256), (64, 128, 256))
    ),
    *(
        cases.Paged(f"q{q}_{name}", (40, 700, 3, 1300), q, 16, 8, 2, d, score=score)
        for (q, d), (name, score) in zip(
            itertools.product((2, 5, 16), (64, 128, 256)),
            itertools.cycle(
                [
                    ("causal", cases.Score(True)),
                    ("full", cases.Score(False)),
                    ("window", cases.Score(True, (45, 0), sinks=True)),
                    ("everything", cases.Score(True, (333, 0), 5.0, True, 0.2)),
                ]
            ),
            strict=False,
        )
    ),
    cases.Paged("window_left", (5000, 33, 700), None, 16, 8, 2, 128, score=cases.Score(True, (1000, 0))),
    cases.Paged("window_one_key", (500, 1, 64), None, 64, 8, 2, 128, score=cases.Score(True, (0, 0))),
    cases.Paged("sharp", (900, 70), None, 16, 8, 2, 128, spread=8.0),
    cases.Paged("scale_negative", (900, 70), None, 16, 8, 2, 64, score=cases.Score(True, softmax_scale=-0.1)),
    cases.Paged("scale_zero", (900, 70), None, 16, 8, 2, 128, score=cases.Score(True, softmax_scale=0.0)),
    cases.Paged("one_long", (9000, 130, 4097), None, 16, 4, 2, 128),
    cases.Paged("lengths_around_borders", tuple(range(120, 136)), None, 16, 4, 2, 128),
]


@SIXTEEN
@EACH_KV
@pytest.mark.parametrize("case", CASES, ids=str)
def test_paged_matches_reference(case, kv_dtype, dtype, best_kernels, gpu):
    _check_kernel(gpu, best_kernels, kv_dtype, dtype, case)
    shapes = list(itertools.product(SCALES, SCALES))
    k_shape, v_shape = shapes[(CASES.index(case) * 7 + HALF_TYPES.index(dtype)) % len(shapes)]
    made = quantised.make(case, dtype, kv_dtype, k_shape, v_shape)
    compare.result_close(made.run(gpu), made.want(), dtype)
    ta.check(gpu.device)


@SIXTEEN
@EACH_KV
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("shape", SCALES)
def test_every_scale(shape, head_dim, kv_dtype, dtype, kernels, gpu):
    for group, q_lens in ((4, None), (4, 4)):
        case = cases.Paged("", (700, 5, 0, 1100), q_lens, 16, 2 * group, 2, head_dim)
        _check_kernel(gpu, kernels, kv_dtype, dtype, case)
        made = quantised.make(case, dtype, kv_dtype, shape)
        compare.result_close(made.run(gpu), made.want(), dtype)


def _with_scales(made, **scales):
    """The same codes with other scales."""
    scales = {**made.scales, **scales}
    with np.errstate(invalid="ignore"):
        real = made.data._replace(
            k_pool=quantised.dequantise(made.data.k_pool, scales["k_scale"]),
            v_pool=quantised.dequantise(made.data.v_pool, scales["v_scale"]),
        )
    return made._replace(real=real, scales=scales)


def _run_float32(gpu, made):
    """(out, lse) with a float32 output: nothing is too small for it."""
    out = gpu.full(made.data.q.shape, 7.0, "float32")
    _, lse = made.run(gpu, out=out)
    return gpu.numpy(out), lse


@SIXTEEN
@EACH_KV
@pytest.mark.parametrize("shape", ["head", "block", "slot"])
@pytest.mark.parametrize("size", [1e-20, 1e-9, 1e9, 1e20])
def test_scales_of_any_size(size, shape, kv_dtype, dtype, best_kernels, gpu):
    """V of any size, and K with a softmax_scale that makes up for it."""
    score = cases.Score(True, softmax_scale=0.09 / size)
    case = cases.Paged("", (700, 5), 2, 16, 8, 2, 128, score=score)
    made = quantised.make(case, dtype, kv_dtype, shape)
    scales = {name: (scale * np.float32(size)).astype(np.float32) for name, scale in made.scales.items()}
    made = _with_scales(made, **scales)
    out, lse = _run_float32(gpu, made)
    want = made.want()
    compare.out_close(out / size, want.out / size, dtype)
    compare.lse_close(lse, want.lse)


@SIXTEEN
@EACH_KV
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("shape", ["block", "slot"])
@pytest.mark.parametrize("decades", [2, 8])
@pytest.mark.parametrize("order", ["mixed", "growing", "shrinking"])
def test_scales_far_apart(order, decades, shape, head_dim, kv_dtype, dtype, best_kernels, gpu):
    """V's scales differ by many orders within a sequence: a weight times its scale leaves fp16."""
    case = cases.Paged("", (1504, 304, 48), None, 16, 8, 2, head_dim, spread=3.0)
    made = quantised.make(case, dtype, kv_dtype, shape)
    rng = np.random.default_rng(5)
    v_scale = made.scales["v_scale"].copy()
    for b, length in enumerate(made.data.seq_lens):
        blocks = made.data.block_table[b, : length // 16]
        exponents = rng.uniform(-decades, decades, v_scale[blocks].shape)
        if order != "mixed":
            exponents = np.sort(exponents, axis=0)[:: 1 if order == "growing" else -1]
        v_scale[blocks] *= (10**exponents).astype(np.float32)
    made = _with_scales(made, v_scale=v_scale)
    out, lse = _run_float32(gpu, made)
    want = made.want()
    for b in range(len(out)):  # a sequence with small values is not drowned by the others
        compare.out_close(out[b], want.out[b], dtype, want.max_score)
    compare.lse_close(lse, want.lse)


@EACH_KV
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e6, 1e30])
def test_queries_of_any_size(size, kv_dtype, best_kernels, gpu):
    """bf16 reaches much further than fp16, in which the products are made."""
    for head_dim, q_lens in ((64, None), (128, 3), (256, None)):
        score = cases.Score(True, softmax_scale=0.05 / size)
        case = cases.Paged("", (700, 5), q_lens, 16, 8, 2, head_dim, spread=size, score=score)
        made = quantised.make(case, "bfloat16", kv_dtype, "head")
        compare.result_close(made.run(gpu), made.want(), "bfloat16")


@EACH_KV
def test_rows_of_very_different_queries(kv_dtype, best_kernels, gpu):
    """Each row has a size of its own, and elements of a row differ by six orders."""
    case = cases.Paged("", (700, 33), 2, 16, 8, 2, 128)
    made = quantised.make(case, "bfloat16", kv_dtype, "slot")
    rng = np.random.default_rng(6)
    q = made.data.q
    rows = 10 ** rng.uniform(-20, 0, (*q.shape[:-1], 1)) * 10 ** rng.uniform(-6, 0, q.shape)
    q[...] = (q.astype(np.float64) * rows).astype(q.dtype)
    compare.result_close(made.run(gpu), made.want(), "bfloat16")


@SIXTEEN
@EACH_KV
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_queries_that_are_no_numbers(value, kv_dtype, dtype, best_kernels, gpu):
    case = cases.Paged("", (300, 70), None, 16, 8, 2, 128)
    made = quantised.make(case, dtype, kv_dtype, "head")
    codes = np.abs(made.data.k_pool.astype(np.float32)) + 1
    k_pool = np.minimum(codes, 100).astype(made.data.k_pool.dtype)
    real = made.real._replace(k_pool=quantised.dequantise(k_pool, made.scales["k_scale"]))
    made = made._replace(data=made.data._replace(k_pool=k_pool), real=real)
    made.data.q[0, 3, 5] = value
    with np.errstate(invalid="ignore"):
        want = made.want()
    compare.result_close(made.run(gpu), want, dtype)


def _all_codes(kv_dtype):
    return np.arange(256, dtype=np.uint8).view(quantised.STORED[kv_dtype])


@SIXTEEN
@EACH_KV
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("shape", ["number", "slot"])
def test_every_code_of_v(shape, head_dim, kv_dtype, dtype, best_kernels, gpu):
    """Keys of equal weight and equal V: the output is V, every code in some columns, NaN and subnormals too."""
    heads = 256 // head_dim
    scale = 1.0 if shape == "number" else np.full((1, 8, heads), 0.75, np.float32)
    q = np.ones((1, heads, 16), NP_DTYPE[dtype])
    for turn in (0, 1, 5):
        codes = np.roll(_all_codes(kv_dtype), turn)
        v = np.repeat(codes.reshape(1, 1, heads, head_dim), 8, axis=1)
        k = np.zeros((1, 8, heads, 16), codes.dtype)
        out = gpu.full((1, heads, head_dim), 7.0, "float32")
        table, lengths = np.zeros((1, 1), np.int32), np.array([1 + turn], np.int32)
        gpu.call(ta.paged_attention, q, k, v, table, lengths, k_scale=1.0, v_scale=scale, out=out)
        want = codes.astype(np.float32) * np.float32(np.max(scale))
        np.testing.assert_allclose(gpu.numpy(out).reshape(-1), want, rtol=1e-6)


@SIXTEEN
@EACH_KV
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("shape", ["number", "block"])
def test_every_code_of_k(shape, head_dim, kv_dtype, dtype, best_kernels, gpu):
    """256 sequences of one key: the lse is the score, which is the code in one column."""
    codes = _all_codes(kv_dtype)
    scale = 1.0 if shape == "number" else np.full((256, 1), 0.75, np.float32)
    q = np.ones((256, 1, head_dim), NP_DTYPE[dtype])
    table, lengths = np.arange(256, dtype=np.int32).reshape(256, 1), np.ones(256, np.int32)
    for column in range(0, head_dim, 9):
        pool = np.zeros((256, 8, 1, head_dim), codes.dtype)
        pool[:, 0, 0, column] = codes
        pool[:, 1:] = codes[0x7F]
        _, lse = gpu.call(
            ta.paged_attention,
            q,
            pool,
            np.zeros_like(pool),
            table,
            lengths,
            softmax_scale=1.0,
            k_scale=scale,
            v_scale=1.0,
            return_lse=True,
        )
        want = codes.astype(np.float32) * np.float32(np.max(scale))
        np.testing.assert_array_equal(lse.reshape(-1), want)


@SIXTEEN
@EACH_KV
@pytest.mark.parametrize("head_dim", [64, 128])
def test_each_column_of_q_meets_its_own_of_k(head_dim, kv_dtype, dtype, best_kernels, gpu):
    """Sequence i has a query that is 1 in column i alone: its score is the code there."""
    codes = np.roll(_all_codes(kv_dtype)[1:100], 3)
    row = np.resize(codes, head_dim)
    q = np.eye(head_dim, dtype=np.float32).reshape(head_dim, 1, head_dim).astype(NP_DTYPE[dtype])
    pool = np.zeros((1, 8, 1, head_dim), codes.dtype)
    pool[:, :] = row
    table, lengths = np.zeros((head_dim, 1), np.int32), np.ones(head_dim, np.int32)
    kwargs = {"softmax_scale": 1.0, "k_scale": 1.0, "v_scale": 1.0, "return_lse": True}
    _, lse = gpu.call(ta.paged_attention, q, pool, pool, table, lengths, **kwargs)
    np.testing.assert_array_equal(lse.reshape(-1), row.astype(np.float32))


TILED = [
    cases.Tiled("tiles", cases.Paged("", (1, 1500, 96, 0), None, 16, 8, 2, 128), (20, 40, 1, 40)),
    cases.Tiled("many", cases.Paged("", (640, 333), None, 16, 8, 2, 64), (1,) * 40),
    cases.Tiled("dv", cases.Paged("", (500, 70), None, 16, 8, 2, 192, 128), (16, 16)),
    cases.Tiled("q_len_9", cases.Paged("", (500, 70), 9, 16, 8, 2, 128), (16, 16)),
    cases.Tiled(
        "positions",
        cases.Paged("", (500, 40, 96), 4, 16, 8, 2, 128, score=cases.Score(True, (121, 0), 3.0, True)),
        (7, 9, 16),
        positions=True,
    ),
]


@SIXTEEN
@EACH_KV
@pytest.mark.parametrize("shape", SCALES)
@pytest.mark.parametrize("case", TILED, ids=str)
def test_tiles_match_reference(case, shape, kv_dtype, dtype, best_kernels, gpu):
    _check_kernel(gpu, best_kernels, kv_dtype, dtype, case.paged, "tiled_attention")
    got, want = quantised.run_tiled(gpu, case, dtype, kv_dtype, shape)
    compare.result_close(got, want, dtype)


@EACH_KV
@pytest.mark.parametrize("shape", ["head", "slot"])
def test_state_holds_what_the_cache_stands_for(shape, kv_dtype, best_kernels, gpu):
    """After each tile; so tiles with other scales, or of 16 bits, may follow."""
    case = TILED[0]
    made = quantised.make(case.paged, "bfloat16", kv_dtype, shape)
    data = case.make("bfloat16")
    attn = calls.make_attention(gpu, data)
    judge = reference.Tiled(**data.options)
    attn.begin_step(len(made.data.q))
    plain = case.make("bfloat16").paged
    for i, tile in enumerate(data.tiles):
        kwargs = data.step_kwargs(tile)
        pools, real, scales = made.data[1:3], made.real[1:3], made.scales
        if i == 1:
            pools, real, scales = plain[1:3], plain[1:3], {}
        gpu.call(attn.step_tile, made.data.q, *pools, tile.blocks, tile.counts, **kwargs, **scales)
        judge.step_tile(made.data.q, *real, tile.blocks, tile.counts, **kwargs)
        compare.state_close(
            calls.state_arrays(gpu, attn, len(made.data.q)), judge.state, "bfloat16", judge.max_score
        )


def _only(made, rows):
    data = made.data
    return made._replace(
        data=data._replace(q=data.q[rows], block_table=data.block_table[rows], seq_lens=data.seq_lens[rows])
    )


@EACH_KV
@pytest.mark.parametrize("shape", ["head", "slot"])
@pytest.mark.parametrize("sizes", [(8, 2, 128), (32, 2, 128), (8, 2, 64), (4, 2, 256)], ids=str)
def test_same_bits_in_random_company(sizes, shape, kv_dtype, best_kernels, gpu):
    lengths = cases.random_lengths(1, 12, 6000)
    made = quantised.make(cases.Paged("", lengths, None, 16, *sizes), "bfloat16", kv_dtype, shape)
    out, lse = made.run(gpu)
    compare.result_close((out, lse), made.want(), "bfloat16")
    rng = np.random.default_rng(2)
    for b in range(len(lengths)):
        compare.same_bits(_only(made, [b]).run(gpu), (out[[b]], lse[[b]]), f"{lengths[b]} keys alone")
    for _ in range(10):
        rows = rng.integers(0, len(lengths), rng.integers(2, 200))
        compare.same_bits(_only(made, rows).run(gpu), (out[rows], lse[rows]), "in company")


@EACH_KV
@pytest.mark.parametrize("shape", ["one", "slot"])
def test_same_bits_whatever_the_workspace(shape, kv_dtype, gpu):
    case = cases.Paged("", (2500, 1, 700, 0, 130, 4000, 333, 1100), None, 16, 16, 2, 128)
    made = quantised.make(case, "bfloat16", kv_dtype, shape)
    want = made.run(gpu)
    compare.result_close(want, made.want(), "bfloat16")
    for nbytes in (1 << 20, 500_000):
        for _ in range(3):
            got = made.run(gpu, workspace=ta.Workspace(gpu.device, nbytes))
            compare.same_bits(got, want, f"{nbytes} bytes")


@SIXTEEN
@EACH_KV
@pytest.mark.parametrize("shape", ["head", "block", "slot"])
def test_replays_follow_new_contents(shape, kv_dtype, dtype, best_kernels, gpu):
    """Lengths, tables, codes and scales."""
    if gpu.name != "torch":
        pytest.skip("steers torch's graphs")
    torch = gpu.torch
    case = cases.Paged("", (3200, 1, 0), None, 16, 8, 2, 128)
    first = quantised.make(case, dtype, kv_dtype, shape)
    given = list(map(gpu.array, first.data.args))
    scales = {name: gpu.array(scale) for name, scale in first.scales.items()}
    out = torch.empty_like(given[0])
    lse = torch.empty(first.data.q.shape[:-1], device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        ta.paged_attention(*given, **scales, out=out, lse=lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            ta.paged_attention(*given, **scales, out=out, lse=lse)
    for seed, seq_lens in enumerate([(3200, 1, 0), (5, 2999, 17), (0, 0, 0), (1500, 1400, 100)]):
        rng = np.random.default_rng(seed)
        table = rng.integers(0, len(first.data.k_pool), first.data.block_table.shape).astype(np.int32)
        codes = [quantised.stored_values(rng, x.shape, kv_dtype) for x in first.data[1:3]]
        fresh = {name: quantised.make_scale(rng, codes[0], shape) for name in scales}
        data = first.data._replace(
            q=cases.random(rng, first.data.q.shape, dtype),
            k_pool=codes[0],
            v_pool=codes[1],
            block_table=table,
            seq_lens=np.array(seq_lens, np.int32),
        )
        pools = [quantised.dequantise(*x) for x in zip(codes, fresh.values(), strict=True)]
        made = quantised.Quantised(data, data._replace(k_pool=pools[0], v_pool=pools[1]), fresh)
        for to, x in zip(given, data.args, strict=True):
            to.copy_(gpu.array(x))
        for name, to in scales.items():
            to.copy_(gpu.array(fresh[name]))
        for _ in range(3):
            graph.replay()
        got = gpu.numpy(out).copy(), gpu.numpy(lse).copy()
        compare.result_close(got, made.want(), dtype)
        compare.same_bits(got, made.run(gpu), "graph and call")


@EACH_KV
@pytest.mark.parametrize("shape", ["head", "block", "slot"])
@pytest.mark.parametrize("block", [10**6, -1])
def test_wrong_block_ids_are_nan_and_raised(block, shape, kv_dtype, best_kernels, gpu):
    """Neither keys nor scales of a block outside the pool are read."""
    made = quantised.make(cases.Paged("", (400, 333, 50), None, 16, 8, 2, 128), "bfloat16", kv_dtype, shape)
    want = made.want()
    table = made.data.block_table.copy()
    table[1, 2] = block
    out, lse = made._replace(data=made.data._replace(block_table=table)).run(gpu)
    with pytest.raises(IndexError, match=f"block_table.*{block}"):
        ta.check(gpu.device)
    assert np.isnan(out[1].astype(np.float32)).all()
    assert np.isnan(lse[1]).all()
    keep = [0, 2]
    compare.result_close(
        (out[keep], lse[keep]), reference.Result(want.out[keep], want.lse[keep], want.max_score), "bfloat16"
    )
    compare.result_close(made.run(gpu), want, "bfloat16")
    ta.check(gpu.device)


@SIXTEEN
@EACH_KV
def test_pools_that_no_box_fits_take_the_plain_kernel(kv_dtype, dtype, gpu):
    """Rows that begin at odd places; blocks of 4 tokens."""
    made = quantised.make(cases.Paged("", (100, 9), None, 16, 8, 2, 64), dtype, kv_dtype, "slot")
    wide = gpu.array(np.pad(made.data.k_pool, ((0, 0), (0, 0), (0, 0), (3, 13))))
    got = made._replace(data=made.data._replace(k_pool=wide[..., 3:-13])).run(gpu)
    compare.result_close(got, made.want(), dtype)
    case = cases.Paged("", (100, 9), None, 4, 8, 2, 64)
    sizes = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "device": gpu.device, "block_size": 4}
    answer = ta.supports("paged_attention", dtype=dtype, kv_dtype=kv_dtype, **sizes)
    assert answer.kernel == "cuda_decode_plain"
    made = quantised.make(case, dtype, kv_dtype, "slot")
    compare.result_close(made.run(gpu), made.want(), dtype)
