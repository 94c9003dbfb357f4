# SPDX-License-Identifier: Apache-2.0
"""CPU attention against other libraries, on the machine at hand.

    python benchmarks/bench_cpu.py                                   # print a table
    python benchmarks/bench_cpu.py --out benchmarks/results/cpu.json # and keep it
    python benchmarks/bench_cpu.py --only decode --threads 1
    python benchmarks/bench_cpu.py --quantised                       # quantised caches beside bfloat16 ones

Each cell (one shape and type) runs every contender in turn, round after round, so that what else the machine
does hits all of them alike; a contender's figure is its median over the rounds. Before any timing, results
are compared with each other. Needs torch.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import tiledattn as ta
import torch

Run = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Cell:
    """One shape: ``q [batch, q_len, num_q_heads, head_dim]`` against ``kv_len`` keys."""

    name: str
    dtype: str
    batch: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    q_len: int
    kv_len: int
    causal: bool = False
    kv_dtype: str | None = None  # of a quantised paged cache

    def kv_name(self) -> str:
        """Types of q, K and V as the tables show them."""
        return self.dtype if self.kv_dtype is None else f"{self.dtype}, {self.kv_dtype} cache"

    def torch_dtype(self) -> torch.dtype:
        """Element type of q, K and V."""
        return getattr(torch, self.dtype)


DECODE = {"batch": 8, "num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "q_len": 1, "kv_len": 4096}
PREFILL = {"batch": 1, "num_q_heads": 16, "num_kv_heads": 16, "head_dim": 128, "q_len": 1024, "kv_len": 1024}
CELLS = [
    *(Cell("decode", dtype, **DECODE) for dtype in ("bfloat16", "float32", "float16")),
    *(Cell("prefill", dtype, **PREFILL) for dtype in ("bfloat16", "float32")),
    *(Cell("prefill_causal", dtype, causal=True, **PREFILL) for dtype in ("bfloat16", "float32")),
]
QUANTISED_CELLS = [Cell("decode", "bfloat16", kv_dtype=kv, **DECODE) for kv in ("int8", "float8_e4m3fn")]


@dataclass(frozen=True)
class Inputs:
    """Arrays of a cell in torch's own layout, ``[batch, heads, tokens, head_dim]``."""

    cell: Cell
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def make_inputs(cell: Cell) -> Inputs:
    """Random inputs, the same in every run."""
    generator = torch.Generator().manual_seed(0)

    def normal(heads: int, tokens: int) -> torch.Tensor:
        shape = (cell.batch, heads, tokens, cell.head_dim)
        return torch.randn(shape, generator=generator).to(cell.torch_dtype())

    k = normal(cell.num_kv_heads, cell.kv_len)
    v = normal(cell.num_kv_heads, cell.kv_len)
    if cell.kv_dtype is not None:  # values that the cache holds exactly, so that all compute the same
        k, v = (quantise(x, cell.kv_dtype).to(k.dtype) * KV_SCALE for x in (k, v))
    return Inputs(cell, normal(cell.num_q_heads, cell.q_len), k, v)


# A power of two: bfloat16 holds every element of the quantised types times it.
KV_SCALE = 1 / 32


def quantise(x: torch.Tensor, kv_dtype: str) -> torch.Tensor:
    """Round to the values of a quantised cache with scale KV_SCALE."""
    largest = 127 if kv_dtype == "int8" else 448
    scaled = (x.float() / KV_SCALE).clamp(-largest, largest)
    return (scaled.round() if kv_dtype == "int8" else scaled).to(getattr(torch, kv_dtype))


def tiledattn_flash(x: Inputs) -> Run:
    """``flash_attention`` on the arrays as they are."""
    out = torch.empty_like(x.q)
    return lambda: ta.flash_attention(x.q, x.k, x.v, causal=x.cell.causal, layout="bhsd", out=out)


def tiledattn_paged_unquantised(x: Inputs) -> Run | None:
    """Where the cache is quantised: the same over a cache of the type of q."""
    if x.cell.kv_dtype is None:
        return None
    return tiledattn_paged(Inputs(replace(x.cell, kv_dtype=None), x.q, x.k, x.v))


def tiledattn_paged(x: Inputs) -> Run:
    """``paged_attention`` over shuffled blocks of 16 tokens; a quantised cache has a scale for each head."""
    block_size, cell = 16, x.cell
    blocks = cell.kv_len // block_size
    order = torch.randperm(cell.batch * blocks, generator=torch.Generator().manual_seed(1))

    def pool(x: torch.Tensor) -> torch.Tensor:
        tokens = x.transpose(1, 2).reshape(-1, block_size, cell.num_kv_heads, cell.head_dim)
        pool = torch.empty_like(tokens)
        pool[order] = tokens
        return pool

    k_pool, v_pool = pool(x.k), pool(x.v)
    scales = {}
    if cell.kv_dtype is not None:
        k_pool, v_pool = (quantise(x, cell.kv_dtype) for x in (k_pool, v_pool))
        scale = torch.full((cell.num_kv_heads,), KV_SCALE)
        scales = {"k_scale": scale, "v_scale": scale}
    block_table = order.reshape(cell.batch, blocks).to(torch.int32)
    seq_lens = torch.full((cell.batch,), cell.kv_len, dtype=torch.int32)
    q = x.q.transpose(1, 2).contiguous()
    out = torch.empty_like(q)

    def run() -> torch.Tensor:
        ta.paged_attention(q, k_pool, v_pool, block_table, seq_lens, causal=cell.causal, out=out, **scales)
        return out.transpose(1, 2)

    return run


