# SPDX-License-Identifier: Apache-2.0
"""Fixtures: devices, frameworks, element types and CPU instruction sets."""

from __future__ import annotations

import arrays
import pytest
import tiledattn as ta
from hypothesis import HealthCheck, settings

# The same examples in every run: a failure here is a failure everywhere.
settings.register_profile(
    "tiledattn",
    derandomize=True,
    deadline=None,
    max_examples=300,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("tiledattn")


def _params(*names):
    return [pytest.param(name, marks=pytest.mark.gpu) if name.endswith("cuda") else name for name in names]


@pytest.fixture(scope="session", params=_params("cpu", "cuda"))
def device(request):
    """Carrier of arrays on each device: NumPy on the CPU, torch (or CuPy) on a GPU."""
    return arrays.make_carrier(request.param)


@pytest.fixture(
    scope="session", params=_params("numpy-cpu", "torch-cpu", "jax-cpu", "torch-cuda", "cupy-cuda")
)
def carrier(request):
    """Carrier of each framework that is installed."""
    return arrays.make_carrier(request.param)


@pytest.fixture(scope="session", params=_params("torch-cpu", "torch-cuda"))
def torch_carrier(request):
    """Carrier of torch's tensors on each device."""
    return arrays.make_carrier(request.param)


@pytest.fixture(scope="session")
def cpu():
    return arrays.make_carrier("cpu")


@pytest.fixture(scope="session")
def gpu():
    """For tests marked gpu that make no sense on the CPU."""
    return arrays.make_carrier("cuda")


@pytest.fixture(scope="session", params=arrays.DTYPES)
def dtype(request):
    return request.param


@pytest.fixture(scope="session", params=ta.info()["cpu_isas"])
def isa(request):
    """Name of each CPU instruction set that this machine has."""
    return request.param
