# SPDX-License-Identifier: Apache-2.0
"""Attention over KV in host memory, against the speed of the link and against attention in place.

    python benchmarks/bench_stream.py                                      # the best device present
    python benchmarks/bench_stream.py --device cpu --out benchmarks/results/stream_cpu.json
    python benchmarks/bench_stream.py --only decode --total-gib 64

On a GPU each cell is measured against plain copies of the same pinned bytes in the same run, and against
copying all KV first and then attending to it; on the CPU against `paged_attention` over the same pool.
Contenders take turns, round after round, and count by their median. Results are compared with attention in
place before anything is timed. A GPU needs torch.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiledattn as ta
from bench_cpu import machine

MIB = 2**20
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128


@dataclass(frozen=True)
class Cell:
    """Calls over ``mib`` of KV each; a table in order, or permuted so that no two blocks are neighbours.

    K and V of a block lie side by side, or ``apart``: then a block is two pieces of memory.
    """

    name: str
    mib: int
    block_size: int
    permuted: bool = False
    scratch_mib: int = 24
    prefetch: str = ""  # "own": each call's fetching begins right before it; "next": one call earlier
    dtype: str = "float16"
    num_kv_heads: int = NUM_KV_HEADS
    apart: bool = False

    @property
    def num_q_heads(self) -> int:
        """Four for each KV head."""
        return self.num_kv_heads * NUM_Q_HEADS // NUM_KV_HEADS

    @property
    def block_bytes(self) -> int:
        """Bytes of K and V of a block."""
        return 2 * self.block_size * self.num_kv_heads * HEAD_DIM * np.dtype(self.dtype).itemsize

    @property
    def num_blocks(self) -> int:
        """Blocks of one call."""
        return self.mib * MIB // self.block_bytes


GPU_CELLS = [
    Cell("64 MiB", 64, 64),
    Cell("64 MiB, permuted", 64, 64, permuted=True),
    Cell("64 MiB, permuted, blocks of 16", 64, 16, permuted=True),
    Cell("256 MiB", 256, 64, scratch_mib=96),
    Cell("256 MiB, permuted", 256, 64, permuted=True, scratch_mib=96),
    Cell("16 MiB", 16, 64, scratch_mib=12),
    Cell("16 MiB, begun before its call", 16, 64, scratch_mib=12, prefetch="own"),
    Cell("16 MiB, prefetched", 16, 64, scratch_mib=12, prefetch="next"),
    Cell("64 MiB, begun before its call", 64, 64, prefetch="own"),
    Cell("64 MiB, prefetched", 64, 64, prefetch="next"),
    Cell("64 MiB, permuted, blocks of 16, prefetched", 64, 16, permuted=True, prefetch="next"),
    *(
        Cell(f"64 MiB, pieces of {kib} KiB", 64, 4 * kib, permuted=True, num_kv_heads=1, apart=True)
        for kib in (2, 4, 16)
    ),
]
CPU_CELLS = [
    Cell(
        f"256 MiB in tiles of {tile} MiB, {dtype}", 256, 16, permuted=True, scratch_mib=3 * tile, dtype=dtype
    )
    for tile in (8, 32)
    for dtype in ("float16", "float32")
]


def blocks_of(cell: Cell, elements: Any) -> tuple[Any, Any]:
    """K and V, ``[blocks, tokens, heads, dim]``, of a flat array of elements of any library."""
    if not cell.apart:
        shape = (-1, 2, cell.num_kv_heads, cell.block_size, HEAD_DIM)
        return ta.scratch_pool_views(elements.reshape(shape))
    return tuple(elements.reshape(2, -1, cell.block_size, cell.num_kv_heads, HEAD_DIM))


def make_pool(cell: Cell, mib: int) -> tuple[ta.PoolSource, np.ndarray]:
    """Random KV in host memory that the library allocates, and its bytes; 64 MiB of it, repeated."""
    num_blocks = mib * MIB // cell.block_bytes
    geometry = ta.TileGeometry(
        num_blocks=num_blocks,
        block_size=cell.block_size,
        num_kv_heads=cell.num_kv_heads,
        head_dim=HEAD_DIM,
        dtype=cell.dtype,
    )
    pool = ta.PoolSource.allocate(geometry)
    memory = np.asarray(pool._compiled.bytes())
    if cell.apart:
        pool = ta.PoolSource(*blocks_of(cell, memory.view(cell.dtype)))
    unit = min(num_blocks, 64 * MIB // geometry.block_bytes)
    generator = np.random.default_rng(0)
    for view in (pool.k_pool, pool.v_pool):
        some = generator.standard_normal((unit, *view.shape[1:]), dtype=np.float32).astype(cell.dtype)
        for first in range(0, num_blocks, unit):
            view[first : first + unit] = some[: num_blocks - first]
    return pool, memory


def make_streaming(device: str, cell: Cell) -> ta.StreamingAttention:
    """Tiles that fill a third of the scratch, but for the gap between K and V where these are apart."""
    tile_bytes = cell.scratch_mib * MIB // 3 - (256 if cell.apart else 0)
    dims = ta.TiledAttentionDims(
        max_seqs=1,
        num_q_heads=cell.num_q_heads,
        num_kv_heads=cell.num_kv_heads,
        head_dim=HEAD_DIM,
        block_size=cell.block_size,
        tile_capacity=tile_bytes // cell.block_bytes,
    )
    return ta.StreamingAttention(dims, device=device, scratch_bytes=cell.scratch_mib * MIB)


def table(cell: Cell, num_blocks: int, seed: int = 1) -> np.ndarray:
    """Block ids of a call over the whole pool, or of as many blocks as the cell has."""
    ids = np.arange(cell.num_blocks) % num_blocks
    return np.random.default_rng(seed).permutation(ids) if cell.permuted else ids


def median_seconds(
    runs: dict[str, Callable[[], None]], rounds: int, settle: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds of each run in each round; ``settle`` waits for the device."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            settle()
            begin = time.perf_counter()
            run()
            settle()
            times[name].append(time.perf_counter() - begin)
    return times


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Norm of the difference over the norm of what is right."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def check_error(cell: str, error: float) -> None:
    """Stop where a result is wrong: its time would mean nothing."""
    if not error <= 4e-3:
        raise SystemExit(f"{cell}: differs from attention in place by {error:.1e}")


def summary(cell: Cell, times: dict[str, list[float]], calls: int) -> dict[str, Any]:
    """Medians and rates of one cell; each time is of ``calls`` calls."""
    num_bytes = cell.num_blocks * cell.block_bytes * calls
    rates = {name: num_bytes / statistics.median(values) / 1e9 for name, values in times.items()}
    base = rates["streaming"]
    return {
        "cell": asdict(cell),
        "calls": calls,
        "rounds": len(times["streaming"]),
        "GB/s": {name: round(rate, 2) for name, rate in rates.items()},
        "best GB/s": {name: round(num_bytes / min(values) / 1e9, 2) for name, values in times.items()},
        "streaming / others": {name: round(base / rate, 3) for name, rate in rates.items()},
    }


def show(result: dict[str, Any]) -> None:
    """One line for each contender."""
    print(result["cell"]["name"])
    for name, rate in result["GB/s"].items():
        print(f"  {name:30} {rate:8.2f} GB/s   streaming / this {result['streaming / others'][name]:.3f}")
    sys.stdout.flush()


def measure_cpu(cell: Cell, rounds: int) -> dict[str, Any]:
    """Streaming against paged_attention over the same pool."""
    pool, _ = make_pool(cell, cell.mib)
    ids = table(cell, pool.num_blocks)
    length = cell.num_blocks * cell.block_size
    q = np.random.default_rng(2).standard_normal((1, cell.num_q_heads, HEAD_DIM)).astype(cell.dtype)
    streaming = make_streaming("cpu", cell)
    sequences = [ta.StreamSequence(length, ta.KvPart(pool, ids))]
    out, in_place = np.empty_like(q), np.empty_like(q)
    block_table, seq_lens = ids[None], np.array([length])
    runs = {
        "streaming": lambda: streaming.attend(q, sequences, out=out),
        "paged_attention": lambda: ta.paged_attention(
            q, pool.k_pool, pool.v_pool, block_table, seq_lens, out=in_place
        ),
    }
    times = median_seconds(runs, rounds, lambda: None)
    check_error(cell.name, relative_error(out, in_place))
    return summary(cell, times, 1)


def measure_gpu(cell: Cell, rounds: int) -> dict[str, Any]:
    """Streaming against copies of the same bytes, and against copying first and attending then."""
    import torch

    calls = max(1, 256 // cell.mib)  # in a row, as the layers of a model
    pool, memory = make_pool(cell, cell.mib)
    ids = table(cell, pool.num_blocks)
    length = cell.num_blocks * cell.block_size
    q = torch.randn(1, cell.num_q_heads, HEAD_DIM, device="cuda", dtype=torch.float16)
    streaming = make_streaming("cuda", cell)
    sequences = [ta.StreamSequence(length, ta.KvPart(pool, ids))]
    out, in_place = torch.empty_like(q), torch.empty_like(q)
    streaming.attend(q, sequences, out=out)  # pins the pool

    host = torch.from_numpy(memory)
    device = torch.empty(host.shape, dtype=torch.uint8, device="cuda")
    pools = blocks_of(cell, device.view(torch.float16))
    block_table = torch.from_numpy(ids.astype(np.int32))[None].cuda()
    seq_lens = torch.tensor([length], dtype=torch.int32, device="cuda")

    def stream() -> None:
        for call in range(calls):
            if cell.prefetch and (cell.prefetch == "own" or call == 0):
                streaming.prefetch(sequences)
            if cell.prefetch == "next" and call + 1 < calls:
                streaming.prefetch(sequences)
            streaming.attend(q, sequences, out=out)

    def copy() -> None:
        for _ in range(calls):
            device.copy_(host, non_blocking=True)

    def copy_then_attend() -> None:
        for _ in range(calls):
            device.copy_(host, non_blocking=True)
            ta.paged_attention(q, *pools, block_table, seq_lens, out=in_place)

    runs = {"streaming": stream, "copy": copy, "copy, then paged_attention": copy_then_attend}
    times = median_seconds(runs, rounds, torch.cuda.synchronize)
    check_error(cell.name, relative_error(out.cpu().numpy(), in_place.cpu().numpy()))
    return summary(cell, times, calls)


def measure_decode(total_gib: float, scratch_mib: int, block_size: int) -> dict[str, Any]:
    """One step over far more KV than the scratch holds: 64 MiB in host memory, named again and again."""
    import torch

    cell = Cell("decode", int(total_gib * 1024), block_size, permuted=True, scratch_mib=scratch_mib)
    pool, memory = make_pool(cell, 64)
    ids = table(cell, pool.num_blocks)
    length = cell.num_blocks * block_size
    q = torch.randn(1, cell.num_q_heads, HEAD_DIM, device="cuda", dtype=torch.float16)
    before = torch.cuda.mem_get_info()[0]
    streaming = make_streaming("cuda", cell)
    sequences = [ta.StreamSequence(length, ta.KvPart(pool, ids))]
    warm_up = [ta.StreamSequence(64 * block_size, ta.KvPart(pool, ids[:64]))]
    streaming.attend(q, warm_up)
    streaming.reset_stats()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    out = streaming.attend(q, sequences)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    used = before - torch.cuda.mem_get_info()[0]
    stats = streaming.stats

    host = torch.from_numpy(memory)
    device = torch.empty(host.shape, dtype=torch.uint8, device="cuda")
    copies = median_seconds(
        {"copy": lambda: device.copy_(host, non_blocking=True)}, 15, torch.cuda.synchronize
    )
    copy_rate = host.numel() / statistics.median(copies["copy"]) / 1e9

    # The same tiles where they lie: equal bits. All keys in one call: equal within rounding.
    k_pool, v_pool = blocks_of(cell, device.view(torch.float16))
    in_place = streaming.attend(q, [ta.StreamSequence(length, ta.KvPart(ta.PoolSource(k_pool, v_pool), ids))])
    whole = ta.paged_attention(
        q,
        k_pool,
        v_pool,
        torch.from_numpy(ids.astype(np.int32))[None].cuda(),
        torch.tensor([length], dtype=torch.int64, device="cuda"),
    )
    error = relative_error(out.cpu().numpy(), whole.cpu().numpy())
    check_error("decode", error)
    rate = cell.num_blocks * cell.block_bytes / seconds / 1e9
    result = {
        "GiB of KV": total_gib,
        "tokens": length,
        "block_size": block_size,
        "scratch MiB": scratch_mib,
        "seconds": round(seconds, 4),
        "GB/s": round(rate, 2),
        "copy of 64 MiB, GB/s": round(copy_rate, 2),
        "share of the copy rate": round(rate / copy_rate, 3),
        "link use": round(stats.link_use, 3),
        "stall seconds": round(stats.stall_seconds, 4),
        "GPU memory taken, MiB": round(used / MIB),
        "bits equal to the same tiles in place": bool(torch.equal(out, in_place)),
        "difference from one call": float(f"{error:.1e}"),
    }
    print("\n".join(f"  {name:40} {value}" for name, value in result.items()), flush=True)
    print(stats, flush=True)
    return result


def table_rows(results: list[dict[str, Any]], decodes: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return what the documentation shows; the yardstick is a plain copy, or attention in place."""
    rows = []
    for result in results:
        cell, rates = result["cell"], result["GB/s"]
        yardstick = "copy" if "copy" in rates else "paged_attention"
        milliseconds = cell["mib"] * MIB / rates["streaming"] / 1e6
        rows.append(
            {
                "KV of a call": cell["name"],
                "scratch, MiB": str(cell["scratch_mib"]),
                "ms": f"{milliseconds:.2f}",
                "streaming, GB/s": f"{rates['streaming']:.1f}",
                f"{yardstick}, GB/s": f"{rates[yardstick]:.1f}",
                "share": f"{result['streaming / others'][yardstick]:.1%}",
            }
        )
    for decode in decodes:
        rows.append(
            {
                "KV of a call": f"{decode['GiB of KV']:g} GiB, permuted, blocks of {decode['block_size']}",
                "scratch, MiB": str(decode["scratch MiB"]),
                "ms": f"{decode['seconds'] * 1e3:.1f}",
                "streaming, GB/s": f"{decode['GB/s']:.1f}",
                "copy, GB/s": f"{decode['copy of 64 MiB, GB/s']:.1f}",
                "share": f"{decode['share of the copy rate']:.1%}",
            }
        )
    return rows


