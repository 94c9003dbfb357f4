# SPDX-License-Identifier: Apache-2.0
"""The same cases under each CPU instruction set of this machine, one process each."""

from __future__ import annotations

import json

import core_set
import processes
import quantised
import tiledattn as ta


def test_core_set(isa):
    said = json.loads(processes.run("core_set.py", TILEDATTN_CPU_ISA=isa))
    kinds = len(quantised.KV_DTYPES) * len(quantised.SCALES)
    quantised_runs = (len(core_set.QUANTISED) + len(core_set.BYTES)) * kinds
    paged = len(core_set.PAGED) + len(core_set.PREFILL)
    wanted = 3 * (len(core_set.FLASH) + paged + len(core_set.TILED) + quantised_runs)
    assert said == {"isa": isa, "count": wanted}


def test_an_unknown_instruction_set_is_refused_by_name():
    code = """
import numpy as np, tiledattn as ta
x = np.zeros((1, 1, 1, 8), np.float32)
try:
    ta.flash_attention(x, x, x)
except ValueError as error:
    print(error)
"""
    said = processes.run(code, TILEDATTN_CPU_ISA="abacus")
    names = ", ".join(ta.info()["cpu_isas"])
    expected = f"{names}, which this machine and build have"
    assert said.strip() == f'TILEDATTN_CPU_ISA: got "abacus"; expected {expected}'
