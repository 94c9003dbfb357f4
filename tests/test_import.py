# SPDX-License-Identifier: Apache-2.0
"""Importing is quick and silent and touches neither driver, GPU nor framework."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
import typing

import arrays
import processes
import pytest
import tiledattn as ta

USE = """
import numpy as np
x = np.ones((1, 2, 1, 8), np.float32)
assert (ta.flash_attention(x, x, x) == 1).all()
"""


def test_silent_and_free_of_frameworks():
    code = """
import sys
import tiledattn
names = {"torch", "jax", "cupy", "ml_dtypes", "tensorflow", "triton", "transformers", "gguf"}
print(sorted(names & set(sys.modules)))
"""
    assert processes.run(code, options=["-W", "error"]).strip() == "[]"


def test_touches_no_driver():
    code = """
import os
import tiledattn
with open("/proc/self/maps") as file:
    mapped = {line.split()[-1] for line in file}
fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
opened = {os.readlink(fd) for fd in fds if os.path.lexists(fd)}
print([name for name in sorted(mapped | opened) if "libcuda" in name or "nvidia" in name])
"""
    assert processes.run(code).strip() == "[]"


def test_starts_no_thread():
    code = """
import os, numpy
before = len(os.listdir("/proc/self/task"))
import tiledattn
print(len(os.listdir("/proc/self/task")) - before)
"""
    assert processes.run(code).strip() == "0"


def test_is_quick():
    """On top of NumPy's own import; the best of five, with room for a busy machine."""
    code = """
import time, numpy
start = time.perf_counter()
import tiledattn
print(time.perf_counter() - start)
"""
    assert min(float(processes.run(code)) for _ in range(5)) < 0.25


@pytest.mark.parametrize(
    "order", ["import torch\nimport tiledattn as ta", "import tiledattn as ta\nimport torch"]
)
def test_before_and_after_torch(order):
    pytest.importorskip("torch")
    code = (
        order
        + USE
        + """
t = torch.ones(1, 2, 1, 8)
assert (ta.flash_attention(t, t, t) == 1).all()
device = "cuda" if ta.info()["num_cuda_devices"] else "cpu"
t = t.to(device)
assert (ta.flash_attention(t, t, t).cpu() == 1).all()
print("right")
"""
    )
    assert processes.run(code).strip() == "right"


def test_works_with_the_gpus_hidden():
    code = (
        "import tiledattn as ta"
        + USE
        + """
info = ta.info()
assert info["num_cuda_devices"] == 0 and info["no_cuda"], info
sizes = dict(max_seqs=1, num_q_heads=1, num_kv_heads=1, head_dim=8, block_size=8, tile_capacity=1)
dims = ta.TiledAttentionDims(**sizes)
assert str(ta.TiledAttention(dims).device) == "cpu"
try:
    ta.TiledAttention(dims, device="cuda")
except (ValueError, RuntimeError) as error:
    print(error)
"""
    )
    said = processes.run(code, CUDA_VISIBLE_DEVICES="")
    assert "cuda" in said.lower()
    assert len(said) > 20


def test_a_missing_driver_is_named():
    if not arrays.missing_cuda():
        pytest.skip("a CUDA device answers")
    assert ta.info()["num_cuda_devices"] == 0
    assert ta.info()["no_cuda"]


def test_version_is_the_package_s():
    assert ta.__version__ == importlib.metadata.version("tiledattn")


def test_public_names():
    names = """TiledAttention TiledAttentionDims State Workspace CudaError flash_attention paged_attention
        merge_states merge_attention write_kv supports check info set_num_threads get_num_threads
        scratch_pool_views"""
    for name in names.split():
        assert name in ta.__all__, name
        assert getattr(ta, name).__doc__, name


def _public_callables():
    """(name, function) for each public function, constructor and method."""
    for name in ta.__all__:
        thing = getattr(ta, name)
        if inspect.isclass(thing):
            if thing is ta.CudaError:
                continue
            yield name, thing.__init__
            for part in vars(thing):
                if not part.startswith("_") and callable(getattr(thing, part)):
                    yield f"{name}.{part}", getattr(thing, part)
        elif callable(thing):
            yield name, thing


def test_what_defaults_to_none_is_typed_so():
    checked = set()
    for name, function in _public_callables():
        if not inspect.isfunction(function):
            continue
        hints = typing.get_type_hints(function)
        for parameter in inspect.signature(function).parameters.values():
            if parameter.default is None:
                hint = hints[parameter.name]
                assert hint is typing.Any or type(None) in typing.get_args(hint), (name, parameter)
                checked.add(f"{name}.{parameter.name}")
    assert "TiledAttentionDims.head_dim_v" in checked
    assert len(checked) > 20


def test_help_tells_that_head_dim_v_may_be_none():
    assert "head_dim_v: 'int | None' = None" in str(inspect.signature(ta.TiledAttentionDims))


def _documented(section):
    """Names of a numpydoc section's parameters, in order."""
    names = []
    for line in section.splitlines():
        if line and not line.startswith(" "):
            names += [name.strip().lstrip("*") for name in line.split(",")]
    return names


def test_docstrings_name_the_parameters_of_the_signature():
    for name, function in _public_callables():
        owner = getattr(ta, name) if inspect.isclass(getattr(ta, name, None)) else function
        sections = re.split(r"\n([A-Z][a-z ]+)\n-+\n", inspect.getdoc(owner))
        sections = dict(zip(sections[1::2], sections[2::2], strict=True))
        parameters = [
            p for p in inspect.signature(function).parameters if p not in ("self", "args", "kwargs")
        ]
        if parameters:
            # Of results, which nobody makes, the fields are described as attributes.
            documented = sections.get("Parameters") or sections["Attributes"]
            assert sorted(_documented(documented)) == sorted(parameters), name


def test_errors_are_the_built_in_kinds():
    assert issubclass(ta.CudaError, RuntimeError)
