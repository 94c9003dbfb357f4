# SPDX-License-Identifier: Apache-2.0
"""Each error names the argument, what came and what was wanted, and leaves outputs and state as they were."""

from __future__ import annotations

import copy
import math
import pickle
import re

import calls
import cases
import compare
import numpy as np
import pytest
import tiledattn as ta


def _all_in(message, parts):
    for part in parts:
        assert re.search(rf"(?<!\w){re.escape(str(part))}(?!\w)", message), f"{part!r} is not in: {message}"


def _refused(error, parts, function, *args, **kwargs):
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    _all_in(str(caught.value), parts)


DIMS = {
    "max_seqs": 4,
    "num_q_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "block_size": 16,
    "tile_capacity": 64,
    "max_q_len": 1,
}


@pytest.mark.parametrize("name", [*DIMS, "head_dim_v"])
@pytest.mark.parametrize("value", [0, -3])
def test_dims_refuse_sizes_below_one(name, value):
    _refused(ValueError, [name, value], ta.TiledAttentionDims, **{**DIMS, name: value})


def test_dims_refuse_heads_and_head_dims_that_do_not_fit():
    _refused(ValueError, ["num_q_heads", 32, 5], ta.TiledAttentionDims, **{**DIMS, "num_kv_heads": 5})
    _refused(ValueError, ["head_dim", 257, 256], ta.TiledAttentionDims, **{**DIMS, "head_dim": 257})
    _refused(ValueError, ["head_dim_v", 300, 256], ta.TiledAttentionDims, **{**DIMS, "head_dim_v": 300})
    _refused(TypeError, ["max_seqs"], ta.TiledAttentionDims, **{**DIMS, "max_seqs": "four"})


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"softmax_scale": math.nan}, ["softmax_scale", "nan"]),
        ({"softmax_scale": math.inf}, ["softmax_scale", "inf"]),
        ({"softcap": -1.0}, ["softcap", "-1"]),
        ({"softcap": math.nan}, ["softcap", "nan"]),
        ({"softcap": math.inf}, ["softcap", "inf"]),
        ({"window": (-1, None)}, ["window", "-1"]),
        ({"window": (None, -2)}, ["window", "-2"]),
        ({"sinks": np.zeros(3, np.float32)}, ["sinks", 3, 4]),
        ({"sinks": np.zeros((4, 1), np.float32)}, ["sinks"]),
    ],
)
def test_score_options(options, parts, device):
    given = {key: device.array(x) if isinstance(x, np.ndarray) else x for key, x in options.items()}
    qkv, _ = cases.Flash("").make("float32")
    _refused(ValueError, parts, calls.run_flash, device, qkv, **given)
    paged = cases.Paged("").make("float32")
    _refused(ValueError, parts, calls.run_paged, device, paged, **given)
    tiled = cases.Tiled("", cases.Paged("")).make("float32")
    _refused(ValueError, parts, calls.make_attention, device, tiled, **options)


def test_score_option_types(cpu):
    qkv, _ = cases.Flash("").make("float32")
    for bad in ({"window": 3}, {"window": (1, 2, 3)}, {"window": ("a", None)}):
        _refused((TypeError, ValueError), ["window"], calls.run_flash, cpu, qkv, **bad)
    _refused(TypeError, ["sinks"], calls.run_flash, cpu, qkv, sinks=np.zeros(4, np.float64))
    _refused(TypeError, ["softcap"], calls.run_flash, cpu, qkv, softcap="big")
    for name in ("softcap", "softmax_scale"):
        for value in (True, np.False_):
            _refused(TypeError, [name, "bool"], calls.run_flash, cpu, qkv, **{name: value})
    _refused(TypeError, ["softmax_scale"], calls.run_flash, cpu, qkv, softmax_scale="big")


def _f(*shape):
    return np.zeros(shape, np.float32)


