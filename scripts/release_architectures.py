# SPDX-License-Identifier: Apache-2.0
"""Print the GPU architectures of release wheels, which are written in pyproject.toml for cibuildwheel."""

import re
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"

# Not tomllib, which Python 3.10 lacks.
match = re.search(r'^CUDAARCHS = "([^"]+)"$', PYPROJECT.read_text(encoding="utf-8"), re.MULTILINE)
if match is None:
    raise SystemExit("pyproject.toml: [tool.cibuildwheel.linux.environment] has no CUDAARCHS")
print(match[1])
