# SPDX-License-Identifier: Apache-2.0
"""CPU attention against other libraries, on the machine at hand.

    python benchmarks/bench_cpu.py                                   # print a table
    python benchmarks/bench_cpu.py --out benchmarks/results/cpu.json # and keep it
    python benchmarks/bench_cpu.py --only decode --threads 1
    python benchmarks/bench_cpu.py --contestants tiledattn,torch
    python benchmarks/bench_cpu.py --quantised                       # quantised caches beside bfloat16 ones

Each cell (one shape and type) runs every contestant in turn, round after round, so that what else the machine
does hits all of them alike; a contestant's figure is its best round, since a shared machine only ever adds to a
time. Medians are kept beside it. Before any timing, each result is compared with ours. Contestants that are not
installed, or do not take a cell, are named and left out. Arrays of the other libraries and of `flash_attention`
lie in ordinary memory, those of `paged_attention` in the library's own. Needs torch;
onnxruntime (with onnx), openvino and ggml (the package ggml-python) take part where they are installed.
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
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import tiledattn as ta
import torch
from cpu_contestants import CONTESTANTS, READING, Cell, Run, Skip, make_inputs
from tiledattn import _core

DECODE = {"batch": 8, "num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "q_len": 1, "kv_len": 4096}
LONG = DECODE | {"batch": 1, "kv_len": 32768}
HEADS = {"num_q_heads": 16, "num_kv_heads": 16, "head_dim": 128}
SMALL = HEADS | {"batch": 64, "q_len": 64, "kv_len": 64}
CELLS = [
    *(Cell("decode", dtype, **DECODE) for dtype in ("bfloat16", "float32", "float16")),
    *(Cell("decode", dtype, **LONG) for dtype in ("bfloat16", "float16")),
    *(
        Cell("prefill causal" if causal else "prefill", dtype, 1, **HEADS, q_len=n, kv_len=n, causal=causal)
        for n in (1024, 2048)
        for causal in (False, True)
        for dtype in ("bfloat16", "float32")
    ),
    *(Cell("prefill", dtype, **SMALL) for dtype in ("bfloat16", "float32")),
]
QUANTISED_CELLS = [
    Cell("decode", "bfloat16", kv_dtype=kv, **shape)
    for shape in (DECODE, LONG)
    for kv in ("int8", "float8_e4m3fn")
]
BOUND = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 2e-5}
MIN_ROUNDS = 3


def seconds(run: Run) -> float:
    """Time of one call, after a pause in which the threads of the contestant before stop spinning."""
    time.sleep(0.02)
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def check(name: str, result: torch.Tensor, first: torch.Tensor, dtype: str) -> None:
    """All must compute the same thing, or their times mean nothing."""
    error = float((result.double() - first).norm() / first.norm())
    if error <= BOUND[dtype]:
        return
    problem = f"differs from the first contestant by {error:.1e}, more than {BOUND[dtype]:.0e}"
    if name.startswith("tiledattn"):
        raise SystemExit(f"{name}: {problem}")
    raise Skip(problem)


def make_runs(cell: Cell, wanted: list[str]) -> tuple[dict[str, Run], dict[str, str]]:
    """Contestants whose results are right, and why others are left out."""
    inputs = make_inputs(cell)
    runs: dict[str, Run] = {}
    left_out: dict[str, str] = {}
    first = None
    for name in wanted:
        try:
            run = CONTESTANTS[name](inputs)
            result = run()
            if first is None:
                first = result.double()
            elif name != READING:
                check(name, result, first, cell.dtype)
            runs[name] = run
        except ImportError as error:
            left_out[name] = f"not installed: {error.name}"
        except Skip as reason:
            left_out[name] = str(reason)
    return runs, left_out


def measure(cell: Cell, wanted: list[str], rounds: int, limit_s: float) -> dict[str, object]:
    """Interleaved times of one cell."""
    runs, left_out = make_runs(cell, wanted)
    times: dict[str, list[float]] = {name: [] for name in runs}
    begin = time.perf_counter()
    for turn in range(rounds):
        if turn >= MIN_ROUNDS and time.perf_counter() - begin > limit_s:
            break
        for name, run in runs.items():
            times[name].append(seconds(run))
    best = {name: min(values) for name, values in times.items()}
    base = next(iter(best.values()))
    return {
        "cell": asdict(cell),
        "rounds": len(next(iter(times.values()))),
        "milliseconds": {name: round(value * 1e3, 3) for name, value in best.items()},
        "median_milliseconds": {
            name: round(statistics.median(values) * 1e3, 3) for name, values in times.items()
        },
        "times_slower_than_first": {name: round(value / base, 2) for name, value in best.items()},
        "left_out": left_out,
    }


def measure_overhead(rounds: int = 15, calls: int = 2000) -> dict[str, float]:
    """Microseconds of a tiny problem, and of the binding: the same call with no sequence, all else being equal."""
    window = (None, None)

    def timed(batch: int) -> float:
        q, k, out = (np.ones((batch, tokens, 1, 128), np.float32) for tokens in (1, 16, 1))
        args = (
            q,
            k,
            k,
            False,
            None,
            window,
            0.0,
            None,
            "bshd",
            *[None] * 4,
            out,
            None,
            False,
            False,
            None,
            None,
        )
        begin = time.perf_counter()
        for _ in range(calls):
            _core.flash_attention(*args)
        return (time.perf_counter() - begin) / calls * 1e6

    both = [(timed(1), timed(0)) for _ in range(rounds)]
    tiny, binding = (min(times) for times in zip(*both, strict=True))
    return {"tiny_us": round(tiny, 2), "binding_us": round(binding, 2)}


def command() -> str:
    """What to type for the same run: a forced instruction set is part of it."""
    forced = os.environ.get("TILEDATTN_CPU_ISA")
    return shlex.join([*([f"TILEDATTN_CPU_ISA={forced}"] if forced else []), "python", *sys.argv])


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


def versions() -> dict[str, str]:
    """Versions of what took part."""
    found = {"tiledattn": ta.__version__, "torch": torch.__version__, "python": platform.python_version()}
    for package in ("onnxruntime", "openvino", "ggml-python"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def show(result: dict) -> None:
    """One line for each contestant."""
    cell = result["cell"]
    shape = f"{cell['batch']} x {cell['q_len']} queries, {cell['kv_len']} keys"
    print(f"{cell['name']} {Cell(**cell).kv_name()}, {shape}, {result['rounds']} rounds")
    for name, milliseconds in result["milliseconds"].items():
        ratio = result["times_slower_than_first"][name]
        print(f"  {name:38} {milliseconds:9.2f} ms   {ratio:6.2f} x")
    for name, reason in result["left_out"].items():
        print(f"  {name:38} left out: {reason}")
    sys.stdout.flush()


def read_share(result: dict) -> str:
    """Part of the rate of plain reading that `paged_attention` reaches."""
    times = result["milliseconds"]
    if READING not in times:
        return "-"
    return f"{100 * times[READING] / times['tiledattn paged_attention']:.0f} %"


def table_row(result: dict) -> dict[str, str]:
    """Return what the documents show of one cell."""
    cell, times = result["cell"], result["milliseconds"]
    heads = f"{cell['num_q_heads']}/{cell['num_kv_heads']} heads of {cell['head_dim']}"
    shape = f"{cell['batch']} x {cell['q_len']} queries, {cell['kv_len']} keys, {heads}"
    if cell["kv_dtype"] is not None:
        quantised, plain = (times[f"tiledattn paged_attention{x}"] for x in ("", ", unquantised"))
        return {
            "cache": cell["kv_dtype"],
            "shape": shape,
            "paged_attention, ms": f"{quantised:.1f}",
            f"of a {cell['dtype']} cache, ms": f"{plain:.1f}",
            "ratio": f"{plain / quantised:.2f}",
        }
    peers = {name: t for name, t in times.items() if not name.startswith("tiledattn") and name != READING}
    best = min(peers, key=peers.__getitem__) if peers else None
    return {
        "cell": cell["name"],
        "shape": shape,
        "type": Cell(**cell).kv_name(),
        "flash_attention, ms": f"{times['tiledattn flash_attention']:.1f}",
        "paged_attention, ms": f"{times['tiledattn paged_attention']:.1f}",
        "of the read rate": read_share(result),
        "best peer": best or "-",
        "its ms": f"{peers[best]:.1f}" if best else "-",
        "peer / flash_attention": f"{peers[best] / times['tiledattn flash_attention']:.2f}" if best else "-",
    }


def main() -> None:
    """Run the cells asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the results there as JSON")
    parser.add_argument("--only", default="", help="run only cells whose name and types contain this")
    parser.add_argument("--contestants", default="", help="parts of their names, with commas between them")
    parser.add_argument("--quantised", action="store_true", help="the cells of quantised caches instead")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--limit-s", type=float, default=6, help="no new round of a cell after this")
    parser.add_argument("--threads", type=int, default=ta.get_num_threads(), help="for all contestants")
    args = parser.parse_args()
    ta.set_num_threads(args.threads)
    torch.set_num_threads(args.threads)
    wanted = [name for name in CONTESTANTS if any(part in name for part in args.contestants.split(","))]

    before = machine()  # its load average is of what ran before the benchmark
    results = []
    for cell in QUANTISED_CELLS if args.quantised else CELLS:
        if args.only not in f"{cell.name} {cell.kv_name()}":
            continue
        results.append(measure(cell, wanted, args.rounds, args.limit_s))
        show(results[-1])
    overhead = measure_overhead()
    print(f"16 keys, one head: {overhead['tiny_us']} us, the binding alone {overhead['binding_us']} us")
    if args.out:
        report = {
            "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
            "command": command(),
            "machine": before,
            "threads": args.threads,
            "versions": versions(),
            "table": [table_row(result) for result in results],
            "overhead": overhead,
            "results": results,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
