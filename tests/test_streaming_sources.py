# SPDX-License-Identifier: Apache-2.0
"""Sources that raise, stall, return short or are pinned: what an error says, and what it leaves as it was."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from dataclasses import dataclass

import calls
import cases
import compare
import numpy as np
import processes
import pytest
import tiledattn as ta
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


def test_text_that_is_no_utf8_stands_in_messages(cpu):
    """Half of a surrogate pair, as in the name of a file that is not UTF-8."""
    data = LONG.make("float32")
    source = make_source("read", cpu, data)
    source.name = "kv\udc80.bin"
    source.before_read = fail_at(data.block_table[3][7], GoneError("no kv\udc81"))
    with pytest.raises(
        ta.TileError, match=r"source 'kv\\udc80.bin', .*, got GoneError: no kv\\udc81"
    ) as raised:
        attend(cpu, make_streaming(cpu, data), data, sequences_of(data, source))
    assert raised.value.__cause__.args == ("no kv\udc81",)
    assert ta.PoolSource(data.k_pool, data.v_pool, name="\udc80").name == r"\udc80"
    sizes = {"num_blocks": 1, "block_size": 1, "num_kv_heads": 1, "head_dim": 8}
    with pytest.raises(ValueError, match=r"dtype: got '\\udc80'"):
        ta.TileGeometry(**sizes, dtype="\udc80")
    with pytest.raises(ValueError, match=r"layout: got '\\udc80'"):
        ta.TileGeometry(**sizes, dtype="float32", layout="\udc80")


def test_an_error_that_has_no_text_is_named_by_its_type(cpu):
    class MuteError(Exception):
        def __str__(self):
            raise RuntimeError("nothing to say")

    data = LONG.make("float32")
    for method in ("before_read", "pin"):
        source = make_source("read", cpu, data)
        setattr(source, method, fail_at(data.block_table[3][7], MuteError()))
        with pytest.raises(ta.TileError, match=r"bytes, got MuteError$") as raised:
            attend(cpu, make_streaming(cpu, data), data, sequences_of(data, source))
        assert isinstance(raised.value.__cause__, MuteError)


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
    wanted = rf"bytes, got {type(result).__name__} from read\(\), not the number of bytes"
    with pytest.raises(ta.TileError, match=wanted):
        attend(cpu, streaming, data, sequences)


def _sort(blocks):
    blocks.sort()


def _offset(blocks):
    blocks -= 1


@pytest.mark.parametrize("method", ["before_read", "pin"])
@pytest.mark.parametrize("change", [_sort, _offset])
def test_a_source_cannot_change_which_blocks_are_asked_for(device, method, change):
    """Its rows would hold other blocks than attention takes them for: silently wrong."""
    data = LONG.make("float32")
    source = make_source("read", device, data)
    setattr(source, method, change)
    with pytest.raises(ta.TileError, match=r"got ValueError: .*read-only"):
        attend(device, make_streaming(device, data), data, sequences_of(data, source))


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


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("call", ["attend", "partial", "prefetch"])
def test_an_interrupt_in_a_pin_ends_the_call(device, call, error):
    """Ctrl-C comes in whatever Python the thread is in. No tile may pass for failed because of it."""
    data, _, streaming, sequences = small(device)
    for block in (data.block_table[0][0], data.block_table[3][18]):
        source = ReadSource(data.k_pool, data.v_pool)
        source.pin = fail_at(block, error("asked for"))
        pinned = sequences_of(data, source)
        out = device.full(data.q.shape, 7.0, "float32")
        streaming.prefetch(sequences)

        def ended(pinned=pinned, out=out):
            if call == "prefetch":
                streaming.discard()
                streaming.prefetch(pinned)
            on_error = "partial" if call == "partial" else "raise"
            streaming.attend(device.array(data.q), pinned, out=out, on_error=on_error)

        with pytest.raises(error, match="asked for") as raised:
            ended()
        assert raised.traceback[-1].name == "before_read"
        assert (device.numpy(out) == 7.0).all()
        source.pin = lambda blocks: None
        got = attend(device, streaming, data, pinned)
        compare.same_bits(got, tiles_by_hand(device, data, TILE, 5))


@pytest.mark.parametrize("form", ["dataclass", "slots"])
def test_any_object_with_the_methods_is_a_source(device, form):
    """One that has no hash, and one that no weak reference can name."""

    @dataclass
    class Data:
        inner: ReadSource

        def describe(self):
            return self.inner.describe()

        def read(self, blocks, buffer):
            return self.inner.read(blocks, buffer)

    class Slots:
        __slots__ = ("inner",)

        def __init__(self, inner):
            self.inner = inner

        describe, read = Data.describe, Data.read

    data, inner, streaming, _ = small(device)
    source = (Data if form == "dataclass" else Slots)(inner)
    twice = [sequences_of(data, source) for _ in range(2)]
    assert streaming.prefetch(twice[0])  # known again by its identity
    got = attend(device, streaming, data, twice[1])
    compare.result_close(got, calls.want_paged(data), "float32")
    assert streaming.stats.prefetched_launches > 0
    assert streaming.stats.dropped_launches == 0


def test_sources_and_streamers_go_away(cpu):
    data, source, streaming, sequences = small(cpu)
    attend(cpu, streaming, data, sequences)
    streaming.prefetch(sequences)
    gone = weakref.ref(source), weakref.ref(streaming)
    del source, streaming, sequences
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_sources_that_hold_their_sequences_go_away(cpu):
    data, source, streaming, sequences = small(cpu)
    source.sequences, source.kept = sequences, sequences_of(data, source)
    gc.collect()
    compare.same_bits(attend(cpu, streaming, data, sequences), tiles_by_hand(cpu, data, TILE, 5))
    gone = weakref.ref(source)
    streaming.prefetch(source.kept)
    del source, sequences
    gc.collect()
    assert gone() is not None  # it is being fetched from
    streaming.discard()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("kept", ["sequences", "leases", "errors"])
def test_sources_that_hold_who_prefetches_from_them_go_away(device, kept):
    data, go = LONG.make("float32"), threading.Event()
    source, streaming = make_source("read", device, data), make_streaming(device, data)
    if kept == "leases":
        source.pin = lambda blocks, lease=source: lease
    source.streaming, source.sequences = streaming, sequences_of(data, source)

    def before_read(blocks):
        go.wait(60)  # not for ever, or the process of a test that fails never ends
        if kept == "errors":
            raise GoneError("the disk")  # its traceback holds the source

    source.before_read = before_read
    assert streaming.prefetch(source.sequences)
    gone = weakref.ref(source), weakref.ref(streaming)
    del source, streaming
    gc.collect()
    assert gone[0]().streaming is gone[1]()  # it is being read
    go.set()
    for _ in range(1000):
        gc.collect()
        if gone[0]() is None:
            break
        time.sleep(0.01)
    assert [ref() for ref in gone] == [None, None]


def test_an_error_does_not_outlive_its_call(device):
    data, source, streaming, sequences = small(device)
    raised = []

    def before_read(blocks):
        error = GoneError("the disk")
        raised.append(weakref.ref(error))
        raise error

    source.before_read = before_read
    with pytest.raises(ta.TileError):
        streaming.attend(device.array(data.q), sequences)
    assert raised
    for _ in range(1000):  # threads that read other tiles may still be leaving
        gc.collect()
        if not any(error() for error in raised):
            break
        time.sleep(0.01)
    assert [error() for error in raised if error() is not None] == []


@pytest.fixture
def quick_collections():
    """Only objects that come from here on are looked at: not those of every library that is loaded."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("quick_collections")
