# SPDX-License-Identifier: Apache-2.0
"""Two GPUs: work on the one that is not current, state that moves, and KV that is streamed from one to the other."""

from __future__ import annotations

import arrays
import calls
import cases
import compare
import numpy as np
import pytest
import reference
import tiledattn as ta
from streamed import LONG, TILE, attend, make_source, make_streaming, sequences_of, tiles_by_hand

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        ta.info()["num_cuda_devices"] < 2, reason=f"{ta.info()['num_cuda_devices']} GPUs here, wanted two"
    ),
]

PAGED = cases.Paged("", seq_lens=(40, 0, 96, 700), q_lens=2)
TILED = cases.Tiled("", cases.Paged("", seq_lens=(40, 0, 96)), tile_blocks=(4, 2))
FLASH = cases.Flash("", 2, 50, 70, 4, 2, head_dim=64, score=cases.Score(causal=True))


@pytest.fixture
def other():
    """Arrays on the second GPU, while the first one is current."""
    carrier = arrays.TorchCarrier("cuda:1")
    carrier.torch.cuda.set_device(0)
    yield carrier
    assert carrier.torch.cuda.current_device() == 0
    carrier.torch.cuda.synchronize(1)


@pytest.fixture
def first():
    return arrays.TorchCarrier("cuda:0")


def test_functions(other, dtype):
    data = PAGED.make(dtype)
    got = calls.run_paged(other, data)
    compare.result_close(got, calls.want_paged(data), dtype)
    qkv, score = FLASH.make(dtype)
    got = calls.run_flash(other, qkv, score)
    compare.result_close(got, reference.flash(*qkv, **score), dtype)


def test_an_object(other, dtype):
    data = TILED.make(dtype)
    compare.result_close(calls.run_tiled(other, data), calls.want_tiled(data).finalize(), dtype)


def test_both_in_turn(first, other):
    """Workspaces, kernels' limits and fault logs are those of each device."""
    data = PAGED.make("bfloat16")
    want = calls.run_paged(first, data)
    for carrier in (other, first, other):
        compare.same_bits(calls.run_paged(carrier, data), want)


def test_results_are_on_the_device_of_the_arguments(other):
    q = other.array(np.ones((1, 3, 2, 16), np.float32))
    out, lse = ta.flash_attention(q, q, q, return_lse=True)
    assert out.device == lse.device == q.device


def test_arrays_on_both(first, other):
    q = first.array(np.ones((1, 3, 2, 16), np.float32))
    k = other.array(np.ones((1, 3, 2, 16), np.float32))
    with pytest.raises(ValueError, match=r"^k: is on cuda:1, but q is on cuda:0"):
        ta.flash_attention(q, k, k)


def test_a_bad_block_id_is_raised_on_its_device(first, other):
    data = PAGED.make("float32")
    data.block_table[0, 0] = 10**6
    calls.run_paged(other, data)
    ta.check("cuda:0")
    with pytest.raises(IndexError, match="block_table"):
        ta.check("cuda:1")


def test_a_state_moves(first, other):
    data = TILED.make("float32")
    half = calls.make_attention(other, data)
    half.begin_step(3)
    calls.step(other, half, data, data.tiles[0])
    state = half.state().to("cuda:0")
    rest = calls.make_attention(first, data)
    rest.begin_step(3)
    rest.load_state(state)
    for tile in data.tiles[1:]:
        calls.step(first, rest, data, tile)
    got = first.call(rest.finalize, return_lse=True)
    compare.same_bits(got, calls.run_tiled(other, data))


@pytest.mark.parametrize("tile", [1, TILE, 64])
def test_streaming_from_the_other(first, other, tile):
    """Peer copies bring the bits that are there."""
    data = LONG.make("float32")
    source = make_source("device", other, data)
    streaming = make_streaming(first, data, tile)
    sequences = sequences_of(data, source)
    want = tiles_by_hand(first, data, tile, 5)
    for ahead in (False, True):
        if ahead:
            streaming.prefetch(sequences)
        compare.same_bits(attend(first, streaming, data, sequences), want)
    moved = sum(tier.bytes for name, tier in streaming.stats.tiers.items() if name == source.residency)
    assert moved == 2 * sum(len(s.parts[0].blocks) for s in sequences) * (
        data.k_pool[0].nbytes + data.v_pool[0].nbytes
    )


def test_streaming_on_the_second(other):
    data = LONG.make("bfloat16")
    for kind in ("host", "read", "device"):
        got = attend(
            other, make_streaming(other, data), data, sequences_of(data, make_source(kind, other, data))
        )
        compare.result_close(got, calls.want_paged(data), "bfloat16")


def test_capture_on_the_second(other):
    torch = other.torch
    data = PAGED.make("float16")
    args = [other.array(x) for x in data.args]
    kwargs = {key: other.array(x) if isinstance(x, np.ndarray) else x for key, x in data.kwargs.items()}
    with torch.cuda.device(1):
        out = torch.empty_like(args[0])
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            ta.paged_attention(*args, **kwargs, out=out)
        side.synchronize()
        want = other.numpy(out).copy()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ta.paged_attention(*args, **kwargs, out=out)
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
    compare.same_bits((other.numpy(out),), (want,))
