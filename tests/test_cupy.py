# SPDX-License-Identifier: Apache-2.0
"""CuPy: its current stream, streams chosen by the caller, results given, graphs that it captures."""

from __future__ import annotations

import arrays
import calls
import cases
import compare
import numpy as np
import pytest
import tiledattn as ta

pytestmark = pytest.mark.gpu

PAGED = cases.Paged("", seq_lens=(40, 0, 96), q_lens=2)


@pytest.fixture
def cupy_carrier():
    carrier = arrays.make_carrier("cupy-cuda")
    yield carrier
    carrier.cupy.cuda.Device().synchronize()


def _kept_busy(cupy, milliseconds=30):
    """Work that delays what follows on the current stream."""
    kernel = cupy.RawKernel(
        """extern "C" __global__ void spin(long long ticks) {
             const long long start = clock64();
             while (clock64() - start < ticks) {}
           }""",
        "spin",
    )
    kernel((1,), (1,), (np.int64(milliseconds * 1.5e6),))


def _close(carrier, got, data, dtype="float32"):
    compare.result_close(tuple(carrier.numpy(x) for x in got), calls.want_paged(data), dtype)


def _late(carrier, data):
    """The arguments of a case; q is zero until work on the current stream has filled it."""
    q, *rest = map(carrier.array, data.args)
    late = carrier.cupy.zeros_like(q)
    return q, late, rest


def test_the_current_stream_is_used(cupy_carrier):
    cupy, data = cupy_carrier.cupy, PAGED.make("float32")
    q, late, rest = _late(cupy_carrier, data)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True):
        _kept_busy(cupy)
        late[...] = q
        got = ta.paged_attention(late, *rest, return_lse=True)
        _close(cupy_carrier, got, data)


@pytest.mark.parametrize("form", ["object", "handle"])
def test_a_chosen_stream_waits_for_the_current_one(form, cupy_carrier):
    cupy, data = cupy_carrier.cupy, PAGED.make("float32")
    q, late, rest = _late(cupy_carrier, data)
    cupy.cuda.Device().synchronize()
    side = cupy.cuda.Stream(non_blocking=True)
    _kept_busy(cupy)
    late[...] = q
    got = ta.paged_attention(late, *rest, return_lse=True, stream=side if form == "object" else side.ptr)
    side.synchronize()
    _close(cupy_carrier, got, data)


def test_results_given(cupy_carrier):
    cupy, data = cupy_carrier.cupy, PAGED.make("float16")
    wide = cupy.full((*data.q.shape[:-1], 70), 7, cupy.float16)
    lse = cupy.empty(data.q.shape[:-1], cupy.float32)
    ta.paged_attention(*map(cupy_carrier.array, data.args), out=wide[..., 2:66], lse=lse)
    _close(cupy_carrier, (wide[..., 2:66], lse), data, "float16")
    assert (wide[..., :2] == 7).all()


def test_write_kv_in_place(cupy_carrier):
    cupy = cupy_carrier.cupy
    pools = [cupy.zeros((3, 16, 2, 8), cupy.float32) for _ in range(2)]
    k = cupy.ones((2, 2, 8), cupy.float32)
    ta.write_kv(k, 2 * k, *pools, cupy.asarray([33, -1]))
    for value, pool in enumerate(pools, 1):
        assert (pool[2, 1] == value).all()
        assert float(pool.sum()) == value * 16


def test_a_captured_graph_replays(cupy_carrier):
    cupy, data = cupy_carrier.cupy, PAGED.make("float32")
    given = list(map(cupy_carrier.array, data.args))
    out = cupy.empty(data.q.shape, cupy.float32)
    lse = cupy.empty(data.q.shape[:-1], cupy.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        ta.paged_attention(*given, out=out, lse=lse)  # makes the workspace
        stream.begin_capture()
        ta.paged_attention(*given, out=out, lse=lse)
        graph = stream.end_capture()
    out.fill(0)
    lens = np.array([7, 0, 96], data.seq_lens.dtype)
    given[4][...] = cupy.asarray(lens)
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    _close(cupy_carrier, (out, lse), data._replace(seq_lens=lens))
