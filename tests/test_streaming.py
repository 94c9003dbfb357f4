# SPDX-License-Identifier: Apache-2.0
"""Streaming: the bits of the same tiles by hand, from arrays and from sources written in Python."""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path

import calls
import cases
import compare
import numpy as np
import pytest
import tiledattn as ta
from arrays import NP_DTYPE
from streamed import (
    LONG,
    TILE,
    GoneError,
    ReadSource,
    attend,
    fail_at,
    make_source,
    make_streaming,
    sequences_of,
    small,
    tiles_by_hand,
)

# Streaming takes no ragged queries, is causal among the tokens of a query, and wants positions for tokens from before
# a sequence.
STREAMED = [
    case
    for case in cases.PAGED
    if not isinstance(case.q_lens, tuple)
    and min(case.seq_lens) >= (case.q_lens or 1) - (1 if not case.q_lens else 0)
    and (case.score.causal or not case.q_lens)
]


@pytest.mark.parametrize("kind", ["read", "host", "device"])
@pytest.mark.parametrize("case", STREAMED, ids=str)
def test_any_source_gives_the_right_result(device, dtype, case, kind):
    if kind == "device" and dtype not in device.dtypes:
        pytest.skip(f"{device} holds no {dtype}")
    data = case.make(dtype)
    source = make_source(kind, device, data)
    streaming = make_streaming(device, data)
    got = attend(device, streaming, data, sequences_of(data, source))
    compare.result_close(got, calls.want_paged(data), dtype)


@pytest.mark.parametrize("kind", ["read", "host", "device"])
@pytest.mark.parametrize("tile", [1, 3, 64])
def test_equal_tiles_give_equal_bits(device, kind, tile):
    data = LONG.make("float32")
    source = make_source(kind, device, data)
    streaming = make_streaming(device, data, tile)
    got = attend(device, streaming, data, sequences_of(data, source))
    compare.same_bits(got, tiles_by_hand(device, data, tile, 5))


def test_scratch_size_and_company_change_no_bit(device):
    data = LONG.make("float32")
    source = ReadSource(data.k_pool, data.v_pool)
    sequences = sequences_of(data, source)
    want = attend(device, make_streaming(device, data), data, sequences)
    least = 3 * TILE * source.geometry.block_bytes
    for options in ({"scratch_bytes": least}, {"scratch_bytes": 5 * least, "num_slots": 7, "num_readers": 1}):
        compare.same_bits(attend(device, make_streaming(device, data, **options), data, sequences), want)
    streaming = make_streaming(device, data)
    for b in range(5):
        alone = device.call(streaming.attend, data.q[b : b + 1], sequences[b : b + 1], return_lse=True)
        compare.same_bits(alone, (want[0][b : b + 1], want[1][b : b + 1]))


@pytest.mark.parametrize("layout", ["hnd", "nhd"])
def test_layouts_of_a_source(device, dtype, layout):
    data = cases.Paged("", seq_lens=(50, 7), head_dim_v=32).make(dtype)
    source = ReadSource(data.k_pool, data.v_pool, layout)
    got = attend(device, make_streaming(device, data), data, sequences_of(data, source))
    compare.result_close(got, calls.want_paged(data), dtype)


@pytest.mark.parametrize("make", [np.array, "slots", "halves", "padded"], ids=str)
def test_layouts_of_a_pool(device, make):
    data = LONG.make("float32")
    shape = data.k_pool.shape
    if make == "slots":
        memory = np.empty((shape[0], 2, shape[2], shape[1], shape[3]), np.float32)
        pools = ta.scratch_pool_views(memory)
    elif make == "halves":
        memory = np.empty((2, *shape), np.float32)
        pools = memory[0], memory[1]
    elif make == "padded":
        memory = np.full((shape[0], shape[1] + 3, *shape[2:]), np.nan, np.float32)
        pools = memory[:, : shape[1]], np.empty_like(data.v_pool)
    else:
        pools = np.empty_like(data.k_pool), np.empty_like(data.v_pool)
    pools[0][...], pools[1][...] = data.k_pool, data.v_pool
    source = ta.PoolSource(*pools)
    got = attend(device, make_streaming(device, data), data, sequences_of(data, source))
    compare.same_bits(got, tiles_by_hand(device, data, TILE, 5))
    assert source.residency == ("pinned" if device.is_cuda else "host")


