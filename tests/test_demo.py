# SPDX-License-Identifier: Apache-2.0
"""The demo: its model against float64 written another way, its KV file, streaming, verification, commands."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys

import compare
import numpy as np
import pytest
import reference
import tiledattn as ta
from tiledattn import cli
from tiledattn.demo import app
from tiledattn.demo.arrays import arrays_for
from tiledattn.demo.attention import PromptAttention, StreamedAttention, tiles
from tiledattn.demo.config import ModelConfig
from tiledattn.demo.errors import DemoError
from tiledattn.demo.generate import generate
from tiledattn.demo.kv_file import KvFile
from tiledattn.demo.model import Model
from tiledattn.demo.progress import ProgressBar
from tiledattn.demo.verify import DenseAttention, Verifier
from tiledattn.demo.weights import random_weights

SMALL = ModelConfig(
    num_layers=3,
    num_q_heads=6,
    num_kv_heads=2,
    head_dim=16,
    hidden_size=96,
    feed_forward_size=160,
    vocab_size=300,
    context_length=100,
)
WEIGHTS = random_weights(SMALL, seed=7)


def small_kv(path=None, *, block_size=4, num_blocks=25):
    return KvFile(
        path,
        num_layers=SMALL.num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=SMALL.num_kv_heads,
        head_dim=SMALL.head_dim,
    )


def random_kv(tokens, seed=0):
    generator = np.random.default_rng(seed)
    shape = (2, tokens, SMALL.num_kv_heads, SMALL.head_dim)
    return generator.standard_normal(shape).astype(np.float32)


def dense_logits(config, weights, tokens):
    """Logits after each token, in float64: one head and one token at a time, RoPE as complex numbers."""

    def norm(x, weight):
        return x / np.sqrt((x * x).mean() + config.norm_epsilon) * weight

    def rope(x, position):
        pairs = x[0::2] + 1j * x[1::2]
        exponents = np.arange(len(pairs)) / len(pairs)
        turned = pairs * np.exp(1j * position * config.rope_base**-exponents)
        return np.stack([turned.real, turned.imag], axis=1).ravel()

    x = [weights.embedding[token].astype(np.float64) for token in tokens]
    d, ratio = config.head_dim, config.num_q_heads // config.num_kv_heads
    for layer in weights.layers:
        qkv = [layer.qkv.astype(np.float64) @ norm(row, layer.attention_norm) for row in x]
        heads = [row.reshape(-1, d) for row in qkv]  # query heads, then key heads, then value heads
        for i in range(len(tokens)):
            results = []
            for h in range(config.num_q_heads):
                key = config.num_q_heads + h // ratio
                value = key + config.num_kv_heads
                q = rope(heads[i][h], i)
                scores = np.array([q @ rope(heads[j][key], j) / np.sqrt(d) for j in range(i + 1)])
                share = np.exp(scores - scores.max())
                share /= share.sum()
                results.append(sum(share[j] * heads[j][value] for j in range(i + 1)))
            x[i] = x[i] + layer.attention_output.astype(np.float64) @ np.concatenate(results)
        for i in range(len(tokens)):
            both = layer.gate_up.astype(np.float64) @ norm(x[i], layer.feed_forward_norm)
            gate, up = np.split(both, 2)
            x[i] = x[i] + layer.down.astype(np.float64) @ (gate / (1 + np.exp(-gate)) * up)
    return np.array([weights.output.astype(np.float64) @ norm(row, weights.output_norm) for row in x])


class UnroundedAttention:
    """Causal attention over float32 K and V kept in memory, by the tests' reference."""

    def __init__(self):
        self.kept = {}

    def __call__(self, layer, position, q, k, v):
        if position:
            k, v = (np.concatenate(pair) for pair in zip(self.kept[layer], (k, v), strict=True))
        self.kept[layer] = k, v
        out = reference.flash(q[None], k[None], v[None], causal=True).out
        return out[0].astype(np.float32)


def run_small(kv, prompt, max_tokens, *, arrays=None, scratch_blocks=2, token_attention=None, **options):
    arrays = arrays_for("cpu") if arrays is None else arrays
    if token_attention is None:
        token_attention = StreamedAttention(
            kv, arrays, num_q_heads=SMALL.num_q_heads, scratch_blocks=scratch_blocks
        )
    return generate(
        Model(SMALL, WEIGHTS),
        prompt,
        prompt_attention=PromptAttention(kv, arrays),
        token_attention=token_attention,
        max_tokens=max_tokens,
        stop_tokens=options.pop("stop_tokens", frozenset()),
        **options,
    )


