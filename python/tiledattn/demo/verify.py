# SPDX-License-Identifier: Apache-2.0
"""Replay of the same tokens with dense float32 attention over the keys and values in the file."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tiledattn.demo.kv_file import KvFile
from tiledattn.demo.model import Model
from tiledattn.demo.weights import FloatArray

# The library promises float16 attention to within 2e-3: norm of the error over norm of the result.
FLOAT16_ERROR = 2e-3
# Errors of the layers are independent and each reaches the logits through the residual stream at most at its
# own share of it, so they add up like a random walk: sqrt(num_layers). The largest of some 50,000 normally
# distributed differences lies 4.5 standard deviations out; 6 leaves room for a whole run of tokens.
# Right runs stay below a tenth of the bound; leaving out a single key went 5 to 80 times over it.
LARGEST_OF_ALL = 6.0


class DenseAttention:
    """Softmax over all stored keys of a layer at once, in float32 and in NumPy alone.

    It stores nothing: K and V of the token itself must be in the file already.
    """

    def __init__(self, kv: KvFile) -> None:
        self._kv = kv

    def __call__(self, layer: int, position: int, q: FloatArray, k: FloatArray, v: FloatArray) -> FloatArray:
        """Attend to all stored tokens up to `position`; `k` and `v` are not used."""
        _, num_q_heads, head_dim = q.shape
        stored_k, stored_v = self._kv.read_tokens(layer, position + 1)
        keys = stored_k.astype(np.float32).transpose(1, 0, 2)  # [num_kv_heads, tokens, head_dim]
        values = stored_v.astype(np.float32).transpose(1, 0, 2)
        queries = q.reshape(len(keys), -1, head_dim)  # [num_kv_heads, gqa_ratio, head_dim]
        scores = queries @ keys.transpose(0, 2, 1) * np.float32(head_dim**-0.5)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        result: FloatArray = (weights @ values).reshape(1, num_q_heads, head_dim)
        return result


@dataclass(frozen=True)
class Disagreement:
    """A position where the two runs would choose different tokens."""

    position: int
    streamed_choice: int
    dense_choice: int
    margin: float  # between the two choices, in the dense logits


class Verifier:
    """Compares logits of the run under test with those of a dense run over the same tokens, K and V."""

    def __init__(self, model: Model, kv: KvFile) -> None:
        self._model = model
        self._attention = DenseAttention(kv)
        self._sum = 0.0
        self.positions = 0
        self.largest = 0.0
        self.largest_share = 0.0  # of the bound; above 1 the run is wrong
        self.disagreements: list[Disagreement] = []

    def check(self, token: int, position: int, logits: FloatArray) -> None:
        """`logits` came from `token` at `position`, whose K and V are in the file with all earlier ones."""
        dense = self._model.forward([token], position, self._attention)
        difference = np.abs(logits - dense)
        largest = float(difference.max())
        self.positions += 1
        self._sum += float(difference.mean())
        # A NaN must not pass as a small number.
        self.largest = max(self.largest, largest if math.isfinite(largest) else math.inf)
        self.largest_share = max(
            self.largest_share, largest / self.bound(dense) if math.isfinite(largest) else math.inf
        )
        ours, theirs = int(np.argmax(logits)), int(np.argmax(dense))
        if ours != theirs:
            margin = float(dense[theirs] - dense[ours])
            self.disagreements.append(Disagreement(position, ours, theirs, margin))

    def bound(self, dense: FloatArray) -> float:
        """Give the largest difference of a logit that rounding to float16 explains, for logits like these."""
        return (
            FLOAT16_ERROR * math.sqrt(self._model.config.num_layers) * LARGEST_OF_ALL * float(np.std(dense))
        )

    @property
    def passed(self) -> bool:
        """Whether something was compared and every logit is inside its bound."""
        return self.positions > 0 and self.largest_share <= 1.0

    def report(self) -> str:
        """Say what was found, in a few lines."""
        if not self.positions:
            return "verify    FAILED: nothing was compared"
        lines = [
            f"verify    {self.positions} positions against dense float32 attention over the stored K and V",
            f"          |logit difference|: largest {self.largest:.3g}, "
            f"mean {self._sum / self.positions:.3g}; largest is {self.largest_share:.0%} of its bound",
            f"          choices that agree: {self.positions - len(self.disagreements)} of {self.positions}",
        ]
        for found in self.disagreements:
            lines.append(
                f"          position {found.position}: token {found.streamed_choice}, "
                f"dense {found.dense_choice}; their dense logits are {found.margin:.3g} apart"
            )
        lines.append(f"          {'passed' if self.passed else 'FAILED: a logit is outside its bound'}")
        return "\n".join(lines)
