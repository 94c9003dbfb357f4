# SPDX-License-Identifier: Apache-2.0
"""attn_implementation="tiledattn": tiny random models against transformers' own eager attention in float32."""

from __future__ import annotations

import copy
import importlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
ta_transformers = importlib.import_module("tiledattn.transformers")

# Importing and building models warns of things that are not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
SLIDING = {"sliding_window": 5}
BOTH_KINDS = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "llama": ("LlamaConfig", {}),
    "mistral_sliding": ("MistralConfig", SLIDING),
    "qwen2_sliding": ("Qwen2Config", {**BOTH_KINDS, "use_sliding_window": True}),
    "qwen3": ("Qwen3Config", {}),
    "gemma2_softcap": (
        "Gemma2Config",
        {**BOTH_KINDS, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4},
    ),
    "gemma3": ("Gemma3TextConfig", BOTH_KINDS),
    "gpt_oss_sinks": ("GptOssConfig", {**BOTH_KINDS, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
LENGTH = 12


@pytest.fixture(scope="module", params=MODELS)
def models(request):
    """A model on tiledattn, and the same weights on eager attention. (In float64 its mask overflows to NaN.)"""
    return _models(request.param)


def _models(name):
    ta_transformers.register()
    config_class, options = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**SIZES, **options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for (
        parameter
    ) in model.parameters():  # sharper attention than that of the usual start, and sinks that count
        parameter.data.normal_(std=0.2)
    judge = copy.deepcopy(model)
    model.set_attn_implementation("tiledattn")
    return model, judge


def _tokens(batch=3, length=LENGTH, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(3, 99, (batch, length)))


def _close(got, want, exists=None, bound=1e-4):
    got, want = got.double().cpu(), want.double().cpu()
    if exists is not None:
        got, want = got[exists.cpu()], want[exists.cpu()]
    error = ((got - want).norm() / want.norm()).item()
    assert error <= bound, f"relative error {error:.3g}, bound {bound:.3g}"


def _padded(side, lengths=(12, 7, 1)):
    mask = torch.zeros(len(lengths), LENGTH, dtype=torch.int64)
    for row, n in zip(mask, lengths, strict=True):
        row[LENGTH - n :] = 1 if side == "left" else 0
        if side == "right":
            row[:n] = 1
    return mask


@torch.no_grad()
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_logits(padding, models):
    model, judge = models
    mask = torch.ones(3, LENGTH, dtype=torch.int64) if padding == "none" else _padded(padding)
    tokens = _tokens()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
    _close(model(**inputs).logits, judge(**inputs).logits, mask.bool())


@torch.no_grad()
def test_the_mask_is_seen(models):
    """The check above has teeth: eager attention without the mask is far away."""
    _, judge = models
    mask = _padded("left")
    with pytest.raises(AssertionError, match="relative error"):
        _close(judge(_tokens()).logits, judge(_tokens(), attention_mask=mask).logits, mask.bool(), bound=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["none", "left"])
def test_generation(padding, cache, models):
    """Prefill, then steps over a cache that grows past the sliding window, or is longer than its contents."""
    model, judge = models
    mask = torch.ones(3, LENGTH, dtype=torch.int64) if padding == "none" else _padded("left")
    options = {
        "attention_mask": mask,
        "max_new_tokens": 8,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
        "disable_compile": True,
    }
    got = model.generate(_tokens(), cache_implementation=None if cache == "dynamic" else cache, **options)
    want = judge.generate(_tokens(), **options)
    assert torch.equal(got.sequences, want.sequences)
    _close(torch.stack(got.logits), torch.stack(want.logits))


@torch.no_grad()
@pytest.mark.parametrize("padding", ["none", "left"])
def test_several_tokens_after_a_cache(padding, models):
    """Chunked prefill: queries that are fewer than the keys."""
    model, judge = models
    mask = torch.ones(3, LENGTH, dtype=torch.int64) if padding == "none" else _padded("left")
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    tokens, cache = _tokens(), None
    want = judge(tokens, attention_mask=mask, position_ids=positions).logits
    for begin, end in ((0, 5), (5, 9), (9, LENGTH)):
        result = model(
            tokens[:, begin:end],
            attention_mask=mask[:, :end],
            position_ids=positions[:, begin:end],
            past_key_values=cache,
            use_cache=True,
        )
        cache = result.past_key_values
        _close(result.logits, want[:, begin:end], mask[:, begin:end].bool())


@torch.no_grad()
def test_bidirectional_with_padding():
    ta_transformers.register()
    torch.manual_seed(0)
    sizes = {
        key: SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    }
    config = transformers.BertConfig(**sizes, num_attention_heads=4)
    model = transformers.BertModel._from_config(config, attn_implementation="eager").eval()
    judge = copy.deepcopy(model)
    model.set_attn_implementation("tiledattn")
    for side in ("left", "right"):
        mask = _padded(side)
        inputs = {"input_ids": _tokens(), "attention_mask": mask}
        _close(model(**inputs).last_hidden_state, judge(**inputs).last_hidden_state, mask.bool())
    _close(model(_tokens()).last_hidden_state, judge(_tokens()).last_hidden_state)


@torch.no_grad()
def test_compiled_without_a_break():
    model, judge = _models("llama")
    torch._dynamo.reset()
    mask = _padded("left")
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    call = torch.compile(
        lambda tokens, mask, positions: (
            model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
        ),
        fullgraph=True,
        backend="aot_eager",
    )
    want = judge(_tokens(), attention_mask=mask, position_ids=positions).logits
    _close(call(_tokens(), mask, positions), want, mask.bool())


@torch.no_grad()
def test_packed_sequences():
    """cu_seq_lens, as collators without padding and continuous batching give them, beside each sequence alone."""
    model, judge = _models("mistral_sliding")
    tokens = _tokens(1)
    cu = torch.tensor([0, 7, LENGTH], dtype=torch.int32)
    packed = torch.cat([torch.arange(7), torch.arange(5)])[None]
    # A mask that transformers does not look into: packing is described by cu_seq_lens alone.
    got = model(
        tokens,
        attention_mask=torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool),
        position_ids=packed,
        cu_seq_lens_q=cu,
        cu_seq_lens_k=cu,
        use_cache=False,
    ).logits
    want = torch.cat([judge(tokens[:, :7]).logits, judge(tokens[:, 7:]).logits], dim=1)
    _close(got, want)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "mistral_sliding"])
