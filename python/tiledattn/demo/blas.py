# SPDX-License-Identifier: Apache-2.0
"""How many threads NumPy's matrix products use."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

# With fewer rows than this a product is short and bound by reading the weights once. OpenBLAS's threads wait
# for each other in a busy loop at the end of every product; where another process has a core, that made
# decoding several times slower than one thread alone.
MANY_ROWS = 256


class BlasThreads:
    """One thread for a decoded token or a short prompt, NumPy's own choice for a long prompt.

    Without the package threadpoolctl NumPy's choice holds for all.
    """

    def __init__(self) -> None:
        try:
            self._controller: Any = import_module("threadpoolctl").ThreadpoolController()
        except ImportError:
            self._controller = None

    def for_rows(self, rows: int) -> AbstractContextManager[Any]:
        """Limit the products of `rows` rows inside a ``with`` statement."""
        if self._controller is None or rows >= MANY_ROWS:
            return nullcontext()
        limit: AbstractContextManager[Any] = self._controller.limit(limits=1, user_api="blas")
        return limit
