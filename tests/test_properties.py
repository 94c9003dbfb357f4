# SPDX-License-Identifier: Apache-2.0
"""Random problems: cuts into tiles, block orders, strides, lengths, garbage where nobody may look."""

from __future__ import annotations

import dataclasses

import calls
import cases
import compare
import numpy as np
import reference
import tiledattn as ta
from arrays import DTYPES
from hypothesis import given
from hypothesis import strategies as st

dtypes = st.sampled_from(DTYPES)
garbage = st.sampled_from(["nan", "inf", "bytes"])
seeds = st.integers(0, 2**32 - 1)
heads = st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 2), (7, 1), (3, 3), (10, 2)])
head_dims = st.sampled_from([1, 8, 16, 20, 32, 64, 80, 128])
block_sizes = st.sampled_from([1, 2, 7, 8, 16, 64])
sides = st.one_of(st.none(), st.integers(0, 60))


@st.composite
def score_options(draw):
    return cases.Score(
        causal=draw(st.booleans()),
        window=(draw(sides), draw(sides)),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5, 30.0])),
        sinks=draw(st.booleans()),
        softmax_scale=draw(st.sampled_from([None, None, 0.05, 0.7, -0.3])),
    )


@st.composite
def paged_cases(draw, tiles=3, q_lens=None, score=None):
    """Lengths from nothing to ``tiles`` tiles of a few blocks."""
    block_size = draw(block_sizes)
    num_q_heads, num_kv_heads = draw(heads)
    longest = min(tiles * 4 * block_size, 300)
    seq_lens = tuple(draw(st.lists(st.integers(0, longest), min_size=1, max_size=4)))
    return cases.Paged(
        "",
        seq_lens=seq_lens,
        q_lens=draw(q_lens(len(seq_lens))) if q_lens else None,
        block_size=block_size,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=draw(head_dims),
        head_dim_v=draw(head_dims),
        score=score or draw(score_options()),
    )


