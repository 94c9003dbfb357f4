# SPDX-License-Identifier: Apache-2.0
"""CUDA streams and graphs: which stream a call runs on, what a capture holds, what a replay reads."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import arrays
import calls
import cases
import compare
import numpy as np
import pytest
import tiledattn as ta

pytestmark = pytest.mark.gpu

PAGED = cases.Paged("", seq_lens=(40, 0, 96), q_lens=2)
TILED = cases.Tiled("", cases.Paged("", seq_lens=(40, 0, 96)), tile_blocks=(4, 2))


@pytest.fixture
def gpu():
    """These tests steer torch's streams."""
    carrier = arrays.make_carrier("torch-cuda")
    yield carrier
    carrier.synchronize()


def _kept_busy(torch, milliseconds=30):
    """Work that delays what follows on the current stream."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))


class _Protocol:
    def __init__(self, stream):
        self.stream = stream

    def __cuda_stream__(self):
        return (0, self.stream.cuda_stream)


STREAM_FORMS = {
    "handle": lambda s: s.cuda_stream,
    "torch": lambda s: s,
    "ptr": lambda s: SimpleNamespace(ptr=s.cuda_stream),
    "protocol": _Protocol,
}


@pytest.mark.parametrize("form", STREAM_FORMS)
def test_a_chosen_stream_waits_for_the_producer(form, gpu):
    """The arrays are filled late on the current stream; the call on another stream sees them filled."""
    torch = gpu.torch
    data = PAGED.make("float32")
    q, *rest = map(gpu.array, data.args)
    late = torch.zeros_like(q)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    _kept_busy(torch)
    late.copy_(q)
    out, lse = ta.paged_attention(late, *rest, return_lse=True, stream=STREAM_FORMS[form](side))
    side.synchronize()
    compare.result_close((gpu.numpy(out), gpu.numpy(lse)), calls.want_paged(data), "float32")


def test_the_current_stream_is_used(gpu):
    """A call under torch.cuda.stream(side) is ordered after side's work, not the default stream's."""
    torch = gpu.torch
    data = PAGED.make("float32")
    q, *rest = map(gpu.array, data.args)
    late = torch.zeros_like(q)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        _kept_busy(torch)
        late.copy_(q)
        out, lse = ta.paged_attention(late, *rest, return_lse=True)
        compare.result_close((gpu.numpy(out), gpu.numpy(lse)), calls.want_paged(data), "float32")


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_h42_legacy_and_per_thread_default_streams(handle, gpu):
    """Dao-AILab/flash-attention#1957: handles 0 and 1 are the legacy default, 2 the thread's own."""
    data = PAGED.make("float32")
    got = calls.run_paged(gpu, data, stream=handle)
    compare.result_close(got, calls.want_paged(data), "float32")


def test_h42_a_step_on_a_user_stream(gpu):
    """Dao-AILab/flash-attention#1957: the whole step on a side stream, finalize on the last step_tile's."""
    torch = gpu.torch
    data = TILED.make("float32")
    side = torch.cuda.Stream()
    attn = calls.make_attention(gpu, data)
    attn.begin_step(3, stream=side)
    given = [([gpu.array(x) for x in data.step_args(t)], gpu.array(t.valid_slots)) for t in data.tiles]
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        _kept_busy(torch)
    for args, valid in given:
        attn.step_tile(*args, last_block_valid_slots=valid, stream=side)
    assert not side.query(), "the calls waited for the device"
    out, lse = attn.finalize(return_lse=True)
    side.synchronize()
    compare.result_close((gpu.numpy(out), gpu.numpy(lse)), calls.want_tiled(data).finalize(), "float32")


def test_bad_streams(gpu):
    data = PAGED.make("float32")
    for bad in ("main", 3.5, object()):
        with pytest.raises(TypeError, match="stream"):
            calls.run_paged(gpu, data, stream=bad)
    with pytest.raises((ValueError, OverflowError), match="stream"):
        calls.run_paged(gpu, data, stream=-5)