# The model


def test_model_agrees_with_another_implementation(monkeypatch):
    monkeypatch.setattr("tiledattn.demo.model.FEED_FORWARD_ROWS", 5)  # the prompt is cut into rows
    tokens = list(np.random.default_rng(1).integers(0, SMALL.vocab_size, 17))
    want = dense_logits(SMALL, WEIGHTS, tokens)
    model, attention = Model(SMALL, WEIGHTS), UnroundedAttention()
    np.testing.assert_allclose(model.forward(tokens[:12], 0, attention), want[11], atol=2e-5)
    for position in range(12, 17):
        got = model.forward([tokens[position]], position, attention)
        np.testing.assert_allclose(got, want[position], atol=2e-5)


@pytest.mark.parametrize(
    ("tokens", "position", "text"),
    [
        ([], 0, "tokens: got none"),
        ([1], SMALL.context_length, "position: 1 token.* do not fit the context of 100"),
        ([300], 0, "tokens: ids 300..300, wanted 0..299"),
        ([3, -1], 0, "tokens: ids -1..3"),
    ],
)
def test_model_refuses(tokens, position, text):
    with pytest.raises(ValueError, match=text):
        Model(SMALL, WEIGHTS).forward(tokens, position, UnroundedAttention())


def test_model_runs_without_threadpoolctl(monkeypatch):
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    attention = UnroundedAttention()
    got = Model(SMALL, WEIGHTS).forward([1, 2, 3], 0, attention)
    np.testing.assert_allclose(got, dense_logits(SMALL, WEIGHTS, [1, 2, 3])[-1], atol=2e-5)


def test_random_weights_are_repeatable():
    again, other = random_weights(SMALL, seed=7), random_weights(SMALL, seed=8)
    np.testing.assert_array_equal(again.layers[2].down, WEIGHTS.layers[2].down)
    assert not np.array_equal(other.embedding, WEIGHTS.embedding)


# The KV file


@pytest.mark.parametrize("cuts", [[0, 25], [0, 1, 2, 3, 25], [0, 4, 8, 25], [0, 7, 9, 16, 17, 25]], ids=str)
def test_kv_file_gives_back_what_was_written(cuts):
    k, v = random_kv(25)
    with small_kv() as kv:
        for first, last in itertools.pairwise(cuts):
            kv.write(1, first, k[first:last], v[first:last])
        got_k, got_v = kv.read_tokens(1, 25)
        np.testing.assert_array_equal(got_k, k.astype(np.float16))
        np.testing.assert_array_equal(got_v, v.astype(np.float16))
        for layer in (0, 2):  # the neighbours are untouched
            assert not np.any(kv.read_tokens(layer, 100))


def test_kv_file_layout_on_disk(tmp_path):
    path = tmp_path / "kv"
    k, v = random_kv(25)
    with small_kv(path) as kv:
        kv.write(2, 0, k, v)
    shape = (SMALL.num_layers, 25, 2, SMALL.num_kv_heads, 4, SMALL.head_dim)
    on_disk = np.fromfile(path, np.float16).reshape(shape)
    np.testing.assert_array_equal(on_disk[2, 5, 1, 0, 3], v[23, 0].astype(np.float16))
    with pytest.raises(DemoError, match=r"--kv-file: got .*kv, which exists; expected a new file"):
        small_kv(path)


def test_kv_file_refuses(tmp_path):
    k, v = random_kv(3)
    path = tmp_path / "kv"
    with small_kv(path, num_blocks=2) as kv:
        with pytest.raises(IndexError, match=r"layer: 3, wanted 0..2"):
            kv.write(3, 0, k, v)
        with pytest.raises(IndexError, match=r"block: 1..2, but the file has 2"):
            kv.write(0, 6, k, v)
        with pytest.raises(ValueError, match=r"v: layer 0 holds 70000, which float16 cannot store"):
            kv.write(0, 0, k, np.full_like(v, 70000))
        with pytest.raises(ValueError, match=r"k: layer 0 holds nan"):
            kv.write(0, 0, np.full_like(k, np.nan), v)
        with pytest.raises(ValueError, match=r"into: float32 of shape .* wanted contiguous float16"):
            kv.read(0, 0, np.zeros((1, *kv.block_shape), np.float32))
        with path.open("r+b") as other:
            other.truncate(kv.block_bytes)
        with pytest.raises(OSError, match=r"kv ended 512 bytes early"):
            kv.read(0, 0, np.zeros((2, *kv.block_shape), np.float16))


