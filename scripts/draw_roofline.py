# SPDX-License-Identifier: Apache-2.0
"""Draw docs/kernels/forward.svg, the roofline of prefill, from benchmarks/results/forward.json.

Run it after each new record (needs matplotlib); scripts/update_docs.py --check says when the picture is older.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "forward.json"
PICTURE = ROOT / "docs" / "kernels" / "forward.svg"

# NVIDIA's data sheet of the H200 (SXM): dense bfloat16 products, and the memory.
PEAK_TFLOPS = 989.0
PEAK_TB_S = 4.8
COLORS = {64: "#d95f02", 128: "#1b9e77", 256: "#7570b3"}
BYTES_OF_ITEM = 2


def intensity(cell: dict) -> float:
    """FLOP for each byte of q, K, V and the result, each moved once."""
    rows = cell["batch"] * cell["tokens"]
    items = rows * cell["head_dim"] * 2 * (cell["num_q_heads"] + cell["num_kv_heads"])
    flop = 4.0 * rows * cell["num_q_heads"] * cell["tokens"] * cell["head_dim"]
    return (flop / 2 if cell["causal"] else flop) / (items * BYTES_OF_ITEM)


def main() -> int:
    """Write the picture."""
    record = json.loads(RESULT.read_text())
    # Equal inputs give equal bytes, and text stays text.
    mpl.rcParams.update({"svg.hashsalt": "tiledattn", "svg.fonttype": "none", "font.size": 9})
    figure, axes = plt.subplots(figsize=(7.2, 4.4), layout="constrained")
    ends = (10.0, 20000.0)
    ridge = PEAK_TFLOPS / PEAK_TB_S
    axes.plot((ends[0], ridge, ends[1]), (ends[0] * PEAK_TB_S, PEAK_TFLOPS, PEAK_TFLOPS), color="black", lw=1)
    axes.annotate(f"{PEAK_TB_S} TB/s", (14, 14 * PEAK_TB_S * 1.2), rotation=40)
    axes.annotate(f"{PEAK_TFLOPS:.0f} TFLOP/s", (4000, PEAK_TFLOPS * 1.04))
    for result in record["results"]:
        cell, rates = result["cell"], {name: x["median"] for name, x in result["tflops"].items()}
        color, x = COLORS[cell["head_dim"]], intensity(cell)
        ours = rates.pop("tiledattn", None)
        if ours is None:
            continue
        if rates:
            axes.plot((x, x), (ours, max(rates.values())), color=color, lw=0.6)
            axes.plot(x, max(rates.values()), "_", color=color, ms=7)
        axes.plot(x, ours, "^" if cell["causal"] else "o", color=color, ms=4.5)
    for head_dim, color in COLORS.items():
        axes.plot([], [], "s", color=color, label=f"head_dim {head_dim}")
    for mark, label in (("o", "tiledattn, full"), ("^", "tiledattn, causal"), ("_", "best peer of the cell")):
        axes.plot([], [], mark, color="gray", label=label)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=(15, 1500))
    axes.set(xlabel="FLOP for each byte of q, K, V and the result", ylabel="TFLOP/s")
    axes.legend(loc="lower right", frameon=False)
    axes.set_title(f"{record['machine']['gpu']}, data sheet roofs, measured {record['date']}", fontsize=9)
    figure.savefig(PICTURE, metadata={"Date": None, "Creator": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
