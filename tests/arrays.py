# SPDX-License-Identifier: Apache-2.0
"""Who carries the arrays of a test: NumPy, torch, JAX on the CPU; torch, CuPy on a GPU.

Tests make NumPy arrays; a Carrier turns them into its framework's arrays, calls, and turns results back.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util

import ml_dtypes
import numpy as np
import pytest

DTYPES = ("bfloat16", "float16", "float32")
NP_DTYPE = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)


@functools.cache
def missing_cuda():
    """Why no CUDA device answers, or "" when one does. Asks the driver itself, not the library under test."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"no CUDA device answers: {error}"
    status = driver.cuInit(0)
    if status:
        return f"no CUDA device answers: cuInit returned {status}"
    count = ctypes.c_int(0)
    status = driver.cuDeviceGetCount(ctypes.byref(count))
    if status or not count.value:
        return f"no CUDA device answers: cuDeviceGetCount returned {status}, {count.value} devices"
    return ""


class Carrier:
    """``device`` is the name that the library takes; ``dtypes`` are the ones the framework can hold."""

    name = "numpy"
    device = "cpu"
    dtypes = DTYPES
    is_cuda = False

    def __repr__(self):
        return f"{self.name}-{self.device}"

    def array(self, x):
        return x

    def numpy(self, x):
        return np.asarray(x)

    def is_array(self, x):
        return isinstance(x, np.ndarray)

    def full(self, shape, value, dtype):
        return self.array(np.full(shape, value, NP_DTYPE[dtype]))

    def synchronize(self):
        pass

    def call(self, function, *args, **kwargs):
        """``function`` on this carrier's arrays: NumPy in and out; other arguments go as they are."""
        args = [self._give(x) for x in args]
        kwargs = {key: self._give(x) for key, x in kwargs.items()}
        return self._take(function(*args, **kwargs))

    def _give(self, x):
        return self.array(x) if isinstance(x, np.ndarray) else x

    def _take(self, result):
        if isinstance(result, tuple):
            return tuple(self._take(x) for x in result)
        if result is None:
            return None
        assert self.is_array(result), f"the result is a {type(result)}, wanted an array of {self.name}"
        return self.numpy(result)


class TorchCarrier(Carrier):
    name = "torch"

    def __init__(self, device="cpu"):
        self.torch = pytest.importorskip("torch")
        self.device = device
        self.is_cuda = device != "cpu"

    def array(self, x):
        if x.dtype == NP_DTYPE["bfloat16"]:
            return self._tensor(x.view(np.int16)).view(self.torch.bfloat16)
        if x.dtype == FLOAT8:
            return self._tensor(x.view(np.uint8)).view(self.torch.float8_e4m3fn)
        return self._tensor(x)

    def _tensor(self, x):
        x = x if x.flags.writeable and x.size else x.copy()
        return self.torch.from_numpy(x).to(self.device)

    def numpy(self, x):
        if x.dtype == self.torch.bfloat16:
            return x.view(self.torch.int16).cpu().numpy().view(NP_DTYPE["bfloat16"])
        if x.dtype == self.torch.float8_e4m3fn:
            return x.view(self.torch.uint8).cpu().numpy().view(FLOAT8)
        return x.cpu().numpy()

    def is_array(self, x):
        return isinstance(x, self.torch.Tensor) and x.device.type == self.device.split(":")[0]

    def synchronize(self):
        if self.is_cuda:
            self.torch.cuda.synchronize()


class JaxCarrier(Carrier):
    name = "jax"

    def __init__(self):
        self.jax = pytest.importorskip("jax")
        self.cpu = self.jax.devices("cpu")[0]

    def array(self, x):
        # JAX holds no int64 unless told to; indices of the tests fit into int32.
        return self.jax.device_put(x.astype(np.int32) if x.dtype == np.int64 else x, self.cpu)

    def is_array(self, x):
        return isinstance(x, self.jax.Array)


class CupyCarrier(Carrier):
    name = "cupy"
    device = "cuda"
    dtypes = ("float16", "float32")
    is_cuda = True

    def __init__(self):
        self.cupy = pytest.importorskip("cupy")

    def array(self, x):
        return self.cupy.asarray(x)

    def numpy(self, x):
        return self.cupy.asnumpy(x)

    def is_array(self, x):
        return isinstance(x, self.cupy.ndarray)

    def synchronize(self):
        self.cupy.cuda.get_current_stream().synchronize()


def cuda_carrier():
    """A carrier of GPU arrays; skips only where no CUDA device answers, not where torch and CuPy lack."""
    if missing_cuda():
        pytest.skip(missing_cuda())
    if importlib.util.find_spec("torch"):
        import torch

        if torch.cuda.is_available():
            return TorchCarrier("cuda")
    if importlib.util.find_spec("cupy"):
        return CupyCarrier()
    pytest.fail("a CUDA device answers, but neither torch with CUDA nor CuPy is installed to carry arrays")


def make_carrier(name):
    """A carrier by name: cpu, cuda (whichever framework is there), or framework-device."""
    if name.endswith("cuda") and missing_cuda():
        pytest.skip(missing_cuda())
    makers = {
        "cpu": Carrier,
        "cuda": cuda_carrier,
        "numpy-cpu": Carrier,
        "torch-cpu": TorchCarrier,
        "jax-cpu": JaxCarrier,
        "torch-cuda": lambda: TorchCarrier("cuda"),
        "cupy-cuda": CupyCarrier,
    }
    return makers[name]()
