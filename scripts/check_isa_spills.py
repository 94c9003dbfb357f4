# SPDX-License-Identifier: Apache-2.0
"""Check that no hot loop of src/cpp/cpu/kernels_<isa>.cpp keeps vectors on the stack.

A hot loop is an innermost one that multiplies and adds vectors several times and does nothing else: the sums of scores
and of values, in groups and in products. Sums that left the registers there would be stored and loaded again in each
turn. Two kinds are left out: softmax, which runs once for each score and may keep constants on the stack, and the last
columns of a row that fills no vector, which are copied by a call. x86-64 alone.

    python scripts/check_isa_spills.py BUILD_FOLDER
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from check_isa_objects import kernel_objects

# The baseline has no fused operations to tell a hot loop by.
OBJECTS = tuple(f"kernels_{isa}.cpp.o" for isa in ("avx2", "avx512", "avx512bf16", "amxbf16"))
MIN_PRODUCTS = 4

FUNCTION = re.compile(r"^[0-9a-f]+ <(?P<name>.+)>:$")
INSTRUCTION = re.compile(r"^\s*(?P<address>[0-9a-f]+):\t(?P<text>.+)$")
JUMP = re.compile(r"^j\w+\s+(?P<target>[0-9a-f]+)\b")
PRODUCT = re.compile(r"^(vfn?m(add|sub)\d+ps|vdpbf16ps|tdpbf16ps)\b")
NOT_HOT = re.compile(r"^(v(cmp|max|div)|call)")
SPILL = re.compile(r"^v(?!broadcast)(?=.*%[xyz]mm).*[\s,](-?0x[0-9a-f]+)?\(%r[sb]p\)")


class Instruction(NamedTuple):
    """Where it stands, and its text."""

    address: int
    text: str


def functions(path: Path) -> dict[str, list[Instruction]]:
    """Instructions of each function of an object."""
    command = ["objdump", "--disassemble", "--demangle", "--no-show-raw-insn", str(path)]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, list[Instruction]] = {}
    body: list[Instruction] = []
    for line in listing.splitlines():
        if match := FUNCTION.match(line):
            body = found.setdefault(match["name"], [])
        elif match := INSTRUCTION.match(line):
            body.append(Instruction(int(match["address"], 16), match["text"].strip()))
    return found


def innermost_loops(body: list[Instruction]) -> list[list[Instruction]]:
    """What stands between the target of each jump backwards and the jump, where no other such jump is inside."""
    places = {instruction.address: i for i, instruction in enumerate(body)}
    ends = {}
    for i, instruction in enumerate(body):
        match = JUMP.match(instruction.text)
        begin = places.get(int(match["target"], 16)) if match else None
        if begin is not None and begin <= i:
            ends[i] = begin
    inner = [(begin, end) for end, begin in ends.items() if not any(begin <= other < end for other in ends)]
    return [body[begin : end + 1] for begin, end in inner]


def hot_loops(path: Path) -> list[tuple[str, list[str]]]:
    """Name of the function and instructions of each hot loop."""
    loops = []
    for name, body in functions(path).items():
        for loop in innermost_loops(body):
            texts = [instruction.text for instruction in loop]
            products = sum(bool(PRODUCT.match(text)) for text in texts)
            if products >= MIN_PRODUCTS and not any(NOT_HOT.match(text) for text in texts):
                loops.append((name, texts))
    return loops


def problems(path: Path) -> list[str]:
    """List what hot loops of one object move to or from a fixed place of the stack."""
    loops = hot_loops(path)
    found = [f"{name}: {text}" for name, texts in loops for text in texts if SPILL.match(text)]
    print(f"{path.name}: {len(loops)} hot loops, {len(found)} vector moves to or from the stack")
    return [f"{path.name}: {line}" for line in found] if loops else [f"{path.name}: no hot loop found"]


def main() -> int:
    """Check the kernel objects of the vector instruction sets; return the exit status."""
    objects = kernel_objects()
    found = [line for path in objects if path.name in OBJECTS for line in problems(path)]
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
