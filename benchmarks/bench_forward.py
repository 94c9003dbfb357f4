# SPDX-License-Identifier: Apache-2.0
"""Prefill attention on one GPU against other libraries, in TFLOP/s.

    python benchmarks/bench_forward.py                                        # print a table
    python benchmarks/bench_forward.py --out benchmarks/results/forward.json  # and keep it
    python benchmarks/bench_forward.py --cells d128 --contestants tiledattn,torch-cudnn
    python benchmarks/bench_forward.py --kernels portable --contestants tiledattn,torch-flash
    python benchmarks/bench_forward.py --cells causal --contestants tiledattn,tiledattn-p16,tiledattn-p64
    python benchmarks/bench_forward.py --table chunked --contestants tiledattn,tiledattn-uncut,flash-attn-3

A GPU at its power limit changes its clock all the time, so only neighbours in time can be compared: after a
pre-heat every cell times its contestants in slices of some milliseconds, in a new random order each round; a
contestant's figure is its median over the rounds. Each output is compared with float64 first. FLOP are
4 * B * Hq * Sq * Sk * D, less what a causal mask leaves out. Needs torch; libraries that are not installed are named
and skipped.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import json
import os
import platform
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import tiledattn as ta
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

Run = Callable[[], object]


@dataclass(frozen=True)
class Cell:
    """One shape; q has as many tokens as there are keys, or is the last chunk of them."""

    head_dim: int
    batch: int
    num_q_heads: int
    num_kv_heads: int
    tokens: int
    causal: bool
    dtype: str = "bfloat16"
    keys_before: int = 0  # the first token of q

    @property
    def keys(self) -> int:
        """Of each sequence."""
        return self.keys_before + self.tokens

    @property
    def name(self) -> str:
        """Short and unique."""
        heads = (
            f"{self.num_q_heads}"
            if self.num_q_heads == self.num_kv_heads
            else (f"{self.num_q_heads}/{self.num_kv_heads}")
        )
        kind = "causal" if self.causal else "full"
        half = "_fp16" if self.dtype == "float16" else ""
        behind = f"_of_{self.keys}" if self.keys_before else ""
        return f"d{self.head_dim}_{kind}_{self.batch}x{heads}x{self.tokens}{behind}{half}"

    @property
    def flop(self) -> float:
        """Floating-point operations that have to be done."""
        pairs = self.tokens * self.keys - (self.tokens**2 / 2 if self.causal else 0)
        return 4.0 * self.batch * self.num_q_heads * pairs * self.head_dim


def chunked_cells() -> list[Cell]:
    """The last tokens of one long prompt."""
    return [
        Cell(128, 1, 32, 8, tokens, True, keys_before=keys - tokens)
        for keys in (32768, 131072)
        for tokens in (32, 128, 512)
    ]


def prefill_cells() -> list[Cell]:
    """16k tokens in all, hidden size 2048; GQA; float16; small sequences."""
    cells = []
    for head_dim, heads in ((128, 16), (64, 32), (256, 8)):
        for tokens in (512, 1024, 2048, 4096, 8192, 16384):
            for causal in (False, True):
                cells.append(Cell(head_dim, 16384 // tokens, heads, heads, tokens, causal))
    cells.append(Cell(128, 1, 32, 8, 8192, True))
    cells.append(Cell(128, 2, 16, 16, 8192, False, "float16"))
    for head_dim in (64, 128):
        for tokens in (64, 128, 256):
            for causal in (False, True):
                cells.append(Cell(head_dim, 256, 16, 16, tokens, causal))
    return cells


TABLES = {"prefill": prefill_cells, "chunked": chunked_cells}


@dataclass(frozen=True)
class Inputs:
    """Arrays of a cell, ``[batch, tokens or keys, heads, head_dim]``."""

    cell: Cell
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def make_inputs(cell: Cell) -> Inputs:
    """Normal random numbers: constant ones would draw less power and look faster."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(tokens: int, heads: int) -> torch.Tensor:
        shape = (cell.batch, tokens, heads, cell.head_dim)
        return torch.randn(shape, generator=generator, device="cuda").to(getattr(torch, cell.dtype))

    q = normal(cell.tokens, cell.num_q_heads)
    return Inputs(cell, q, *(normal(cell.keys, cell.num_kv_heads) for _ in range(2)))