def _captured(torch, work):
    """``work`` in a CUDA graph, after one run outside that makes workspaces."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_replay_reads_new_lengths_and_tables(dtype, gpu):
    torch = gpu.torch
    first = cases.Paged("", seq_lens=(3200, 1, 0), num_q_heads=6).make(dtype)
    given = list(map(gpu.array, first.args))
    out = torch.full(first.q.shape, 7.0, dtype=given[0].dtype, device="cuda")
    lse = torch.full(first.q.shape[:-1], 7.0, device="cuda")
    graph = _captured(torch, lambda: ta.paged_attention(*given, out=out, lse=lse))
    for seed, seq_lens in enumerate([(3200, 1, 0), (5, 2999, 17), (0, 0, 0), (1500, 1400, 100)]):
        data = cases.Paged("", seq_lens=seq_lens, num_q_heads=6).make(dtype, seed)
        blocks = min(len(data.k_pool), len(first.k_pool))
        assert blocks == len(data.k_pool)
        given[0].copy_(gpu.array(data.q))
        for pool, new in ((given[1], data.k_pool), (given[2], data.v_pool)):
            pool[:blocks].copy_(gpu.array(new))
        given[3].fill_(-9)
        given[3][:, : data.block_table.shape[1]].copy_(gpu.array(data.block_table))
        given[4].copy_(gpu.array(data.seq_lens))
        for _ in range(2):
            graph.replay()
        got = gpu.numpy(out).copy(), gpu.numpy(lse).copy()
        compare.result_close(got, calls.want_paged(data), dtype)
        compare.same_bits(got, calls.run_paged(gpu, data), "graph and call")
    ta.check("cuda")


def test_a_captured_step_starts_afresh_at_each_replay(gpu):
    torch = gpu.torch
    data = TILED.make("float32")
    attn = calls.make_attention(gpu, data)
    out, lse = (
        torch.zeros(data.paged.q.shape, device="cuda"),
        torch.zeros(data.paged.q.shape[:-1], device="cuda"),
    )
    given = [([gpu.array(x) for x in data.step_args(t)], gpu.array(t.valid_slots)) for t in data.tiles]

    def work():
        attn.begin_step(3)
        for args, valid in given[:-1]:
            attn.step_tile(*args, last_block_valid_slots=valid)
        attn.step_tile(*given[-1][0], last_block_valid_slots=given[-1][1], out=out, lse=lse)

    graph = _captured(torch, work)
    for _ in range(3):
        out.fill_(7.0)
        graph.replay()
        got = gpu.numpy(out), gpu.numpy(lse)
        compare.result_close(got, calls.want_tiled(data).finalize(), "float32")
    given[1][0][4].zero_()  # the second tile has nothing
    graph.replay()
    got = gpu.numpy(out), gpu.numpy(lse)
    compare.result_close(got, calls.want_tiled(data, 1).finalize(), "float32")


def _graph_of_a_whole_step(gpu, data, given, out):
    """The graph alone; the object that was captured is gone."""
    attn = calls.make_attention(gpu, data)

    def work():
        attn.begin_step(3)
        for args, valid in given:
            attn.step_tile(*args, last_block_valid_slots=valid)
        attn.finalize(out=out)

    return _captured(gpu.torch, work)


def test_a_capture_keeps_what_it_uses_alive(gpu):
    data = TILED.make("float32")
    given = [([gpu.array(x) for x in data.step_args(t)], gpu.array(t.valid_slots)) for t in data.tiles]
    out = gpu.torch.zeros(data.paged.q.shape, device="cuda")
    graph = _graph_of_a_whole_step(gpu, data, given, out)
    gc.collect()
    # Other objects would take the memory of the freed one and spoil it.
    others = [calls.make_attention(gpu, data) for _ in range(4)]
    for other in others:
        other.begin_step(3)
        calls.step(gpu, other, data, data.tiles[0])
    out.fill_(7.0)
    graph.replay()
    compare.out_close(gpu.numpy(out), calls.want_tiled(data).finalize().out, "float32")


def test_a_step_is_inside_one_capture_or_outside_all(gpu):
    torch = gpu.torch
    data = TILED.make("float32")
    attn = calls.make_attention(gpu, data)
    args, valid = [gpu.array(x) for x in data.step_args(data.tiles[0])], gpu.array(data.tiles[0].valid_slots)
    attn.begin_step(3)
    attn.step_tile(*args, last_block_valid_slots=valid)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    counter = torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        counter.add_(1)  # an empty graph would warn
        with pytest.raises(ValueError, match=r"capture|begin_step"):
            attn.step_tile(*args, last_block_valid_slots=valid)
    # Outside again, the step that began outside goes on.
    out = gpu.call(attn.finalize)
    compare.out_close(out, calls.want_tiled(data, 1).finalize().out, "float32")


def _late_step(gpu, data):
    """An object and the arrays of its tiles, which are there already."""
    attn = calls.make_attention(gpu, data)
    given = [([gpu.array(x) for x in data.step_args(t)], gpu.array(t.valid_slots)) for t in data.tiles]
    gpu.torch.cuda.synchronize()
    return attn, given


@pytest.mark.parametrize("what", ["load_state", "state", "view"])
def test_what_the_object_launches_by_itself_is_ordered_before_the_next_stream(what, gpu):
    """load_state(), state() and the views without a stream, then a tile on another stream."""
    torch = gpu.torch
    data = TILED.make("float32")
    source, given = _late_step(gpu, data)
    source.begin_step(3)
    source.step_tile(*given[0][0], last_block_valid_slots=given[0][1])
    kept = source.state()
    torch.cuda.synchronize()
    attn = calls.make_attention(gpu, data)
    side = torch.cuda.Stream()
    tiles = given
    _kept_busy(torch)  # the legacy default stream, where a new object's own work goes
    if what == "load_state":
        attn.load_state(kept)
        tiles = given[1:]
    else:
        attn.begin_step(3)
        _ = attn.state() if what == "state" else attn.m
    with torch.cuda.stream(side):  # else the tiles would wait for the arrays' framework, which is busy
        for args, valid in tiles:
            attn.step_tile(*args, last_block_valid_slots=valid)
        out, lse = attn.finalize(return_lse=True)
        side.synchronize()
        compare.result_close((gpu.numpy(out), gpu.numpy(lse)), calls.want_tiled(data).finalize(), "float32")


def test_finalize_follows_the_last_tile_and_no_other_call(gpu):
    """A copy of the state on another stream does not take finalize() there."""
    torch = gpu.torch
    data = TILED.make("float32")
    attn, given = _late_step(gpu, data)
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        _kept_busy(torch)
    attn.begin_step(3)
    for args, valid in given:
        attn.step_tile(*args, last_block_valid_slots=valid, stream=side)
    attn.state(stream=other)
    out = torch.zeros(data.paged.q.shape, device="cuda")
    attn.finalize(out=out)
    side.synchronize()
    compare.out_close(gpu.numpy(out), calls.want_tiled(data).finalize().out, "float32")


def test_states_on_chosen_streams(gpu):
    """merge_states() and State.finalize() on a stream wait for the streams that made the states."""
    torch = gpu.torch
    data = TILED.make("float32")
    attn, given = _late_step(gpu, data)
    streams = [torch.cuda.Stream() for _ in range(3)]
    states = []
    for (args, valid), stream in zip(given, streams, strict=False):
        with torch.cuda.stream(stream):
            _kept_busy(torch)
        attn.begin_step(3)
        attn.step_tile(*args, last_block_valid_slots=valid, stream=stream)
        states.append(attn.state())
        torch.cuda.current_stream().wait_stream(stream)
        streams[1].wait_stream(stream)
    merged = ta.merge_states(states, stream=streams[2])
    out, lse = (torch.from_dlpack(x) for x in merged.finalize(stream=streams[0]))
    torch.cuda.synchronize()
    compare.result_close((gpu.numpy(out), gpu.numpy(lse)), calls.want_tiled(data).finalize(), "float32")


def test_a_capture_keeps_states_alive(gpu):
    """state(), merge_states() and State.finalize() in a capture, whose states are gone at the replay."""
    torch = gpu.torch
    data = TILED.make("float32")
    attn, given = _late_step(gpu, data)
    out = torch.zeros(data.paged.q.shape, device="cuda")

    def work():
        states = []
        for args, valid in given:
            attn.begin_step(3)
            attn.step_tile(*args, last_block_valid_slots=valid)
            states.append(attn.state())
        out.copy_(torch.from_dlpack(ta.merge_states(states).finalize()[0]))

    graph = _captured(torch, work)
    gc.collect()
    spoilers = [calls.make_attention(gpu, data) for _ in range(16)]
    for spoiler in spoilers:
        spoiler.begin_step(3)
        spoiler.step_tile(*given[0][0], last_block_valid_slots=given[0][1])
    out.fill_(7.0)
    graph.replay()
    compare.out_close(gpu.numpy(out), calls.want_tiled(data).finalize().out, "float32")


def test_check_in_a_capture_changes_nothing(gpu):
    """attn.check() and check=True are refused in a capture, and the step goes on as if never called."""
    torch = gpu.torch
    data = TILED.make("float32")
    attn, given = _late_step(gpu, data)
    out = torch.zeros(data.paged.q.shape, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attn.begin_step(3)
        with pytest.raises(ValueError, match="check"):
            attn.step_tile(*given[0][0], last_block_valid_slots=given[0][1], check=True)
        for args, valid in given:
            attn.step_tile(*args, last_block_valid_slots=valid)
        with pytest.raises(ValueError, match="check"):
            attn.check()
        attn.finalize(out=out)
    graph.replay()
    compare.out_close(gpu.numpy(out), calls.want_tiled(data).finalize().out, "float32")


def test_a_stream_lives_as_long_as_an_object_remembers_it():
    """A CuPy stream that the caller has dropped, and calls without a stream afterwards."""
    cupy = pytest.importorskip("cupy")
    gpu = arrays.make_carrier("cupy-cuda")
    data = TILED.make("float32")
    attn = calls.make_attention(gpu, data)
    given = [([gpu.array(x) for x in data.step_args(t)], gpu.array(t.valid_slots)) for t in data.tiles]
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    attn.begin_step(3)
    for args, valid in given:
        attn.step_tile(*args, last_block_valid_slots=valid, stream=stream)
    del stream
    gc.collect()
    out, lse = attn.finalize(return_lse=True)
    state = attn.state()
    cupy.cuda.Device().synchronize()
    want = calls.want_tiled(data).finalize()
    compare.result_close((gpu.numpy(out), gpu.numpy(lse)), want, "float32")
    out, _ = (cupy.from_dlpack(x) for x in state.finalize())
    compare.out_close(gpu.numpy(out), want.out, "float32")


def test_h42_per_thread_streams_do_not_share_scratch(gpu):
    """Two threads on handle 2, each with long sequences that need partial results."""
    torch = gpu.torch
    case = cases.Paged("", seq_lens=(6000, 5000, 4000, 3000))
    work = []
    for seed in range(2):
        data = case.make("float32", seed)
        work.append((data, list(map(gpu.array, data.args)), torch.zeros(data.q.shape, device="cuda")))
    torch.cuda.synchronize()

    def repeat(item):
        _, given, out = item
        for _ in range(50):
            ta.paged_attention(*given, out=out, stream=2)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(repeat, work))
    torch.cuda.synchronize()
    for data, _, out in work:
        compare.out_close(gpu.numpy(out), calls.want_paged(data)[0], "float32")


def test_check_while_capturing_is_refused(gpu):
    torch = gpu.torch
    data = PAGED.make("float32")
    given = list(map(gpu.array, data.args))
    out = torch.empty_like(given[0])
    ta.paged_attention(*given, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.zero_()  # an empty graph would warn
        with pytest.raises(ValueError, match=r"check.*captur|captur.*check"):
            ta.paged_attention(*given, out=out, check=True)


def test_a_call_beside_a_capture_runs_at_once(gpu):
    """The legacy default stream is in no capture, also while another stream is: its call runs, and once."""
    torch = gpu.torch
    data = PAGED.make("float32")
    given = list(map(gpu.array, data.args))
    at_once, captured = (torch.full_like(given[0], 7.0) for _ in range(2))
    ta.paged_attention(*given, out=at_once.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        ta.paged_attention(*given, out=captured)
        ta.paged_attention(*given, out=at_once, stream=0)
    torch.cuda.synchronize()
    want = calls.want_paged(data)[0]
    compare.out_close(gpu.numpy(at_once), want, "float32")
    assert (captured == 7.0).all(), "the captured call has run"
    at_once.fill_(7.0)
    graph.replay()
    torch.cuda.synchronize()
    compare.out_close(gpu.numpy(captured), want, "float32")
    assert (at_once == 7.0).all(), "the call beside the capture is in the graph"


def test_threads_alternate_between_kernels(gpu):
    """What a thread remembers of its last launch and its device's faults is right for the next call too."""
    torch = gpu.torch
    work = []
    for head_dim in (64, 128, 256):
        data = cases.Paged("", seq_lens=(40, 0, 96), head_dim=head_dim).make("bfloat16")
        work.append((list(map(gpu.array, data.args)), calls.want_paged(data)[0]))
    flash = [gpu.array(cases.Flash("", head_dim=head_dim).make("bfloat16")[0][0]) for head_dim in (64, 128)]
    torch.cuda.synchronize()

    def repeat(_):
        for _ in range(3):
            for given, want in work:
                out = ta.paged_attention(*given)
                for q in flash:
                    ta.flash_attention(q, q, q)
                torch.cuda.synchronize()
                compare.out_close(gpu.numpy(out), want, "bfloat16")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(repeat, range(4)))


