# SPDX-License-Identifier: Apache-2.0
"""Arguments for the operators, with the library's words for what it refuses.

torch's own words for a wrong type name no argument, and it takes True for a number. What a trace can hold is looked at
here; the compiled part has the words for all else, and makes plain numbers of NumPy's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _core
from .._types import Window


def check_tensors(**arguments: object) -> None:
    """Refuse what is no tensor."""
    for name, argument in arguments.items():
        if not isinstance(argument, Tensor):
            raise TypeError(f"{name}: expected a torch tensor, got {type(argument).__name__}")


def check_optional_tensors(**arguments: object) -> None:
    """Refuse what is neither a tensor nor None."""
    for name, argument in arguments.items():
        if argument is not None and not isinstance(argument, Tensor):
            raise TypeError(f"{name}: expected a torch tensor or None, got {type(argument).__name__}")


def _is_integer(value: Any) -> bool:
    if isinstance(value, torch.SymInt):
        return True
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    # While a graph is traced an int may stand for a size that only the run will know.
    return torch.compiler.is_compiling() or -(2**63) <= value < 2**63


def flag(value: Any, name: str) -> bool:
    """Return True or False."""
    return value if isinstance(value, bool) else bool(_core.flag(value, name))


def integer(value: Any, name: str) -> int:
    """Return an integer that is no bool."""
    return value if _is_integer(value) else int(_core.integer(value, name))


def optional_integer(value: Any, name: str) -> int | None:
    """Return None or an integer."""
    return None if value is None else integer(value, name)


def number(value: Any, name: str) -> float:
    """Return a number that is no bool."""
    is_number = isinstance(value, float | torch.SymFloat) or _is_integer(value)
    result: float = value if is_number else _core.number(value, name)
    return result


def text(value: Any, name: str) -> str:
    """Return a str."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a str, got {type(value).__name__}")
    return value


def window(value: Any) -> Window:
    """Return ``(left, right)``, each None or an integer."""
    if isinstance(value, tuple | list) and len(value) == 2:
        left, right = value
        if (left is None or _is_integer(left)) and (right is None or _is_integer(right)):
            return left, right
    result: Window = _core.window(value)
    return result


def score(causal: bool, softmax_scale: float | None, sides: Window, softcap: float) -> tuple[Any, ...]:
    """Return what says how scores are made, as the operators take it."""
    scale = None if softmax_scale is None else number(softmax_scale, "softmax_scale")
    return (flag(causal, "causal"), scale, *window(sides), number(softcap, "softcap"))


def scales(k_scale: Tensor | float | None, v_scale: Tensor | float | None) -> tuple[Any, ...]:
    """Return each scale as an operator takes it: a tensor and a number, one of them None."""
    split = []
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if isinstance(scale, Tensor):
            split += [scale, None]
            continue
        try:
            split += [None, None if scale is None else number(scale, name)]
        except TypeError:
            got = type(scale).__name__
            raise TypeError(f"{name}: expected a tensor or a number, got {got}") from None
    return tuple(split)
