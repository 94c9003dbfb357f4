# SPDX-License-Identifier: Apache-2.0
"""What a reader would copy: the docstrings' examples, README's for NumPy, and the programs in examples/."""

from __future__ import annotations

import doctest
import importlib
import re
import sys

import numpy as np
import processes
import pytest
import tiledattn as ta

ROOT = processes.TESTS.parent
README = (ROOT / "README.md").read_text()
NUMPY_BLOCKS = [
    block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "import numpy" in block
]


@pytest.mark.parametrize(
    "module",
    [
        "_api",
        "_arrays",
        "_attention",
        "_sources",
        "_state",
        "_stream_stats",
        "_streaming",
        "_types",
    ],
)
def test_docstrings(module):
    results = doctest.testmod(importlib.import_module(f"tiledattn.{module}"))
    assert results.attempted
    assert not results.failed


def test_docstring_of_the_error():
    """By its module it belongs to the package, where testmod() does not look for it."""
    (example,) = doctest.DocTestFinder().find(ta.TileError, "TileError")
    results = doctest.DocTestRunner().run(example)
    assert results.attempted
    assert not results.failed


@pytest.mark.parametrize("block", NUMPY_BLOCKS, ids=[f"block_{i}" for i in range(len(NUMPY_BLOCKS))])
def test_readme(block):
    processes.run(block)


def test_readme_has_examples_for_numpy():
    assert len(NUMPY_BLOCKS) == 2


OUT_OF_CORE = ROOT / "docs" / "out-of-core.md"


def out_of_core_blocks():
    return re.findall(r"```python\n(.*?)```", OUT_OF_CORE.read_text(), re.DOTALL)


@pytest.mark.skipif(not OUT_OF_CORE.exists(), reason="a source distribution has no docs")
def test_the_page_on_larger_kv_runs_as_it_stands(tmp_path):
    blocks = out_of_core_blocks()
    assert len(blocks) == 4
    check = "\nassert out.shape == (1, 32, 128) and not out.any() and result.complete"
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks) + check)
    processes.run(f"import os, runpy; os.chdir({str(tmp_path)!r}); runpy.run_path({str(script)!r})")


@pytest.mark.skipif(not OUT_OF_CORE.exists(), reason="a source distribution has no docs")
def test_fetching_ahead_as_documented():
    """Each layer is asked for once, one layer ahead of its use, and nothing that was fetched is dropped."""
    block = next(b for b in out_of_core_blocks() if "attn.prefetch(" in b)
    setup, loop = block.split("\n\n", 1)
    assert setup.startswith("layers = ")
    dims = ta.TiledAttentionDims(
        max_seqs=1, num_q_heads=2, num_kv_heads=1, head_dim=8, block_size=4, tile_capacity=2
    )
    rng = np.random.default_rng(0)
    read = []

    class Layer(ta.TileSource):
        def __init__(self, number):
            self.number, self.name = number, f"layer {number}"
            self.cache = rng.standard_normal((10, 2, 1, 4, 8), dtype=np.float32)

        def describe(self):
            return ta.TileGeometry(num_blocks=10, block_size=4, num_kv_heads=1, head_dim=8, dtype="float32")

        def read(self, blocks, buffer):
            read.append(self.number)
            buffer[:] = self.cache[blocks].reshape(len(blocks), -1).view(np.uint8)
            return buffer.nbytes

    layers = [[ta.StreamSequence(40, ta.KvPart(Layer(n), range(10)))] for n in range(4)]
    attn = ta.StreamingAttention(dims, scratch_bytes=1 << 14, device="cpu", num_readers=1)
    exec(loop, {"attn": attn, "q": np.ones((1, 2, 8), np.float32), "layers": layers})
    assert read == sorted(read)
    assert set(read) == {0, 1, 2, 3}
    assert attn.stats.prefetched_launches > 0
    assert attn.stats.dropped_launches == 0


def test_tiled_decode():
    text = processes.run(str(ROOT / "examples" / "tiled_decode.py"))
    assert text.startswith("20000 tokens, cache 156 MiB, scratch 8 MiB")
    assert float(re.search(r"whole cache: (\S+)", text)[1]) < 1e-5


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is Linux's")
def test_stream_file_runs_under_its_limit():
    text = processes.run(str(ROOT / "examples" / "stream_file.py"))
    assert "no memory, as it should be" in text
    assert "256 MiB of KV through 24 MiB" in text