def tiledattn(inputs: Inputs) -> Run:
    """This library."""
    out = torch.empty_like(inputs.q)
    q, k, v, causal = inputs.q, inputs.k, inputs.v, inputs.cell.causal
    return lambda: ta.flash_attention(q, k, v, causal=causal, out=out)


def tiledattn_uncut(inputs: Inputs) -> Run:
    """This library, packed: the keys of packed sequences are not cut into segments."""
    cell = inputs.cell
    q, k, v = (x.flatten(0, 1) for x in (inputs.q, inputs.k, inputs.v))
    cu_q, cu_k = (
        torch.arange(cell.batch + 1, dtype=torch.int32, device="cuda") * n for n in (cell.tokens, cell.keys)
    )
    out = torch.empty_like(q)

    def run() -> torch.Tensor:
        ta.flash_attention(q, k, v, causal=cell.causal, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, out=out)
        return out.view(inputs.q.shape)

    return run


def _paged(inputs: Inputs, block_size: int) -> Run:
    """The same keys in blocks of a paged cache, in random order."""
    cell = inputs.cell
    if not cell.causal:
        raise ValueError("prefill over a paged cache is timed with a causal mask")
    num_blocks = inputs.k.shape[0] * inputs.k.shape[1] // block_size
    places = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).cuda()

    def pool_of(x: torch.Tensor) -> torch.Tensor:
        blocks = x.reshape(num_blocks, block_size, *x.shape[2:])
        return torch.empty_like(blocks).index_copy_(0, places, blocks)

    table = places.to(torch.int32).view(cell.batch, -1)
    seq_lens = torch.full((cell.batch,), cell.keys, dtype=torch.int32, device="cuda")
    k_pool, v_pool, out = pool_of(inputs.k), pool_of(inputs.v), torch.empty_like(inputs.q)
    return lambda: ta.paged_attention(inputs.q, k_pool, v_pool, table, seq_lens, causal=True, out=out)


def tiledattn_p16(inputs: Inputs) -> Run:
    """This library, blocks of 16 tokens."""
    return _paged(inputs, 16)


def tiledattn_p64(inputs: Inputs) -> Run:
    """This library, blocks of 64 tokens."""
    return _paged(inputs, 64)


def _sdpa(inputs: Inputs, backend: SDPBackend) -> Run:
    cell = inputs.cell
    # Heads first, contiguous: the layout that torch's own kernels like best.
    q, k, v = (x.transpose(1, 2).contiguous() for x in (inputs.q, inputs.k, inputs.v))
    gqa = cell.num_q_heads != cell.num_kv_heads
    mask = None
    if cell.causal and cell.keys_before:  # torch's own flag aligns the mask with the first key
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(cell.tokens, cell.keys)

    def run() -> torch.Tensor:
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, mask, is_causal=cell.causal and mask is None, enable_gqa=gqa
            )
        return out.transpose(1, 2)

    return run


def torch_cudnn(inputs: Inputs) -> Run:
    """torch's scaled_dot_product_attention, cuDNN."""
    return _sdpa(inputs, SDPBackend.CUDNN_ATTENTION)


def torch_flash(inputs: Inputs) -> Run:
    """torch's scaled_dot_product_attention, its copy of FlashAttention-2."""
    return _sdpa(inputs, SDPBackend.FLASH_ATTENTION)


def flash_attention_3(inputs: Inputs) -> Run:
    """FlashAttention-3; of a long prompt's last tokens it chooses itself how often to split the keys."""
    from flash_attn_interface import flash_attn_func

    options = {"causal": inputs.cell.causal, "num_splits": 0 if inputs.cell.keys_before else 1}

    def run() -> torch.Tensor:
        out = flash_attn_func(inputs.q, inputs.k, inputs.v, **options)
        return out[0] if isinstance(out, tuple) else out

    return run