def test_an_allocated_pool(device, dtype):
    data = cases.Paged("", seq_lens=(50, 7), head_dim_v=32).make(dtype)
    geometry = ReadSource(data.k_pool, data.v_pool).geometry
    source = ta.PoolSource.allocate(geometry, name="cache")
    source.k_pool[...], source.v_pool[...] = data.k_pool, data.v_pool
    assert source.k_pool.dtype == NP_DTYPE[dtype]
    assert (source.name, source.num_blocks) == ("cache", geometry.num_blocks)
    got = attend(device, make_streaming(device, data), data, sequences_of(data, source))
    compare.result_close(got, calls.want_paged(data), dtype)
    k_pool = source.k_pool
    del source
    gc.collect()
    compare.same_bits(k_pool, data.k_pool)  # the view keeps the memory


def _memory_flags(address):
    """What Linux says of the memory at an address: "hg" where huge pages are asked for."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name:
            begin, end = (int(part, 16) for part in name.split("-"))
            inside = begin <= address < end
        elif inside and name == "VmFlags:":
            return rest
    raise AssertionError(f"no flags of the memory at {address:#x}")


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="this system has no transparent huge pages",
)
def test_an_allocated_pool_asks_for_huge_pages(cpu):
    geometry = ta.TileGeometry(num_blocks=64, block_size=16, num_kv_heads=8, head_dim=128, dtype="float32")
    source = ta.PoolSource.allocate(geometry)
    begin = source.k_pool.ctypes.data
    for address in (begin, begin + geometry.num_blocks * geometry.block_bytes - 1):
        assert "hg" in _memory_flags(address)


def test_a_pool_keeps_its_arrays(device):
    data = LONG.make("float32")
    source = ta.PoolSource(np.array(data.k_pool), np.array(data.v_pool))
    sequences = sequences_of(data, source)
    del source
    gc.collect()
    got = attend(device, make_streaming(device, data), data, sequences)
    compare.result_close(got, calls.want_paged(data), "float32")


def test_parts_in_several_sources(device):
    data, source, streaming, _ = small(device)
    resident = make_source("device", device, data)
    host = make_source("host", device, data)
    sequences = []
    for table, length in zip(data.block_table, data.seq_lens, strict=True):
        blocks = table[: -(-int(length) // 4)]
        third = len(blocks) // 3
        parts = [resident, source, host]
        cuts = [blocks[:third], blocks[third : 2 * third], blocks[2 * third :]]
        sequences.append(ta.StreamSequence(int(length), [*map(ta.KvPart, parts, cuts)]))
    compare.result_close(attend(device, streaming, data, sequences), calls.want_paged(data), "float32")
    assert streaming.stats.tiers["remote"].tiles > 0
    assert streaming.stats.tiers["device" if device.is_cuda else "host"].tiles > 0


def test_a_window_fetches_only_what_it_shows(device):
    case = cases.Paged("", seq_lens=(400,), block_size=4, score=cases.Score(True, (15, 0)))
    data = case.make("float32")
    source = ReadSource(data.k_pool, data.v_pool)
    streaming = make_streaming(device, data)
    got = attend(device, streaming, data, sequences_of(data, source))
    compare.result_close(got, calls.want_paged(data), "float32")
    assert streaming.stats.tiers["remote"].tiles <= 3


def test_q_positions_and_a_state_to_go_on_from(device):
    case = cases.Paged("", seq_lens=(40, 33), q_lens=4, block_size=4)
    data = case.make("float32")
    source = ReadSource(data.k_pool, data.v_pool)
    streaming = make_streaming(device, data)
    sequences = sequences_of(data, source)
    parts = [s.parts[0] for s in sequences]
    first = [
        ta.StreamSequence(s.length, ta.KvPart(source, p.blocks[:3], 0))
        for s, p in zip(sequences, parts, strict=True)
    ]
    rest = [
        ta.StreamSequence(s.length, ta.KvPart(source, p.blocks[3:], 12))
        for s, p in zip(sequences, parts, strict=True)
    ]
    q = device.array(data.q)
    positions = np.array([36, 29])
    state = streaming.attend(q, first, return_state=True, q_positions=positions).state
    got = attend(device, streaming, data, rest, state=state, q_positions=[36, 29])
    compare.result_close(got, calls.want_paged(data), "float32")
    compare.same_bits(got, attend(device, streaming, data, sequences))


def test_results_go_where_they_are_wanted(device):
    data, _, streaming, sequences = small(device)
    want = attend(device, streaming, data, sequences)
    wide = device.full((5, *data.q.shape[1:-1], data.q.shape[-1] + 6), 7.0, "float32")
    out = wide[..., 2:-4]
    assert streaming.attend(device.array(data.q), sequences, out=out) is out
    compare.same_bits(np.ascontiguousarray(device.numpy(wide)[..., 2:-4]), want[0])
    alone = streaming.attend(device.array(data.q), sequences)
    compare.same_bits(device.numpy(alone), want[0])
    whole = streaming.attend(device.array(data.q), sequences, return_lse=True, return_state=True)
    compare.same_bits((device.numpy(whole.out), device.numpy(whole.lse)), want)
    assert whole.complete


def test_no_sequences_at_all(device):
    data, _, streaming, _ = small(device)
    out, lse = device.call(streaming.attend, data.q[:0], [], return_lse=True)
    assert out.shape == (0, *data.q.shape[1:])
    assert lse.shape == (0, data.q.shape[1])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": None}, TypeError, "q: expected an array .*, got NoneType"),
        ({"sequences": lambda s: s[:-1]}, ValueError, "q: got 5 sequences; expected 4 like sequences"),
        ({"sequences": lambda s: s[0]}, TypeError, "sequences: expected a list"),
        ({"sequences": lambda s: 5}, TypeError, "sequences: expected a list of StreamSequence, got int"),
        ({"sequences": lambda s: [*s[:-1], None]}, TypeError, r"sequences\[4\]: expected a StreamSequence"),
        ({"sequences": lambda s: s + s}, ValueError, "sequences: got 10; expected at most"),
        ({"q_positions": [1, 2]}, ValueError, "q_positions: got 2 numbers; expected 5"),
        ({"q_positions": [1, 2, 3, -1, 5]}, ValueError, r"q_positions\[3\]: got -1"),
        ({"q_positions": []}, ValueError, "q_positions: got 0 numbers; expected 5"),
        ({"q_positions": [2**63] * 5}, ValueError, "q_positions: got 9223372036854775808; expected a 64-bit"),
        ({"q_positions": [-(2**70)] * 5}, ValueError, f"q_positions: got -{2**70}; expected a 64-bit number"),
        ({"q_positions": [None] * 5}, TypeError, "q_positions: expected an int, got NoneType"),
        ({"q_positions": [0.5] * 5}, TypeError, "q_positions: expected integers"),
        ({"q_positions": np.ma.array([9] * 5)}, TypeError, "q_positions: is a masked array"),
        ({"on_error": "ignore"}, ValueError, "on_error: got 'ignore'; expected 'raise' or 'partial'"),
        ({"state": 3}, TypeError, "state: expected a State, got int"),
        ({"state": object.__new__(ta.State)}, TypeError, "state: got a State that holds nothing"),
        ({"return_lse": 1}, TypeError, "return_lse: expected True or False"),
        ({"out": np.zeros((5, 8, 7), np.float32)}, ValueError, "out: got shape"),
    ],
)
def test_wrong_calls_are_named(cpu, change, error, message):
    data, source, streaming, sequences = small(cpu)
    kwargs = dict(change)
    given = kwargs.pop("sequences", lambda s: s)(sequences)
    q = kwargs.pop("q", data.q)
    with pytest.raises(error, match=message):
        streaming.attend(q, given, **kwargs)
    assert not source.threads


@pytest.mark.parametrize("positions", [[], [2**63] * 5, [1, 2]], ids=["none", "beyond", "few"])
def test_positions_that_attend_refuses_are_not_fetched_for(cpu, positions):
    _, source, streaming, sequences = small(cpu)
    with pytest.raises(ValueError, match="q_positions: got"):
        streaming.prefetch(sequences, q_positions=positions)
    with pytest.raises(TypeError, match="sequences: expected a list of StreamSequence, got int"):
        streaming.prefetch(5)
    assert not source.threads


def test_sequences_may_come_from_a_generator(cpu):
    """Also where they are needed again, to tell what is missing."""
    data, source, streaming, sequences = small(cpu)
    want = tiles_by_hand(cpu, data, TILE, 5)
    compare.same_bits(attend(cpu, streaming, data, iter(sequences)), want)
    source.before_read = fail_at(data.block_table[3][7], GoneError("the disk"))
    result = streaming.attend(data.q, iter(sequences), on_error="partial")
    assert [error.sequence for error in result.errors] == [3]
    assert [len(sequence.parts) for sequence in result.missing] == [0, 0, 0, 1, 0]


def test_wrong_sources_are_named(cpu):
    data, source, streaming, _ = small(cpu)
    half = ReadSource(data.k_pool.astype(np.float16), data.v_pool.astype(np.float16))
    with pytest.raises(TypeError, match="source 'bytes' holds float16; expected float32 like q"):
        streaming.attend(data.q, sequences_of(data, half))
    with pytest.raises(IndexError, match=r"sequences\[0\].parts\[0\].blocks\[1\]: got block 999; source"):
        streaming.attend(data.q, [ta.StreamSequence(8, ta.KvPart(source, [0, 999]))] * 5)
    part = ta.KvPart(source, [0, 1])
    with pytest.raises(ValueError, match=r"parts\[1\].position: got 4; expected 8 or more"):
        streaming.attend(data.q, [ta.StreamSequence(8, [part, ta.KvPart(source, [2], 4)])] * 5)
    with pytest.raises(TypeError, match=r"parts\[0\].blocks: expected integers, got float64"):
        ta.StreamSequence(8, ta.KvPart(source, [0.5]))
    with pytest.raises(ValueError, match=r"parts\[0\].blocks: setting an array element with a sequence"):
        ta.StreamSequence(8, ta.KvPart(source, [0, [1]]))
    masked = np.ma.array([0, 1], mask=[False, True])
    with pytest.raises(TypeError, match=r"parts\[0\].blocks: is a masked array"):
        ta.StreamSequence(8, ta.KvPart(source, masked))
    with pytest.raises(TypeError, match="blocks: is a masked array"):
        ta.PoolSource(data.k_pool, data.v_pool).evict(masked)
    with pytest.raises(TypeError, match=r"expected a PoolSource or an object with describe\(\) and read\(\)"):
        ta.StreamSequence(8, ta.KvPart(object.__new__(type("Thing", (), {})), [0]))
    with pytest.raises(TypeError, match=r"expected a PoolSource or an object with describe\(\) and read\(\)"):
        ta.StreamSequence(8, ta.KvPart(3, [0]))
    with pytest.raises(TypeError, match=r"parts\[0\]: expected a KvPart"):
        ta.StreamSequence(8, [source])
    for wrong in (None, 5):
        with pytest.raises(TypeError, match=r"parts\[0\].blocks: expected a list of block ids, got"):
            ta.StreamSequence(8, ta.KvPart(source, wrong))
    with pytest.raises(ValueError, match=r"block_size: got \d+; expected blocks of less than 1e18 elements"):
        ta.TileGeometry(num_blocks=1, block_size=2**55, num_kv_heads=3, head_dim=255, dtype="float16")
    for many in (2**62, 2**63 - 1):
        with pytest.raises(ValueError, match=f"num_blocks: got {many}; expected less than 1e18 elements"):
            ta.TileGeometry(num_blocks=many, block_size=16, num_kv_heads=2, head_dim=8, dtype="float32")
    beyond = np.array([0, 2**64 - 1], np.uint64)
    with pytest.raises(
        IndexError, match=r"parts\[0\].blocks: got block 18446744073709551615; expected a block"
    ):
        ta.StreamSequence(8, ta.KvPart(source, beyond))
    with pytest.raises(IndexError, match="blocks: got block 18446744073709551615; expected a block"):
        ta.PoolSource(data.k_pool, data.v_pool).evict(beyond)
    with pytest.raises(TypeError, match="parts: expected a KvPart or several, got ReadSource"):
        ta.StreamSequence(8, source)
    with pytest.raises(ValueError, match="head_dim: got head dimension 300"):
        ta.TileGeometry(num_blocks=1, block_size=1, num_kv_heads=1, head_dim=300, dtype="float32")
    with pytest.raises(ValueError, match="dtype: got 'uint8'"):
        ta.TileGeometry(num_blocks=1, block_size=1, num_kv_heads=1, head_dim=3, dtype="uint8")
    memory = np.zeros((4, 6, 2, 8), np.float32).swapaxes(0, 1)
    with pytest.raises(ValueError, match="a block must be one run of memory"):
        ta.PoolSource(memory, memory)
    with pytest.raises(IndexError, match="blocks: got block -1"):
        ta.PoolSource(data.k_pool, data.v_pool).evict([-1])


def test_parts_hold_all_keys_unless_they_say_where_they_are(cpu):
    _, source, _, _ = small(cpu)
    with pytest.raises(ValueError, match="parts: got blocks for 8 keys; expected at least length = 9"):
        ta.StreamSequence(9, ta.KvPart(source, [0, 1]))
    with pytest.raises(ValueError, match="parts: got blocks for 12 keys; expected at least length = 1000"):
        ta.StreamSequence(1000, [ta.KvPart(source, [0, 1]), ta.KvPart(source, [2])])
    assert ta.StreamSequence(8, ta.KvPart(source, [0, 1])).length == 8
    assert ta.StreamSequence(9, ta.KvPart(source, [0, 1], 0)).parts[0].position == 0
    assert ta.StreamSequence(9).parts == ()


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int64])
def test_positions_of_any_integer_type(cpu, dtype):
    """What follows a part lies where that ends, also where its position's type does not reach."""
    _, source, _, _ = small(cpu)
    blocks = np.zeros(10_000, np.int64)
    parts = [ta.KvPart(source, blocks, dtype(100)), ta.KvPart(source, [0])]
    assert [part.position for part in ta.StreamSequence(9, parts).parts] == [100, 40_100]
    for wrong in (1.5, True, "1", np.array([1, 2])):
        with pytest.raises(TypeError, match=r"parts\[0\].position: expected an int, got"):
            ta.StreamSequence(9, ta.KvPart(source, [0], wrong))


