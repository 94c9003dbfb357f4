# SPDX-License-Identifier: Apache-2.0
"""The GPU's decode kernels: the plain one, the portable one and the one that is chosen, under the same cases.

Values are judged by the float64 reference, never by another kernel.
"""

from __future__ import annotations

import itertools

import calls
import cases
import compare
import numpy as np
import pytest
import reference
import tiledattn as ta

pytestmark = pytest.mark.gpu

HALF_TYPES = ("bfloat16", "float16")
SIXTEEN = pytest.mark.parametrize("dtype", HALF_TYPES)


@pytest.fixture(params=["plain", "portable", "best"])
def kernels(request, monkeypatch):
    """Which kernels the calls of a test use."""
    monkeypatch.setenv("TILEDATTN_CUDA_KERNELS", request.param)
    return request.param


CASES = [
    *(
        cases.Paged(f"d{d}_dv{dv}_g{g}", cases.random_lengths(d + g, 5, 3000), None, 16, 2 * g, 2, d, dv)
        for d, dv, g in [
            (64, 64, 4),
            (64, 64, 7),
            (96, 96, 4),
            (128, 128, 1),
            (128, 128, 4),
            (128, 128, 8),
            (128, 128, 16),
            (128, 128, 20),
            (192, 192, 4),
            (192, 128, 8),
            (256, 256, 2),
            (256, 256, 12),
            (128, 64, 3),
            (64, 128, 5),
            (40, 72, 4),
            (8, 8, 4),
            (136, 248, 3),
        ]
    ),
    *(
        cases.Paged(f"block_{block}_d{d}", cases.random_lengths(block, 6, 1500), None, block, 8, 2, d)
        for block, d in itertools.product((8, 16, 24, 32, 48, 64, 128, 256), (64, 128, 256))
    ),
    *(
        cases.Paged(f"q{q}_{name}", (40, 700, 3, 1300), q, 16, 8, 2, d, score=score)
        for q, d, (name, score) in itertools.product(
            (2, 3, 5, 16),
            (64, 128, 256),
            [
                ("causal", cases.Score(True)),
                ("full", cases.Score(False)),
                ("window", cases.Score(True, (45, 0), sinks=True)),
            ],
        )
    ),
    cases.Paged("window_left", (5000, 33, 700), None, 16, 8, 2, 128, score=cases.Score(True, (1000, 0))),
    cases.Paged("window_one_key", (500, 1, 64), None, 64, 8, 2, 128, score=cases.Score(True, (0, 0))),
    cases.Paged(
        "softcap", (500, 1, 64), None, 16, 8, 2, 128, score=cases.Score(True, softcap=2.0), spread=4.0
    ),
    cases.Paged("everything", (900, 70), 3, 16, 8, 2, 128, score=cases.Score(True, (333, 0), 5.0, True, 0.2)),
    cases.Paged("sharp", (900, 70), None, 16, 8, 2, 128, spread=8.0),
    cases.Paged(
        "scale_negative", (900, 70), None, 16, 8, 2, 128, score=cases.Score(True, softmax_scale=-0.3)
    ),
    cases.Paged("scale_zero", (900, 70), None, 16, 8, 2, 128, score=cases.Score(True, softmax_scale=0.0)),
    cases.Paged("one_kv_head", (9000, 130, 4097), None, 16, 8, 1, 128),
    cases.Paged("many_kv_heads", (2100, 130), None, 16, 32, 32, 128),
    cases.Paged("lengths_around_borders", tuple(range(120, 136)), None, 16, 4, 1, 128),
]


@SIXTEEN
@pytest.mark.parametrize("case", CASES, ids=str)
def test_paged_matches_reference(case, dtype, kernels, gpu):
    data = case.make(dtype)
    compare.result_close(calls.run_paged(gpu, data), calls.want_paged(data), dtype)
    ta.check(gpu.device)


def test_supports_says_which_kernel_runs(gpu, monkeypatch):
    sizes = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "device": gpu.device}
    monkeypatch.setenv("TILEDATTN_CUDA_KERNELS", "plain")
    assert ta.supports("paged_attention", dtype="bfloat16", **sizes).kernel == "cuda_decode_plain"
    monkeypatch.setenv("TILEDATTN_CUDA_KERNELS", "portable")
    for dtype in HALF_TYPES:
        assert ta.supports("paged_attention", dtype=dtype, **sizes).kernel == "cuda_decode_portable"
    assert ta.supports("flash_attention", **sizes).kernel == "cuda_prefill_portable"
    monkeypatch.setenv("TILEDATTN_CUDA_KERNELS", "best")
    assert ta.supports("paged_attention", dtype="float32", **sizes).kernel == "cuda_decode_plain"
    if "sm_90" in ta.info()["cuda_devices"][0] and "sm_90a" in ta.info()["cuda"]:
        assert ta.supports("paged_attention", dtype="bfloat16", **sizes).kernel == "cuda_decode_sm90"
        assert ta.supports("tiled_attention", dtype="float16", **sizes).kernel == "cuda_decode_sm90"
    monkeypatch.setenv("TILEDATTN_CUDA_KERNELS", "fastest")
    with pytest.raises(ValueError, match=r"TILEDATTN_CUDA_KERNELS.*fastest"):
        calls.run_paged(gpu, cases.Paged("").make("float16"))


