# SPDX-License-Identifier: Apache-2.0
"""`tiledattn demo`: put the parts together, print the text as it comes, then the figures."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import tiledattn as ta
from tiledattn.demo.arrays import arrays_for
from tiledattn.demo.attention import PromptAttention, StreamedAttention
from tiledattn.demo.config import ModelConfig
from tiledattn.demo.errors import DemoError
from tiledattn.demo.generate import Step, generate
from tiledattn.demo.gguf_file import GgufFile, find_model
from tiledattn.demo.kv_file import KvFile
from tiledattn.demo.model import Model
from tiledattn.demo.progress import ProgressBar
from tiledattn.demo.tokenizer import ByteTokenizer, Tokenizer
from tiledattn.demo.verify import Verifier
from tiledattn.demo.weights import random_weights


@dataclass(frozen=True)
class DemoOptions:
    """The options of `tiledattn demo`, as typed."""

    prompt: str
    device: str = "cpu"
    tokens: int = 128
    block_size: int = 16
    scratch_blocks: int = 4
    model: Path | None = None
    random_weights: int | None = None
    kv_file: Path | None = None
    verify: bool = False


def run(options: DemoOptions) -> int:
    """Run the demo and return the exit code: 0, or 1 where ``verify`` finds a logit outside its bound.

    Raises
    ------
    DemoError
        For anything that the user can put right: no model, no array library, a prompt that is too long.
    """
    # Wrong settings in the environment are refused here, not while the text is printed.
    ta.info()
    ta.get_num_threads()
    arrays = arrays_for(options.device)
    model, tokenizer = _load(options)
    config = model.config
    prompt = tokenizer.encode_chat(options.prompt)
    if not prompt:
        raise DemoError("--prompt or --prompt-file: got no text; expected one token or more")
    if len(prompt) >= config.context_length:
        raise DemoError(
            f"--prompt or --prompt-file: got {len(prompt)} tokens; "
            f"expected at most {config.context_length - 1}, which leaves room for an answer"
        )
    # The last token that is chosen is never fed back, so it needs no place.
    capacity = min(len(prompt) + options.tokens - 1, config.context_length)
    with KvFile(
        options.kv_file,
        num_layers=config.num_layers,
        num_blocks=-(-capacity // options.block_size),
        block_size=options.block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    ) as kv:
        streamed = StreamedAttention(
            kv, arrays, num_q_heads=config.num_q_heads, scratch_blocks=options.scratch_blocks
        )
        verifier = Verifier(model, kv) if options.verify else None
        bar = ProgressBar(f"prompt, {len(prompt)} tokens", config.num_layers)
        steps = generate(
            model,
            prompt,
            prompt_attention=PromptAttention(kv, arrays),
            token_attention=streamed,
            max_tokens=options.tokens,
            stop_tokens=tokenizer.stop_tokens,
            on_layer=bar.update,
        )
        timing = Timing(prompt_tokens=len(prompt))
        _print_text(_watch(steps, timing, verifier), tokenizer)
        print(_report(timing, kv, streamed))
    if verifier is None:
        return 0
    print(verifier.report())
    return 0 if verifier.passed else 1


@dataclass
class Timing:
    """How long the model ran, without the time for printing and verifying."""

    prompt_tokens: int
    prompt_seconds: float | None = None
    decoded_tokens: int = 0
    decode_seconds: float = 0.0

    def add(self, step: Step) -> None:
        """Count one step: the first is the prompt, the others are one token each."""
        if self.prompt_seconds is None:
            self.prompt_seconds = step.seconds
        else:
            self.decoded_tokens += 1
            self.decode_seconds += step.seconds


def _load(options: DemoOptions) -> tuple[Model, Tokenizer]:
    start = perf_counter()
    tokenizer: Tokenizer
    if options.random_weights is not None:
        name = f"random weights, seed {options.random_weights}"
        config = ModelConfig()
        weights = random_weights(config, options.random_weights)
        tokenizer = ByteTokenizer()
    else:
        path = find_model() if options.model is None else options.model
        name = path.name
        file = GgufFile(path)
        config = file.config()
        weights = file.weights(config)
        tokenizer = file.tokenizer()
    print(
        f"model, {name}: {config.num_layers} layers, {config.num_q_heads} query heads, "
        f"{config.num_kv_heads} KV heads, loaded in {perf_counter() - start:.1f} s",
        file=sys.stderr,
        flush=True,
    )
    return Model(config, weights), tokenizer


def _watch(steps: Iterator[Step], timing: Timing, verifier: Verifier | None) -> Iterator[int]:
    """Pass on the choices; time and verify each step on the way."""
    for step in steps:
        timing.add(step)
        yield step.choice  # printed before it is verified, which takes longer
        if verifier is not None:
            verifier.check(step.token, step.position, step.logits)


def _print_text(choices: Iterator[int], tokenizer: Tokenizer) -> None:
    """Print each token as it comes; a character that spans tokens appears with the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in choices:
        sys.stdout.write(decoder.decode(tokenizer.token_bytes(token)))
        sys.stdout.flush()
    print(decoder.decode(b"", final=True), end="\n\n")


def _report(timing: Timing, kv: KvFile, streamed: StreamedAttention) -> str:
    tokens = timing.prompt_tokens + timing.decoded_tokens
    blocks = kv.blocks_for(tokens)
    kv_bytes = kv.num_layers * blocks * kv.block_bytes
    decode = "decode    none: the prompt gave the only token"
    if timing.decoded_tokens:
        decode = f"decode    {_rate(timing.decoded_tokens, timing.decode_seconds)}"
    return "\n".join(
        [
            f"prompt    {_rate(timing.prompt_tokens, timing.prompt_seconds or 0.0)}",
            decode,
            f"KV        {_size(kv_bytes)} in a file: {tokens} tokens in {kv.num_layers} layers, "
            f"{blocks} blocks of {kv.block_size} tokens each",
            f"scratch   {_size(streamed.scratch_bytes)} in memory on the {streamed.device}: "
            f"{streamed.scratch_blocks} blocks",
            f"streamed  {_size(streamed.streamed_bytes)} from the file in {streamed.streamed_tiles} tiles",
        ]
    )


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s" if seconds else "0 tokens"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