@pytest.mark.parametrize("num_seqs", [1, 5])
@pytest.mark.parametrize("kind", ["read", "pool"])
@pytest.mark.parametrize("missing", [1, 256, 20_000])
def test_scratch_without_room_for_a_tile_in_each_slot_is_refused(device, kind, num_seqs, missing):
    """Also where a call has one tile alone, and when it is fetched ahead."""
    data, _, _, sequences = small(device, kind)
    first = [0, 2, 3, 4, 1][:num_seqs]
    q, some = device.array(data.q[first]), [sequences[i] for i in first]
    block_bytes = data.k_pool[0].nbytes + data.v_pool[0].nbytes
    gap = 256 if kind == "pool" else 0  # the two planes are aligned
    least = 3 * -(-(TILE * block_bytes + gap) // 256) * 256
    tight = make_streaming(device, data, scratch_bytes=least)
    if kind == "pool" and device.device == "cpu":
        make_streaming(device, data, scratch_bytes=1024).attend(q, some)  # read in place
        return
    tight.attend(q, some)
    few = make_streaming(device, data, scratch_bytes=least - missing)
    for call in (lambda: few.attend(q, some), lambda: few.prefetch(some)):
        with pytest.raises(
            ValueError, match=f"scratch_bytes: got {least - missing}; expected at least {least}"
        ):
            call()


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"num_slots": 1}, ValueError, "num_slots: got 1; expected 2 or more"),
        ({"num_readers": 0}, ValueError, "num_readers: got 0"),
        ({"scratch_bytes": 0}, ValueError, "scratch_bytes: got 0"),
        ({"scratch_bytes": 1.5}, TypeError, "scratch_bytes: expected an int"),
        ({"softcap": -1.0}, ValueError, "softcap"),
        ({"tile": 2**53}, ValueError, f"dims.tile_capacity: got {2**53} blocks for each of 5 sequences"),
        ({"tile": 2**58}, ValueError, f"dims.tile_capacity: got {2**58} blocks for each of 5 sequences"),
    ],
)
def test_wrong_options_are_named(cpu, option, error, message):
    with pytest.raises(error, match=message):
        make_streaming(cpu, LONG.make("float32"), **option)