@SIXTEEN
@pytest.mark.parametrize("q_lens", [None, 3])
def test_dense_decode(q_lens, dtype, kernels, gpu):
    for kv_len in (1, 31, 33, 1000):
        case = cases.Flash("", 3, q_lens or 1, kv_len, 8, 2, 128, score=cases.Score(True, sinks=True))
        qkv, score = case.make(dtype)
        compare.result_close(calls.run_flash(gpu, qkv, score), reference.flash(*qkv, **score), dtype)


@SIXTEEN
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_pool_layouts(head_dim, dtype, kernels, gpu):
    """Heads before tokens; K and V interleaved as in a scratch pool; a pool inside a wider one."""
    data = cases.Paged("", (700, 9, 130), None, 16, 8, 2, head_dim).make(dtype)
    want = calls.want_paged(data)
    heads_first = [
        gpu.array(np.ascontiguousarray(x.swapaxes(1, 2))).swapaxes(1, 2) for x in (data.k_pool, data.v_pool)
    ]
    scratch = gpu.array(np.stack([x.swapaxes(1, 2) for x in (data.k_pool, data.v_pool)], axis=1))
    views = ta.scratch_pool_views(scratch)
    inside = gpu.array(np.pad(data.k_pool, ((1, 0), (0, 0), (1, 1), (8, 24)), constant_values=np.nan))
    pools = [
        heads_first,
        views,
        (inside[1:, :, 1:-1, 8:-24], data.v_pool),
        (heads_first[0], data.v_pool),
    ]
    for k, v in pools:
        compare.result_close(calls.run_paged(gpu, data._replace(k_pool=k, v_pool=v)), want, dtype)


@SIXTEEN
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_tables_of_both_types_with_strides(index_dtype, dtype, kernels, gpu):
    data = cases.Paged("", (700, 9, 130), None, 16, 8, 2, 128).make(dtype)
    wide = np.full((3, 2 * data.block_table.shape[1]), -5, index_dtype)
    wide[:, ::2] = data.block_table
    table = gpu.array(wide)[:, ::2]
    got = calls.run_paged(gpu, data._replace(block_table=table, seq_lens=data.seq_lens.astype(index_dtype)))
    compare.result_close(got, calls.want_paged(data), dtype)


