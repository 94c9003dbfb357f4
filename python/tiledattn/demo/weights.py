# SPDX-License-Identifier: Apache-2.0
"""The weights of a model: the arrays, and random ones for machines without a model file.

Every matrix is float32 and is kept as ``[outputs, inputs]``, the order of the GGUF file. Matrices that
take the same input are joined, so that a decoded token costs four products in each layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiledattn.demo.config import ModelConfig

FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class LayerWeights:
    """One layer. The rows of ``qkv`` are q, k and v; those of ``gate_up`` are gate and up."""

    attention_norm: FloatArray  # [hidden]
    qkv: FloatArray  # [q_size + 2 * kv_size, hidden]
    attention_output: FloatArray  # [hidden, q_size]
    feed_forward_norm: FloatArray  # [hidden]
    gate_up: FloatArray  # [2 * feed_forward, hidden]
    down: FloatArray  # [hidden, feed_forward]


@dataclass(frozen=True)
class Weights:
    """The whole model. ``output`` is ``embedding`` itself where the model ties the two."""

    embedding: FloatArray  # [vocab, hidden]
    layers: list[LayerWeights]
    output_norm: FloatArray  # [hidden]
    output: FloatArray  # [vocab, hidden]


def random_weights(config: ModelConfig, seed: int) -> Weights:
    """Weights of the shapes of `config`, the same for the same `seed`.

    Each matrix keeps the size of what goes through it (variance 1 / inputs). So scores are of order one and
    no softmax is flat or a single spike: an attention that reads the wrong keys changes the logits.
    """
    generator = np.random.default_rng(seed)

    def matrix(outputs: int, inputs: int) -> FloatArray:
        values = generator.standard_normal((outputs, inputs), dtype=np.float32)
        values *= np.float32(inputs**-0.5)
        return values

    def norm() -> FloatArray:
        return generator.uniform(0.5, 1.5, config.hidden_size).astype(np.float32)

    hidden, feed_forward = config.hidden_size, config.feed_forward_size
    embedding = matrix(config.vocab_size, hidden)
    layers = [
        LayerWeights(
            attention_norm=norm(),
            qkv=matrix(config.q_size + 2 * config.kv_size, hidden),
            attention_output=matrix(hidden, config.q_size),
            feed_forward_norm=norm(),
            gate_up=matrix(2 * feed_forward, hidden),
            down=matrix(hidden, feed_forward),
        )
        for _ in range(config.num_layers)
    ]
    return Weights(embedding=embedding, layers=layers, output_norm=norm(), output=embedding)