FLASH_BAD = {
    "q_rank": ((_f(2, 4, 8), _f(2, 5, 2, 8), _f(2, 5, 2, 8)), {}, ValueError, ["q", 2, 8, "seq"]),
    "k_batch": ((_f(2, 3, 4, 8), _f(3, 5, 2, 8), _f(3, 5, 2, 8)), {}, ValueError, ["k", 3, 2]),
    "k_head_dim": ((_f(2, 3, 4, 8), _f(2, 5, 2, 16), _f(2, 5, 2, 8)), {}, ValueError, ["k", 16, 8]),
    "v_length": ((_f(2, 3, 4, 8), _f(2, 5, 2, 8), _f(2, 6, 2, 8)), {}, ValueError, ["v", 6, 5]),
    "v_heads": ((_f(2, 3, 4, 8), _f(2, 5, 2, 8), _f(2, 5, 4, 8)), {}, ValueError, ["v", 4, 2]),
    "heads": ((_f(2, 3, 4, 8), _f(2, 5, 3, 8), _f(2, 5, 3, 8)), {}, ValueError, [4, 3]),
    "head_dim": ((_f(1, 1, 1, 257), _f(1, 1, 1, 257), _f(1, 1, 1, 8)), {}, ValueError, [257, 256]),
    "head_dim_v": ((_f(1, 1, 1, 8), _f(1, 1, 1, 8), _f(1, 1, 1, 300)), {}, ValueError, [300, 256]),
    "layout": ((_f(2, 3, 4, 8),) * 3, {"layout": "sbhd"}, ValueError, ["layout", "sbhd", "bshd"]),
    "float64": ((np.zeros((2, 3, 4, 8)),) * 3, {}, TypeError, ["q", "float64"]),
    "integer": (
        (_f(2, 3, 4, 8), np.zeros((2, 3, 4, 8), np.int32), _f(2, 3, 4, 8)),
        {},
        TypeError,
        ["k", "int32"],
    ),
    "mixed": (
        (_f(2, 3, 4, 8), _f(2, 3, 4, 8), _f(2, 3, 4, 8).astype(np.float16)),
        {},
        TypeError,
        ["v", "float16", "float32"],
    ),
    "list": (([[1.0]], _f(2, 3, 4, 8), _f(2, 3, 4, 8)), {}, TypeError, ["q", "list"]),
    "none": ((_f(2, 3, 4, 8), None, _f(2, 3, 4, 8)), {}, TypeError, ["k", "NoneType"]),
    "out_shape": ((_f(2, 3, 4, 8),) * 3, {"out": _f(2, 3, 4, 9)}, ValueError, ["out", 9, 8]),
    "out_type": (
        (_f(2, 3, 4, 8),) * 3,
        {"out": _f(2, 3, 4, 8).astype(np.float16)},
        TypeError,
        ["out: dtype is float16; expected float32 like q"],
    ),
    "lse_shape": ((_f(2, 3, 4, 8),) * 3, {"lse": _f(2, 4, 3)}, ValueError, ["lse"]),
    "lse_type": (
        (_f(2, 3, 4, 8),) * 3,
        {"lse": np.zeros((2, 3, 4))},
        TypeError,
        ["lse", "float64", "float32"],
    ),
    "one_cu": ((_f(3, 4, 8),) * 3, {"cu_seqlens_q": np.array([0, 3])}, ValueError, ["cu_seqlens_k"]),
    "cu_dense": (
        (_f(2, 3, 4, 8),) * 3,
        {"cu_seqlens_q": np.array([0, 3]), "cu_seqlens_k": np.array([0, 3])},
        ValueError,
        ["q"],
    ),
    "cu_lengths": (
        (_f(3, 4, 8),) * 3,
        {"cu_seqlens_q": np.array([0, 3]), "cu_seqlens_k": np.array([0, 1, 3])},
        ValueError,
        ["cu_seqlens_k", 3, 2],
    ),
    "cu_type": (
        (_f(3, 4, 8),) * 3,
        {"cu_seqlens_q": np.array([0.0, 3.0]), "cu_seqlens_k": np.array([0, 3])},
        TypeError,
        ["cu_seqlens_q", "float64"],
    ),
    "out_rank": ((_f(2, 3, 4, 8),) * 3, {"out": _f(6, 4, 8)}, ValueError, ["out", "6, 4, 8", "2, 3, 4, 8"]),
    "out_rank_packed": (
        (_f(3, 4, 8),) * 3,
        {"out": _f(1, 3, 4, 8), "cu_seqlens_q": np.array([0, 3]), "cu_seqlens_k": np.array([0, 3])},
        ValueError,
        ["out", "1, 3, 4, 8", "3, 4, 8"],
    ),
    "cu_empty": (
        (_f(0, 4, 8),) * 3,
        {"cu_seqlens_q": np.zeros(0, np.int32), "cu_seqlens_k": np.zeros(0, np.int32)},
        ValueError,
        ["cu_seqlens_q"],
    ),
}