def torch_sdpa(x: Inputs) -> Run:
    """``scaled_dot_product_attention(enable_gqa=True)``: the common spelling."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    gqa = x.cell.num_q_heads != x.cell.num_kv_heads
    return lambda: sdpa(x.q, x.k, x.v, is_causal=x.cell.causal, enable_gqa=gqa)


def torch_sdpa_folded(x: Inputs) -> Run | None:
    """The same with the query heads of a KV head as query rows: what one who tunes would write."""
    cell = x.cell
    if cell.q_len != 1 or cell.num_q_heads == cell.num_kv_heads:
        return None
    q = x.q.reshape(cell.batch, cell.num_kv_heads, -1, cell.head_dim)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return lambda: sdpa(q, x.k, x.v).reshape(x.q.shape)


# The first is what the others' times are divided by.
CONTENDERS: dict[str, Callable[[Inputs], Run | None]] = {
    "tiledattn flash_attention": tiledattn_flash,
    "tiledattn paged_attention": tiledattn_paged,
    "tiledattn paged_attention, unquantised": tiledattn_paged_unquantised,
    "torch sdpa": torch_sdpa,
    "torch sdpa folded": torch_sdpa_folded,
}


def seconds(run: Run) -> float:
    """Time of one call, after a pause in which the threads of the contender before stop spinning."""
    time.sleep(0.02)
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def check_agreement(runs: dict[str, Run], dtype: str) -> None:
    """All contenders must compute the same thing, or their times mean nothing."""
    bound = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 2e-5}[dtype]
    results = {name: run().to(torch.float64) for name, run in runs.items()}
    first = next(iter(results.values()))
    for name, result in results.items():
        error = float((result - first).norm() / first.norm())
        if not error <= bound:
            raise SystemExit(
                f"{name}: differs from the first contender by {error:.1e}, more than {bound:.0e}"
            )


def measure(cell: Cell, rounds: int) -> dict[str, object]:
    """Interleaved medians of one cell."""
    inputs = make_inputs(cell)
    made = {name: make(inputs) for name, make in CONTENDERS.items()}
    runs = {name: run for name, run in made.items() if run is not None}
    check_agreement(runs, cell.dtype)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(seconds(run))
    medians = {name: statistics.median(values) for name, values in times.items()}
    base = medians[next(iter(medians))]
    return {
        "cell": asdict(cell),
        "rounds": rounds,
        "milliseconds": {name: round(value * 1e3, 3) for name, value in medians.items()},
        "best_milliseconds": {name: round(min(values) * 1e3, 3) for name, values in times.items()},
        "times_slower_than_first": {name: round(value / base, 2) for name, value in medians.items()},
    }


def machine() -> dict[str, object]:
    """What the figures depend on."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line
        ]
        model = names[0] if names else model
    return {
        "cpu": model,
        "cpus": os.cpu_count(),
        "system": platform.system(),
        "load_average": round(os.getloadavg()[0], 2),
        "cpu_isa": ta.info()["cpu_isa"],
    }


def show(result: dict[str, object]) -> None:
    """One line for each contender."""
    cell = result["cell"]
    print(f"{cell['name']} {Cell(**cell).kv_name()}")
    for name, milliseconds in result["milliseconds"].items():
        ratio = result["times_slower_than_first"][name]
        print(f"  {name:38} {milliseconds:9.2f} ms   {ratio:6.2f} x", flush=True)


def main() -> None:
    """Run the cells asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the results there as JSON")
    parser.add_argument("--only", help="run only cells whose name and types contain this")
    parser.add_argument("--quantised", action="store_true", help="the cells of quantised caches instead")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=ta.get_num_threads(), help="for all contenders")
    args = parser.parse_args()
    ta.set_num_threads(args.threads)
    torch.set_num_threads(args.threads)

    before = machine()  # its load average is of what ran before the benchmark
    results = []
    for cell in QUANTISED_CELLS if args.quantised else CELLS:
        if args.only and args.only not in f"{cell.name} {cell.kv_name()}":
            continue
        results.append(measure(cell, args.rounds))
        show(results[-1])
    if args.out:
        report = {
            "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
            "command": shlex.join(["python", *sys.argv]),
            "machine": before,
            "threads": args.threads,
            "versions": {
                "tiledattn": ta.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "table": [table_row(result) for result in results],
            "results": results,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=2) + "\n")


def table_row(result: dict) -> dict[str, str]:
    """Return what the documents show of one cell."""
    cell, times = result["cell"], result["milliseconds"]
    if cell["kv_dtype"] is not None:
        quantised, plain = (times[f"tiledattn paged_attention{x}"] for x in ("", ", unquantised"))
        return {
            "cache": cell["kv_dtype"],
            "paged_attention, ms": f"{quantised:.1f}",
            f"of a {cell['dtype']} cache, ms": f"{plain:.1f}",
            "ratio": f"{plain / quantised:.2f}",
        }
    heads = f"{cell['num_q_heads']}/{cell['num_kv_heads']} heads of {cell['head_dim']}"
    shape = f"{cell['batch']} x {cell['q_len']} queries, {cell['kv_len']} keys, {heads}"
    row = {"cell": cell["name"].replace("_", " "), "shape": shape, "type": Cell(**cell).kv_name()}
    shown = ("tiledattn flash_attention", "tiledattn paged_attention", "torch sdpa")
    row |= {f"{name}, ms": f"{times[name]:.1f}" for name in shown}
    row["torch / tiledattn"] = f"{times['torch sdpa'] / times['tiledattn flash_attention']:.1f}"
    return row


if __name__ == "__main__":
    main()
