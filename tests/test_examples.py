# SPDX-License-Identifier: Apache-2.0
"""What a reader would copy: the docstrings' examples, README's for NumPy, and the programs in examples/."""

from __future__ import annotations

import doctest
import importlib
import re
import sys

import processes
import pytest

ROOT = processes.TESTS.parent
README = (ROOT / "README.md").read_text()
NUMPY_BLOCKS = [
    block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "import numpy" in block
]


@pytest.mark.parametrize(
    "module", ["_api", "_arrays", "_attention", "_sources", "_state", "_streaming", "_types"]
)
def test_docstrings(module):
    results = doctest.testmod(importlib.import_module(f"tiledattn.{module}"))
    assert results.attempted
    assert not results.failed


@pytest.mark.parametrize("block", NUMPY_BLOCKS, ids=[f"block_{i}" for i in range(len(NUMPY_BLOCKS))])
def test_readme(block):
    processes.run(block)


def test_readme_has_examples_for_numpy():
    assert len(NUMPY_BLOCKS) == 2


def test_tiled_decode():
    text = processes.run(str(ROOT / "examples" / "tiled_decode.py"))
    assert text.startswith("20000 tokens, cache 156 MiB, scratch 8 MiB")
    assert float(re.search(r"whole cache: (\S+)", text)[1]) < 1e-5


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is Linux's")
def test_stream_file_runs_under_its_limit():
    text = processes.run(str(ROOT / "examples" / "stream_file.py"))
    assert "no memory, as it should be" in text
    assert "256 MiB of KV through 24 MiB" in text