def test_continuous_batching(name, monkeypatch):
    """The opt-in that takes the name sdpa; prompts of several lengths, beside eager attention one by one."""
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
    ta_transformers.register(replace_sdpa=True)
    model, judge = _models(name)
    model.set_attn_implementation("sdpa")
    prompts = [row[:n].tolist() for row, n in zip(_tokens(), (12, 7, 3), strict=True)]
    options = transformers.GenerationConfig(
        max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    # By itself it takes most of the memory that it finds.
    sizes = transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    got = model.generate_batch(inputs=prompts, generation_config=options, continuous_batching_config=sizes)
    for prompt, result in zip(prompts, got.values(), strict=True):
        want = judge.generate(torch.tensor([prompt]), generation_config=options)[0, len(prompt) :]
        assert result.generated_tokens == want.tolist()


@torch.no_grad()
def test_what_it_does_not_support_is_refused():
    model, _ = _models("llama")
    tokens = _tokens()
    packed = torch.cat([torch.arange(7), torch.arange(5)]).expand(3, -1)
    with pytest.raises(ValueError, match=r"^mask_function: got a pattern"):
        model(tokens, position_ids=packed, use_cache=False)
    with pytest.raises(ValueError, match=r"^attention_mask: got shape"):
        model(tokens, attention_mask=torch.ones(3, 1, LENGTH, LENGTH, dtype=torch.bool))
    sliding, _ = _models("mistral_sliding")
    holes = torch.ones(3, LENGTH, dtype=torch.int64)
    holes[0, 4] = 0
    with pytest.raises(ValueError, match=r"^attention_mask: got padding between"):
        sliding(tokens, attention_mask=holes)
    query = torch.ones(1, 2, 3, 8)
    with pytest.raises(ValueError, match=r"^dropout: "):
        ta_transformers.attention(torch.nn.Module(), query, query, query, None, dropout=0.1)
    with pytest.raises(ValueError, match=r"^position_bias: "):
        ta_transformers.attention(torch.nn.Module(), query, query, query, None, position_bias=query)


def test_training_is_refused():
    model, _ = _models("llama")
    with pytest.raises(ValueError, match="requires grad"):
        model(_tokens())


@torch.no_grad()
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu(name, dtype, gpu):
    """Prefill with padding and greedy steps; errors are measured beside those of eager attention in that type."""
    model, _ = _models(name)
    kind = getattr(torch, dtype)
    model = model.to("cuda", kind)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    exact = copy.deepcopy(eager).float()
    mask = _padded("left").cuda()
    inputs = {
        "input_ids": _tokens().cuda(),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
    }
    want = exact(**inputs).logits
    usual = eager(**inputs).logits.float()
    scale = want[mask.bool()].norm()
    bound = max(1e-4, 2 * ((usual - want)[mask.bool()].norm() / scale).item())
    _close(model(**inputs).logits, want, mask.bool(), bound)
    if dtype == "float32":
        steps = {"max_new_tokens": 6, "do_sample": False, "attention_mask": mask}
        assert torch.equal(
            model.generate(inputs["input_ids"], **steps), exact.generate(inputs["input_ids"], **steps)
        )
