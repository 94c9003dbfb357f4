# SPDX-License-Identifier: Apache-2.0
"""A small set of cases over every operation, run as a script: under one CPU instruction set, or for a GPU's checkers.

TILEDATTN_CPU_ISA is read once, at first use, so each instruction set needs its own process. Prints JSON.

    python tests/core_set.py [cuda]
"""

from __future__ import annotations

import json
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


def main():
    carrier = arrays.make_carrier(sys.argv[1] if len(sys.argv) > 1 else "cpu")
    count = 0
    for dtype in arrays.DTYPES:
        for case in cases.FLASH:
            if case.name in FLASH:
                qkv, score = case.make(dtype)
                compare.result_close(
                    calls.run_flash(carrier, qkv, score), reference.flash(*qkv, **score), dtype
                )
                count += 1
        for case in cases.PAGED:
            if case.name in PAGED:
                data = case.make(dtype)
                compare.result_close(calls.run_paged(carrier, data), calls.want_paged(data), dtype)
                count += 1
        for case in cases.TILED:
            if case.name in TILED:
                data = case.make(dtype)
                compare.result_close(calls.run_tiled(carrier, data), calls.want_tiled(data).finalize(), dtype)
                count += 1
        for case in cases.PAGED:
            if case.name in QUANTISED:
                for kv_dtype in quantised.KV_DTYPES:
                    for shape in quantised.SCALES:
                        made = quantised.make(case, dtype, kv_dtype, shape)
                        compare.result_close(made.run(carrier), made.want(), dtype)
                        count += 1
    print(json.dumps({"isa": ta.info()["cpu_isa"], "count": count}))


if __name__ == "__main__":
    sys.exit(main())
