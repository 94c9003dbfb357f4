# SPDX-License-Identifier: Apache-2.0
"""The sizes of a model of the Llama architecture."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a Llama model; the defaults are those of SmolLM2-135M."""

    num_layers: int = 30
    num_q_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    hidden_size: int = 576
    feed_forward_size: int = 1536
    vocab_size: int = 49152
    context_length: int = 8192
    rope_base: float = 100000.0
    norm_epsilon: float = 1e-5

    @property
    def q_size(self) -> int:
        """Numbers in the query of one token, all heads."""
        return self.num_q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Numbers in the key (or the value) of one token, all heads."""
        return self.num_kv_heads * self.head_dim
