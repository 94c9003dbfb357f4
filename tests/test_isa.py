# SPDX-License-Identifier: Apache-2.0
"""The same cases under each CPU instruction set of this machine, one process each."""

from __future__ import annotations

import json
import re
from pathlib import Path

import core_set
import processes
import pytest
import quantised
import tiledattn as ta

TILE_FLAGS = {"amx_tile", "amx_bf16", "avx512_bf16", "avx512vbmi"}
# arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA)
ASK_FOR_TILES = "import ctypes; print(ctypes.CDLL(None).syscall(158, 0x1023, 18))"


def test_core_set(isa):
    said = json.loads(processes.run("core_set.py", TILEDATTN_CPU_ISA=isa))
    kinds = len(quantised.KV_DTYPES) * len(quantised.SCALES)
    quantised_runs = (len(core_set.QUANTISED) + len(core_set.BYTES)) * kinds
    paged = len(core_set.PAGED) + len(core_set.PREFILL)
    wanted = 3 * (len(core_set.FLASH) + paged + len(core_set.TILED) + quantised_runs)
    assert said == {"isa": isa, "count": wanted}


def test_products_of_one_sign_stay_precise(isa):
    code = """
import arrays, test_flash
for q_len in (1, 12):
    test_flash.test_products_of_one_sign_stay_precise(q_len, 256, arrays.make_carrier("cpu"))
"""
    assert processes.run(code, TILEDATTN_CPU_ISA=isa) == ""


def test_tiles_are_used_where_cpu_and_system_have_them():
    flags = (
        set(re.findall(r"\w+", Path("/proc/cpuinfo").read_text()))
        if Path("/proc/cpuinfo").exists()
        else set()
    )
    missing = TILE_FLAGS - flags
    offered = "amxbf16" in ta.info()["cpu_isas"]
    if missing:
        assert not offered
        pytest.skip(f"no {', '.join(sorted(missing))} in /proc/cpuinfo")
    refused = processes.run(ASK_FOR_TILES).strip()
    assert offered == (refused == "0")


@pytest.mark.parametrize("chosen", [None, *ta.info()["cpu_isas"]])
def test_a_process_has_tiles_only_where_their_set_is_chosen(chosen):
    """None: by default."""
    if "amxbf16" not in ta.info()["cpu_isas"]:
        pytest.skip("no amxbf16 in tiledattn.info()")
    code = """
import ctypes, platform
import numpy as np, tiledattn as ta
x = np.zeros((1, 1, 1, 8), np.float32)
ta.flash_attention(x, x, x)
ta.info()
permitted = ctypes.c_uint64(0)
if platform.machine() == "x86_64":  # arch_prctl(ARCH_GET_XCOMP_PERM); 0 where Linux does not know it
    ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(permitted))
print(permitted.value >> 18 & 1)
"""
    assert processes.run(code, TILEDATTN_CPU_ISA=chosen).strip() == str(int(chosen in (None, "amxbf16")))


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
