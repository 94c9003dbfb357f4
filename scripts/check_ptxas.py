# SPDX-License-Identifier: Apache-2.0
"""Read the log of a build with -DTILEDATTN_PTXAS_VERBOSE=ON and fail on spills and on ptxas warnings C75xx.

A spilled register turns into memory traffic in the innermost loop; C75xx says that ptxas serialised instructions that
should overlap.

    python scripts/check_ptxas.py BUILD_LOG
"""

import re
import sys
from pathlib import Path

ENTRY = re.compile(r"Compiling entry function '(?P<kernel>\w+)' for '(?P<architecture>\w+)'")
SPILLS = re.compile(r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads")
WARNING = re.compile(r"\(?C75\d\d\)?")


def main() -> int:
    """Check the log that the command line names; return the exit status."""
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    kernels: dict[str, int] = {}
    found = []
    entry = "a function before the first kernel"
    for line in Path(sys.argv[1]).read_text(encoding="utf-8", errors="replace").splitlines():
        if match := ENTRY.search(line):
            entry = f"{match['kernel']} for {match['architecture']}"
            kernels[match["architecture"]] = kernels.get(match["architecture"], 0) + 1
        elif (match := SPILLS.search(line)) and (int(match["stores"]) or int(match["loads"])):
            found.append(f"{entry}: {match[0]}")
        elif WARNING.search(line):
            found.append(f"{entry}: {line.strip()}")
    if not kernels:
        found.append("the log names no kernel: was it a clean build with -DTILEDATTN_PTXAS_VERBOSE=ON?")
    print("\n".join(found) if found else f"no spills, no C75xx warnings; kernels by architecture: {kernels}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