def test_it_is_not_copied_or_pickled(cpu):
    _, _, streaming, _ = small(cpu)
    for function in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be"):
            function(streaming)
    assert "StreamingAttention(" in repr(streaming)


def test_nbytes_counts_state_scratch_and_tables(device):
    data = LONG.make("float32")
    tables = []
    for tile in (TILE, TILE + 1000):
        streaming = make_streaming(device, data, tile, num_slots=4, scratch_bytes=4 << 20)
        state = ta.TiledAttention(streaming.dims, device=device.device).nbytes
        tables.append(streaming.nbytes - state - streaming.scratch_bytes)
    # Of each slot and sequence, and on a CPU for each of 32 rounds: a wider row of ids, beside four numbers.
    rounds = 1 if device.is_cuda else 32
    assert tables[1] - tables[0] == pytest.approx(4 * rounds * 5 * 1000 * 8, abs=4 * 256)
    assert tables[0] == pytest.approx(4 * rounds * 5 * (TILE + 4) * 8, abs=4 * 256)


def test_stats_are_counted_and_shown(device):
    data, source, streaming, sequences = small(device)
    attend(device, streaming, data, sequences)
    stats = streaming.stats
    blocks = sum(len(sequence.parts[0].blocks) for sequence in sequences)
    assert stats.calls == 1
    assert stats.tiers["remote"].bytes == blocks * source.geometry.block_bytes
    assert stats.link.bytes == (stats.tiers["remote"].bytes if device.is_cuda else 0)
    assert 0 <= stats.link_use <= 1
    assert "remote" in str(stats)
    streaming.reset_stats()
    assert streaming.stats.launches == 0