@pytest.mark.parametrize("name", FLASH_BAD)
def test_flash_attention(name, cpu):
    qkv, kwargs, error, parts = FLASH_BAD[name]
    _refused(error, parts, ta.flash_attention, *qkv, **kwargs)


def _paged(**changes):
    """A good call and what to change of it."""
    data = cases.Paged("", seq_lens=(20, 9)).make("float32")
    names = ("q", "k_pool", "v_pool", "block_table", "seq_lens")
    return {**dict(zip(names, data.args, strict=True)), **changes}


PAGED_BAD = {
    "q_rank": ({"q": _f(2, 64)}, ValueError, ["q", 2]),
    "q_batch": ({"q": _f(3, 4, 64)}, ValueError, [3, 2]),
    "q_head_dim": ({"q": _f(2, 4, 32)}, ValueError, [32, 64]),
    "k_pool_rank": ({"k_pool": _f(3, 16, 64)}, ValueError, ["k_pool", 64, "num_blocks"]),
    "v_pool_block": ({"v_pool": _f(9, 8, 2, 64)}, ValueError, ["v_pool", 8]),
    "v_pool_heads": ({"v_pool": _f(8, 16, 4, 64)}, ValueError, ["v_pool", 4, 2]),
    "table_rank": ({"block_table": np.zeros(2, np.int32)}, ValueError, ["block_table", 2, "max_blocks"]),
    "table_rows": ({"block_table": np.zeros((3, 4), np.int32)}, ValueError, ["block_table", 3, 2]),
    "table_type": ({"block_table": np.zeros((2, 4), np.uint32)}, TypeError, ["block_table", "uint32"]),
    "lens_rank": ({"seq_lens": np.zeros((2, 1), np.int32)}, ValueError, ["seq_lens"]),
    "lens_rows": ({"seq_lens": np.zeros(1, np.int32)}, ValueError, ["seq_lens", 1, 2]),
    "lens_type": ({"seq_lens": np.zeros(2, np.int16)}, TypeError, ["seq_lens", "int16"]),
    "lens_list": ({"seq_lens": [20, 9]}, TypeError, ["seq_lens", "list"]),
    "q_type": ({"q": _f(2, 4, 64).astype(np.float16)}, TypeError, ["float16", "float32"]),
    "out_shape": ({"out": _f(2, 4, 63)}, ValueError, ["out", 63, 64]),
    "out_tokens": ({"out": _f(2, 1, 4, 64)}, ValueError, ["out", "2, 1, 4, 64", "2, 4, 64"]),
    "out_no_tokens": (
        {"q": _f(2, 1, 4, 64), "out": _f(2, 4, 64)},
        ValueError,
        ["out", "2, 4, 64", "2, 1, 4, 64"],
    ),
    "out_ragged": (
        {"out": _f(2, 1, 4, 64), "cu_seqlens_q": np.array([0, 1, 2])},
        ValueError,
        ["out", "2, 1, 4, 64", "2, 4, 64"],
    ),
    "lse_shape": ({"lse": _f(4, 2)}, ValueError, ["lse"]),
    "lse_tokens": ({"lse": _f(2, 1, 4)}, ValueError, ["lse", "2, 1, 4", "2, 4"]),
    "ragged_q_rank": (
        {"q": _f(2, 1, 4, 64), "cu_seqlens_q": np.array([0, 1, 2])},
        ValueError,
        ["q", 64, "total_q"],
    ),
    "ragged_count": ({"cu_seqlens_q": np.array([0, 2])}, ValueError, ["block_table", 2, 1]),
}


