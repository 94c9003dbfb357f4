# SPDX-License-Identifier: Apache-2.0
"""tiledattn.torch's drop-ins for flash-attn: its names, layouts and meanings, against float64."""

from __future__ import annotations

import importlib

import cases
import compare
import numpy as np
import pytest
import reference

torch = pytest.importorskip("torch")
tt = importlib.import_module("tiledattn.torch")

WINDOWS = {(-1, -1): (None, None), (5, -1): (5, None), (-1, 2): (None, 2), (4, 3): (4, 3), (0, 0): (0, 0)}


def _close(carrier, got, want, heads_first=True):
    """``got`` is (out, softmax_lse): flash-attn's lse has heads before the sequence."""
    out, lse = (carrier.numpy(x.contiguous()) for x in got)
    compare.out_close(out, want.out, "float32", want.max_score)
    compare.lse_close(lse.swapaxes(-1, -2) if heads_first else lse, want.lse)


@pytest.mark.parametrize("lengths", [(9, 21), (21, 9), (1, 21), (21, 21)])
@pytest.mark.parametrize("window_size", WINDOWS)
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attn_func(causal, window_size, lengths, torch_carrier):
    q_len, kv_len = lengths
    (q, k, v), _ = cases.Flash("", q_len=q_len, kv_len=kv_len, head_dim=16).make("float32")
    options = {"causal": causal, "softcap": 3.0, "softmax_scale": 0.3}
    want = reference.flash(q, k, v, **options, window=WINDOWS[window_size])
    args = [torch_carrier.array(x) for x in (q, k, v)]
    out, lse, probs = tt.flash_attn_func(*args, **options, window_size=window_size, return_attn_probs=True)
    _close(torch_carrier, (out, lse), want)
    assert lse.shape == (2, 4, q_len)
    assert probs.numel() == 0
    assert torch.equal(tt.flash_attn_func(*args, **options, window_size=window_size, deterministic=True), out)


def test_positional_order_is_flash_attn_s(torch_carrier):
    (q, k, v), _ = cases.Flash("", q_len=9, kv_len=21, head_dim=16).make("float32")
    want = reference.flash(q, k, v, softmax_scale=0.3, causal=True, window=(5, 0), softcap=2.0)
    args = [torch_carrier.array(x) for x in (q, k, v)]
    _close(torch_carrier, tt.flash_attn_func(*args, 0.0, 0.3, True, (5, 0), 2.0, None, False, True)[:2], want)


CU_Q, CU_K = np.array([0, 4, 4, 5, 9]), np.array([0, 10, 13, 19, 21])


@pytest.mark.parametrize("window_size", WINDOWS)
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attn_varlen_func(causal, window_size, torch_carrier):
    (q, k, v), _ = cases.Flash("", batch=1, q_len=9, kv_len=21, head_dim=16).make("float32")
    q, k, v = q[0], k[0], v[0]
    want = reference.flash_packed(q, k, v, CU_Q, CU_K, causal=causal, window=WINDOWS[window_size])
    args = [torch_carrier.array(x) for x in (q, k, v, CU_Q.astype(np.int32), CU_K.astype(np.int32))]
    out, lse, _ = tt.flash_attn_varlen_func(
        *args, 4, 10, causal=causal, window_size=window_size, return_attn_probs=True
    )
    assert lse.shape == (4, 9)
    _close(torch_carrier, (out, lse), want)


