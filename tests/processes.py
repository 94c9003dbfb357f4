# SPDX-License-Identifier: Apache-2.0
"""Python in a fresh process, for what can only be seen there: imports, environment variables, crashes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def run(code, *, timeout=120, options=(), **environment):
    """Run Python code in the tests' folder; returns stdout. An exit code or output on stderr fails."""
    command = [sys.executable, *options, "-c", code] if not code.endswith(".py") else [sys.executable, code]
    kept = {key: value for key, value in os.environ.items() if key not in environment}
    env = kept | {key: value for key, value in environment.items() if value is not None}
    done = subprocess.run(
        command, cwd=TESTS, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.stderr == "", f"stderr:\n{done.stderr}"
    return done.stdout