@pytest.mark.parametrize("name", PAGED_BAD)
def test_paged_attention(name, cpu):
    changes, error, parts = PAGED_BAD[name]
    _refused(error, parts, ta.paged_attention, **_paged(**changes))


def _i(*values):
    return np.array(values, np.int32)


STEP_BAD = {
    "q_batch": ({"q": _f(3, 4, 64)}, ValueError, ["q", 3, 2]),
    "q_heads": ({"q": _f(2, 5, 64)}, ValueError, ["q", 5, 4]),
    "q_head_dim": ({"q": _f(2, 4, 65)}, ValueError, ["q", 65, 64]),
    "q_len": ({"q": _f(2, 3, 4, 64)}, ValueError, ["q", 3, "max_q_len"]),
    "q_type": ({"q": np.zeros((2, 4, 64))}, TypeError, ["q", "float64"]),
    "pool_type": (
        {"k_pool": np.zeros((9, 16, 2, 64), np.float16)},
        TypeError,
        ["k_pool", "float16", "float32"],
    ),
    "pool_block_size": ({"k_pool": _f(9, 8, 2, 64)}, ValueError, ["k_pool", 8, 16]),
    "pool_heads": ({"v_pool": _f(9, 16, 3, 64)}, ValueError, ["v_pool", 3, 2]),
    "pool_blocks": ({"v_pool": _f(2, 16, 2, 64)}, ValueError, ["v_pool", 2]),
    "table_width": ({"tile_blocks": np.zeros((2, 4), np.int32)}, ValueError, ["tile_blocks", 4, 3]),
    "table_rows": ({"tile_blocks": np.zeros((1, 3), np.int32)}, ValueError, ["tile_blocks", 1, 2]),
    "table_type": ({"tile_blocks": np.zeros((2, 3), bool)}, TypeError, ["tile_blocks", "bool"]),
    "counts_rows": ({"tile_block_counts": _i(1)}, ValueError, ["tile_block_counts", 1, 2]),
    "counts_type": ({"tile_block_counts": np.ones(2, np.int8)}, TypeError, ["tile_block_counts", "int8"]),
    "valid_number": ({"last_block_valid_slots": 17}, ValueError, ["last_block_valid_slots", 17, 16]),
    "valid_negative": ({"last_block_valid_slots": -1}, ValueError, ["last_block_valid_slots", -1]),
    "valid_rows": ({"last_block_valid_slots": _i(1, 2, 3)}, ValueError, ["last_block_valid_slots", 3, 2]),
    "valid_type": ({"last_block_valid_slots": 2.5}, TypeError, ["last_block_valid_slots"]),
    "one_position": ({"kv_positions": _i(0, 0)}, ValueError, ["q_positions", "kv_positions"]),
    "position_rows": ({"kv_positions": _i(0, 0), "q_positions": _i(5)}, ValueError, ["q_positions", 1, 2]),
    "position_type": (
        {"kv_positions": _i(0, 0), "q_positions": _f(2)},
        TypeError,
        ["q_positions", "float32"],
    ),
    "out_batch": ({"out": _f(3, 4, 64)}, ValueError, ["out", 3, 2]),
    "out_type": ({"out": np.zeros((2, 4, 64))}, TypeError, ["out", "float64"]),
    "out_tokens": ({"out": _f(2, 1, 4, 64)}, ValueError, ["out", "2, 1, 4, 64", "num_seqs=2, num_q_heads=4"]),
    "out_no_tokens": (
        {"q": _f(2, 1, 4, 64), "out": _f(2, 4, 64)},
        ValueError,
        ["out", "2, 4, 64", "num_seqs=2, q_len=1, num_q_heads=4"],
    ),
    "lse_tokens": ({"out": _f(2, 4, 64), "lse": _f(2, 1, 4)}, ValueError, ["lse", "2, 1, 4", "2, 4"]),
    "lse_alone": ({"lse": _f(2, 4)}, ValueError, ["lse", "out"]),
    "lse_shape": ({"out": _f(2, 4, 64), "lse": _f(2, 5)}, ValueError, ["lse", 5, 4]),
}


