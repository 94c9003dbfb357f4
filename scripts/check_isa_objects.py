# SPDX-License-Identifier: Apache-2.0
"""Check that each object of src/cpp/cpu/kernels_<isa>.cpp exports its table alone.

The linker keeps one copy of a weak function (an inline or template one) for the whole program. Were it the copy
compiled for AVX-512, the library would stop with an illegal instruction on a CPU without it. So these objects hold
no weak symbols, and one strong one: the table of kernels.

    python scripts/check_isa_objects.py BUILD_FOLDER
"""

import subprocess
import sys
from pathlib import Path


def problems(path: Path) -> list[str]:
    """List what one object exports that it must not."""
    listing = subprocess.run(["nm", "-C", "--defined-only", path], check=True, capture_output=True, text=True)
    symbols = [line.split(maxsplit=2)[1:] for line in listing.stdout.splitlines()]
    weak = [name for kind, name in symbols if kind in "WVu"]
    strong = [name for kind, name in symbols if kind in "TDBRC"]
    found = [f"{path.name}: weak symbol {name}" for name in weak]
    if len(strong) != 1:
        found.append(f"{path.name}: wanted one exported symbol, got {', '.join(strong) or 'none'}")
    return found


def kernel_objects() -> list[Path]:
    """Every kernel object below the folder of the command line."""
    if len(sys.argv) != 2:
        raise SystemExit("expected one argument: the build folder")
    objects = sorted(Path(sys.argv[1]).rglob("kernels_*.cpp.o"))
    if not objects:
        raise SystemExit(f"no kernels_*.cpp.o below {sys.argv[1]}")
    return objects


def main() -> int:
    """Check all of them; return the exit status."""
    objects = kernel_objects()
    found = [line for path in objects for line in problems(path)]
    print(
        "\n".join(found) if found else f"{len(objects)} kernel objects export one table each and nothing weak"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