# Streaming


@pytest.mark.parametrize("capacity", [1, 2, 7])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_tiles_cover_a_sequence_once(block_size, capacity):
    for tokens in range(1, 3 * block_size * capacity + 2):
        cut = list(tiles(tokens, block_size, capacity))
        assert all(1 <= tile.count <= capacity for tile in cut)
        assert all(tile.last_block_valid_slots == block_size for tile in cut[:-1])
        assert 1 <= cut[-1].last_block_valid_slots <= block_size
        seen = [
            (tile.first_block + block) * block_size + slot
            for tile in cut
            for block in range(tile.count)
            for slot in range(tile.last_block_valid_slots if block == tile.count - 1 else block_size)
        ]
        assert seen == list(range(tokens))


@pytest.mark.parametrize(
    ("tokens", "block_size", "scratch_blocks"),
    [(1, 4, 2), (8, 4, 2), (9, 4, 2), (37, 4, 3), (64, 1, 5), (64, 16, 1), (50, 7, 100), (99, 16, 2)],
)
def test_streamed_attention_is_exact(device, tokens, block_size, scratch_blocks):
    k, v = random_kv(tokens)
    k16, v16 = k.astype(np.float16), v.astype(np.float16)
    q = np.random.default_rng(5).standard_normal((1, SMALL.num_q_heads, SMALL.head_dim)).astype(np.float16)
    with small_kv(block_size=block_size, num_blocks=100) as kv:
        streamed = StreamedAttention(
            kv, arrays_for(device.device), num_q_heads=SMALL.num_q_heads, scratch_blocks=scratch_blocks
        )
        kv.write(1, 0, k[:-1], v[:-1])
        query = q.astype(np.float32)
        # Twice: the second time the scratch pool and the state hold what the first left.
        for _ in range(2):
            got = streamed(1, tokens - 1, query, k[-1:], v[-1:])
            want = reference.flash(q[None], k16[None], v16[None]).out
            compare.out_close(got, want[0], "float16")
            dense = DenseAttention(kv)(1, tokens - 1, query, k[-1:], v[-1:])
            compare.out_close(dense, want[0], "float32")
        blocks = kv.blocks_for(tokens)
        assert streamed.streamed_bytes == 2 * blocks * kv.block_bytes
        assert streamed.streamed_tiles == 2 * -(-blocks // scratch_blocks)
        assert streamed.scratch_bytes == scratch_blocks * kv.block_bytes


def test_attentions_refuse_the_wrong_number_of_tokens():
    k, v = random_kv(2)
    q = np.zeros((2, SMALL.num_q_heads, SMALL.head_dim), np.float32)
    with small_kv() as kv:
        streamed = StreamedAttention(kv, arrays_for("cpu"), num_q_heads=SMALL.num_q_heads, scratch_blocks=1)
        with pytest.raises(ValueError, match="q: 2 tokens, but one is decoded at a time"):
            streamed(0, 4, q, k, v)
        with pytest.raises(ValueError, match="position: 4, but a prompt begins at 0"):
            PromptAttention(kv, arrays_for("cpu"))(0, 4, q, k, v)


# Generation and verification


def test_generation_follows_the_dense_model(device):
    prompt = [5, 250, 17, 17, 99, 3, 42]
    done = []
    with small_kv() as kv:
        verifier = Verifier(Model(SMALL, WEIGHTS), kv)
        steps = []
        for step in run_small(kv, prompt, 12, arrays=arrays_for(device.device), on_layer=done.append):
            steps.append(step)
            verifier.check(step.token, step.position, step.logits)
    assert done == [1, 2, 3]
    assert [step.position for step in steps] == list(range(6, 18))
    tokens = prompt + [step.choice for step in steps[:-1]]
    assert [step.token for step in steps] == tokens[6:]
    # K and V are float16 here, and the weights are random: logits of standard deviation one.
    want = dense_logits(SMALL, WEIGHTS, tokens)[6:]
    np.testing.assert_allclose([step.logits for step in steps], want, atol=2e-2)
    assert verifier.passed
    assert verifier.positions == 12
    assert "choices that agree: 12 of 12" in verifier.report()


def test_generation_ends():
    prompt = [1, 2, 3]
    with small_kv() as kv:
        choices = [step.choice for step in run_small(kv, prompt, 8)]
    assert len(choices) == 8
    stop = choices[3]
    with small_kv() as kv:
        stopped = [step.choice for step in run_small(kv, prompt, 8, stop_tokens=frozenset({stop}))]
    assert stopped == choices[: choices.index(stop) + 1]
    with small_kv() as kv:
        full = [step.position for step in run_small(kv, [1] * 97, 8)]
    assert full == [96, 97, 98, 99]  # the token at the last position still chooses one


@pytest.mark.parametrize("fault", ["misses the last block", "misses the first tile", "wrong layer", "NaN"])
def test_verification_finds_faults(fault):
    class Faulty(DenseAttention):
        def __call__(self, layer, position, q, k, v):
            kv.write(layer, position, k, v)
            if fault == "NaN" and layer == SMALL.num_layers - 1:
                return np.full_like(q, np.nan)
            if fault == "wrong layer":
                return super().__call__(max(layer - 1, 0), position, q, k, v)
            keys, values = kv.read_tokens(layer, position + 1)
            used = slice(8, None) if fault == "misses the first tile" else slice(0, position // 4 * 4)
            out = reference.flash(q[None], keys[None, used], values[None, used]).out
            return out[0].astype(np.float32)

    with small_kv() as kv:
        verifier = Verifier(Model(SMALL, WEIGHTS), kv)
        assert not verifier.passed  # nothing was compared yet
        assert "FAILED" in verifier.report()
        for step in run_small(kv, list(range(40)), 4, token_attention=Faulty(kv)):
            verifier.check(step.token, step.position, step.logits)
    assert not verifier.passed
    assert "FAILED" in verifier.report()


# Commands


def test_demo_command_with_random_weights(capsys, tmp_path):
    kv_file = tmp_path / "kv"
    command = ["demo", "--random-weights", "3", "--prompt", "tiles " * 15, "--tokens", "4", "--verify"]
    assert cli.main([*command, "--scratch-blocks", "2", "--kv-file", str(kv_file)]) == 0
    out, err = capsys.readouterr()
    assert "random weights, seed 3: 30 layers, 9 query heads, 3 KV heads" in err
    assert f"[{'#' * 30}] 30/30 layers" in err
    assert "prompt    90 tokens in" in out
    assert "decode    3 tokens in" in out
    # 93 tokens are 6 blocks of 12,288 bytes in each of 30 layers, visited in 3 tiles for each token.
    assert "KV        2.109 MiB in a file: 93 tokens in 30 layers, 6 blocks of 16 tokens each" in out
    assert "scratch   24 KiB in memory on the cpu: 2 blocks" in out
    assert "streamed  6.328 MiB from the file in 270 tiles" in out
    assert "choices that agree: 4 of 4" in out
    assert kv_file.stat().st_size == 30 * 6 * 12288


def test_demo_exit_code_tells_of_a_failed_verification(monkeypatch, capsys):
    monkeypatch.setattr(app, "ModelConfig", lambda: SMALL)
    monkeypatch.setattr("tiledattn.demo.verify.FLOAT16_ERROR", 1e-9)
    assert cli.main(["demo", "--random-weights", "0", "--prompt", "abc", "--tokens", "3", "--verify"]) == 1
    assert "FAILED: a logit is outside its bound" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "required: {info,demo}"),
        (["demo", "--device", "tpu"], "--device: invalid choice: 'tpu'"),
        (["demo", "--tokens", "0"], "--tokens: got '0'; expected an integer >= 1"),
        (["demo", "--scratch-blocks", "two"], "--scratch-blocks: got 'two'; expected an integer >= 1"),
        (["demo", "--random-weights", "-1"], "--random-weights: got '-1'; expected an integer >= 0"),
        (["demo", "--prompt", "a", "--prompt-file", "b"], "not allowed with argument"),
        (["demo", "--model", "a", "--random-weights", "1"], "not allowed with argument"),
    ],
    ids=str,
)
def test_wrong_command_lines(capsys, arguments, text):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert text in capsys.readouterr().err