class _Cache:
    """Sequences of random keys in a paged cache, and the same keys packed one after the other."""

    def __init__(self, kv_lens, block_size=8, spare=2, seed=0):
        rng = np.random.default_rng(seed)
        width = max(-(-n // block_size) for n in kv_lens) + spare
        num_blocks = len(kv_lens) * width
        self.table = rng.permutation(num_blocks).reshape(len(kv_lens), width).astype(np.int32)
        self.pools = [np.full((num_blocks, block_size, 2, 16), np.nan, np.float32) for _ in range(2)]
        self.packed = []
        for pool in self.pools:
            rows = [rng.standard_normal((n, 2, 16)).astype(np.float32) for n in kv_lens]
            for blocks, row in zip(self.table, rows, strict=True):
                for j, token in enumerate(row):
                    pool[blocks[j // block_size], j % block_size] = token
            self.packed.append(rows)
        self.lens = np.array(kv_lens, np.int32)
        self.cu = np.concatenate([[0], np.cumsum(kv_lens)]).astype(np.int32)

    def want(self, q_rows, **options):
        """One result for each sequence: q_rows[b] is [Sq, Hq, D]."""
        return [
            reference.flash(q[None], k[None], v[None], **options)
            for q, k, v in zip(q_rows, *self.packed, strict=True)
        ]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_size", [(-1, -1), (5, 0), (5, -1)])
@pytest.mark.parametrize("q_lens", [(1, 1, 1, 1), (4, 0, 1, 9)], ids=["decode", "ragged"])
def test_varlen_with_a_block_table(q_lens, window_size, causal, torch_carrier):
    """Also for sequences shorter than their queries, where flash-attn shows early queries all keys."""
    cache = _Cache((21, 3, 0, 5))
    rng = np.random.default_rng(1)
    rows = [rng.standard_normal((n, 4, 16)).astype(np.float32) for n in q_lens]
    cu_q = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    given = [torch_carrier.array(x) for x in (np.concatenate(rows), *cache.pools, cu_q, cache.cu)]
    options = {"causal": causal, "window_size": window_size, "block_table": torch_carrier.array(cache.table)}
    if max(q_lens) > 1 and not causal and window_size != (-1, -1):
        with pytest.raises(ValueError, match=r"^window_size: "):
            tt.flash_attn_varlen_func(*given, max(q_lens), 21, **options)
        return
    out, lse, _ = tt.flash_attn_varlen_func(*given, max(q_lens), 21, **options, return_attn_probs=True)
    assert lse.shape == (4, sum(q_lens))
    for b, want in enumerate(cache.want(rows, causal=causal, window=WINDOWS.get(window_size, (5, 0)))):
        mine = slice(cu_q[b], cu_q[b + 1])
        _close(torch_carrier, (out[None, mine], lse[None, :, mine]), want)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("new", [0, 1, 4])
@pytest.mark.parametrize("paged", [False, True])
def test_flash_attn_with_kvcache(paged, new, q_len, causal, torch_carrier):
    """Appends in place, then attends; without new tokens some sequences are shorter than the queries."""
    old_lens = (21, 3, 0, 5)
    cache = _Cache([n + new for n in old_lens])
    rng = np.random.default_rng(1)
    q = rng.standard_normal((4, q_len, 4, 16)).astype(np.float32)
    pools, where = _with_old_tokens(cache, old_lens, paged)
    k_cache, v_cache = map(torch_carrier.array, pools)
    appended = {}
    if new:
        for name, rows in zip("kv", cache.packed, strict=True):
            tokens = np.stack([row[n:] for row, n in zip(rows, old_lens, strict=True)])
            appended[name] = torch_carrier.array(tokens)
    out, lse = tt.flash_attn_with_kvcache(
        torch_carrier.array(q),
        k_cache,
        v_cache,
        **appended,
        cache_seqlens=torch_carrier.array(np.array(old_lens, np.int32)),
        **{name: torch_carrier.array(x) for name, x in where.items()},
        causal=causal,
        softcap=2.0,
        return_softmax_lse=True,
    )
    assert lse.shape == (4, 4, q_len)
    for b, want in enumerate(cache.want(q, causal=causal, softcap=2.0)):
        _close(torch_carrier, (out[b : b + 1], lse[b : b + 1]), want)
    full, _ = _with_old_tokens(cache, cache.lens, paged)
    for got, want in zip((k_cache, v_cache), full, strict=True):
        np.testing.assert_array_equal(torch_carrier.numpy(got), want)


def _with_old_tokens(cache, lens, paged):
    """Pools that hold the first ``lens`` tokens of each sequence, and the arguments that find them."""
    if paged:
        pools = [np.full_like(pool, np.nan) for pool in cache.pools]
        for b, n in enumerate(lens):
            for pool, rows in zip(pools, cache.packed, strict=True):
                for j in range(n):
                    pool[cache.table[b, j // 8], j % 8] = rows[b][j]
        return pools, {"block_table": cache.table}
    row_of = np.array([2, 0, 5, 1], np.int32)
    pools = [np.full((6, 40, 2, 16), np.nan, np.float32) for _ in range(2)]
    for b, n in enumerate(lens):
        for pool, rows in zip(pools, cache.packed, strict=True):
            pool[row_of[b], :n] = rows[b][:n]
    return pools, {"cache_batch_idx": row_of}


@pytest.mark.parametrize("cache_seqlens", [None, 12, 2])
def test_a_plain_cache(cache_seqlens, torch_carrier):
    """No table: row b is sequence b; an int is the length of all, None the whole cache."""
    (q, k, v), _ = cases.Flash("", q_len=4, kv_len=12, head_dim=16).make("float32")
    wide = [np.concatenate([x, np.full_like(x, np.nan)]) for x in (k, v)]
    got = tt.flash_attn_with_kvcache(
        *map(torch_carrier.array, (q, *wide)), cache_seqlens=cache_seqlens, return_softmax_lse=True
    )
    seen = cache_seqlens or 12
    _close(torch_carrier, got, reference.flash(q, k[:, :seen], v[:, :seen]))


def test_a_full_cache_is_refused():
    q, k = torch.ones(2, 1, 4, 16), torch.ones(2, 1, 2, 16)
    caches = torch.zeros(2, 2, 8, 2, 16).unbind()
    for options in ({}, {"block_table": torch.tensor([[0], [1]])}):
        for lengths, told in (
            (torch.tensor([3, 8]), "1: got 8"),
            (8, "0: got 8"),
            (torch.tensor([-1, 3]), "0: got -1"),
        ):
            with pytest.raises(IndexError, match=f"cache_seqlens: sequence {told}; expected 0 to 7"):
                tt.flash_attn_with_kvcache(q, *caches, k, k, cache_seqlens=lengths, **options)
        assert not any(cache.any() for cache in caches), "written before the refusal"


def test_compiled_without_a_break(torch_carrier):
    device = torch_carrier.device
    torch._dynamo.reset()

    def step(q, k, k_cache, v_cache, lens):
        tt.flash_attn_with_kvcache(q, k_cache, v_cache, k, k, cache_seqlens=lens, causal=True)
        packed = tt.flash_attn_varlen_func(q[0], k[0], k[0], cu, cu, 4, 4, causal=True)
        return packed + tt.flash_attn_func(q, k, k, causal=True, window_size=(2, -1))

    cu = torch.tensor([0, 1, 4], device=device)
    q, k = torch.randn(2, 4, 4, 16, device=device), torch.randn(2, 4, 2, 16, device=device)
    lens = torch.tensor([3, 0], device=device)
    caches = [torch.zeros(2, 2, 8, 2, 16, device=device).unbind() for _ in range(2)]
    want = step(q, k, *caches[0], lens)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, *caches[1], lens)
    assert torch.equal(got, want)
    for one, other in zip(*caches, strict=True):
        assert torch.equal(one, other)
        assert one.any()


@pytest.mark.parametrize(
    "options",
    [
        {"rotary_cos": torch.ones(4, 8)},
        {"rotary_sin": torch.ones(4, 8)},
        {"cache_leftpad": torch.zeros(2, dtype=torch.int32)},
        {"alibi_slopes": torch.ones(4)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_kvcache_refuses_by_name(options):
    q, cache = torch.ones(2, 1, 4, 16), torch.ones(2, 8, 2, 16)
    with pytest.raises(ValueError, match=rf"^{next(iter(options))}: "):
        tt.flash_attn_with_kvcache(q, cache, cache, **options)


def test_kvcache_refuses_bad_combinations():
    q, k, cache = torch.ones(2, 1, 4, 16), torch.ones(2, 1, 2, 16), torch.ones(2, 8, 2, 16)
    table, lens = torch.tensor([[0], [1]]), torch.tensor([1, 2])
    call = tt.flash_attn_with_kvcache
    with pytest.raises(ValueError, match=r"^v: "):
        call(q, cache, cache, k, cache_seqlens=lens)
    with pytest.raises(ValueError, match=r"^cache_seqlens: "):
        call(q, cache, cache, block_table=table)
    with pytest.raises(ValueError, match=r"^cache_seqlens: "):
        call(q, cache, cache, k, k)
    with pytest.raises(ValueError, match=r"^cache_batch_idx: "):
        call(q, cache, cache, cache_seqlens=lens, block_table=table, cache_batch_idx=lens)
    with pytest.raises(ValueError, match=r"^k_cache: "):
        call(q, cache[:1], cache[:1])
    with pytest.raises(ValueError, match=r"^q: "):
        call(q[0], cache, cache)
    with pytest.raises(ValueError, match=r"^window_size: "):
        call(torch.ones(2, 3, 4, 16), cache, cache, cache_seqlens=lens, window_size=(3, -1))


@pytest.mark.parametrize("options", [{"dropout_p": 0.1}, {"alibi_slopes": torch.ones(4)}], ids=str)
def test_dense_functions_refuse_by_name(options):
    name = next(iter(options))
    q, cu = torch.ones(2, 4, 4, 16), torch.tensor([0, 4])
    with pytest.raises(ValueError, match=rf"^{name}: "):
        tt.flash_attn_func(q, q, q, **options)
    with pytest.raises(ValueError, match=rf"^{name}: "):
        tt.flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 4, 4, **options)


def test_wrong_types_are_named():
    q, k = torch.ones(2, 3, 4, 16), torch.ones(2, 5, 2, 16)
    packed, cu = (q[0], k[0], k[0]), (torch.tensor([0, 3]), torch.tensor([0, 5]))
    varlen = dict(zip(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"), (*packed, *cu), strict=True))
    calls = [
        (tt.flash_attn_func, {"q": q, "k": k, "v": k}, []),
        (tt.flash_attn_varlen_func, {**varlen, "max_seqlen_q": 3, "max_seqlen_k": 5}, ["block_table"]),
        (
            tt.flash_attn_with_kvcache,
            {"q": q, "k_cache": k, "v_cache": k},
            ["k", "v", "cache_batch_idx", "block_table"],
        ),
    ]
    for call, given, optional in calls:
        for name in (*(name for name in given if not name.startswith("max_")), *optional):
            with pytest.raises(TypeError, match=rf"^{name}: expected a torch tensor.*, got ndarray$"):
                call(**{**given, name: k.numpy()})
        for wrong in (None, 3, (1,), (1, 2, 3), (None, 0), (1.5, 0), (True, 0), ("1", 0)):
            with pytest.raises(TypeError, match=r"^window_size: "):
                call(**given, window_size=wrong)
        for options in ({"causal": "no"}, {"softmax_scale": "1"}, {"softmax_scale": True}, {"softcap": None}):
            with pytest.raises(TypeError, match=rf"^{next(iter(options))}: expected "):
                call(**given, **options)
    for wrong in (1.5, True, "5", [5, 5]):
        with pytest.raises(TypeError, match=r"^cache_seqlens: "):
            tt.flash_attn_with_kvcache(q, k, k, cache_seqlens=wrong)
    for wrong in (2.5, None, True):
        with pytest.raises(TypeError, match=r"^max_seqlen_q: expected an int"):
            tt.flash_attn_varlen_func(*packed, *cu, wrong, 5)
