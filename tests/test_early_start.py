# SPDX-License-Identifier: Apache-2.0
"""early_start: a call that may begin while the kernel before it ends gives the bits of one that does not."""

from __future__ import annotations

import calls
import cases
import compare
import numpy as np
import pytest
import tiledattn as ta

PAGED = [
    cases.Paged("one_long", (5000,), None, 64, 8, 2, 128),
    cases.Paged("some", (700, 1, 0, 64, 33), None, 16, 8, 2, 128),
    cases.Paged("many", cases.random_lengths(3, 70, 900), None, 16, 8, 2, 64),
    cases.Paged("queries", (40, 700, 3, 1300), 4, 16, 8, 2, 128),
    cases.Paged("window", (900, 70), None, 16, 8, 2, 256, score=cases.Score(True, (333, 0), sinks=True)),
]


@pytest.mark.parametrize("case", PAGED, ids=str)
def test_paged(case, dtype, device):
    data = case.make(dtype)
    got = calls.run_paged(device, data, early_start=True)
    compare.result_close(got, calls.want_paged(data), dtype)
    compare.same_bits(got, calls.run_paged(device, data), "with and without")


TILED = [
    cases.Tiled("long", PAGED[0], (7, 40, 33)),
    cases.Tiled("short", PAGED[1], (5,) * 9),
    cases.Tiled("before_the_window", PAGED[4], (30, 27), positions=True),
]


@pytest.mark.parametrize("case", TILED, ids=str)
def test_tiles(case, dtype, device):
    data = case.make(dtype)
    attn = calls.make_attention(device, data)
    attn.begin_step(len(data.paged.q))
    for tile in data.tiles:
        calls.step(device, attn, data, tile, early_start=True)
    got = device.call(attn.finalize, return_lse=True)
    compare.result_close(got, calls.want_tiled(data).finalize(), dtype)
    compare.same_bits(got, calls.run_tiled(device, data), "with and without")


@pytest.mark.parametrize("value", [None, 1, "yes", np.array([True, False])], ids=repr)
def test_wants_a_bool(value, device):
    data = PAGED[1].make("float32")
    with pytest.raises(TypeError, match="early_start"):
        calls.run_paged(device, data, early_start=value)


class Decode:
    """A decode step on a GPU: lengths grow, then write_kv appends a token, then attention.

    ``tiled``: by one tile, of which positions say how much is seen; sequence 0 of several sees nothing.
    """

    def __init__(self, gpu, dtype, num_seqs, length, kv_dtype=None, tiled=False):
        torch, rng = gpu.torch, np.random.default_rng(7)
        blocks = -(-(length + 300) // 16)
        self.table = gpu.array(rng.permutation(num_seqs * blocks).reshape(num_seqs, blocks).astype(np.int32))
        shape = (num_seqs * blocks, 16, 2, 128)
        self.k_pool, self.v_pool = (gpu.array(cases.random(rng, shape, dtype)) for _ in "kv")
        self.scales = {}
        if kv_dtype:
            self.scales = {"k_scale": 0.02, "v_scale": 0.03}
            self.k_pool, self.v_pool = (
                (pool.float() * 50).clamp(-100, 100).to(kv_dtype) for pool in (self.k_pool, self.v_pool)
            )
        self.q = gpu.array(cases.random(rng, (num_seqs, 8, 128), dtype))
        self.k, self.v = (gpu.array(cases.random(rng, (num_seqs, 2, 128), dtype)) for _ in "kv")
        self.lens = torch.full((num_seqs,), length, dtype=torch.int32, device="cuda")
        self.seqs = torch.arange(num_seqs, device="cuda")
        self.slots = torch.zeros(num_seqs, dtype=torch.int64, device="cuda")
        self.out = torch.empty_like(self.q)
        self.attn = None
        if tiled:
            dims = ta.TiledAttentionDims(
                max_seqs=num_seqs,
                num_q_heads=8,
                num_kv_heads=2,
                head_dim=128,
                block_size=16,
                tile_capacity=blocks,
            )
            self.attn = ta.TiledAttention(dims, device="cuda")
            self.counts = torch.full_like(self.lens, blocks)
            self.kv_positions = torch.zeros_like(self.lens)
            if num_seqs > 1:
                self.kv_positions[0] = 1 << 20
            self.q_positions = torch.zeros_like(self.lens)

    def attend(self, early_start):
        arrays = (self.q, self.k_pool, self.v_pool, self.table)
        kwargs = {**self.scales, "out": self.out, "early_start": early_start}
        if self.attn is None:
            ta.paged_attention(*arrays, self.lens, **kwargs)
            return
        positions = {"kv_positions": self.kv_positions, "q_positions": self.q_positions}
        self.attn.begin_step(len(self.q))
        self.attn.step_tile(*arrays, self.counts, **positions, **kwargs)

    def step(self, early_start):
        """New queries, keys and values hang on the last result, so a result that is wrong once stays wrong."""
        column = (self.lens // 16).long()
        self.slots.copy_(self.table[self.seqs, column].long() * 16 + self.lens % 16)
        if self.attn is not None:
            self.q_positions.copy_(self.lens)
        self.lens += 1
        self.k.add_(self.out[:, :2]).mul_(0.7)
        self.v.sub_(self.out[:, 2:4]).mul_(0.7)
        self.q.add_(self.out).mul_(0.7)
        ta.write_kv(self.k, self.v, self.k_pool, self.v_pool, self.slots, **self.scales)
        self.attend(early_start)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("tiled", [False, True], ids=["paged", "tile"])
@pytest.mark.parametrize(("num_seqs", "length"), [(1, 40), (1, 3000), (3, 1000), (70, 200)])
def test_new_keys_of_the_kernel_before_are_seen(num_seqs, length, tiled, kv_dtype, gpu):
    if gpu.name != "torch":
        pytest.skip("steers torch's graphs")
    torch = gpu.torch
    results = []
    for early_start in (False, True):
        decode = Decode(gpu, "bfloat16", num_seqs, length, kv_dtype and getattr(torch, kv_dtype), tiled)
        decode.out.zero_()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            decode.step(early_start)  # makes what a capture may not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for _ in range(50):
                decode.step(early_start)
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        results.append([gpu.numpy(x).copy() for x in (decode.out, decode.q, decode.lens)])
    assert results[0][2][0] == length + 251
    for got, want in zip(*results, strict=True):
        compare.same_bits(got, want, "early and not")