CONTESTANTS: dict[str, Callable[[Inputs], Run]] = {
    "tiledattn": tiledattn,
    "tiledattn-uncut": tiledattn_uncut,
    "tiledattn-p16": tiledattn_p16,
    "tiledattn-p64": tiledattn_p64,
    "torch-cudnn": torch_cudnn,
    "torch-flash": torch_flash,
    "flash-attn-3": flash_attention_3,
}


def reference(inputs: Inputs, batch: int, head: int) -> torch.Tensor:
    """float64 attention of one head; float32 where that would take too long."""
    cell = inputs.cell
    wide = torch.float64 if cell.tokens <= 4096 else torch.float32
    kv_head = head * cell.num_kv_heads // cell.num_q_heads
    q = inputs.q[batch, :, head].to(wide)
    k, v = (x[batch, :, kv_head].to(wide) for x in (inputs.k, inputs.v))
    scores = q @ k.T * cell.head_dim**-0.5
    if cell.causal:
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1 + cell.keys_before)
        scores.masked_fill_(hidden, float("-inf"))
    return scores.softmax(-1) @ v


def references(inputs: Inputs) -> dict[tuple[int, int], torch.Tensor]:
    """The first and the last head, which all contestants are compared with."""
    cell = inputs.cell
    places = {(0, 0), (cell.batch - 1, cell.num_q_heads - 1)}
    return {place: reference(inputs, *place).double() for place in places}


def relative_error(out: torch.Tensor, wanted: dict[tuple[int, int], torch.Tensor]) -> float:
    """Over the heads of the reference."""
    wrong, size = 0.0, 0.0
    for (batch, head), want in wanted.items():
        wrong += (out[batch, :, head].double() - want).square().sum().item()
        size += want.square().sum().item()
    return (wrong / size) ** 0.5


def seconds(run: Run, calls: int) -> float:
    """Time of one call among ``calls``."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3 / calls


def graph_of(run: Run) -> Run:
    """The call in a CUDA graph, so that short ones are not timed by their Python part."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(GRAPH_CALLS):
            run()

    def replay(arrays_of: Run = run) -> None:  # whose arrays must live as long as the graph
        graph.replay()

    return replay


GRAPH_CALLS = 8
SHORT_S = 500e-6  # calls below this are timed as graphs