def _cuts(draw, case):
    """Random widths that together hold the longest sequence; tiles of nothing may come anywhere."""
    left = -(-max(case.seq_lens) // case.block_size)
    widths = []
    while left > 0:
        widths.append(draw(st.integers(1, min(left, 12))))
        left -= widths[-1]
    return tuple(widths) + (1,) * draw(st.integers(0, 2)) or (1,)


@given(st.data(), dtypes, garbage, seeds)
def test_any_cut_into_tiles(device, data, dtype, kind, seed):
    positions = data.draw(st.booleans())
    q_len = data.draw(st.integers(1, 5))
    plain = cases.Score(softcap=data.draw(st.sampled_from([0.0, 2.0])), sinks=data.draw(st.booleans()))
    window = (data.draw(sides), data.draw(sides)) if positions else cases.NO_WINDOW
    score = cases.Score(True, window, plain.softcap, plain.sinks)
    case = data.draw(paged_cases(q_lens=lambda _: st.just(q_len), score=score))
    tiled = cases.Tiled("", case, _cuts(data.draw, case), positions).make(dtype, seed, garbage=kind)
    got = calls.run_tiled(device, tiled, dims={"max_seqs": len(case.seq_lens) + data.draw(st.integers(0, 3))})
    compare.result_close(got, calls.want_tiled(tiled).finalize(), dtype)


@given(st.data(), dtypes, seeds)
def test_states_of_any_partition_merge_to_the_whole(device, data, dtype, seed):
    case = data.draw(paged_cases(score=cases.Score()))
    tiled = cases.Tiled("", case, _cuts(data.draw, case)).make(dtype, seed)
    parts = data.draw(st.integers(1, 3))
    owner = data.draw(
        st.lists(st.integers(0, parts - 1), min_size=len(tiled.tiles), max_size=len(tiled.tiles))
    )
    states = []
    for part in range(parts):
        attn = calls.make_attention(device, tiled)
        attn.begin_step(len(case.seq_lens))
        for tile, mine in zip(tiled.tiles, owner, strict=True):
            if mine == part:
                calls.step(device, attn, tiled, tile)
        states.append(attn.state())
    merged = ta.merge_states(states)
    want = calls.want_tiled(tiled)
    got = tuple(
        calls.device_view(device, x).reshape(y.shape)
        for x, y in zip((merged.m, merged.l, merged.o), want.state, strict=True)
    )
    compare.state_close(got, want.state, dtype, want.max_score)


@given(paged_cases(), dtypes, garbage, seeds)
def test_paged_decode(device, case, dtype, kind, seed):
    arrays = case.make(dtype, seed, garbage=kind)
    compare.result_close(calls.run_paged(device, arrays), calls.want_paged(arrays), dtype)


@given(
    paged_cases(q_lens=lambda n: st.lists(st.integers(0, 40), min_size=n, max_size=n).map(tuple)),
    dtypes,
    garbage,
    seeds,
)
def test_paged_ragged(device, case, dtype, kind, seed):
    # Without a causal mask, what a query in front of the whole sequence sees is nobody's business.
    if not case.score.causal:
        lens = tuple(max(length, q) for length, q in zip(case.seq_lens, case.q_lens, strict=True))
        case = dataclasses.replace(case, seq_lens=lens)
    arrays = case.make(dtype, seed, garbage=kind)
    compare.result_close(calls.run_paged(device, arrays), calls.want_paged(arrays), dtype)


@given(paged_cases(), dtypes, seeds, st.randoms(use_true_random=False))
def test_physical_order_of_blocks_never_shows(device, case, dtype, seed, shuffle):
    """The same bits after moving every block and rewriting every unused entry."""
    arrays = case.make(dtype, seed)
    moved = list(range(len(arrays.k_pool)))
    shuffle.shuffle(moved)
    moved = np.array(moved, np.int64)
    k_pool, v_pool = np.empty_like(arrays.k_pool), np.empty_like(arrays.v_pool)
    k_pool[moved], v_pool[moved] = arrays.k_pool, arrays.v_pool
    table = np.full(arrays.block_table.shape, 2**40, np.int64)
    for b, length in enumerate(case.seq_lens):
        used = -(-length // case.block_size)
        table[b, :used] = moved[arrays.block_table[b, :used]]
    other = arrays._replace(k_pool=k_pool, v_pool=v_pool, block_table=table)
    compare.same_bits(calls.run_paged(device, other), calls.run_paged(device, arrays))


@st.composite
def flash_cases(draw):
    num_q_heads, num_kv_heads = draw(heads)
    return cases.Flash(
        "",
        batch=draw(st.integers(0, 3)),
        q_len=draw(st.integers(0, 150)),
        kv_len=draw(st.integers(0, 200)),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=draw(head_dims),
        head_dim_v=draw(head_dims),
        score=draw(score_options()),
    )


def _with_strides(draw, device, x):
    """The values of x as a view: outer dimensions stepped and permuted in memory, the last one padded."""
    order = draw(st.permutations(range(x.ndim - 1)))
    steps = [draw(st.sampled_from([1, 1, 2, 3])) for _ in range(x.ndim - 1)]
    pad = draw(st.sampled_from([0, 0, 1, 5]))
    buffer = np.full([x.shape[i] * steps[i] for i in order] + [x.shape[-1] + pad], np.nan, x.dtype)
    back = [*np.argsort(order), x.ndim - 1]
    view = buffer.transpose(back)[tuple(slice(None, None, s) for s in steps)][..., : x.shape[-1]]
    view[...] = x
    base = device.array(buffer)
    base = base.permute(back) if hasattr(base, "permute") else base.transpose(back)
    return base[tuple(slice(None, None, s) for s in steps)][..., : x.shape[-1]]


@given(st.data(), flash_cases(), dtypes, seeds)
def test_flash_with_any_strides(device, data, case, dtype, seed):
    qkv, score = case.make(dtype, seed)
    given_arrays = [_with_strides(data.draw, device, x) for x in qkv]
    compare.result_close(calls.run_flash(device, given_arrays, score), reference.flash(*qkv, **score), dtype)


@given(st.data(), dtypes, seeds, score_options())
def test_packed(device, data, dtype, seed, score):
    n = data.draw(st.integers(0, 4))
    q_lens, kv_lens = (data.draw(st.lists(st.integers(0, 70), min_size=n, max_size=n)) for _ in range(2))
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(lens)]).astype(np.int64) for lens in (q_lens, kv_lens))
    spare_q, spare_k = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    num_q_heads, num_kv_heads = data.draw(heads)
    rng = np.random.default_rng(seed)
    q = cases.random(rng, (cu_q[-1] + spare_q, num_q_heads, 16), dtype)
    k, v = (cases.random(rng, (cu_k[-1] + spare_k, num_kv_heads, d), dtype) for d in (16, 24))
    k[cu_k[-1] :], v[cu_k[-1] :] = np.nan, np.nan
    options = score.kwargs(rng, num_q_heads)
    out, lse = calls.run_flash(device, (q, k, v), options, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    want = reference.flash_packed(q, k, v, cu_q, cu_k, **options)
    used = slice(0, int(cu_q[-1]))
    compare.result_close(
        (out[used], lse[used]), reference.Result(want.out[used], want.lse[used], want.max_score), dtype
    )


@given(st.data(), dtypes, seeds, st.sampled_from([2.0, 2.718281828459045, 10.0]))
def test_merge_attention_of_any_cut(device, data, dtype, seed, base):
    kv_len = data.draw(st.integers(0, 60))
    at = data.draw(st.integers(0, kv_len))
    (q, k, v), _ = cases.Flash("", batch=1, q_len=3, kv_len=kv_len, head_dim=16).make(dtype, seed)
    given_arrays = []
    for part in (slice(0, at), slice(at, kv_len)):
        half = reference.flash(q, k[:, part], v[:, part])
        given_arrays += [half.out.astype(q.dtype), (half.lse / np.log(base)).astype(np.float32)]
    out, lse = device.call(ta.merge_attention, *given_arrays, lse_base=base)
    want = reference.flash(q, k, v)
    compare.out_close(out, want.out, dtype)
    compare.lse_close(lse, want.lse / np.log(base))


@given(st.data(), dtypes, seeds)
def test_write_kv_then_read(device, data, dtype, seed):
    """Tokens written one batch after another are what attention then reads."""
    rng = np.random.default_rng(seed)
    length, block_size = data.draw(st.integers(1, 60)), data.draw(block_sizes)
    blocks = -(-length // block_size)
    table = rng.permutation(blocks + 2)[:blocks][None]
    k, v = (cases.random(rng, (length, 2, 16), dtype) for _ in range(2))
    pools = [device.full((blocks + 2, block_size, 2, 16), np.nan, dtype) for _ in range(2)]
    slots = table[0, np.arange(length) // block_size] * block_size + np.arange(length) % block_size
    order = rng.permutation(length)
    for part in np.array_split(order, data.draw(st.integers(1, 4))):
        device.call(ta.write_kv, k[part], v[part], *pools, slots[part])
    q, lens = cases.random(rng, (1, 4, 16), dtype), np.array([length], np.int32)
    got = device.call(ta.paged_attention, q, *pools, table, lens, return_lse=True)
    want = reference.flash(q[:, None], k[None], v[None])
    compare.result_close(got, reference.Result(want.out[:, 0], want.lse[:, 0], want.max_score), dtype)
