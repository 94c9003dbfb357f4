# SPDX-License-Identifier: Apache-2.0
"""Decode attention on a GPU against other libraries: one query token, K and V cold in L2, CUDA graphs.

    python benchmarks/bench_decode.py                                      # print a table
    python benchmarks/bench_decode.py --out benchmarks/results/decode.json # and keep it
    python benchmarks/bench_decode.py --cells b1_ --contestants tiledattn_p16,torch_cudnn
    python benchmarks/bench_decode.py --kernels portable --contestants tiledattn_p16,tiledattn_p64,torch_flash
    python benchmarks/bench_decode.py --contestants tiledattn_p64,tiledattn_fp8_p64,tiledattn_fp8_p64_slot

Each contestant captures a graph of many launches that cycle through copies of K and V, so that no launch finds
its keys in L2; a cell replays the graphs of all contestants in turn, round after round, and a contestant's figure
is its median. Before any timing, results are compared with float64 over some of the sequences. GB/s counts the
bytes of K and V once, which a float8 cache has half of. Contestants named ``early`` pass ``early_start=True``,
which is true here: the launch before writes nothing but its own result. Contestants that are not installed, or
refuse a cell, are named and left out.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import json
import os
import shlex
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tiledattn as ta
import torch

Launch = Callable[[], object]

COLD_BYTES = (
    400e6  # at least this much (float8: half) between two uses of the same keys: several times the L2
)
GRAPH_SECONDS = 4e-3
READ_GB_PER_S = 4570  # of an H200: loads of large boxes by TMA, nothing done with them


@dataclass(frozen=True)
class Cell:
    """One shape; ``lengths`` is the number of keys of each sequence."""

    name: str
    lengths: tuple[int, ...]
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V."""
        return sum(self.lengths) * self.num_kv_heads * self.head_dim * 4

    @property
    def uniform(self) -> bool:
        """All sequences have the same number of keys."""
        return len(set(self.lengths)) == 1


def _uniform(batch: int, length: int, *heads: int) -> Cell:
    q, kv, d = heads or (32, 8, 128)
    return Cell(f"b{batch}_{q}q{kv}kv_d{d}_s{length}", (length,) * batch, q, kv, d)


CELLS = [
    *(_uniform(1, n) for n in (1024, 4096, 8192, 32768, 131072)),
    *(_uniform(8, n) for n in (1024, 8192, 32768)),
    *(_uniform(64, n) for n in (1024, 4096, 8192)),
    _uniform(256, 1024),
    _uniform(16, 8192, 64, 8, 128),
    _uniform(16, 4096, 32, 32, 128),
    _uniform(32, 8192, 8, 1, 128),
    _uniform(16, 8192, 16, 8, 256),
    _uniform(32, 4096, 14, 2, 64),
    Cell("b64_32q8kv_d128_skew_1x128k_63x1k", (131072, *[1024] * 63)),
]


class Inputs:
    """Copies of one cell's arrays; ``out`` is what each contestant writes."""

    def __init__(self, cell: Cell):
        self.cell = cell
        self.copies = max(1, min(64, int(COLD_BYTES / cell.kv_bytes) + 1))
        shape = (self.copies, sum(cell.lengths), cell.num_kv_heads, cell.head_dim)
        self.k = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self.v = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        batch = len(cell.lengths)
        self.q = torch.randn((batch, cell.num_q_heads, cell.head_dim), device="cuda", dtype=torch.bfloat16)
        self.seq_lens = torch.tensor(cell.lengths, dtype=torch.int32, device="cuda")

    def check(self, name: str, run: Run) -> float:
        """Relative error over the first and the last sequence; the first copy of K and V was used."""
        cell, worst = self.cell, 0.0
        keys, values = run.real or (self.k[0], self.v[0])
        for b in (0, len(cell.lengths) - 1):
            begin, end = sum(cell.lengths[:b]), sum(cell.lengths[: b + 1])
            group = cell.num_q_heads // cell.num_kv_heads
            q = self.q[b].double().view(cell.num_kv_heads, group, -1)
            k, v = (x[begin:end].transpose(0, 1).double() for x in (keys, values))
            want = ((q @ k.transpose(1, 2) * cell.head_dim**-0.5).softmax(-1) @ v).flatten(0, 1)
            got = run.out.view(self.q.shape)[b].double()
            worst = max(worst, float((got - want).norm() / want.norm()))
        if not worst < 1e-2:
            raise ArithmeticError(f"{name}: relative error {worst:.3g}")
        return worst