def main() -> None:
    """Run the cells asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the best one present by default")
    parser.add_argument("--out", type=Path, help="write the results there as JSON")
    parser.add_argument("--only", help="run only cells whose name contains this; 'decode' is the long one")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--total-gib", type=float, default=64, help="KV of the long decode; 0 leaves it out")
    args = parser.parse_args()
    on_gpu = (args.device or ("cuda" if ta.info()["cuda_devices"] else "cpu")) == "cuda"
    before = machine()
    cells, results = (GPU_CELLS if on_gpu else CPU_CELLS), []
    for cell in cells:
        if args.only and args.only not in cell.name:
            continue
        results.append((measure_gpu if on_gpu else measure_cpu)(cell, args.rounds))
        show(results[-1])
    decodes = []
    if on_gpu and args.total_gib and (not args.only or args.only in "decode"):
        decodes = [measure_decode(args.total_gib, 240, block_size) for block_size in (64, 16)]
    if args.out:
        versions = {"tiledattn": ta.__version__, "python": platform.python_version(), "numpy": np.__version__}
        if on_gpu:
            import torch

            versions["torch"] = torch.__version__
            before["gpu"] = torch.cuda.get_device_name()
        report = {
            "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
            "command": shlex.join(["python", *sys.argv]),
            "machine": before,
            "versions": versions,
            "table": table_rows(results, decodes),
            "results": results,
            "decode": decodes,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
