# SPDX-License-Identifier: Apache-2.0
"""Greedy generation: the prompt at once, then one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from tiledattn.demo.model import Attention, Model
from tiledattn.demo.weights import FloatArray


@dataclass(frozen=True)
class Step:
    """One run of the model: what went in last, what came out, and how long it took."""

    token: int  # the last token that went in
    position: int  # its position
    logits: FloatArray
    choice: int  # the most likely next token
    seconds: float


def generate(
    model: Model,
    prompt: Sequence[int],
    *,
    prompt_attention: Attention,
    token_attention: Attention,
    max_tokens: int,
    stop_tokens: frozenset[int],
    on_layer: Callable[[int], None] | None = None,
) -> Iterator[Step]:
    """Yield a step for the prompt and then one for each token but the last, `max_tokens` at most.

    Every step chooses a token. The iteration ends after a stop token, after `max_tokens` choices, or when
    the context is full.
    """
    start = perf_counter()
    logits = model.forward(prompt, 0, prompt_attention, on_layer)
    token, position = prompt[-1], len(prompt) - 1
    for count in range(1, max_tokens + 1):
        choice = int(np.argmax(logits))
        yield Step(token, position, logits, choice, perf_counter() - start)
        token, position = choice, position + 1
        if count == max_tokens or choice in stop_tokens or position == model.config.context_length:
            return
        start = perf_counter()
        logits = model.forward([token], position, token_attention)