TILED = [
    cases.Tiled("tiles", cases.Paged("", (1, 1500, 96, 0), None, 16, 8, 2, 128), (20, 40, 1, 40)),
    cases.Tiled("many", cases.Paged("", (640, 333), None, 16, 8, 2, 128), (1,) * 40),
    cases.Tiled("long", cases.Paged("", (5000, 70), None, 16, 4, 1, 128), (313,)),
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
@pytest.mark.parametrize("case", TILED, ids=str)
def test_tiles_match_reference(case, dtype, kernels, gpu):
    data = case.make(dtype)
    compare.result_close(calls.run_tiled(gpu, data), calls.want_tiled(data).finalize(), dtype)


@SIXTEEN
def test_state_after_each_tile_and_out_in_the_last(dtype, kernels, gpu):
    data = TILED[0].make(dtype)
    attn = calls.make_attention(gpu, data)
    num_seqs = len(data.paged.q)
    attn.begin_step(num_seqs)
    out, lse = gpu.full(data.paged.q.shape, 7.0, dtype), gpu.full(data.paged.q.shape[:2], 7.0, "float32")
    for i, tile in enumerate(data.tiles):
        last = i + 1 == len(data.tiles)
        calls.step(gpu, attn, data, tile, **({"out": out, "lse": lse} if last else {}))
        want = calls.want_tiled(data, i + 1)
        compare.state_close(calls.state_arrays(gpu, attn, num_seqs), want.state, dtype, want.max_score)
    want = calls.want_tiled(data).finalize()
    compare.result_close((gpu.numpy(out), gpu.numpy(lse)), want, dtype)
    again = gpu.call(attn.finalize, return_lse=True)
    compare.same_bits(again, (gpu.numpy(out), gpu.numpy(lse)), "finalize and out=")


def _only(data, rows):
    return data._replace(q=data.q[rows], block_table=data.block_table[rows], seq_lens=data.seq_lens[rows])


@SIXTEEN
@pytest.mark.parametrize("sizes", [(8, 2, 128), (16, 1, 128), (8, 8, 64), (4, 2, 256)], ids=str)
def test_same_bits_in_random_company(sizes, dtype, kernels, gpu):
    num_q_heads, num_kv_heads, head_dim = sizes
    lengths = cases.random_lengths(1, 12, 6000)
    data = cases.Paged("", lengths, None, 16, num_q_heads, num_kv_heads, head_dim).make(dtype)
    out, lse = calls.run_paged(gpu, data)
    compare.result_close((out, lse), calls.want_paged(data), dtype)
    rng = np.random.default_rng(2)
    for b in range(len(lengths)):
        alone = calls.run_paged(gpu, _only(data, [b]))
        compare.same_bits(alone, (out[[b]], lse[[b]]), f"sequence {b} of {lengths[b]} keys alone")
    for _ in range(20):
        rows = rng.integers(0, len(lengths), rng.integers(2, 200))
        compare.same_bits(calls.run_paged(gpu, _only(data, rows)), (out[rows], lse[rows]), "in company")


@pytest.mark.parametrize("q_lens", [None, 2])
@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "long", "others"),
    [
        (128, 4, 8000, (31, 500)),
        (128, 4, 8000, (60, 300)),
        (256, 4, 4000, (31, 300)),
        (64, 4, 16000, (60, 300)),
        (128, 1, 16384, (1000, 20)),
    ],
    ids=str,
)
def test_one_long_sequence_among_short_ones(head_dim, num_kv_heads, long, others, q_lens, kernels, gpu):
    """Teams that have a part of the long one have short ones too: the same sums, whatever the place and company."""
    count, length = others
    rng = np.random.default_rng(head_dim + count)
    lengths = [int(n) for n in rng.integers(length // 2, 3 * length // 2, count)]
    at = int(rng.integers(count))
    lengths[at:at] = [long]
    data = cases.Paged("", tuple(lengths), q_lens, 16, 2 * num_kv_heads, num_kv_heads, head_dim).make(
        "bfloat16"
    )
    out, lse = calls.run_paged(gpu, data)
    compare.result_close((out, lse), calls.want_paged(data), "bfloat16")
    for rows in ([at], [0], [at, 0], list(range(len(lengths)))[::-1]):
        compare.same_bits(calls.run_paged(gpu, _only(data, rows)), (out[rows], lse[rows]), f"rows {rows[:3]}")
    for nbytes in (32 << 20, 1 << 20):
        got = calls.run_paged(gpu, data, workspace=ta.Workspace(gpu.device, nbytes))
        compare.same_bits(got, (out, lse), f"workspace of {nbytes} bytes")


def test_same_bits_a_thousand_times(kernels, gpu):
    data = cases.Paged("", (2500, 1, 700, 0, 130, 4000), None, 16, 8, 2, 128).make("bfloat16")
    given = list(map(gpu.array, data.args))
    first = ta.paged_attention(*given, return_lse=True)
    for _ in range(1000):
        again = ta.paged_attention(*given, return_lse=True)
    compare.same_bits(tuple(map(gpu.numpy, again)), tuple(map(gpu.numpy, first)))
    for _ in range(50):
        again = ta.paged_attention(*given, return_lse=True)
        compare.same_bits(tuple(map(gpu.numpy, again)), tuple(map(gpu.numpy, first)))


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 4, 8, 12])
def test_same_bits_whatever_the_workspace(head_dim, group, gpu):
    """A small workspace means fewer workers, each with long runs of work, not other sums."""
    data = cases.Paged("", (2500, 1, 700, 0, 130, 4000, 333, 1100), None, 16, 4 * group, 4, head_dim).make(
        "bfloat16"
    )
    want = calls.run_paged(gpu, data)
    compare.result_close(want, calls.want_paged(data), "bfloat16")
    for nbytes in (1 << 20, 500_000):
        for _ in range(3):
            got = calls.run_paged(gpu, data, workspace=ta.Workspace(gpu.device, nbytes))
            compare.same_bits(got, want, f"{nbytes} bytes")


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 64, 255, 256, 257, 600])
def test_any_number_of_sequences(count, kernels, gpu):
    """Who does what is found in one way for few sequences and in another for many."""
    lengths = np.random.default_rng(count).integers(0, 200, count)
    lengths[count // 2] = 3000
    data = cases.Paged("", tuple(map(int, lengths)), None, 16, 8, 2, 64).make("bfloat16")
    compare.result_close(calls.run_paged(gpu, data), calls.want_paged(data), "bfloat16")


def test_65536_sequences(kernels, gpu):
    rng = np.random.default_rng(0)
    count = 65536
    k_pool, v_pool = (cases.random(rng, (64, 16, 1, 64), "bfloat16") for _ in "kv")
    table = rng.integers(0, 64, (count, 4)).astype(np.int32)
    lengths = rng.integers(0, 65, count).astype(np.int32)
    q = cases.random(rng, (count, 2, 64), "bfloat16")
    out, lse = gpu.call(ta.paged_attention, q, k_pool, v_pool, table, lengths, return_lse=True)
    some = np.r_[0, 1, count - 1, rng.integers(0, count, 300)]
    want = reference.paged(q[some], k_pool, v_pool, table[some], lengths[some])
    compare.result_close((out[some], lse[some]), want, "bfloat16")
    assert np.isfinite(out.astype(np.float32)).all()


@SIXTEEN
def test_replays_follow_new_lengths(dtype, kernels, gpu):
    if gpu.name != "torch":
        pytest.skip("steers torch's graphs")
    torch = gpu.torch
    first = cases.Paged("", (3200, 1, 0), None, 16, 8, 2, 128).make(dtype)
    given = list(map(gpu.array, first.args))
    out = torch.empty_like(given[0])
    lse = torch.empty(first.q.shape[:-1], device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        ta.paged_attention(*given, out=out, lse=lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            ta.paged_attention(*given, out=out, lse=lse)
    for seq_lens in [(3200, 1, 0), (5, 2999, 17), (0, 0, 0), (1500, 1400, 100)]:
        data = first._replace(seq_lens=np.array(seq_lens, np.int32))
        table = np.random.default_rng(5).integers(0, 200, first.block_table.shape).astype(np.int32)
        pools = [np.where(np.isnan(x.astype(np.float32)), 1, x).astype(x.dtype) for x in data[1:3]]
        data = data._replace(k_pool=pools[0], v_pool=pools[1], block_table=table)
        for to, x in zip(given[1:], data.args[1:], strict=True):
            to.copy_(gpu.array(x))
        for _ in range(3):
            graph.replay()
        got = gpu.numpy(out).copy(), gpu.numpy(lse).copy()
        compare.result_close(got, calls.want_paged(data), dtype)
        compare.same_bits(got, calls.run_paged(gpu, data), "graph and call")


FAULTS = {
    "id_high": ("block_table", (1, 2), 10**6, IndexError),
    "id_negative": ("block_table", (1, 0), -1, IndexError),
    "length_negative": ("seq_lens", (1,), -5, ValueError),
    "length_over_the_table": ("seq_lens", (1,), 10**5, ValueError),
}


@pytest.mark.parametrize("q_lens", [None, 12])
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_nan_and_raised(name, q_lens, kernels, gpu):
    argument, index, value, error = FAULTS[name]
    case = cases.Paged("", (400, 333, 50), q_lens, 16, 8, 2, 128)
    good, data = case.make("bfloat16"), case.make("bfloat16")
    getattr(data, argument)[index] = value
    out, lse = calls.run_paged(gpu, data)
    with pytest.raises(error, match=f"{argument}.*{value}"):
        ta.check(gpu.device)
    assert np.isnan(out[1].astype(np.float32)).all()
    assert np.isnan(lse[1]).all()
    want = calls.want_paged(good)
    keep = [0, 2]
    compare.result_close(
        (out[keep], lse[keep]), reference.Result(want.out[keep], want.lse[keep], want.max_score), "bfloat16"
    )
    compare.result_close(calls.run_paged(gpu, good), want, "bfloat16")
    ta.check(gpu.device)


def test_a_fault_poisons_the_state(kernels, gpu):
    data = TILED[0].make("bfloat16")
    data.tiles[1].blocks[1, 3] = 10**6
    attn = calls.make_attention(gpu, data)
    attn.begin_step(4)
    calls.step(gpu, attn, data, data.tiles[0])
    calls.step(gpu, attn, data, data.tiles[1])
    gpu.synchronize()
    with pytest.raises(IndexError, match="tile_blocks"):
        attn.check()
    m, l, o = calls.state_arrays(gpu, attn, 4)
    for part in (m, l, o):
        assert np.isnan(part[1]).all()
        assert not np.isnan(part[[0, 2, 3]]).any()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_special_scores(value, kernels, gpu):
    """A score of +inf or NaN makes its row NaN; one of -inf has weight 0."""
    data = cases.Paged("", (300, 70), None, 16, 8, 2, 128).make("bfloat16")
    data.q[...] = np.abs(data.q.astype(np.float32)).astype(data.q.dtype)
    block, slot = data.block_table[0, 5], 3
    data.k_pool[block, slot, 0] = value
    compare.result_close(calls.run_paged(gpu, data), calls.want_paged(data), "bfloat16")


def test_huge_scores(kernels, gpu):
    data = cases.Paged("", (300, 70), None, 16, 8, 2, 128, score=cases.Score(True, softmax_scale=1e27)).make(
        "bfloat16"
    )
    got, want = calls.run_paged(gpu, data), calls.want_paged(data)
    compare.result_close(got, want, "bfloat16")
    assert np.isfinite(got[0].astype(np.float32)).all()
