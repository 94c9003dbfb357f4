# SPDX-License-Identifier: Apache-2.0
"""tiledattn.torch.scaled_dot_product_attention against torch's own, in float64."""

from __future__ import annotations

import importlib

import compare
import pytest

torch = pytest.importorskip("torch")
tt = importlib.import_module("tiledattn.torch")

SHAPES = {
    "square": ((2, 4, 33, 16), (2, 4, 33, 16)),
    "more_keys": ((2, 4, 7, 16), (2, 4, 40, 16)),
    "more_queries": ((2, 4, 40, 16), (2, 4, 7, 16)),
    "one_query": ((2, 4, 1, 16), (2, 4, 40, 16)),
    "heads_alone": ((4, 9, 16), (4, 12, 16)),
    "five_dimensions": ((2, 3, 4, 9, 16), (2, 3, 4, 9, 16)),
    "no_keys": ((2, 4, 5, 16), (2, 4, 0, 16)),
    "no_queries": ((2, 4, 0, 16), (2, 4, 5, 16)),
    "no_batch": ((0, 4, 5, 16), (0, 4, 5, 16)),
}


def _tensors(q_shape, kv_shape, device, head_dim_v=None, seed=0):
    make = torch.Generator().manual_seed(seed)
    v_shape = (*kv_shape[:-1], head_dim_v or kv_shape[-1])
    return [torch.randn(shape, generator=make).to(device) for shape in (q_shape, kv_shape, v_shape)]


def _same_as_torch(q, k, v, **options):
    got = tt.scaled_dot_product_attention(q, k, v, **options)
    want = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), **options)
    assert got.dtype == q.dtype
    compare.out_close(got.float().cpu().numpy(), want.cpu().numpy(), str(q.dtype).removeprefix("torch."))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_same_as_torch(shape, is_causal, torch_carrier):
    q, k, v = _tensors(*SHAPES[shape], torch_carrier.device)
    _same_as_torch(q, k, v, is_causal=is_causal)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_queries(kv_heads, torch_carrier):
    q, k, v = _tensors((2, 4, 9, 16), (2, kv_heads, 9, 16), torch_carrier.device)
    _same_as_torch(q, k, v, is_causal=True, enable_gqa=True)


def test_one_head_of_keys_needs_no_flag(torch_carrier):
    """torch broadcasts it."""
    _same_as_torch(*_tensors((2, 4, 9, 16), (2, 1, 12, 16), torch_carrier.device))


def test_scale_types_and_value_sizes(torch_carrier):
    q, k, v = _tensors((2, 4, 9, 16), (2, 4, 12, 16), torch_carrier.device, head_dim_v=24)
    _same_as_torch(q, k, v, scale=0.3, is_causal=True)
    for dtype in (torch.bfloat16, torch.float16):
        _same_as_torch(q.to(dtype), k.to(dtype), v.to(dtype), is_causal=True)


def test_strided_tensors(torch_carrier):
    q, k, v = (x.transpose(1, 2) for x in _tensors((2, 9, 4, 16), (2, 12, 4, 16), torch_carrier.device))
    _same_as_torch(q, k, v, is_causal=True)
    assert tt.scaled_dot_product_attention(q, k, v).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("is_causal", [False, True])
def test_traced_with_changing_lengths(is_causal, torch_carrier):
    torch._dynamo.reset()
    call = torch.compile(tt.scaled_dot_product_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ((9, 9), (5, 12), (14, 6)):
        q, k, v = _tensors((2, 4, lengths[0], 16), (2, 4, lengths[1], 16), torch_carrier.device)
        got = call(q, k, v, is_causal=is_causal)
        assert torch.equal(got, tt.scaled_dot_product_attention(q, k, v, is_causal=is_causal))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"attn_mask": torch.ones(9, 12, dtype=torch.bool)}, "attn_mask"),
        ({"attn_mask": torch.ones(9, 12)}, "attn_mask"),
        ({"dropout_p": 0.1}, "dropout_p"),
    ],
)
def test_refused_arguments(options, name):
    with pytest.raises(ValueError, match=rf"^{name}: "):
        tt.scaled_dot_product_attention(*_tensors((2, 4, 9, 16), (2, 4, 12, 16), "cpu"), **options)


def test_refused_shapes():
    q, k, v = _tensors((2, 4, 9, 16), (2, 2, 12, 16), "cpu")
    with pytest.raises(ValueError, match=r"^enable_gqa: "):
        tt.scaled_dot_product_attention(q, k, v)
    with pytest.raises(ValueError, match=r"^value: "):
        tt.scaled_dot_product_attention(q, k, v[0], enable_gqa=True)
    with pytest.raises(ValueError, match=r"^key: got shape \[1, 2, 12, 16\]; expected \[2, "):
        tt.scaled_dot_product_attention(q, k[:1], v, enable_gqa=True)
    with pytest.raises(ValueError, match=r"^key: got shape \[2, 2, 12, 8\]; expected \[2, 2, 12, 16\]"):
        tt.scaled_dot_product_attention(q, k[..., :8], v, enable_gqa=True)
    with pytest.raises(ValueError, match=r"^value: got shape \[2, 1, 12, 16\]; expected \[2, 2, 12, 16\]"):
        tt.scaled_dot_product_attention(q, k, v[:, :1], enable_gqa=True)
    five = torch.ones(2, 3, 4, 9, 16)
    with pytest.raises(ValueError, match=r"^key: "):
        tt.scaled_dot_product_attention(five, five.transpose(0, 1), five)
    with pytest.raises(ValueError, match=r"^query: "):
        tt.scaled_dot_product_attention(q[0, 0], k[0, 0], v[0, 0])
    with pytest.raises(ValueError, match=r"^q: requires grad"):
        tt.scaled_dot_product_attention(q.requires_grad_(), k, v, enable_gqa=True)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("keys", "values"), [(12, 9), (9, 12), (12, 15), (4, 9), (9, 4), (0, 9)])
@pytest.mark.parametrize("leading", [(), (2,), (2, 3)], ids=str)
def test_keys_and_values_of_different_lengths_are_refused(leading, keys, values, is_causal):
    """Also where a causal mask would hide all of the difference; with the shapes that the caller gave."""
    q, k, v = (torch.ones(*leading, 4, length, 16) for length in (9, keys, values))
    with pytest.raises(ValueError) as refused:
        tt.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    assert str(refused.value).startswith(f"value: got shape {list(v.shape)}; expected {list(k.shape)}")


def test_refused_types():
    q, k, v = _tensors((2, 4, 9, 16), (2, 4, 12, 16), "cpu")
    for name, wrong in (("query", q.numpy()), ("key", [1.0]), ("value", None)):
        with pytest.raises(TypeError, match=rf"^{name}: expected a torch tensor, got {type(wrong).__name__}"):
            tt.scaled_dot_product_attention(**{"query": q, "key": k, "value": v, name: wrong})
    for name, wrong in (
        ("is_causal", "no"),
        ("is_causal", 1),
        ("enable_gqa", None),
        ("scale", "1"),
        ("scale", True),
    ):
        with pytest.raises(TypeError, match=rf"^{name}: expected "):
            tt.scaled_dot_product_attention(q, k, v, **{name: wrong})