@pytest.mark.parametrize("name", STEP_BAD)
def test_step_tile(name, cpu):
    """Refused, and the state goes on as if nothing had been said."""
    changes, error, parts = STEP_BAD[name]
    data = cases.Tiled("", cases.Paged("", seq_lens=(90, 70)), tile_blocks=(3, 3)).make("float32")
    attn = calls.make_attention(cpu, data)
    attn.begin_step(2)
    calls.step(cpu, attn, data, data.tiles[0])
    before = calls.state_arrays(cpu, attn, 2)
    names = ("q", "k_pool", "v_pool", "tile_blocks", "tile_block_counts")
    good = {
        **dict(zip(names, data.step_args(data.tiles[1]), strict=True)),
        "last_block_valid_slots": data.tiles[1].valid_slots,
    }
    out = changes["out"].copy() if "out" in changes else None
    _refused(error, parts, attn.step_tile, **{**good, **changes})
    if out is not None:
        compare.same_bits(changes["out"], out)
    compare.same_bits(calls.state_arrays(cpu, attn, 2), before)
    attn.step_tile(**good)
    compare.result_close(attn.finalize(return_lse=True), calls.want_tiled(data).finalize(), "float32")


def test_step_order_and_sizes(cpu):
    data = cases.Tiled("", cases.Paged("", seq_lens=(40, 9)), tile_blocks=(3,)).make("float32")
    attn = calls.make_attention(cpu, data)
    _refused(ValueError, ["num_seqs", 3, 2], attn.begin_step, 3)
    _refused(ValueError, ["num_seqs", -1], attn.begin_step, -1)
    _refused(ValueError, ["q", 2, 0], calls.step, cpu, attn, data, data.tiles[0])
    attn.begin_step(2)
    calls.step(cpu, attn, data, data.tiles[0])
    half = data._replace(paged=cases.Paged("", seq_lens=(40, 9)).make("float16"))
    _refused((TypeError, ValueError), ["q", "float16", "float32"], calls.step, cpu, attn, half, data.tiles[0])
    _refused(ValueError, ["out", 3, 2], attn.finalize, out=_f(3, 4, 64))
    _refused(TypeError, ["out", "float64"], attn.finalize, out=np.zeros((2, 4, 64)))
    _refused(ValueError, ["out", 63, 64], attn.finalize, out=_f(2, 4, 63))


@pytest.mark.parametrize("q_shape", [(2, 4, 64), (2, 1, 4, 64)], ids=str)
def test_finalize_goes_by_the_form_of_q(q_shape, device):
    """One token as [B, Hq, D] or as [B, 1, Hq, D]: out has the same form, made or given."""
    data = cases.Tiled("", cases.Paged("", seq_lens=(40, 9)), tile_blocks=(3,)).make("float32")
    data = data._replace(paged=data.paged._replace(q=data.paged.q.reshape(q_shape)))
    attn = calls.make_attention(device, data)
    attn.begin_step(2)
    calls.step(device, attn, data, data.tiles[0])
    out, lse = device.call(attn.finalize, return_lse=True)
    assert (out.shape, lse.shape) == (q_shape, q_shape[:-1])
    other = (2, 1, 4, 64) if len(q_shape) == 3 else (2, 4, 64)
    for name, shape in (("out", other), ("lse", other[:-1])):
        wrong = device.array(np.full(shape, 7.0, np.float32))
        parts = [name, ", ".join(map(str, shape))]
        _refused(ValueError, parts, attn.finalize, **{name: wrong})
        assert (device.numpy(wrong) == 7).all()


