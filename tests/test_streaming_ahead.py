# SPDX-License-Identifier: Apache-2.0
"""Fetching ahead, cancelling, eviction under load, threads; and what only a GPU shows."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time

import calls
import compare
import numpy as np
import processes
import pytest
import tiledattn as ta
from streamed import (
    LONG,
    TILE,
    GoneError,
    attend,
    fail_at,
    make_streaming,
    sequences_of,
    small,
    tiles_by_hand,
)


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


def test_the_garbage_collector_is_told_of_each_reference_once(cpu):
    """Told of one more than there is, it would take what somebody else still uses."""
    data, source, streaming, sequences = small(cpu, num_slots=4)
    compiled, error = sequences[0]._compiled, GoneError("the disk")
    source.before_read = fail_at(data.block_table[0][0], error)
    before = sys.getrefcount(compiled), sys.getrefcount(error)
    # A sequence in several calls, and several times in one; one error for several tiles.
    for _ in range(3):
        assert streaming.prefetch([sequences[0], sequences[1], sequences[0]])
    deadline = time.monotonic() + 60
    while not any(kept is compiled for kept in gc.get_referents(streaming._core)):  # it is reading
        assert time.monotonic() < deadline
        time.sleep(0.001)
    told = gc.get_referents(streaming._core)
    counts = [sum(kept is thing for kept in told) for thing in (compiled, error)]
    del told
    assert counts == [sys.getrefcount(compiled) - before[0], sys.getrefcount(error) - before[1]]
    assert min(counts) > 1


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


def test_cancel_says_whether_the_call_ends(device):
    """Cancelled at any moment, also when all is done but the result."""
    data, _, streaming, sequences = small(device, "device")
    calls_made = cancelled = said = 0
    calling, deadline = threading.Event(), time.monotonic() + 20

    def cancel():
        nonlocal said
        while not calling.is_set():
            said += streaming.cancel()
            ended = calls_made
            while calls_made == ended and not calling.is_set():
                time.sleep(0)

    thread = threading.Thread(target=cancel)
    thread.start()
    while (calls_made < 2000 or not cancelled) and time.monotonic() < deadline:
        _, error = calls.outcome(ta.CancelledError, attend, device, streaming, data, sequences)
        cancelled += error is not None
        calls_made += 1
    calling.set()
    thread.join()
    assert cancelled
    assert said == cancelled


@pytest.mark.parametrize("end", ["cancel", "discard", "another call", "the last reference"])
def test_only_reads_that_have_begun_are_waited_for(device, end):
    data, source, streaming, sequences = small(device, num_readers=1)
    reading, reads = threading.Event(), []

    def slow(blocks):
        reads.append(blocks)
        reading.set()
        time.sleep(0.5)

    source.before_read = slow
    if end == "cancel":

        def cancel():
            reading.wait()
            assert streaming.cancel()

        thread = threading.Thread(target=cancel)
        thread.start()
        with pytest.raises(ta.CancelledError):
            attend(device, streaming, data, sequences)
        thread.join()
    else:
        assert streaming.prefetch(sequences)
        reading.wait()
        if end == "discard":
            streaming.discard()
        elif end == "another call":
            streaming.attend(device.array(data.q[:0]), [])
        else:
            del streaming
    assert len(reads) == 1


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