def test_errors_of_the_demo_are_messages(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(app, "ModelConfig", lambda: SMALL)
    latin, taken = tmp_path / "latin.txt", tmp_path / "taken"
    latin.write_bytes(b"caf\xe9")
    taken.write_text("mine")
    for arguments, text in [
        (["--prompt", "x" * 100], "--prompt or --prompt-file: got 100 tokens; expected at most 99"),
        (["--prompt", ""], "--prompt or --prompt-file: got no text; expected"),
        (["--prompt-file", str(tmp_path / "none")], "No such file"),
        (["--prompt-file", str(latin)], "latin.txt with unexpected end of data at byte 3; expected UTF-8"),
        (["--prompt", "a", "--kv-file", str(taken)], "taken, which exists; expected a new file"),
    ]:
        assert cli.main(["demo", "--random-weights", "0", *arguments]) == 2
        assert text in capsys.readouterr().err
    assert taken.read_text() == "mine"


def test_cuda_without_an_array_library(monkeypatch):
    monkeypatch.setattr("tiledattn.info", lambda: {"num_cuda_devices": 1, "no_cuda": None})
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(DemoError, match="--device cuda: needs CuPy"):
        arrays_for("cuda")


def test_cuda_without_a_device(monkeypatch):
    monkeypatch.setattr("tiledattn.info", lambda: {"num_cuda_devices": 0, "no_cuda": "built without CUDA"})
    with pytest.raises(DemoError, match="--device cuda: built without CUDA; or use --device cpu"):
        arrays_for("cuda")


def test_info_command(capsys):
    assert cli.main(["info"]) == 0
    assert "cpu_isa" in capsys.readouterr().out
    assert cli.main(["info", "--json"]) == 0
    assert '"version"' in capsys.readouterr().out


def _tiledattn(*arguments, **environment):
    """Exit code, stdout and stderr of the command in a process of its own."""
    command = [sys.executable, "-m", "tiledattn.cli", *arguments]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_version_option():
    assert _tiledattn("--version") == (0, f"tiledattn {ta.__version__}\n", "")


@pytest.mark.parametrize(
    "command", [["info"], ["info", "--json"], ["demo", "--random-weights", "1"]], ids=str
)
def test_a_wrong_instruction_set_is_one_line(command):
    code, _, err = _tiledattn(*command, TILEDATTN_CPU_ISA="foo")
    assert code == 2
    assert re.fullmatch(
        rf'tiledattn {command[0]}: error: TILEDATTN_CPU_ISA: got "foo"; expected .*scalar.*\n', err
    )


def test_a_wrong_number_of_threads_is_one_line():
    code, _, err = _tiledattn("demo", "--random-weights", "1", TILEDATTN_NUM_THREADS="many")
    assert code == 2
    assert err == 'tiledattn demo: error: TILEDATTN_NUM_THREADS: got "many"; expected 1 to 1024\n'


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ta.CudaError("cudaMalloc: no\n  such luck"), "cudaMalloc: no; such luck"),
        (MemoryError(), "MemoryError"),
        (ValueError("device: got 3"), "device: got 3"),
        (OSError(28, "No space left"), "[Errno 28] No space left"),
    ],
    ids=repr,
)
def test_refusals_are_one_line(error, line, capsys, monkeypatch):
    def refuse():
        raise error

    monkeypatch.setattr("tiledattn.info", refuse)
    assert cli.main(["info"]) == 2
    assert capsys.readouterr().err == f"tiledattn info: error: {line}\n"


def test_bugs_keep_their_traceback(monkeypatch):
    monkeypatch.setattr("tiledattn.info", lambda: None)
    with pytest.raises(TypeError):
        cli.main(["info"])


@pytest.mark.parametrize("arguments", [[], ["--model", "some.gguf"]], ids=str)
def test_the_extras_of_the_demo_are_named(arguments, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert cli.main(["demo", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    for text in ("`pip install gguf`", '`pip install ".[demo]"`', "--random-weights"):
        assert text in line


def test_progress_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    bar = ProgressBar("prompt", 2)
    bar.update(1)
    bar.update(2)
    lines = capsys.readouterr().err.split("\r")
    assert lines[1].startswith("prompt [..] 0/2 layers")
    assert lines[2].startswith("prompt [#.] 1/2 layers")
    assert lines[3].startswith("prompt [##] 2/2 layers")
    assert lines[3].endswith("\n")
