# SPDX-License-Identifier: Apache-2.0
"""States that are kept, moved, merged and packed; results that are merged."""

from __future__ import annotations

import copy
import math
import pickle
import re
import struct

import calls
import cases
import compare
import numpy as np
import pytest
import reference
import tiledattn as ta

CASE = cases.Tiled("", cases.Paged("", seq_lens=(0, 40, 96), score=cases.Score(sinks=True)))


def _arrays(device, state):
    return tuple(calls.device_view(device, x) for x in (state.m, state.l, state.o))


def _state_of(device, data, tiles):
    attn = calls.make_attention(device, data)
    attn.begin_step(len(data.paged.q))
    for tile in tiles:
        calls.step(device, attn, data, tile)
    return attn.state()


def _states(device, data):
    """One state for each tile."""
    return [_state_of(device, data, [tile]) for tile in data.tiles]


def _finalized(device, state, sinks=None):
    out, lse = state.finalize(sinks=None if sinks is None else device.array(sinks))
    if device.is_cuda:
        return tuple(calls.device_view(device, x) for x in (out, lse))
    return np.asarray(out), np.asarray(lse)


def test_state_is_a_copy(device, dtype):
    data = CASE.make(dtype)
    attn = calls.make_attention(device, data)
    attn.begin_step(3)
    calls.step(device, attn, data, data.tiles[0])
    state = attn.state()
    assert state.num_seqs == 3
    kept = _arrays(device, state)
    assert [x.shape for x in kept] == [(3, 4), (3, 4), (3, 4, 64)]
    compare.same_bits(kept, calls.state_arrays(device, attn, 3))
    calls.step(device, attn, data, data.tiles[1])
    attn.begin_step(2)
    compare.same_bits(_arrays(device, state), kept)


def test_states_of_disjoint_tiles_merge_to_the_whole(device, dtype):
    data = CASE.make(dtype)
    merged = ta.merge_states(_states(device, data))
    want = calls.want_tiled(data)
    compare.state_close(_arrays(device, merged), want.state, dtype, want.max_score)
    out, lse = _finalized(device, merged, data.paged.score["sinks"])
    assert out.dtype == np.float32
    compare.out_close(out, want.finalize().out, dtype, want.max_score)
    compare.lse_close(lse, want.finalize().lse)


def test_finalize_without_sinks(device):
    data = CASE.make("float32")
    out, lse = _finalized(device, ta.merge_states(_states(device, data)))
    want = calls.want_tiled(data, sinks=None).finalize()
    compare.result_close((out, lse), want, "float32")
    assert np.isneginf(lse[0]).all()
    assert not out[0].any()


def test_merging_with_empty_changes_no_bit(device, dtype):
    data = CASE.make(dtype)
    full = _state_of(device, data, data.tiles)
    empty = _state_of(device, data, [])
    for states in ([full], [full, empty], [empty, full], [empty, full, empty]):
        compare.same_bits(_arrays(device, ta.merge_states(states)), _arrays(device, full))
    nothing = _arrays(device, ta.merge_states([empty, empty, empty]))
    assert np.isneginf(nothing[0]).all()
    assert not nothing[1].any()
    assert not nothing[2].any()


def test_merge_leaves_its_inputs(device):
    states = _states(device, CASE.make("float32"))
    before = [_arrays(device, state) for state in states]
    ta.merge_states(states)
    for state, kept in zip(states, before, strict=True):
        compare.same_bits(_arrays(device, state), kept)


def test_state_of_several_query_tokens(device):
    data = cases.Tiled("", cases.Paged("", seq_lens=(20, 96), q_lens=3), positions=True).make("float32")
    states = _states(device, data)
    assert _arrays(device, states[0])[2].shape == (2, 3, 4, 64)
    want = calls.want_tiled(data)
    compare.state_close(_arrays(device, ta.merge_states(states)), want.state, "float32", want.max_score)


def test_load_state_continues_as_if_never_left(device, dtype):
    data = CASE.make(dtype)
    attn = calls.make_attention(device, data)
    attn.begin_step(3)
    for tile in data.tiles[:2]:
        calls.step(device, attn, data, tile)
    state = attn.state()
    calls.step(device, attn, data, data.tiles[2])
    want = device.call(attn.finalize, return_lse=True)
    other = calls.make_attention(device, data, dims={"max_seqs": 7})
    other.load_state(state)
    compare.same_bits(calls.state_arrays(device, other, 3), _arrays(device, state))
    calls.step(device, other, data, data.tiles[2])
    compare.same_bits(device.call(other.finalize, return_lse=True), want)


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "pack"])
def test_state_travels(how, device, dtype):
    data = CASE.make(dtype)
    state = _state_of(device, data, data.tiles)
    if how == "pickle":
        other = pickle.loads(pickle.dumps(state))
    elif how == "deepcopy":
        other = copy.deepcopy(state)
    else:
        packed = state.pack()
        assert isinstance(packed, bytes)
        other = ta.State.unpack(packed, device=device.device)
    assert other.num_seqs == 3
    other = other.to(device.device)
    compare.same_bits(_arrays(device, other), _arrays(device, state))