def test_any_thread_raises_what_the_device_found(gpu):
    torch = gpu.torch
    data = PAGED.make("float32")
    given = list(map(gpu.array, data.args))
    with ThreadPoolExecutor(1) as other:
        other.submit(ta.paged_attention, *given).result()
        wrong = [*given[:4], torch.full_like(given[4], -5)]
        ta.paged_attention(*wrong)
        torch.cuda.synchronize()
        with pytest.raises(ValueError, match="seq_lens"):
            other.submit(ta.paged_attention, *given).result()
    ta.paged_attention(*given)
    ta.check("cuda")


def test_calls_do_not_wait_for_the_device(gpu):
    torch = gpu.torch
    data = PAGED.make("float32")
    given = list(map(gpu.array, data.args))
    calls.run_paged(gpu, data)
    torch.cuda.synchronize()
    _kept_busy(torch, 200)
    ta.paged_attention(*given)
    ta.flash_attention(given[0], given[0], given[0])
    assert not torch.cuda.current_stream().query(), "a call waited for the device"


def test_no_device_memory_after_construction(gpu):
    torch = gpu.torch
    data = TILED.make("float32")
    attn = calls.make_attention(gpu, data)
    given = [([gpu.array(x) for x in data.step_args(t)], gpu.array(t.valid_slots)) for t in data.tiles]
    out = torch.zeros(data.paged.q.shape, device="cuda")

    def step():
        attn.begin_step(3)
        for args, valid in given:
            attn.step_tile(*args, last_block_valid_slots=valid)
        attn.finalize(out=out)

    step()
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    for _ in range(50):
        step()
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] == free