def preheat(duration_s: float) -> None:
    """Bring the GPU to the clock that it holds under load."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    end = time.monotonic() + duration_s
    while time.monotonic() < end:
        for _ in range(8):
            a @ a
        torch.cuda.synchronize()


def measure(cell: Cell, names: list[str], rounds: int, slice_s: float) -> dict:
    """All contestants of one cell."""
    inputs = make_inputs(cell)
    bound = {"bfloat16": 5e-3, "float16": 1e-3}[cell.dtype]
    wanted = references(inputs)
    runs, errors, skipped, per_slice = {}, {}, {}, {}
    for name in names:
        try:
            run = CONTESTANTS[name](inputs)
            errors[name] = relative_error(run(), wanted)
            if not errors[name] <= bound:
                skipped[name] = f"wrong: relative error {errors[name]:.2e}"
                continue
            once, calls = seconds(run, 3), 1
            if once < SHORT_S:
                run, calls = graph_of(run), GRAPH_CALLS
                run()
                once = seconds(run, 3)
            runs[name] = (run, calls)
            per_slice[name] = max(2, round(slice_s / once))
        except Exception as error:  # a library that refuses a shape must not end the run
            skipped[name] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    rates: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            run, calls = runs[name]
            rates[name].append(cell.flop * calls / seconds(run, per_slice[name]) / 1e12)
    return {
        "cell": asdict(cell) | {"name": cell.name},
        "tflops": {
            name: {"median": round(statistics.median(x), 1), "min": round(min(x), 1), "max": round(max(x), 1)}
            for name, x in rates.items()
        },
        "relative_error": {name: float(f"{x:.3g}") for name, x in errors.items()},
        "skipped": skipped,
    }


def is_peer(name: str) -> bool:
    """Whether a contestant is another library."""
    return not name.startswith("tiledattn")


def row(result: dict, names: list[str]) -> str:
    """One line of the table; the last column is this library over the best of the others."""
    tflops = {name: x["median"] for name, x in result["tflops"].items()}
    others = [x for name, x in tflops.items() if is_peer(name)]
    ratio = f"{tflops['tiledattn'] / max(others):.2f}" if others and "tiledattn" in tflops else "-"
    figures = "".join(f"{tflops[name]:>14.0f}" if name in tflops else f"{'-':>14}" for name in names)
    return f"{result['cell']['name']:<28}{figures}{ratio:>8}"


def machine() -> dict:
    """What the figures depend on."""
    found = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "tiledattn": ta.info()["cuda"],
        "version": ta.__version__,
        "kernels": os.environ.get("TILEDATTN_CUDA_KERNELS", "best"),
    }
    for name in ("tokenspeed_fa3", "flash_attn_3"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def table_row(result: dict) -> dict[str, str]:
    """Return what the documentation shows of one cell: TFLOP/s, and the ratio to the best peer."""
    medians = {name: rate["median"] for name, rate in result["tflops"].items()}
    row = {"cell": result["cell"]["name"]}
    asked = [name for name in CONTESTANTS if name in medians or name in result["skipped"]]
    row |= {f"{name}, TFLOP/s": f"{medians[name]:.0f}" if name in medians else "-" for name in asked}
    peers = [rate for name, rate in medians.items() if is_peer(name)]
    compared = peers and "tiledattn" in medians
    if any(is_peer(name) for name in asked):
        row["tiledattn / best peer"] = f"{medians['tiledattn'] / max(peers):.2f}" if compared else "-"
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the results here, as JSON")
    parser.add_argument("--table", choices=TABLES, default="prefill", help="which cells")
    parser.add_argument("--cells", default="", help="comma-separated; a cell is timed if its name holds one")
    parser.add_argument("--contestants", default=",".join(CONTESTANTS))
    parser.add_argument(
        "--kernels", choices=("best", "portable", "plain"), help="of this library; default best"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slice-ms", type=float, default=30.0)
    parser.add_argument("--limit-s", type=float, default=1e9, help="start no cell after this long")
    args = parser.parse_args()
    if args.kernels:
        os.environ["TILEDATTN_CUDA_KERNELS"] = args.kernels
    command = [
        "benchmarks/results/" + x.rsplit("/", 1)[-1] if x.endswith(".json") else x for x in sys.argv[1:]
    ]
    if not torch.cuda.is_available():
        print("bench_forward: needs a CUDA GPU")
        return 2
    names = args.contestants.split(",")
    wanted = args.cells.split(",")
    cells = [cell for cell in TABLES[args.table]() if any(word in cell.name for word in wanted)]
    begin, results, left_out = time.monotonic(), [], []
    preheat(1.5)
    print(f"{'TFLOP/s':<28}" + "".join(f"{name:>14}" for name in names) + f"{'ratio':>8}", flush=True)
    for cell in cells:
        if time.monotonic() - begin > args.limit_s:
            left_out.append(cell.name)
            continue
        results.append(measure(cell, names, args.rounds, args.slice_ms * 1e-3))
        print(row(results[-1], names), flush=True)
        for name, why in results[-1]["skipped"].items():
            print(f"    {name}: {why}", flush=True)
    if left_out:
        print(f"not timed for lack of time: {', '.join(left_out)}")
    if args.out:
        report = {
            "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
            "command": "python benchmarks/bench_forward.py " + shlex.join(command),
            "machine": machine(),
            "table": [table_row(result) for result in results],
            "results": results,
            "not_timed": left_out,
        }
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
