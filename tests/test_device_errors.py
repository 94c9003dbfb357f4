# SPDX-License-Identifier: Apache-2.0
"""What only the arrays' contents tell: ids, counts, slots, lengths, positions, cu_seqlens.

CPU: an error before anything is written. GPU: NaN for that sequence, the others right, and the error at the
next call, at check(), or at once with ``check=True``.
"""

from __future__ import annotations

import re

import calls
import cases
import compare
import numpy as np
import pytest
import reference
import tiledattn as ta

PAGED = cases.Paged("", seq_lens=(40, 33, 50))
TILED = cases.Tiled("", cases.Paged("", seq_lens=(40, 33, 46), q_lens=2), tile_blocks=(3,), positions=True)

# argument, index, value, kind of error
PAGED_FAULTS = {
    "id_high": ("block_table", (1, 2), 10**6, IndexError),
    "id_end": ("block_table", (1, 1), None, IndexError),
    "id_negative": ("block_table", (1, 0), -1, IndexError),
    "length_negative": ("seq_lens", (1,), -5, ValueError),
    "length_over_the_table": ("seq_lens", (1,), 10**5, ValueError),
}
TILED_FAULTS = {
    "id_high": ("blocks", (1, 2), 10**6, IndexError),
    "id_negative": ("blocks", (1, 0), -2, IndexError),
    "count_high": ("counts", (1,), 4, ValueError),
    "count_negative": ("counts", (1,), -1, ValueError),
    "slots_high": ("valid_slots", (1,), 17, ValueError),
    "slots_negative": ("valid_slots", (1,), -1, ValueError),
    "kv_position": ("kv_positions", (1,), -4, ValueError),
    "q_position": ("q_positions", (1,), -3, ValueError),
}
ARGUMENT = {"blocks": "tile_blocks", "counts": "tile_block_counts", "valid_slots": "last_block_valid_slots"}


def _assert_names(error, argument, index, value):
    message = str(error)
    assert argument in message
    numbers = re.findall(r"-?\d+", message)
    for number in (*index, value):
        assert str(number) in numbers, f"{number} is not in: {message}"


def _paged_fault(name):
    """Data with a fault in sequence 1, and what the error must say."""
    argument, index, value, error = PAGED_FAULTS[name]
    data = PAGED.make("float32")
    value = len(data.k_pool) if value is None else value
    getattr(data, argument)[index] = value
    return data, (argument, index, value), error


def _tiled_fault(name):
    argument, index, value, error = TILED_FAULTS[name]
    data = TILED.make("float32")
    target = data.q_positions if argument == "q_positions" else getattr(data.tiles[0], argument)
    target[index] = value
    return data, (ARGUMENT.get(argument, argument), index, value), error


@pytest.mark.parametrize("name", PAGED_FAULTS)
def test_paged_on_the_cpu(name, cpu):
    data, said, error = _paged_fault(name)
    out, lse = np.full((3, 4, 64), 7.0, np.float32), np.full((3, 4), 7.0, np.float32)
    with pytest.raises(error) as caught:
        calls.run_paged(cpu, data, out=out, lse=lse)
    _assert_names(caught.value, *said)
    assert (out == 7.0).all(), "out written before the check"
    assert (lse == 7.0).all(), "lse written before the check"


@pytest.mark.parametrize("name", TILED_FAULTS)
def test_tiled_on_the_cpu(name, cpu):
    data, said, error = _tiled_fault(name)
    good = TILED.make("float32")
    attn = calls.make_attention(cpu, good)
    attn.begin_step(3)
    calls.step(cpu, attn, good, good.tiles[0])
    before = calls.state_arrays(cpu, attn, 3)
    out = np.full((3, 2, 4, 64), 7.0, np.float32)
    with pytest.raises(error) as caught:
        calls.step(cpu, attn, data, data.tiles[0], out=out)
    _assert_names(caught.value, *said)
    compare.same_bits(calls.state_arrays(cpu, attn, 3), before)
    assert (out == 7.0).all(), "written before the check"
    compare.result_close(attn.finalize(return_lse=True), calls.want_tiled(good).finalize(), "float32")