@pytest.mark.gpu
def test_state_between_devices(gpu, cpu):
    data = CASE.make("float32")
    state = _state_of(gpu, data, data.tiles)
    down = state.to("cpu")
    assert str(down.device) == "cpu"
    compare.same_bits(_arrays(cpu, down), _arrays(gpu, state))
    compare.same_bits(_arrays(gpu, down.to("cuda")), _arrays(gpu, state))
    with pytest.raises(ValueError, match=r"cpu.*cuda|cuda.*cpu"):
        ta.merge_states([state, down])


@pytest.mark.parametrize("damage", ["empty", "short", "long", "header", "not_bytes"])
def test_unpack_refuses_what_pack_did_not_make(damage, cpu):
    packed = _state_of(cpu, CASE.make("float32"), []).pack()
    damaged = {
        "empty": b"",
        "short": packed[:-1],
        "long": packed + b"\0",
        "header": b"\xff" * 16 + packed[16:],
        "not_bytes": 7,
    }[damage]
    with pytest.raises((ValueError, TypeError)):
        ta.State.unpack(damaged)


HEADER = struct.Struct("<12sI4q")  # magic, version, num_seqs, q_len, num_q_heads, head_dim_v


def test_the_header_of_a_packed_state(cpu):
    packed = _state_of(cpu, CASE.make("float32"), []).pack()
    assert HEADER.unpack_from(packed) == (b"tiledattn.st", 1, 3, 1, 4, 64)
    assert len(packed) == HEADER.size + 3 * 4 * (64 + 2) * 4


@pytest.mark.parametrize(
    "sizes",
    [
        (3, 1, 4, 63),
        (3, 1, 4, 65),
        (2, 1, 4, 64),
        (3, 2, 4, 64),
        (-3, -1, 4, 64),  # these six have the right product
        (3, -1, -4, 64),
        (3, 1, -4, -68),
        (6, 1, 2, 64),
        (1, 12, 1, 64),
        (12, 1, 22, 10),
        (0, 1, 4, 64),
        (3, 0, 4, 64),
        (3, 1, 4, -2),
        (2**62, 2**62, 4, 64),
        (2**62, 4, 2**62, -1),
        (3, 1, 4, 2**63 - 1),
        (-(2**63), 1, 4, 64),
    ],
    ids=str,
)
def test_unpack_refuses_sizes_that_do_not_go_with_the_bytes(sizes, cpu):
    """Whatever the header says: the right sizes for these bytes, or a ValueError that names the sizes."""
    packed = _state_of(cpu, CASE.make("float32"), []).pack()
    damaged = HEADER.pack(b"tiledattn.st", 1, *sizes) + packed[HEADER.size :]
    fits = min(sizes) > 0 and math.prod(sizes[:3]) * (sizes[3] + 2) * 4 == len(packed) - HEADER.size
    state, error = calls.outcome(ValueError, ta.State.unpack, damaged)
    if fits:
        assert state.num_seqs == sizes[0]
    else:
        assert str(error).startswith("data: ")
        assert f"num_seqs {sizes[0]}, q_len {sizes[1]}" in str(error)


@pytest.mark.parametrize("length", [0, 1, 11, 47, 48, 49, 100, 3 * 4 * 66 * 4 + 47, 3 * 4 * 66 * 4 + 49])
def test_unpack_refuses_other_numbers_of_bytes(length, cpu):
    packed = (_state_of(cpu, CASE.make("float32"), []).pack() + bytes(10))[:length]
    with pytest.raises(ValueError, match=r"^data: .*State\.pack\(\)"):
        ta.State.unpack(packed)


@pytest.mark.parametrize("version", [0, 2, 2**32 - 1])
def test_unpack_refuses_other_versions(version, cpu):
    packed = _state_of(cpu, CASE.make("float32"), []).pack()
    other = packed[:12] + struct.pack("<I", version) + packed[16:]
    with pytest.raises(ValueError, match=rf"^data: .*version {version} "):
        ta.State.unpack(other)


def test_merge_states_refuses_what_does_not_fit(cpu):
    one = _state_of(cpu, CASE.make("float32"), [])
    other = _state_of(cpu, cases.Tiled("", cases.Paged("", seq_lens=(3, 4))).make("float32"), [])
    with pytest.raises(ValueError, match=r"3.*2|2.*3"):
        ta.merge_states([one, other])
    with pytest.raises(ValueError, match="state"):
        ta.merge_states([])
    with pytest.raises(TypeError, match="state"):
        ta.merge_states([one, 3])


