# SPDX-License-Identifier: Apache-2.0
"""What a call costs on the host: each way into the library beside plain binding, in microseconds.

    python benchmarks/bench_host.py                                    # on the CPU
    python benchmarks/bench_host.py --device cuda --out FILE.json      # GPU launches, as the caller sees them

The arrays are so small that next to nothing is computed: one token, one head of 8, one key. "plain binding" is the
compiled function with its results given, without the Python around it; "a call that does nothing" is the floor of the
binding itself. Figures are medians over rounds, all contenders in turn in each round. Frameworks that are missing are
left out.
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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import tiledattn as ta
from tiledattn import _core

Call = Callable[[], object]
ROUNDS, SECONDS_PER_ROUND = 15, 0.01


def numpy_calls() -> dict[str, Call]:
    """NumPy arrays, and what needs no array."""
    q, k, out = (np.ones((1, 1, 1, 8), np.float32) for _ in range(3))
    return {
        "a call that does nothing": _core.get_num_threads,
        "plain binding, numpy": lambda: _plain(q, k, out),
        "flash_attention, numpy, out=": lambda: ta.flash_attention(q, k, k, out=out),
        "flash_attention, numpy": lambda: ta.flash_attention(q, k, k),
    }


def torch_calls(device: str) -> dict[str, Call]:
    """torch tensors: the functions, the operators, the drop-ins, and torch's own."""
    import tiledattn.torch as tt
    import torch

    q, k, out = (torch.ones(1, 1, 1, 8, device=device, dtype=torch.float16) for _ in range(3))
    torch.set_num_threads(1)
    native = torch.nn.functional.scaled_dot_product_attention
    return {
        "plain binding, torch": lambda: _plain(q, k, out),
        "flash_attention, torch, out=": lambda: ta.flash_attention(q, k, k, out=out),
        "flash_attention, torch": lambda: ta.flash_attention(q, k, k),
        "torch.flash_attention, out=": lambda: tt.flash_attention(q, k, k, out=out),
        "torch.flash_attention": lambda: tt.flash_attention(q, k, k),
        "torch.scaled_dot_product_attention": lambda: tt.scaled_dot_product_attention(q, k, k),
        "torch.flash_attn_func": lambda: tt.flash_attn_func(q, k, k),
        "torch's own sdpa": lambda: native(q, k, k),
    }


def jax_calls(device: str) -> dict[str, Call]:
    """JAX arrays, eager and compiled; each call waits for its result."""
    import jax
    import tiledattn.jax as tj

    with jax.default_device(jax.devices(device)[0]):
        q, k = (jax.numpy.ones((1, 1, 1, 8), jax.numpy.float16) for _ in range(2))
    compiled = jax.jit(tj.flash_attention)
    plain = jax.jit(lambda q, k, v: q + k * v)
    calls: dict[str, Call] = {
        "jax.flash_attention, eager": lambda: tj.flash_attention(q, k, k).block_until_ready(),
        "jax.flash_attention, jit": lambda: compiled(q, k, k).block_until_ready(),
        "q + k * v, jit": lambda: plain(q, k, k).block_until_ready(),
    }
    if device == "cpu":
        calls["flash_attention, jax"] = lambda: ta.flash_attention(q, k, k)
    return calls


def cupy_calls() -> dict[str, Call]:
    """CuPy arrays."""
    import cupy

    q, k, out = (cupy.ones((1, 1, 1, 8), cupy.float16) for _ in range(3))
    return {
        "plain binding, cupy": lambda: _plain(q, k, out),
        "flash_attention, cupy, out=": lambda: ta.flash_attention(q, k, k, out=out),
        "flash_attention, cupy": lambda: ta.flash_attention(q, k, k),
    }


def _plain(q: object, k: object, out: object) -> object:
    window = (None, None)
    return _core.flash_attention(
        *(q, k, k, False, None, window, 0.0, None, "bshd"),
        *(None, None, None, None, out, None, False, False, None, None),
    )


def collect(device: str) -> dict[str, Call]:
    """Every contender that this machine has."""
    makers = [lambda: torch_calls(device), lambda: jax_calls(device)]
    makers = [*makers, cupy_calls] if device == "cuda" else [numpy_calls, *makers]
    calls: dict[str, Call] = {}
    for make in makers:
        try:
            calls.update(make())
        except ImportError as error:
            print(f"left out: {error}", file=sys.stderr)
    return calls


def measure(calls: dict[str, Call]) -> dict[str, float]:
    """Microseconds of each, median over the rounds."""
    numbers = {}
    for name, call in calls.items():
        for _ in range(20):
            call()
        start = time.perf_counter()
        for _ in range(20):
            call()
        numbers[name] = max(1, int(SECONDS_PER_ROUND / ((time.perf_counter() - start) / 20)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(numbers[name]):
                call()
            times[name].append((time.perf_counter() - start) / numbers[name] * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def machine(device: str) -> dict[str, object]:
    """What the figures hang on."""
    info = ta.info()
    found: dict[str, object] = {"cpus": os.cpu_count(), "system": platform.system()}
    found["load_average"] = round(os.getloadavg()[0], 2)
    if device == "cuda":
        found["gpu"] = info["cuda_devices"][0]
    return found


def versions() -> dict[str, str]:
    """Versions of what took part."""
    found = {"python": platform.python_version()}
    for name in ("tiledattn", "numpy", "torch", "jax", "cupy-cuda13x"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, metavar="FILE", help="a JSON file to keep the figures in")
    options = parser.parse_args()
    ta.set_num_threads(1)
    figures = measure(collect(options.device))
    width = max(map(len, figures))
    for name, value in figures.items():
        print(f"{name:{width}}  {value:8.2f} us")
    if options.out:
        table = [{"call": name, "us": round(value, 2)} for name, value in figures.items()]
        result = {
            "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
            "command": shlex.join(["python", "benchmarks/bench_host.py", *sys.argv[1:]]),
            "machine": machine(options.device),
            "versions": versions(),
            "table": table,
        }
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
