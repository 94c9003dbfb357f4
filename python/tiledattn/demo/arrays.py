# SPDX-License-Identifier: Apache-2.0
"""Where the attention's arrays live: in NumPy on the CPU, in CuPy or torch on a GPU."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import tiledattn as ta
from tiledattn.demo.errors import DemoError


class DeviceArrays(Protocol):
    """Moves arrays between NumPy and the device that attention runs on."""

    device: str

    def put(self, array: NDArray[Any]) -> Any:
        """Give the array on the device. On the CPU it is `array` itself, not a copy."""

    def refill(self, target: Any, source: NDArray[Any]) -> None:
        """Make `target`, which `put` made from `source`, hold what `source` holds now."""

    def get(self, array: Any) -> NDArray[Any]:
        """Give the array in NumPy."""


class NumpyArrays:
    """On the CPU nothing moves."""

    device = "cpu"

    def put(self, array: NDArray[Any]) -> Any:
        """Give `array` itself."""
        return array

    def refill(self, target: Any, source: NDArray[Any]) -> None:
        """Nothing to do: `target` shares the memory of `source`."""
        assert np.shares_memory(target, source)

    def get(self, array: Any) -> NDArray[Any]:
        """Give `array` itself."""
        result: NDArray[Any] = array
        return result


class CupyArrays:
    """CuPy on its current device and stream."""

    device = "cuda"

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy

    def put(self, array: NDArray[Any]) -> Any:
        """Copy to the GPU."""
        return self._cupy.asarray(array)

    def refill(self, target: Any, source: NDArray[Any]) -> None:
        """Copy on the current stream, so after the kernels that still read the old contents."""
        target.set(source)

    def get(self, array: Any) -> NDArray[Any]:
        """Copy to the host, after what computes it."""
        result: NDArray[Any] = self._cupy.asnumpy(array)
        return result


class TorchArrays:
    """Torch, used for memory and copies alone, on its current device and stream."""

    device = "cuda"

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def put(self, array: NDArray[Any]) -> Any:
        """Copy to the GPU."""
        return self._torch.from_numpy(array).to("cuda")

    def refill(self, target: Any, source: NDArray[Any]) -> None:
        """Copy on the current stream, so after the kernels that still read the old contents."""
        target.copy_(self._torch.from_numpy(source))

    def get(self, array: Any) -> NDArray[Any]:
        """Copy to the host, after what computes it."""
        result: NDArray[Any] = array.cpu().numpy()
        return result


def arrays_for(device: str) -> DeviceArrays:
    """Choose the array library for ``"cpu"`` or ``"cuda"``.

    Raises
    ------
    DemoError
        For ``"cuda"`` where no CUDA device answers, or neither CuPy nor a torch with CUDA can be imported.
    """
    if device == "cpu":
        return NumpyArrays()
    info = ta.info()
    if not info["num_cuda_devices"]:
        reason = info["no_cuda"] or "no CUDA device answers"
        raise DemoError(f"--device cuda: {reason}; or use --device cpu")
    try:
        return CupyArrays(import_module("cupy"))
    except ImportError:
        pass
    try:
        torch = import_module("torch")
        if torch.cuda.is_available():
            return TorchArrays(torch)
    except ImportError:
        pass
    raise DemoError(
        "--device cuda: needs CuPy (or a torch with CUDA) for memory on the GPU, and neither is there; "
        "`pip install cupy-cuda13x` (cupy-cuda12x for CUDA 12), or use --device cpu"
    )