CU_FAULTS = {
    "first": ([1, 4, 9], [0, 7, 20], "cu_seqlens_q"),
    "decreasing": ([0, 4, 3], [0, 7, 20], "cu_seqlens_q"),
    "beyond": ([0, 4, 10], [0, 7, 20], "cu_seqlens_q"),
    "k_decreasing": ([0, 4, 9], [0, 7, 6], "cu_seqlens_k"),
    "k_beyond": ([0, 4, 9], [0, 7, 21], "cu_seqlens_k"),
    "k_negative": ([0, 4, 9], [0, -7, 20], "cu_seqlens_k"),
}


@pytest.mark.parametrize("name", CU_FAULTS)
def test_cu_seqlens_on_the_cpu(name, cpu):
    cu_q, cu_k, argument = CU_FAULTS[name]
    rng = np.random.default_rng(0)
    q, k = cases.random(rng, (9, 4, 16), "float32"), cases.random(rng, (20, 2, 16), "float32")
    out = np.full(q.shape, 7.0, np.float32)
    with pytest.raises(ValueError, match=argument):
        ta.flash_attention(q, k, k, cu_seqlens_q=np.array(cu_q), cu_seqlens_k=np.array(cu_k), out=out)
    assert (out == 7.0).all(), "written before the check"


def test_paged_cu_seqlens_on_the_cpu(cpu):
    data = cases.Paged("", seq_lens=(40, 33), q_lens=(3, 2)).make("float32")
    data.cu_seqlens_q[1] = 6
    with pytest.raises(ValueError, match=r"cu_seqlens_q.*6|cu_seqlens_q.*5"):
        calls.run_paged(cpu, data)


@pytest.mark.parametrize("high", [2**32, 2**32 + 1, -(2**32), 2**63 - 1, -(2**63)])
def test_wide_numbers_are_not_cut(high, cpu):
    """int64 ids, lengths and counts whose low 32 bits would be right."""
    data = PAGED.make("float32")
    table = data.block_table.astype(np.int64)
    table[1, 0] = high + (table[1, 0] if abs(high) < 2**40 else 0)
    with pytest.raises(IndexError, match=rf"block_table.*{table[1, 0]}"):
        calls.run_paged(cpu, data._replace(block_table=table))
    lens = data.seq_lens.astype(np.int64)
    lens[1] = high + (lens[1] if abs(high) < 2**40 else 0)
    with pytest.raises(ValueError, match=rf"seq_lens.*{lens[1]}"):
        calls.run_paged(cpu, data._replace(seq_lens=lens))


def test_unused_entries_are_not_checked(device):
    """Beyond the count, beyond the length, or left of the window of every query: any id may stand there."""
    data = cases.Paged("", seq_lens=(100, 3), score=cases.Score(True, (15, 0))).make("float32")
    want = calls.want_paged(data)
    data.block_table[0, :5] = (-1, 10**9, -(2**31), 2**31 - 1, -2)
    compare.result_close(calls.run_paged(device, data, check=device.is_cuda), want, "float32")


# The GPU: the host sees nothing, so the result says NaN and the error comes later.


