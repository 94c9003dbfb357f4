# SPDX-License-Identifier: Apache-2.0
"""A small set of cases over every operation, run as a script: under one CPU instruction set, or for a GPU's checkers.

TILEDATTN_CPU_ISA is read once, at first use, so each instruction set needs its own process. Prints JSON.

    python tests/core_set.py [cuda]
"""

from __future__ import annotations

import json
import os
import sys

import arrays
import calls
import cases
import compare
import quantised
import reference
import tiledattn as ta

FLASH = (
    "causal",
    "everything",
    "gqa_7",
    "d80",
    "d128",
    "d_odd",
    "d1",
    "dv_smaller",
    "window_both_sides",
    "sharp",
)
PAGED = ("decode", "empties", "ragged", "ragged_all", "decode_block_7", "d256", "long", "mqa_71")
TILED = ("decode", "empties", "positions_q_len_5", "everything", "block_1", "d_odd", "long")
QUANTISED = ("decode", "ragged_all", "decode_block_7", "long", "d_odd")
# A GPU has several kernels: many queries over pages, and 16 rows over wide heads of bytes.
PREFILL = (
    cases.Paged("d64", (200, 0, 33), (130, 5, 33), 16, 4, 2, 64),
    cases.Paged("d128", (200, 33), (130, 5), 8, 4, 2, 128),
    cases.Paged("d256", (90, 17), 40, 64, 2, 1, 256),
)
BYTES = (
    cases.Paged("rows_16_d128", (300, 40), None, 16, 32, 2, 128),
    cases.Paged("rows_16_d64", (300, 40), 2, 16, 16, 2, 64),
    cases.Paged("d256", (200, 9), None, 16, 4, 2, 256),
)


def _named(all_cases, names):
    return [case for case in all_cases if case.name in names]


def run(carrier, dtype, flash, paged, tiled):
    """Returns how many cases ran, all of them right."""
    for case in flash:
        qkv, score = case.make(dtype)
        compare.result_close(calls.run_flash(carrier, qkv, score), reference.flash(*qkv, **score), dtype)
    for case in paged:
        data = case.make(dtype)
        compare.result_close(calls.run_paged(carrier, data), calls.want_paged(data), dtype)
    for case in tiled:
        data = case.make(dtype)
        compare.result_close(calls.run_tiled(carrier, data), calls.want_tiled(data).finalize(), dtype)
    return len(flash) + len(paged) + len(tiled)


def run_quantised(carrier, dtype, paged):
    """The same over caches of bytes, with scales of each kind."""
    kinds = [(kv_dtype, shape) for kv_dtype in quantised.KV_DTYPES for shape in quantised.SCALES]
    for case in paged:
        for kv_dtype, shape in kinds:
            made = quantised.make(case, dtype, kv_dtype, shape)
            compare.result_close(made.run(carrier), made.want(), dtype)
    return len(paged) * len(kinds)


def main():
    carrier = arrays.make_carrier(sys.argv[1] if len(sys.argv) > 1 else "cpu")
    count = 0
    for dtype in arrays.DTYPES:
        flash, tiled = _named(cases.FLASH, FLASH), _named(cases.TILED, TILED)
        count += run(carrier, dtype, flash, [*_named(cases.PAGED, PAGED), *PREFILL], tiled)
        count += run_quantised(carrier, dtype, [*_named(cases.PAGED, QUANTISED), *BYTES])
    if carrier.is_cuda:
        os.environ["TILEDATTN_CUDA_KERNELS"] = "portable"
        for dtype in ("bfloat16", "float16"):
            flash, tiled = (
                _named(cases.FLASH, ("causal", "everything", "d256")),
                _named(cases.TILED, ("decode",)),
            )
            paged = [*_named(cases.PAGED, ("decode_block_7", "ragged_all", "d256", "mqa_71")), *PREFILL]
            count += run(carrier, dtype, flash, paged, tiled)
    print(json.dumps({"isa": ta.info()["cpu_isa"], "count": count}))


if __name__ == "__main__":
    sys.exit(main())
