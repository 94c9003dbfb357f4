# SPDX-License-Identifier: Apache-2.0
"""Streaming: the bits of the same tiles by hand, from arrays and from sources written in Python."""

from __future__ import annotations

import copy
import gc
import pickle
import signal
import sys
import threading
import time
import weakref

import calls
import cases
import compare
import numpy as np
import processes
import pytest
import tiledattn as ta
from arrays import NP_DTYPE

LONG = cases.Paged("", seq_lens=(90, 0, 41, 77, 5), block_size=4)
TILE = 3


class ReadSource:
    """The pools of a case as packed bytes; raises, waits or returns short when told to."""

    name = "bytes"

    def __init__(self, k_pool, v_pool, layout="hnd"):
        num_blocks, block_size, num_kv_heads, head_dim = k_pool.shape
        self.geometry = ta.TileGeometry(
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            head_dim_v=v_pool.shape[3],
            dtype=str(k_pool.dtype),
            layout=layout,
        )
        self.bytes = np.zeros((num_blocks, self.geometry.block_bytes), np.uint8)
        for view, pool in zip(self.geometry.views(self.bytes), (k_pool, v_pool), strict=True):
            view[...] = pool
        self.before_read = lambda blocks: None
        self.short_by = 0
        self.threads = set()

    def describe(self):
        return self.geometry

    def read(self, blocks, buffer):
        self.threads.add(threading.get_ident())
        assert buffer.shape == (len(blocks), self.geometry.block_bytes)
        assert blocks.dtype == np.int64
        self.before_read(blocks)
        buffer[...] = self.bytes[blocks]
        return buffer.nbytes - self.short_by


def fail_at(block, error):
    def before_read(blocks):
        if block in blocks:
            raise error

    return before_read


def make_source(kind, device, data):
    k_pool, v_pool = data.k_pool, data.v_pool
    if kind == "read":
        return ReadSource(k_pool, v_pool)
    carrier = device if kind == "device" else None
    pools = [carrier.array(pool) if carrier else np.array(pool) for pool in (k_pool, v_pool)]
    return ta.PoolSource(*pools, name=kind)