def test_calls_before_begin_step_say_so(cpu):
    data = cases.Tiled("", cases.Paged("", seq_lens=(40, 9)), tile_blocks=(3,)).make("float32")
    attn = calls.make_attention(cpu, data)
    _refused(ValueError, ["q", 2, 0, "call begin_step"], calls.step, cpu, attn, data, data.tiles[0])
    _refused(ValueError, ["out", 2, 0, "call begin_step"], attn.finalize, out=_f(2, 4, 64))
    assert attn.finalize().shape == (0, 4, 64)  # as after begin_step(0)
    attn.begin_step(2)
    calls.step(cpu, attn, data, data.tiles[0])
    with pytest.raises(ValueError) as caught:  # a step of another size needs no such hint
        attn.finalize(out=_f(3, 4, 64))
    assert "call begin_step" not in str(caught.value)


@pytest.mark.gpu
def test_a_result_before_begin_step_on_a_gpu(gpu):
    attn = calls.make_attention(gpu, cases.Tiled("", cases.Paged("")).make("float32"))
    _refused(ValueError, ["out", "None", "begin_step"], attn.finalize)


@pytest.mark.parametrize(
    "pool", [None, [1], [[1.0]], 3, "pool", object()], ids=lambda given: type(given).__name__
)
def test_scratch_pool_views_take_an_array(pool):
    _refused(TypeError, ["pool", "array", type(pool).__name__], ta.scratch_pool_views, pool)


@pytest.mark.parametrize("shape", [(4, 2, 3, 5), (4, 3, 2, 5, 8), ()])
def test_scratch_pool_views_take_a_scratch_pool(shape):
    _refused(ValueError, ["pool", *shape, "num_slots"], ta.scratch_pool_views, _f(*shape))


@pytest.mark.parametrize("states", [None, 3, object()], ids=lambda given: type(given).__name__)
def test_merge_states_takes_a_sequence(states):
    _refused(TypeError, ["states", "State", type(states).__name__], ta.merge_states, states)


def test_merge_states_takes_one_state_or_more(cpu):
    attn = calls.make_attention(cpu, cases.Tiled("", cases.Paged("")).make("float32"))
    state = attn.state()
    _refused(TypeError, ["states", "sequence", "State"], ta.merge_states, state)
    for none in ([], (), iter([])):
        _refused(ValueError, ["states", "empty", "one state or more"], ta.merge_states, none)
    for bad in (None, 1, attn):
        _refused(TypeError, ["states[1]", "State", type(bad).__name__], ta.merge_states, [state, bad])
    _refused(TypeError, ["states[0]", "State", "str"], ta.merge_states, "ab")
    bare = object.__new__(ta.State)
    _refused(TypeError, ["states[1]", "State", "nothing"], ta.merge_states, [state, bare])
    _refused(TypeError, ["state", "State", "nothing"], attn.load_state, bare)
    assert ta.merge_states(iter([state, state])).num_seqs == 0


@pytest.mark.parametrize("workspace", [3, "big", 1 << 20, np.zeros(4), ta.Workspace], ids=str)
def test_workspace_type(workspace, cpu):
    qkv, _ = cases.Flash("").make("float32")
    parts = ["workspace", "Workspace", type(workspace).__name__]
    _refused(TypeError, parts, calls.run_flash, cpu, qkv, workspace=workspace)
    data = cases.Paged("").make("float32")
    _refused(TypeError, parts, calls.run_paged, cpu, data, workspace=workspace)


@pytest.mark.parametrize("max_seqs", [2**42, 2**62])
def test_more_memory_than_there_is(max_seqs, device):
    """A MemoryError with the number of bytes, or a ValueError where bytes do not even fit 64 bits."""
    sizes = {**DIMS, "max_seqs": max_seqs}
    with pytest.raises((MemoryError, ValueError), match=r"\d"):
        ta.TiledAttention(ta.TiledAttentionDims(**sizes), device=device.device)
    calls.run_tiled(device, cases.Tiled("", cases.Paged("")).make("float32"))


@pytest.mark.parametrize("beyond", [1, 255, 4351])
def test_a_workspace_larger_than_numbers(cpu, beyond):
    """Its counters stand behind it, and their end has to be a number too."""
    largest = 2**63 - 4096 - 256
    _refused(ValueError, ["nbytes", largest + beyond, largest], ta.Workspace, "cpu", largest + beyond)
    with pytest.raises(MemoryError, match=rf"could not allocate {largest + 4096} bytes"):
        ta.Workspace("cpu", largest)