def test_scratch_may_be_refilled_after_an_event(gpu):
    """Two scratch tiles in turn, refilled behind events on another stream, as an offloading engine does."""
    torch = gpu.torch
    case = cases.Tiled("", cases.Paged("", seq_lens=(400,)), tile_blocks=(1,) * 25)
    data = case.make("float32")
    attn = calls.make_attention(gpu, data)
    copies, free = torch.cuda.Stream(), [torch.cuda.Event(), torch.cuda.Event()]
    scratch = torch.zeros((2, 2, 16, 2, 64), device="cuda")
    host = [torch.from_numpy(pool).pin_memory() for pool in (data.paged.k_pool, data.paged.v_pool)]
    q, one = gpu.array(data.paged.q), torch.ones(1, dtype=torch.int32, device="cuda")
    tables = [torch.tensor([[slot]], dtype=torch.int32, device="cuda") for slot in (0, 1)]
    attn.begin_step(1)
    for i, tile in enumerate(data.tiles):
        slot, block = i % 2, int(tile.blocks[0, 0])
        with torch.cuda.stream(copies):
            free[slot].wait()
            for part in (0, 1):
                scratch[part, slot].copy_(host[part][block], non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        ready.wait()
        attn.step_tile(
            q, scratch[0], scratch[1], tables[slot], one, last_block_valid_slots=int(tile.valid_slots[0])
        )
        free[slot].record()
    got = gpu.call(attn.finalize, return_lse=True)
    compare.result_close(got, calls.want_tiled(data).finalize(), "float32")


def test_cupy_current_stream(gpu):
    cupy = arrays.make_carrier("cupy-cuda")
    data = PAGED.make("float16")
    side = cupy.cupy.cuda.Stream(non_blocking=True)
    with side:
        got = calls.run_paged(cupy, data)
    compare.result_close(got, calls.want_paged(data), "float16")
    given = list(map(cupy.array, data.args))
    out, lse = ta.paged_attention(*given, return_lse=True, stream=side)
    side.synchronize()  # before anything is copied on another stream
    got = cupy.numpy(out), cupy.numpy(lse)
    compare.result_close(got, calls.want_paged(data), "float16")
    assert np.isfinite(got[0]).all()
