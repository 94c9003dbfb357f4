# SPDX-License-Identifier: Apache-2.0
"""Check what the extension module, or a wheel's, asks the dynamic loader for: nothing of CUDA, of torch or of a driver.

python scripts/check_module.py PATH_OF_CORE_SO
"""

import re
import subprocess
import sys

WANTED = re.compile(r"^(libstdc\+\+|libgcc_s|libc|libm|libpthread|libdl|librt|ld-linux[\w-]*)\.so\.\d+$")


def main() -> int:
    """Check the file that the command line names; return the exit status."""
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    dynamic = subprocess.run(
        ["readelf", "-d", sys.argv[1]], check=True, capture_output=True, text=True
    ).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    unwanted = [name for name in needed if not WANTED.match(name)]
    if re.search(r"\((RPATH|RUNPATH)\)", dynamic):
        unwanted.append("a run path")
    if not needed or unwanted:
        print(
            f"{sys.argv[1]} must need system libraries alone; it has {', '.join(unwanted) or 'no NEEDED entry'}"
        )
        return 1
    print(f"needs {', '.join(needed)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