@dataclass
class Run:
    """What a contestant does of a cell: a launch for each copy of K and V, and where the result is."""

    launches: list[Launch]
    out: torch.Tensor
    element_bytes: int = 2  # of K and V
    real: tuple[torch.Tensor, torch.Tensor] | None = None  # what its first K and V stand for, if not Inputs'


def _paged(
    x: Inputs, block_size: int, heads_first: bool, scales: str | None = None, early_start: bool = False
) -> Run:
    """Our own kernels; ``scales`` of a float8 cache: for each ``head``, ``block`` or ``slot``."""
    cell = x.cell
    blocks = [-(-n // block_size) for n in cell.lengths]
    order = torch.randperm(sum(blocks), device="cuda")
    table = torch.zeros((len(blocks), max(blocks)), dtype=torch.int32, device="cuda")
    at = 0
    for b, count in enumerate(blocks):
        table[b, :count] = order[at : at + count]
        at += count
    out = torch.empty_like(x.q)

    def pools(kv: torch.Tensor) -> torch.Tensor:
        tokens = kv.view(x.copies, -1, block_size, *kv.shape[2:])
        pool = torch.empty_like(tokens.transpose(2, 3).contiguous() if heads_first else tokens)
        pool = pool.transpose(2, 3) if heads_first else pool
        for copy in range(x.copies):
            pool[copy][order] = tokens[copy]
        return pool

    kwargs, real = {"out": out, "early_start": early_start}, None
    if scales is None:
        k, v = pools(x.k), pools(x.v)
    else:
        (k, k_scale, k_real), (v, v_scale, v_real) = (_quantise(kv, block_size, scales) for kv in (x.k, x.v))
        k, v = (pools(codes.view(torch.uint8)).view(torch.float8_e4m3fn) for codes in (k, v))
        kwargs["k_scale"], kwargs["v_scale"] = (
            _scales_of_pool(scale, order, block_size, scales) for scale in (k_scale, v_scale)
        )
        real = k_real, v_real

    def launch(copy: int) -> Launch:
        return lambda: ta.paged_attention(x.q, k[copy], v[copy], table, x.seq_lens, **kwargs)

    return Run([launch(copy) for copy in range(x.copies)], out, 1 if scales else 2, real)


def _quantise(kv: torch.Tensor, block_size: int, scales: str) -> tuple[torch.Tensor, ...]:
    """Float8 codes of [copies, tokens, heads, dim], scales [tokens, heads, 1] and what the first copy stands for."""
    largest = kv.float().abs().amax(dim=(0, 3))  # the same scales for all copies
    if scales == "head":
        largest = largest.amax(dim=0).expand(largest.shape)
    elif scales == "block":
        blocks = largest.view(-1, block_size, largest.shape[1]).amax(dim=1)
        largest = blocks.repeat_interleave(block_size, dim=0)
    scale = (largest / 448).unsqueeze(-1)
    codes = torch.stack([(one / scale).to(torch.float8_e4m3fn).view(torch.uint8) for one in kv])
    codes = codes.view(torch.float8_e4m3fn)
    return codes, scale, codes[0].float() * scale


def _scales_of_pool(scale: torch.Tensor, order: torch.Tensor, block_size: int, scales: str) -> torch.Tensor:
    """The scales of tokens in order as an argument of paged_attention."""
    if scales == "head":
        return scale[0, :, 0].contiguous()
    blocks = scale.view(-1, block_size, scale.shape[1])
    pool = torch.empty_like(blocks)
    pool[order] = blocks
    return pool[:, 0].contiguous() if scales == "block" else pool


def _torch_sdpa(x: Inputs, backend: str) -> Run:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    cell = x.cell
    if not cell.uniform:
        raise NotImplementedError("lengths differ")
    shape = (x.copies, len(cell.lengths), -1, cell.num_kv_heads, cell.head_dim)
    k, v = (kv.view(shape).transpose(2, 3).contiguous() for kv in (x.k, x.v))
    q = x.q.unsqueeze(2)
    out = torch.empty_like(q)

    def launch(copy: int) -> Launch:
        def run() -> None:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                out.data = torch.nn.functional.scaled_dot_product_attention(
                    q, k[copy], v[copy], enable_gqa=True
                )

        return run

    return Run([launch(copy) for copy in range(x.copies)], out)


CONTESTANTS: dict[str, Callable[[Inputs], Run]] = {
    "tiledattn_p16": lambda x: _paged(x, 16, False),
    "tiledattn_p64": lambda x: _paged(x, 64, False),
    "tiledattn_p16_early": lambda x: _paged(x, 16, False, early_start=True),
    "tiledattn_p64_early": lambda x: _paged(x, 64, False, early_start=True),
    "tiledattn_p64_hnd": lambda x: _paged(x, 64, True),
    "tiledattn_fp8_p16": lambda x: _paged(x, 16, False, "head"),
    "tiledattn_fp8_p64": lambda x: _paged(x, 64, False, "head"),
    "tiledattn_fp8_p64_hnd": lambda x: _paged(x, 64, True, "head"),
    "tiledattn_fp8_p64_block": lambda x: _paged(x, 64, False, "block"),
    "tiledattn_fp8_p64_slot": lambda x: _paged(x, 64, False, "slot"),
    "torch_cudnn": lambda x: _torch_sdpa(x, "CUDNN_ATTENTION"),
    "torch_flash": lambda x: _torch_sdpa(x, "FLASH_ATTENTION"),
}


def _graph(launches: list[Launch], kv_bytes: int) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of some milliseconds, and the number of its launches."""
    wanted = max(2, min(400, int(GRAPH_SECONDS * 4e12 / kv_bytes)))
    count = -(-wanted // len(launches)) * len(launches)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for i in range(count):
            launches[i % len(launches)]()
    return graph, count


def _seconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def run_cell(cell: Cell, names: list[str], rounds: int) -> dict:
    """Time every contestant of one cell in turn."""
    x = Inputs(cell)
    graphs, keep, errors, skipped, kv_bytes = {}, [], {}, {}, {}
    for name in names:
        try:
            run = CONTESTANTS[name](x)
            run.launches[0]()
            torch.cuda.synchronize()
            errors[name] = x.check(name, run)
            kv_bytes[name] = cell.kv_bytes * run.element_bytes // 2
            graphs[name] = _graph(run.launches, cell.kv_bytes)
            keep.append(run)
        except (NotImplementedError, RuntimeError, ArithmeticError) as error:
            skipped[name] = str(error).splitlines()[0][:100]
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(rounds + 1):
        for name, (graph, count) in graphs.items():
            seconds = _seconds(graph) / count
            if turn:
                times[name].append(seconds)
    result = {
        name: {
            "us": round(statistics.median(t) * 1e6, 2),
            "min_us": round(min(t) * 1e6, 2),
            "max_us": round(max(t) * 1e6, 2),
            "gb_per_s": round(kv_bytes[name] / statistics.median(t) / 1e9),
            "error": float(f"{errors[name]:.2g}"),
        }
        for name, t in times.items()
    }
    return {"cell": cell.name, "kv_mb": round(cell.kv_bytes / 1e6, 1), "times": result, "skipped": skipped}


def _machine() -> dict[str, str]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "tiledattn": ta.__version__,
        "build": str(ta.info()["cuda"]),
        "torch": torch.__version__,
        "cudnn": str(torch.backends.cudnn.version()),
        "numpy": importlib.metadata.version("numpy"),
        "kernels": os.environ.get("TILEDATTN_CUDA_KERNELS", "best"),
    }


def _print(result: dict, names: list[str]) -> None:
    cells = []
    for name in names:
        one = result["times"].get(name)
        cells.append(f"{one['us']:8.1f} {one['gb_per_s']:5d}" if one else f"{'-':>8} {'':5}")
    print(f"{result['cell']:<36}{result['kv_mb']:8.1f}  " + "  ".join(cells), flush=True)
    for name, why in result["skipped"].items():
        if why != "lengths differ":
            print(f"    {name}: {why}", flush=True)


def table_row(result: dict) -> dict[str, str]:
    """Return what the documentation shows of one cell."""
    times = {name: time["us"] for name, time in result["times"].items()}
    peers = {name: us for name, us in times.items() if not name.startswith("tiledattn")}
    row = {"cell": result["cell"], "KV, MB": f"{result['kv_mb']:.0f}"}
    for name in ("tiledattn_p16", "tiledattn_p64"):
        row[f"{name.replace('_p', ', pages of ')}, us"] = f"{times[name]:.1f}" if name in times else "-"
    best = min(peers, key=peers.__getitem__) if peers else None
    row["best peer"] = best.replace("_", " ") if best else "-"
    row["its us"] = f"{peers[best]:.1f}" if best else "-"
    compared = best and "tiledattn_p64" in times
    row["peer / pages of 64"] = f"{peers[best] / times['tiledattn_p64']:.2f}" if compared else "-"
    early = times.get("tiledattn_p64_early")
    row["pages of 64, early start, us"] = f"{early:.1f}" if early else "-"
    row["peer / early start"] = f"{peers[best] / early:.2f}" if best and early else "-"
    row["pages of 64, GB/s"] = str(result["times"].get("tiledattn_p64", {}).get("gb_per_s", "-"))
    return row


def fp8_row(result: dict) -> dict[str, str]:
    """Return what the documentation shows of one cell's float8 caches."""
    times = result["times"]
    row = {"cell": result["cell"], "KV, MB": f"{result['kv_mb'] / 2:.0f}"}
    columns = {
        "tiledattn_p64": "bf16, us",
        "tiledattn_fp8_p16": "pages of 16, us",
        "tiledattn_fp8_p64": "pages of 64, us",
        "tiledattn_fp8_p64_hnd": "heads first, us",
        "tiledattn_fp8_p64_block": "scale for each block, us",
        "tiledattn_fp8_p64_slot": "scale for each slot, us",
    }
    for name, column in columns.items():
        row[column] = f"{times[name]['us']:.1f}" if name in times else "-"
    ours, plain = times.get("tiledattn_fp8_p64"), times.get("tiledattn_p64")
    row["bf16 / pages of 64"] = f"{plain['us'] / ours['us']:.2f}" if ours and plain else "-"
    row["GB/s"] = str(ours["gb_per_s"]) if ours else "-"
    row[f"of {READ_GB_PER_S}"] = f"{ours['gb_per_s'] / READ_GB_PER_S:.0%}" if ours else "-"
    return row


def main() -> int:
    """Run the cells that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", default="", help="comma-separated parts of names; default all")
    parser.add_argument("--contestants", default=",".join(CONTESTANTS), help="comma-separated")
    parser.add_argument("--fp8", action="store_true", help="the table of --out is about float8 caches")
    parser.add_argument(
        "--kernels", choices=("best", "portable", "plain"), help="of this library; default best"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    args = parser.parse_args()
    if args.kernels:
        os.environ["TILEDATTN_CUDA_KERNELS"] = args.kernels
    names = args.contestants.split(",")
    wanted = [cell for cell in CELLS if any(part in cell.name for part in args.cells.split(","))]
    print(f"{'us, GB/s':<36}{'KV MB':>8}  " + "  ".join(f"{name[-14:]:>14}" for name in names))
    results = []
    for cell in wanted:
        results.append(run_cell(cell, names, args.rounds))
        _print(results[-1], names)
        torch.cuda.empty_cache()
        if args.out:
            report = {
                "date": dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
                "command": "python benchmarks/bench_decode.py " + shlex.join(sys.argv[1:]),
                "machine": _machine(),
                "table": [(fp8_row if args.fp8 else table_row)(result) for result in results],
                "cells": results,
            }
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
