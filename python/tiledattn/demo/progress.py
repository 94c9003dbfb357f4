# SPDX-License-Identifier: Apache-2.0
"""A progress bar of one line."""

from __future__ import annotations

import sys
from time import perf_counter
from typing import TextIO


class ProgressBar:
    """Shows how many of `total` steps are done.

    On a terminal the line is redrawn; elsewhere (a log file) it grows by one sign for each step.
    """

    def __init__(self, label: str, total: int, stream: TextIO | None = None) -> None:
        self._label = label
        self._total = total
        self._stream = sys.stderr if stream is None else stream
        self._redraw = self._stream.isatty()
        self._start = perf_counter()
        self._shown = 0
        self._stream.write("" if self._redraw else f"{label} [")
        self.update(0)

    def update(self, done: int) -> None:
        """`done` steps are finished."""
        seconds = perf_counter() - self._start
        if self._redraw:
            bar = "#" * done + "." * (self._total - done)
            self._stream.write(f"\r{self._label} [{bar}] {done}/{self._total} layers, {seconds:.1f} s")
        else:
            self._stream.write("#" * (done - self._shown))
        self._shown = done
        if done == self._total:
            self._stream.write("\n" if self._redraw else f"] {done}/{self._total} layers, {seconds:.1f} s\n")
        self._stream.flush()
