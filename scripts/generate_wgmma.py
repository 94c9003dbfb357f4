# SPDX-License-Identifier: Apache-2.0
"""Write src/cuda/common/wgmma_instructions.cuh: the wgmma instructions that the kernels of sm_90a use.

Each instruction names all its accumulator registers, 40 to 128 of them, which nobody should type.

    python scripts/generate_wgmma.py           # write the file
    python scripts/generate_wgmma.py --check   # only say whether it is current
"""

from __future__ import annotations

import sys
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "src/cuda/common/wgmma_instructions.cuh"
TYPES = {"__nv_bfloat16": "bf16", "__half": "f16"}
# N where A is in shared memory (scores: keys of a tile) and where A is in registers (output: columns of V).
SHARED_N = (64, 80, 96, 112, 128)
REGISTER_N = (64, 96, 128, 192, 256)

HEADER = """\
// SPDX-License-Identifier: Apache-2.0
// Written by scripts/generate_wgmma.py; change that instead.
//
// D[64, N] += A[64, 16] * B[16, N], float32 accumulators, asynchronous: see wgmma.cuh for what must
// stand around it. A thread's accumulators 4j .. 4j + 3 are columns 8j + 2 (lane % 4) + {0, 1} of
// rows 16 (warp % 4) + lane / 4 and, for the last two, of the row 8 below.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace tiledattn::cuda {

// clang-format off

/// A and B in shared memory, both with adjacent elements along K. accumulate == 0: D = A * B.
template <typename T, int kN>
struct WgmmaShared;

/// A in registers, as packed accumulators of an earlier product; B in shared memory with adjacent elements along N.
template <typename T, int kN>
struct WgmmaRegisters;
"""

FOOTER = """
// clang-format on

}  // namespace tiledattn::cuda
"""


def wrapped(items: list[str], indent: str) -> str:
    """Comma-separated items in lines of a readable length."""
    lines, line = [], ""
    for item in items:
        if line and len(line) + len(item) > 96:
            lines.append(line)
            line = ""
        line += item + ", "
    lines.append(line)
    return f",\n{indent}".join(line.removesuffix(", ") for line in lines)


def registers(count: int) -> str:
    """The part of the instruction's text that names the accumulators, as string literals."""
    lines = wrapped([f"%{i}" for i in range(count)], " ").split("\n")
    return "\n".join(f'        "{line}"' for line in lines)


def outputs(count: int) -> str:
    """The accumulators as operands."""
    return wrapped([f'"+f"(d[{i}])' for i in range(count)], "          ")


def shared(cpp_type: str, ptx_type: str, n: int) -> str:
    """One specialisation with A in shared memory."""
    count = n // 2
    return f"""
template <>
struct WgmmaShared<{cpp_type}, {n}> {{
  static __device__ __forceinline__ void issue(float (&d)[{count}], std::uint64_t a, std::uint64_t b, int accumulate) {{
    asm volatile(
        "{{.reg .pred p; setp.ne.b32 p, %{count + 2}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{ptx_type}.{ptx_type} {{"
{registers(count)}
        "}}, %{count}, %{count + 1}, p, 1, 1, 0, 0;}}"
        : {outputs(count)}
        : "l"(a), "l"(b), "r"(accumulate));
  }}
}};
"""


def in_registers(cpp_type: str, ptx_type: str, n: int) -> str:
    """One specialisation with A in registers."""
    count = n // 2
    return f"""
template <>
struct WgmmaRegisters<{cpp_type}, {n}> {{
  static __device__ __forceinline__ void issue(float (&d)[{count}], std::uint32_t a0, std::uint32_t a1,
                                               std::uint32_t a2, std::uint32_t a3, std::uint64_t b) {{
    asm volatile(
        "{{.reg .pred p; setp.eq.b32 p, 0, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{ptx_type}.{ptx_type} {{"
{registers(count)}
        "}}, {{%{count}, %{count + 1}, %{count + 2}, %{count + 3}}}, %{count + 4}, p, 1, 1, 1;}}"
        : {outputs(count)}
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
  }}
}};
"""


def text() -> str:
    """The whole file."""
    parts = [HEADER]
    for cpp_type, ptx_type in TYPES.items():
        parts += [shared(cpp_type, ptx_type, n) for n in SHARED_N]
        parts += [in_registers(cpp_type, ptx_type, n) for n in REGISTER_N]
    return "".join(parts) + FOOTER


def main() -> int:
    if "--check" in sys.argv[1:]:
        current = TARGET.exists() and TARGET.read_text(encoding="utf-8") == text()
        print(f"{TARGET.name} is {'current' if current else 'out of date: run scripts/generate_wgmma.py'}")
        return 0 if current else 1
    TARGET.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