def sequences_of(data, source):
    block_size = data.k_pool.shape[1]
    return [
        ta.StreamSequence(int(length), ta.KvPart(source, table[: -(-int(length) // block_size)]))
        for table, length in zip(data.block_table, data.seq_lens, strict=True)
    ]


def make_streaming(device, data, tile=TILE, **options):
    q = data.q
    dims = ta.TiledAttentionDims(
        max_seqs=max(1, len(q)),
        num_q_heads=q.shape[-2],
        num_kv_heads=data.k_pool.shape[2],
        head_dim=q.shape[-1],
        head_dim_v=data.v_pool.shape[3],
        block_size=data.k_pool.shape[1],
        tile_capacity=tile,
        max_q_len=q.shape[1] if q.ndim == 4 else 1,
    )
    score = {key: value for key, value in data.score.items() if key != "causal"}
    if score["sinks"] is not None:
        score["sinks"] = device.array(score["sinks"])
    settings = {"scratch_bytes": 1 << 21, "poison_scratch": True, **score, **options}
    return ta.StreamingAttention(dims, device=device.device, **settings)


def small(device, kind="read", **options):
    """LONG in float32 with a streamer and its sequences."""
    data = LONG.make("float32")
    source = make_source(kind, device, data)
    return data, source, make_streaming(device, data, **options), sequences_of(data, source)


def attend(device, streaming, data, sequences, **kwargs):
    return device.call(streaming.attend, data.q, sequences, return_lse=True, **kwargs)


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


def tiles_by_hand(device, data, tile, num_seqs):
    """The tiles of the streamer through TiledAttention, one after the other."""
    attn = ta.TiledAttention(make_streaming(device, data, tile).dims, device=device.device)
    attn.begin_step(num_seqs)
    blocks = -(-int(max(data.seq_lens)) // data.k_pool.shape[1])
    for part in cases.cut(data, (tile,) * -(-blocks // tile)):
        args = (*data.args[:3], part.blocks, part.counts)
        device.call(attn.step_tile, *args, last_block_valid_slots=part.valid_slots)
    return device.call(attn.finalize, return_lse=True)


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


# ---- Sources that misbehave ----


class GoneError(Exception):
    pass


def test_an_error_of_a_source_comes_with_its_cause(device):
    data, source, streaming, sequences = small(device)
    source.before_read = fail_at(data.block_table[3][7], GoneError("the disk"))
    with pytest.raises(ta.TileError, match="the disk") as raised:
        attend(device, streaming, data, sequences)
    error = raised.value
    assert isinstance(error, OSError)
    assert isinstance(error.__cause__, GoneError)
    wanted = 3 * source.geometry.block_bytes
    assert str(error) == (
        f"source 'bytes', tile of 3 blocks at position 24 of sequence 3: wanted {wanted} bytes, "
        "got GoneError: the disk"
    )
    assert (error.source, error.sequence, error.position, error.num_blocks) == ("bytes", 3, 24, 3)
    assert (error.wanted_bytes, error.got_bytes) == (wanted, None)


@pytest.mark.parametrize("by", [1, 4096, -8])
def test_a_count_that_is_not_the_buffers_is_an_error(device, by):
    data, source, streaming, sequences = small(device)
    source.short_by = by
    with pytest.raises(ta.TileError, match=r"wanted \d+ bytes, got \d+") as raised:
        attend(device, streaming, data, sequences)
    assert raised.value.got_bytes == raised.value.wanted_bytes - by
    assert raised.value.__cause__ is None


@pytest.mark.parametrize("result", [None, True, 1.5, "all"])
def test_a_read_returns_a_number_of_bytes(cpu, result):
    data, source, streaming, sequences = small(cpu)
    source.read = lambda blocks, buffer: result
    with pytest.raises(ta.TileError, match="not the number of bytes"):
        attend(cpu, streaming, data, sequences)


@pytest.mark.parametrize("kind", ["raises", "short"])
def test_a_failed_tile_leaves_everything_as_it_was(device, kind):
    data, source, streaming, sequences = small(device)
    before = streaming.attend(device.array(data.q), sequences, return_state=True).state
    packed = before.pack()
    out, lse = device.full(data.q.shape, 7.0, "float32"), device.full(data.q.shape[:-1], 7.0, "float32")
    if kind == "raises":
        source.before_read = fail_at(data.block_table[0][20], GoneError())
    else:
        source.short_by = 1
    for _ in range(3):
        with pytest.raises(ta.TileError):
            streaming.attend(device.array(data.q), sequences, state=before, out=out, lse=lse)
    assert before.pack() == packed
    assert (device.numpy(out) == 7.0).all()
    assert (device.numpy(lse) == 7.0).all()
    source.before_read, source.short_by = lambda blocks: None, 0
    got = attend(device, streaming, data, sequences)
    compare.same_bits(got, tiles_by_hand(device, data, TILE, 5))


def test_what_is_missing_can_follow(device):
    data, source, streaming, sequences = small(device)
    bad = (data.block_table[0][4], data.block_table[3][18])
    source.before_read = lambda blocks: [fail_at(block, GoneError("x"))(blocks) for block in bad]
    partial = streaming.attend(device.array(data.q), sequences, on_error="partial", return_lse=True)
    assert not partial.complete
    assert partial.out is None
    assert partial.lse is None
    assert [len(sequence.parts) for sequence in partial.missing] == [1, 0, 0, 1, 0]
    assert [(error.sequence, error.position) for error in partial.errors] == [(0, 12), (3, 72)]
    assert partial.missing[3].parts[0].position == 72
    other = ReadSource(data.k_pool, data.v_pool)
    rest = [
        ta.StreamSequence(s.length, [ta.KvPart(other, p.blocks, p.position) for p in s.parts])
        for s in partial.missing
    ]
    result = streaming.attend(
        device.array(data.q), rest, state=partial.state, on_error="partial", return_lse=True
    )
    assert result.complete
    assert result.missing == ()
    got = device.numpy(result.out), device.numpy(result.lse)
    compare.result_close(got, calls.want_paged(data), "float32")


def test_a_slow_source_is_waited_for(device):
    data, source, streaming, sequences = small(device)
    source.before_read = lambda blocks: time.sleep(0.003 * (int(blocks[0]) % 3))
    got = attend(device, streaming, data, sequences)
    compare.same_bits(got, tiles_by_hand(device, data, TILE, 5))
    assert streaming.stats.stall_seconds > 0
    assert threading.get_ident() not in source.threads
    assert 1 <= len(source.threads) <= 4


def test_pins_are_held_from_before_the_read_until_after_it(device):
    data = LONG.make("float32")
    source, streaming = ReadSource(data.k_pool, data.v_pool), make_streaming(device, data)
    leases = []

    class Lease:
        pass

    def pin(blocks):
        lease = Lease()
        leases.append((weakref.ref(lease), set(blocks.tolist())))
        return lease

    def before_read(blocks):
        held = [blocks_of for lease, blocks_of in leases if lease() is not None]
        assert set(blocks.tolist()) in held

    source.pin, source.before_read = pin, before_read
    attend(device, streaming, data, sequences_of(data, source))
    assert leases
    assert all(lease() is None for lease, _ in leases)


def test_a_pin_that_raises_is_an_error_of_the_tile(device):
    data = LONG.make("float32")
    source = ReadSource(data.k_pool, data.v_pool)
    source.pin = fail_at(data.block_table[2][0], KeyError("evicted"))
    streaming = make_streaming(device, data)
    with pytest.raises(ta.TileError, match="KeyError") as raised:
        attend(device, streaming, data, sequences_of(data, source))
    assert isinstance(raised.value.__cause__, KeyError)


def test_sources_and_streamers_go_away(cpu):
    data, source, streaming, sequences = small(cpu)
    attend(cpu, streaming, data, sequences)
    streaming.prefetch(sequences)
    gone = weakref.ref(source), weakref.ref(streaming)
    del source, streaming, sequences
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


# ---- Fetching ahead, cancelling, eviction ----


@pytest.mark.parametrize("kind", ["read", "host", "device"])
def test_prefetch(device, kind):
    data, source, streaming, sequences = small(device, kind, scratch_bytes=3 * TILE * 5 * 4096)
    want = tiles_by_hand(device, data, TILE, 5)
    for _ in range(3):
        assert streaming.prefetch(sequences)
        assert streaming.prefetch(sequences_of(data, source))  # equal sequences will do
        for _ in range(2):
            compare.same_bits(attend(device, streaming, data, sequences), want)
    assert streaming.stats.prefetched_launches > 0
    assert streaming.stats.dropped_launches == 0
    assert all(streaming.prefetch(sequences) for _ in range(3))
    assert not streaming.prefetch(sequences)
    compare.same_bits(
        device.call(streaming.attend, data.q[:1], sequences[:1], return_lse=True),
        tuple(x[:1] for x in want),
    )
    assert streaming.stats.dropped_launches > 0
    streaming.prefetch(sequences)
    streaming.discard()
    compare.same_bits(attend(device, streaming, data, sequences), want)


def test_an_error_in_a_prefetch_is_raised_by_its_call(device):
    data, source, streaming, sequences = small(device)
    source.before_read = fail_at(data.block_table[0][0], GoneError("early"))
    assert streaming.prefetch(sequences)
    with pytest.raises(ta.TileError, match="early"):
        attend(device, streaming, data, sequences)


def test_cancel_from_another_thread(device):
    data, source, streaming, sequences = small(device)
    assert not streaming.cancel()
    reading = threading.Event()

    def slow(blocks):
        reading.set()
        time.sleep(0.05)

    source.before_read = slow

    def cancel():
        reading.wait()
        while not streaming.cancel():
            time.sleep(0.001)

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(ta.CancelledError, match="cancelled"):
        attend(device, streaming, data, sequences)
    thread.join()
    source.before_read = lambda blocks: None
    got = attend(device, streaming, data, sequences)
    compare.same_bits(got, tiles_by_hand(device, data, TILE, 5))


@pytest.mark.skipif(sys.platform == "win32", reason="needs setitimer")
def test_signals_reach_a_call_that_waits(cpu):
    data, source, streaming, sequences = small(cpu)
    source.before_read = lambda blocks: time.sleep(0.2)

    def interrupt(number, frame):
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            attend(cpu, streaming, data, sequences)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def test_eviction_under_load(device):
    """Blocks that are evicted and overwritten are refused or right, never read while they change."""
    data, source, streaming, sequences = small(device, "host")
    want = tiles_by_hand(device, data, TILE, 5)
    stop = threading.Event()

    def evict(seed):
        rng = np.random.default_rng(seed)
        while not stop.is_set():
            mine = source.evict(rng.integers(0, source.num_blocks, 2))
            source.k_pool[mine] = np.nan
            time.sleep(0)
            source.k_pool[mine] = data.k_pool[mine]
            source.restore(mine)
            time.sleep(0.0005)

    threads = [threading.Thread(target=evict, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    refused = right = 0
    deadline = time.monotonic() + 20
    while (refused < 3 or right < 3) and time.monotonic() < deadline:
        got, error = calls.outcome(ta.TileError, attend, device, streaming, data, sequences)
        if error is None:
            compare.same_bits(got, want)
            right += 1
        else:
            assert "which was evicted" in str(error)
            refused += 1
    stop.set()
    for thread in threads:
        thread.join()
    assert right
    assert refused
    everything = range(source.num_blocks)
    assert source.evict(everything) == list(everything)  # no lease is left
    with pytest.raises(ta.TileError, match="evicted"):
        attend(device, streaming, data, sequences)
    source.restore(everything)
    compare.same_bits(attend(device, streaming, data, sequences), want)


def test_blocks_that_are_being_fetched_cannot_be_evicted(cpu):
    _, source, streaming, sequences = small(cpu, "host")
    assert streaming.prefetch(sequences)
    assert len(source.evict(range(source.num_blocks))) < source.num_blocks
    streaming.discard()
    left = source.evict(range(source.num_blocks))
    assert left


def test_threads_share_one_object(device):
    data, _, streaming, sequences = small(device)
    want = tiles_by_hand(device, data, TILE, 5)
    results = []

    def work():
        for _ in range(3):
            streaming.prefetch(sequences)
            results.append(attend(device, streaming, data, sequences))
            str(streaming.stats)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 12
    for result in results:
        compare.same_bits(result, want)


def test_a_process_ends_while_reads_are_under_way():
    code = """
import time, numpy as np, tiledattn as ta
class Slow:
    def describe(self):
        return ta.TileGeometry(num_blocks=8, block_size=4, num_kv_heads=1, head_dim=8, dtype="float32")
    def read(self, blocks, buffer):
        time.sleep(0.2)
        return buffer.nbytes
dims = ta.TiledAttentionDims(
    max_seqs=1, num_q_heads=1, num_kv_heads=1, head_dim=8, block_size=4, tile_capacity=1)
streaming = ta.StreamingAttention(dims, device="cpu")
streaming.prefetch([ta.StreamSequence(32, ta.KvPart(Slow(), range(8)))])
print("ended")
"""
    assert processes.run(code).strip() == "ended"


# ---- Arguments ----


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
        ta.StreamSequence(s.length, ta.KvPart(source, p.blocks[:3]))
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
        ({"sequences": lambda s: s[:-1]}, ValueError, "q: got 5 sequences; expected 4"),
        ({"sequences": lambda s: s[0]}, TypeError, "sequences: expected a list"),
        ({"sequences": lambda s: [*s[:-1], None]}, TypeError, r"sequences\[4\]: expected a StreamSequence"),
        ({"sequences": lambda s: s + s}, ValueError, "sequences: got 10; expected at most"),
        ({"q_positions": [1, 2]}, ValueError, "q_positions: got 2 numbers; expected 5"),
        ({"q_positions": [1, 2, 3, -1, 5]}, ValueError, r"q_positions\[3\]: got -1"),
        ({"q_positions": [0.5] * 5}, TypeError, "q_positions: expected integers"),
        ({"on_error": "ignore"}, ValueError, "on_error: got 'ignore'; expected 'raise' or 'partial'"),
        ({"state": 3}, TypeError, "state: expected a State, got int"),
        ({"return_lse": 1}, TypeError, "return_lse: expected True or False"),
        ({"out": np.zeros((5, 8, 7), np.float32)}, ValueError, "out: got shape"),
    ],
)
def test_wrong_calls_are_named(cpu, change, error, message):
    data, source, streaming, sequences = small(cpu)
    kwargs = dict(change)
    given = kwargs.pop("sequences", lambda s: s)(sequences)
    with pytest.raises(error, match=message):
        streaming.attend(data.q, given, **kwargs)
    assert not source.threads


def test_wrong_sources_are_named(cpu):
    data, source, streaming, sequences = small(cpu)
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
    with pytest.raises(TypeError, match=r"expected a PoolSource or an object with describe\(\) and read\(\)"):
        ta.StreamSequence(8, ta.KvPart(object.__new__(type("Thing", (), {})), [0]))
    with pytest.raises(TypeError, match=r"parts\[0\]: expected a KvPart"):
        ta.StreamSequence(8, [source])
    big = make_streaming(cpu, data, scratch_bytes=4096)
    with pytest.raises(ValueError, match="scratch_bytes: got 4096; expected at least"):
        big.attend(data.q, sequences)
    with pytest.raises(ValueError, match="head_dim: got head dimension 300"):
        ta.TileGeometry(num_blocks=1, block_size=1, num_kv_heads=1, head_dim=300, dtype="float32")
    with pytest.raises(ValueError, match="dtype: got 'int8'"):
        ta.TileGeometry(num_blocks=1, block_size=1, num_kv_heads=1, head_dim=3, dtype="int8")
    memory = np.zeros((4, 6, 2, 8), np.float32).swapaxes(0, 1)
    with pytest.raises(ValueError, match="a block must be one run of memory"):
        ta.PoolSource(memory, memory)
    with pytest.raises(IndexError, match="blocks: got block -1"):
        ta.PoolSource(data.k_pool, data.v_pool).evict([-1])


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"num_slots": 1}, ValueError, "num_slots: got 1; expected 2 or more"),
        ({"num_readers": 0}, ValueError, "num_readers: got 0"),
        ({"scratch_bytes": 0}, ValueError, "scratch_bytes: got 0"),
        ({"scratch_bytes": 1.5}, TypeError, "scratch_bytes: expected an int"),
        ({"softcap": -1.0}, ValueError, "softcap"),
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
    assert streaming.nbytes > streaming.scratch_bytes // 2


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


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is Linux's")
def test_the_example_runs_under_its_limit():
    text = processes.run(str(processes.TESTS.parent / "examples" / "stream_file.py"))
    assert "no memory, as it should be" in text
    assert "256 MiB of KV through 24 MiB" in text


# ---- On a GPU only ----


@pytest.mark.gpu
def test_a_stream_in_a_capture_is_refused(gpu):
    torch = pytest.importorskip("torch")
    data, _, streaming, sequences = small(gpu)
    q = gpu.array(data.q)
    streaming.attend(q, sequences)
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(q)
    with torch.cuda.graph(graph):
        out.zero_()  # an empty graph makes torch warn
        with pytest.raises(ValueError, match="cannot be captured"):
            streaming.attend(q, sequences, out=out)


@pytest.mark.gpu
def test_side_streams_and_unpinned_memory(gpu):
    torch = pytest.importorskip("torch")
    data = LONG.make("float32")
    want = tiles_by_hand(gpu, data, TILE, 5)
    for pin in (True, False):
        source = ta.PoolSource(np.array(data.k_pool), np.array(data.v_pool), pin=pin)
        streaming = make_streaming(gpu, data)
        for _ in range(3):
            with torch.cuda.stream(torch.cuda.Stream()):
                got = attend(gpu, streaming, data, sequences_of(data, source))
            compare.same_bits(got, want)
        assert source.residency == ("pinned" if pin else "host")


@pytest.mark.gpu
def test_memory_stays_pinned_for_the_last_of_its_pools(gpu):
    data = LONG.make("float32")
    want = tiles_by_hand(gpu, data, TILE, 5)
    pools = np.array(data.k_pool), np.array(data.v_pool)
    streaming = make_streaming(gpu, data)
    for _ in range(2):
        sequences = sequences_of(data, ta.PoolSource(*pools))  # the former one goes after this one is made
        compare.same_bits(attend(gpu, streaming, data, sequences), want)
        gc.collect()
    compare.same_bits(attend(gpu, streaming, data, sequences), want)


@pytest.mark.gpu
def test_a_large_pool_in_pinned_pieces(gpu):
    """More than the GiB that is pinned at once: copies stop where one piece does."""
    num_blocks = 2200
    geometry = ta.TileGeometry(
        num_blocks=num_blocks, block_size=64, num_kv_heads=8, head_dim=256, dtype="float16"
    )
    source = ta.PoolSource.allocate(geometry)
    assert num_blocks * source.block_bytes > 2**30
    rng = np.random.default_rng(0)
    slots = rng.standard_normal((16, 2, 8, 64, 256)).astype(np.float16)
    for first in range(0, num_blocks, 16):
        k, v = (view[: num_blocks - first] for view in ta.scratch_pool_views(slots))
        source.k_pool[first : first + 16], source.v_pool[first : first + 16] = k, v
    dims = ta.TiledAttentionDims(
        max_seqs=1, num_q_heads=8, num_kv_heads=8, head_dim=256, block_size=64, tile_capacity=32
    )
    streaming = ta.StreamingAttention(dims, device="cuda", scratch_bytes=128 << 20)
    q = rng.standard_normal((1, 8, 256)).astype(np.float16)
    blocks = np.arange(num_blocks)
    got = gpu.call(streaming.attend, q, [ta.StreamSequence(num_blocks * 64, ta.KvPart(source, blocks))])
    resident = ta.PoolSource(*ta.scratch_pool_views(gpu.array(slots)))
    same = ta.StreamSequence(num_blocks * 64, ta.KvPart(resident, blocks % 16))
    compare.same_bits(got, gpu.call(streaming.attend, q, [same]))