def test_load_state_refuses_what_does_not_fit(cpu):
    data = CASE.make("float32")
    attn = calls.make_attention(cpu, data, dims={"max_seqs": 2})
    with pytest.raises(ValueError, match=r"3.*2|2.*3"):
        attn.load_state(_state_of(cpu, data, []))


# Results: out and lse of this or another library.


def _halves(dtype, seed=0):
    qkv, _ = cases.Flash("", q_len=5, kv_len=90).make(dtype, seed)
    q, k, v = qkv
    return [
        reference.flash(q, k[:, part], v[:, part]) for part in (slice(0, 31), slice(31, 90))
    ], reference.flash(*qkv)


@pytest.mark.parametrize("base", [math.e, 2.0, 10.0])
def test_merge_attention(base, device, dtype):
    (a, b), whole = _halves(dtype)
    given = []
    for part in (a, b):
        given += [part.out.astype(cases.NP_DTYPE[dtype]), (part.lse / math.log(base)).astype(np.float32)]
    out, lse = device.call(ta.merge_attention, *given, lse_base=base)
    assert str(out.dtype) == dtype
    compare.out_close(out, whole.out, dtype)
    compare.lse_close(lse, whole.lse / math.log(base))


def test_merge_attention_default_base_is_natural(cpu):
    (a, b), whole = _halves("float32")
    out, lse = ta.merge_attention(*(x.astype(np.float32) for x in (a.out, a.lse, b.out, b.lse)))
    compare.out_close(out, whole.out, "float32")
    compare.lse_close(lse, whole.lse)


def test_merge_attention_with_empty_returns_the_other_bits(device, dtype):
    (a, _), _ = _halves(dtype)
    out, lse = a.out.astype(cases.NP_DTYPE[dtype]), a.lse.astype(np.float32)
    none, minus_inf = np.zeros_like(out), np.full_like(lse, -np.inf)
    compare.same_bits(device.call(ta.merge_attention, out, lse, none, minus_inf), (out, lse))
    compare.same_bits(device.call(ta.merge_attention, none, minus_inf, out, lse), (out, lse))
    got = device.call(ta.merge_attention, none, minus_inf, none, minus_inf)
    compare.same_bits(got, (none, minus_inf))


def test_merge_attention_frameworks(carrier):
    for dtype in carrier.dtypes:
        (a, b), whole = _halves(dtype)
        to = cases.NP_DTYPE[dtype]
        got = carrier.call(
            ta.merge_attention,
            a.out.astype(to),
            a.lse.astype(np.float32),
            b.out.astype(to),
            b.lse.astype(np.float32),
        )
        compare.out_close(got[0], whole.out, dtype)
        compare.lse_close(got[1], whole.lse)


def test_merge_attention_over_layouts_as_the_functions_return_them(cpu):
    """bhsd results merge without transposition."""
    qkv, _ = cases.Flash("", q_len=5, kv_len=90).make("float32")
    q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in qkv)
    parts = []
    for part in (slice(0, 50), slice(50, 90)):
        parts += calls.run_flash(cpu, (q, k[:, :, part], v[:, :, part]), layout="bhsd")
    compare.result_close(
        cpu.call(ta.merge_attention, *parts), reference.flash(q, k, v, layout="bhsd"), "float32"
    )


def test_merge_attention_errors(cpu):
    out, lse = np.zeros((2, 3, 4, 8), np.float32), np.zeros((2, 3, 4), np.float32)
    with pytest.raises(ValueError, match="out_b"):
        ta.merge_attention(out, lse, out[:1], lse[:1])
    with pytest.raises(ValueError, match="lse_a"):
        ta.merge_attention(out, lse[..., None], out, lse)
    with pytest.raises(TypeError, match="lse_b"):
        ta.merge_attention(out, lse, out, lse.astype(np.float64))
    with pytest.raises(TypeError, match="out_b"):
        ta.merge_attention(out, lse, out.astype(np.float16), lse)
    for base in (0.0, -2.0, 1.0, 1 - 1e-9, math.nan, math.inf, -math.inf):
        said = rf"lse_base: got {re.escape(f'{base:.9g}')}; expected a finite base over 1"
        with pytest.raises(ValueError, match=said):
            ta.merge_attention(out, lse, out, lse, lse_base=base)
    for base in (math.nextafter(1, 2), 1e308):
        assert np.isfinite(ta.merge_attention(out, lse, out, lse, lse_base=base)[0]).all()
    for base in ("2", None, [2.0]):
        with pytest.raises(TypeError, match="lse_base: expected a number"):
            ta.merge_attention(out, lse, out, lse, lse_base=base)
