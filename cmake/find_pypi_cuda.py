# SPDX-License-Identifier: Apache-2.0
"""Print the CUDA tree (site-packages/nvidia/cu13) that holds an nvcc, or exit with 1."""

import importlib.util
import pathlib
import sys


def main() -> int:
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        for root in sorted(pathlib.Path(folder).glob("cu[0-9]*"), reverse=True):
            if (root / "bin" / "nvcc").exists():
                print(root)
                return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