def test_window_needs_positions(cpu):
    data = cases.Tiled("", cases.Paged("", seq_lens=(40, 9), score=cases.Score(True, (5, 0)))).make("float32")
    attn = calls.make_attention(cpu, data)
    attn.begin_step(2)
    _refused(ValueError, ["window", "kv_positions"], calls.step, cpu, attn, data, data.tiles[0])


def test_query_length_is_fixed_by_the_first_tile(cpu):
    data = cases.Tiled("", cases.Paged("", seq_lens=(40, 9), q_lens=3)).make("float32")
    attn = calls.make_attention(cpu, data)
    attn.begin_step(2)
    calls.step(cpu, attn, data, data.tiles[0])
    shorter = data._replace(paged=data.paged._replace(q=data.paged.q[:, :2]))
    _refused(ValueError, ["q", 2, 3], calls.step, cpu, attn, shorter, data.tiles[1])


def test_arguments_after_the_arrays_are_keyword_only(cpu):
    (q, k, v), _ = cases.Flash("").make("float32")
    data = cases.Paged("").make("float32")
    for call in (
        lambda: ta.flash_attention(q, k, v, True),
        lambda: ta.paged_attention(*data.args, True),
        lambda: ta.merge_attention(q, k, v, q, 2.0),
        lambda: ta.flash_attention(q, k, v, casual=True),
    ):
        with pytest.raises(TypeError):
            call()


def test_tiled_attention_refuses_pickling_and_copying(device):
    attn = calls.make_attention(device, cases.Tiled("", cases.Paged("")).make("float32"))
    for refused in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"state\(\)"):
            refused(attn)


def test_a_stream_on_the_cpu_is_refused(cpu):
    (q, k, v), _ = cases.Flash("").make("float32")
    data = cases.Tiled("", cases.Paged("")).make("float32")
    attn = calls.make_attention(cpu, data)
    _refused(ValueError, ["stream"], ta.flash_attention, q, k, v, stream=0)
    _refused(ValueError, ["stream"], calls.run_paged, cpu, data.paged, stream=0)
    attn.begin_step(3)
    _refused(ValueError, ["stream"], calls.step, cpu, attn, data, data.tiles[0], stream=0)
    calls.step(cpu, attn, data, data.tiles[0])
    _refused(ValueError, ["stream"], attn.finalize, stream=0)
    state = attn.state()
    _refused(ValueError, ["stream"], attn.state, stream=0)
    _refused(ValueError, ["stream"], attn.load_state, state, stream=0)
    _refused(ValueError, ["stream"], state.finalize, stream=0)
    _refused(ValueError, ["stream"], ta.merge_states, [state], stream=0)


@pytest.mark.gpu
def test_arrays_on_two_devices(gpu):
    """A ValueError naming both devices, whichever argument is the odd one."""
    (q, k, v), _ = cases.Flash("").make("float32")
    on_gpu = [gpu.array(x) for x in (q, k, v)]
    for i, name in enumerate("qkv"):
        mixed = [x if j != i else y for j, (x, y) in enumerate(zip(on_gpu, (q, k, v), strict=True))]
        _refused(ValueError, ["cpu", "cuda:0"], ta.flash_attention, *mixed)
        if name != "q":
            _refused(ValueError, [name], ta.flash_attention, *mixed)
    data = cases.Paged("").make("float32")
    args = [gpu.array(x) for x in data.args[:4]]
    _refused(ValueError, ["seq_lens", "cpu", "cuda:0"], ta.paged_attention, *args, data.seq_lens)
    tiled = cases.Tiled("", cases.Paged("")).make("float32")
    attn = calls.make_attention(gpu, tiled)
    attn.begin_step(3)
    _refused(ValueError, ["cpu", "cuda:0"], attn.step_tile, *tiled.step_args(tiled.tiles[0]))