def _others_right(got, want, dtype="float32"):
    """Sequence 1 is NaN throughout, the others as without the fault."""
    out, lse = got
    assert np.isnan(out[1]).all()
    assert np.isnan(lse[1]).all()
    keep = [0, 2]
    compare.result_close(
        (out[keep], lse[keep]), reference.Result(want.out[keep], want.lse[keep], want.max_score), dtype
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", PAGED_FAULTS)
def test_paged_on_the_gpu(name, gpu):
    data, said, error = _paged_fault(name)
    good = PAGED.make("float32")
    _others_right(calls.run_paged(gpu, data), calls.want_paged(good))
    with pytest.raises(error) as caught:
        calls.run_paged(gpu, good)
    _assert_names(caught.value, *said)
    compare.result_close(calls.run_paged(gpu, good), calls.want_paged(good), "float32")

    calls.run_paged(gpu, data)
    with pytest.raises(error) as caught:
        ta.check(gpu.device)
    _assert_names(caught.value, *said)
    ta.check(gpu.device)

    with pytest.raises(error) as caught:
        calls.run_paged(gpu, data, check=True)
    _assert_names(caught.value, *said)
    ta.check(gpu.device)


@pytest.mark.gpu
@pytest.mark.parametrize("name", TILED_FAULTS)
def test_tiled_on_the_gpu(name, gpu):
    data, said, error = _tiled_fault(name)
    good = TILED.make("float32")
    want = calls.want_tiled(good).finalize()
    attn = calls.make_attention(gpu, good)
    out, lse = gpu.full((3, 2, 4, 64), 7.0, "float32"), gpu.full((3, 2, 4), 7.0, "float32")

    attn.begin_step(3)
    calls.step(gpu, attn, data, data.tiles[0], out=out, lse=lse)
    gpu.synchronize()
    _others_right((gpu.numpy(out), gpu.numpy(lse)), want)
    with pytest.raises(error) as caught:
        attn.finalize()
    _assert_names(caught.value, *said)
    # The sequence stays NaN until the next step, whatever follows.
    calls.step(gpu, attn, good, good.tiles[0])
    again = gpu.call(attn.finalize, return_lse=True)
    assert np.isnan(again[0][1]).all()
    assert np.isfinite(again[0][[0, 2]]).all()

    attn.begin_step(3)
    calls.step(gpu, attn, data, data.tiles[0])
    with pytest.raises(error) as caught:
        attn.check()
    _assert_names(caught.value, *said)
    attn.check()

    attn.begin_step(3)
    with pytest.raises(error) as caught:
        calls.step(gpu, attn, data, data.tiles[0], check=True)
    _assert_names(caught.value, *said)

    attn.begin_step(3)
    calls.step(gpu, attn, good, good.tiles[0])
    compare.result_close(gpu.call(attn.finalize, return_lse=True), want, "float32")
    ta.check(gpu.device)


@pytest.mark.gpu
def test_a_fault_of_one_object_is_not_another_s(gpu):
    data, _, error = _tiled_fault("id_high")
    good = TILED.make("float32")
    faulty, sound = calls.make_attention(gpu, good), calls.make_attention(gpu, good)
    faulty.begin_step(3)
    calls.step(gpu, faulty, data, data.tiles[0])
    gpu.synchronize()
    sound.begin_step(3)
    calls.step(gpu, sound, good, good.tiles[0])
    compare.result_close(
        gpu.call(sound.finalize, return_lse=True), calls.want_tiled(good).finalize(), "float32"
    )
    with pytest.raises(error):
        faulty.check()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CU_FAULTS)
def test_cu_seqlens_on_the_gpu(name, gpu):
    """Nothing outside the arrays is read; the error is named; the next call is right."""
    cu_q, cu_k, argument = CU_FAULTS[name]
    rng = np.random.default_rng(0)
    q, k = cases.random(rng, (9, 4, 16), "float32"), cases.random(rng, (20, 2, 16), "float32")
    with pytest.raises(ValueError, match=argument):
        gpu.call(
            ta.flash_attention, q, k, k, cu_seqlens_q=np.array(cu_q), cu_seqlens_k=np.array(cu_k), check=True
        )
    cu = {"cu_seqlens_q": np.array([0, 4, 9]), "cu_seqlens_k": np.array([0, 7, 20])}
    got = calls.run_flash(gpu, (q, k, k), cu)
    compare.result_close(got, reference.flash_packed(q, k, k, [0, 4, 9], [0, 7, 20]), "float32")


@pytest.mark.gpu
def test_faulty_packed_sequence_is_nan_and_others_right(gpu):
    rng = np.random.default_rng(0)
    q, k = cases.random(rng, (9, 4, 16), "float32"), cases.random(rng, (20, 2, 16), "float32")
    cu = {"cu_seqlens_q": np.array([0, 4, 9]), "cu_seqlens_k": np.array([0, 7, 21])}
    out, lse = calls.run_flash(gpu, (q, k, k), cu)
    want = reference.flash_packed(q, k, k, [0, 4, 9], [0, 7, 20])
    compare.result_close((out[:4], lse[:4]), reference.Result(want.out[:4], want.lse[:4]), "float32")
    assert np.isnan(out[4:]).all()
    assert np.isnan(lse[4:]).all()
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        ta.check(gpu.device)
