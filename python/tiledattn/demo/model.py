# SPDX-License-Identifier: Apache-2.0
"""The Llama architecture in NumPy, with attention left to the caller.

Everything but attention is here: RMSNorm, RoPE, the linear layers and SwiGLU. `Model.forward` hands q, k
and v of each layer to an `Attention`, which decides where keys and values live and how they are visited.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tiledattn.demo.blas import BlasThreads
from tiledattn.demo.config import ModelConfig
from tiledattn.demo.weights import FloatArray, LayerWeights, Weights

# Rows of a long prompt that go through the feed-forward layer at once: bounds its temporary arrays.
FEED_FORWARD_ROWS = 1024


class Attention(Protocol):
    """Attention of one layer for tokens at ``position`` and after it, over all tokens up to each."""

    def __call__(self, layer: int, position: int, q: FloatArray, k: FloatArray, v: FloatArray) -> FloatArray:
        """``q`` is ``[tokens, num_q_heads, head_dim]``, ``k`` and ``v`` ``[tokens, num_kv_heads, head_dim]``.

        The result has the shape of ``q``; it may be overwritten by the next call.
        """


class Model:
    """A Llama model: token ids in, logits of the next token out."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self._weights = weights
        self._blas_threads = BlasThreads()
        frequencies = config.rope_base ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
        angles = np.outer(np.arange(config.context_length), frequencies)
        self._cos = np.cos(angles).astype(np.float32)[:, None, :]  # [context, 1, head_dim / 2]
        self._sin = np.sin(angles).astype(np.float32)[:, None, :]

    def forward(
        self,
        tokens: Sequence[int],
        position: int,
        attention: Attention,
        on_layer: Callable[[int], None] | None = None,
    ) -> FloatArray:
        """Run `tokens`, the first of which is at `position`, and give the logits after the last one.

        Parameters
        ----------
        tokens
            At least one token id below ``config.vocab_size``.
        position
            Position of the first token; ``position + len(tokens)`` is at most ``config.context_length``.
        attention
            Called once for each layer, in order.
        on_layer
            Called after each layer with the number of layers done.

        Returns
        -------
        logits
            ``[vocab_size]`` float32.
        """
        if not tokens:
            raise ValueError("tokens: got none, at least one is needed")
        if position < 0 or position + len(tokens) > self.config.context_length:
            raise ValueError(
                f"position: {len(tokens)} token(s) from position {position} on do not fit "
                f"the context of {self.config.context_length}"
            )
        if min(tokens) < 0 or max(tokens) >= self.config.vocab_size:
            raise ValueError(
                f"tokens: ids {min(tokens)}..{max(tokens)}, wanted 0..{self.config.vocab_size - 1}"
            )
        with self._blas_threads.for_rows(len(tokens)):
            return self._run(np.asarray(tokens), position, attention, on_layer)

    def _run(
        self,
        tokens: NDArray[np.int64],
        position: int,
        attention: Attention,
        on_layer: Callable[[int], None] | None,
    ) -> FloatArray:
        hidden = self._weights.embedding[tokens]
        for index, layer in enumerate(self._weights.layers):
            q, k, v = self._qkv(layer, hidden, position)
            attended = attention(index, position, q, k, v)
            hidden += attended.reshape(len(tokens), self.config.q_size) @ layer.attention_output.T
            for start in range(0, len(tokens), FEED_FORWARD_ROWS):
                rows = hidden[start : start + FEED_FORWARD_ROWS]
                rows += self._feed_forward(layer, rows)
            if on_layer is not None:
                on_layer(index + 1)
        last = self._norm(hidden[-1], self._weights.output_norm)
        logits: FloatArray = self._weights.output @ last
        return logits

    def _norm(self, x: FloatArray, weight: FloatArray) -> FloatArray:
        """Root mean square norm over the last axis."""
        mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
        normed: FloatArray = x * (1.0 / np.sqrt(mean_square + np.float32(self.config.norm_epsilon))) * weight
        return normed

    def _qkv(
        self, layer: LayerWeights, hidden: FloatArray, position: int
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Compute queries, keys and values, heads apart, queries and keys rotated."""
        config = self.config
        rows = len(hidden)
        qkv = self._norm(hidden, layer.attention_norm) @ layer.qkv.T
        q, k, v = np.split(qkv, [config.q_size, config.q_size + config.kv_size], axis=1)
        q = q.reshape(rows, config.num_q_heads, config.head_dim)
        k = k.reshape(rows, config.num_kv_heads, config.head_dim)
        v = v.reshape(rows, config.num_kv_heads, config.head_dim)
        return self._rotate(q, position), self._rotate(k, position), v

    def _rotate(self, x: FloatArray, position: int) -> FloatArray:
        """Rotary position embedding of ``[tokens, heads, head_dim]``.

        A pair is two neighbours, ``(2i, 2i + 1)``: GGUF files of this architecture store the rows of the
        query and key matrices in that order.
        """
        cos = self._cos[position : position + len(x)]
        sin = self._sin[position : position + len(x)]
        even, odd = x[..., 0::2], x[..., 1::2]
        rotated = np.empty_like(x)
        rotated[..., 0::2] = even * cos - odd * sin
        rotated[..., 1::2] = even * sin + odd * cos
        return rotated

    def _feed_forward(self, layer: LayerWeights, hidden: FloatArray) -> FloatArray:
        """SwiGLU: ``down(silu(gate(x)) * up(x))``."""
        gate_up = self._norm(hidden, layer.feed_forward_norm) @ layer.gate_up.T
        gate, up = np.split(gate_up, 2, axis=1)
        with np.errstate(over="ignore"):  # exp of a very negative gate is inf, and gate / inf is the right 0
            up *= gate / (1.0 + np.exp(-gate))
        result: FloatArray = up @ layer.down.T
        return result