def test_collecting_garbage_takes_nothing_that_a_call_uses(device):
    data, source, streaming, sequences = small(device)
    want = tiles_by_hand(device, data, TILE, 5)
    source.streaming, source.pin = streaming, lambda blocks: source
    ended = threading.Event()

    def collect():
        while not ended.is_set():
            gc.collect()

    collector = threading.Thread(target=collect)
    collector.start()
    try:
        for count in range(20):
            # The object keeps them alone.
            assert streaming.prefetch(sequences_of(data, source))
            if count % 3 == 0:
                streaming.discard()
            compare.same_bits(attend(device, streaming, data, sequences), want)
    finally:
        ended.set()
        collector.join()


@pytest.mark.parametrize("head_dim", [64, 66, 33])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_many_small_pieces(device, dtype, block_size, head_dim):
    # 128 B to 4 KiB each, in planes of K and V, at addresses that are multiples of 16, 4 or 2 bytes.
    case = cases.Paged("", seq_lens=(1500, 0, 333), block_size=block_size, num_kv_heads=1, head_dim=head_dim)
    data = case.make(dtype)
    source = make_source("host", device, data)
    streaming = make_streaming(device, data, tile=1200 // block_size)
    got = attend(device, streaming, data, sequences_of(data, source))
    compare.result_close(got, calls.want_paged(data), dtype)
    in_place = make_source("device", device, data) if dtype in device.dtypes else source
    compare.same_bits(got, attend(device, streaming, data, sequences_of(data, in_place)))


@pytest.mark.parametrize("pin", [True, False])
def test_pieces_of_mixed_sizes(device, pin):
    # Neighbouring blocks go together, so runs are of all lengths. Most of the array is pinned, or none.
    data = cases.Paged("", seq_lens=(4000,), block_size=4, num_kv_heads=1).make("float32")
    rng = np.random.default_rng(1)
    starts = np.sort(rng.choice(np.arange(1, 1000), 80, replace=False))
    runs = np.split(np.arange(1000), starts)
    order = np.concatenate([runs[i] for i in rng.permutation(len(runs))])
    finite = [np.nan_to_num(pool) for pool in (data.k_pool, data.v_pool)]
    source = ta.PoolSource(*finite, pin=pin)
    sequences = [ta.StreamSequence(4000, ta.KvPart(source, order))]
    got = attend(device, make_streaming(device, data, tile=300), data, sequences)
    moved = data._replace(k_pool=finite[0], v_pool=finite[1], block_table=order[None].astype(np.int32))
    compare.result_close(got, calls.want_paged(moved), "float32")


# What is done once for a GPU is done by the first object, so only a fresh process shows it.
FIRST_CALL = """
import numpy as np
import tiledattn as ta
import torch


def device_allocations(call):
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        kept = call()
        torch.cuda.synchronize()
    counts = {event.key: event.count for event in profile.key_averages()}
    mallocs = [n for name, n in counts.items() if name.startswith("cudaMalloc") and "Host" not in name]
    return kept, sum(mallocs), counts


q = torch.zeros(1, 4, 64, device="cuda", dtype=torch.float16)
out = torch.empty_like(q)
k_pool, v_pool = np.zeros((2, 400, 4, 1, 64), np.float16)  # a block is two pieces of 512 bytes
pool = ta.PoolSource(k_pool, v_pool)
order = np.random.default_rng(0).permutation(400)
sequences = [ta.StreamSequence(1600, ta.KvPart(pool, order))]
dims = ta.TiledAttentionDims(
    max_seqs=1, num_q_heads=4, num_kv_heads=1, head_dim=64, block_size=4, tile_capacity=100
)
make = lambda: ta.StreamingAttention(dims, device="cuda", scratch_bytes=1 << 20)
streaming, made, _ = device_allocations(make)
_, taken, calls = device_allocations(lambda: streaming.attend(q, sequences, out=out))
assert streaming.stats.link.tiles == 4
assert "cudaLaunch" in " ".join(calls), calls
print(made > 0, taken)
"""


@pytest.mark.gpu
def test_the_first_call_takes_no_device_memory(gpu):
    assert processes.run(FIRST_CALL, KINETO_LOG_LEVEL="99") == "True 0\n"
