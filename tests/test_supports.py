# SPDX-License-Identifier: Apache-2.0
"""supports and info tell the truth about what calls do."""

from __future__ import annotations

import cases
import numpy as np
import pytest
import tiledattn as ta

OPERATIONS = ["flash_attention", "paged_attention", "tiled_attention"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_supported(operation, device, dtype):
    answer = ta.supports(
        operation, device=device.device, dtype=dtype, num_q_heads=32, num_kv_heads=8, head_dim=128
    )
    assert answer.supported is True
    assert bool(answer)
    assert isinstance(answer.kernel, str)
    assert answer.kernel
    assert answer.reason == ""


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"num_q_heads": 7, "num_kv_heads": 2}, "7"),
        ({"head_dim": 0}, "head_dim"),
        ({"dtype": "float64"}, "float64"),
        ({"head_dim": 1000}, "1000"),
        ({"q_len": 0}, "q_len: got 0; expected 1 or more"),
    ],
)
def test_not_supported_says_why(operation, sizes, reason, device):
    answer = ta.supports(operation, device=device.device, **sizes)
    assert answer.supported is False
    assert not answer
    assert reason in answer.reason


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("q_len", "kind"), [(1, "decode"), (16, "decode"), (17, "prefill"), (5000, "prefill")]
)
def test_kernels_by_query_tokens(q_len, kind, operation, device):
    """Tiles are always decode: there is a state."""
    kind = "decode" if operation == "tiled_attention" else kind
    sizes = {"num_q_heads": 32, "num_kv_heads": 8, "device": device.device}
    assert f"_{kind}" in ta.supports(operation, q_len=q_len, **sizes).kernel
    most = "prefill" if operation == "flash_attention" else "decode"
    assert f"_{most}" in ta.supports(operation, **sizes).kernel


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1), (7, 7, 37, 20), (71, 1, 256, 256), (4, 2, 257, 64), (6, 4, 8, 8)]
)
def test_the_answer_is_what_the_call_does(sizes, device):
    num_q_heads, num_kv_heads, head_dim, head_dim_v = sizes
    answer = ta.supports(
        "flash_attention",
        device=device.device,
        dtype="float32",
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
    )
    q = device.full((1, 2, num_q_heads, head_dim), 0, "float32")
    k = device.full((1, 3, num_kv_heads, head_dim), 0, "float32")
    v = device.full((1, 3, num_kv_heads, head_dim_v), 1, "float32")
    if answer:
        assert (device.numpy(ta.flash_attention(q, k, v)) == 1.0).all()
    else:
        with pytest.raises(ValueError, match=r"head"):
            ta.flash_attention(q, k, v)


def test_unknown_words(cpu):
    with pytest.raises(ValueError, match="operation"):
        ta.supports("sort", device="cpu")
    with pytest.raises(ValueError, match="device"):
        ta.supports("flash_attention", device="tpu")


def test_info(cpu):
    info = ta.info()
    assert info["version"] == ta.__version__
    assert info["cpu_isa"] in info["cpu_isas"]
    assert "scalar" in info["cpu_isas"]
    assert info["num_threads"] == ta.get_num_threads()
    assert len(info["cuda_devices"]) == info["num_cuda_devices"]
    assert bool(info["no_cuda"]) == (info["num_cuda_devices"] == 0)


@pytest.mark.gpu
def test_info_sees_the_gpu(gpu):
    info = ta.info()
    assert info["cuda"]
    assert info["num_cuda_devices"] >= 1
    assert info["no_cuda"] == ""


def test_number_of_threads(cpu):
    before = ta.get_num_threads()
    try:
        for n in (1, 2, 3):
            ta.set_num_threads(n)
            assert ta.get_num_threads() == n
        for bad in (0, -1):
            with pytest.raises(ValueError, match=f"{bad}"):
                ta.set_num_threads(bad)
    finally:
        ta.set_num_threads(before)


@pytest.mark.parametrize("name", ["tpu", "cuda:-1", "cuda:x", "cuda:99", "CPU", ""])
def test_device_names(name, cpu):
    dims = ta.TiledAttentionDims(
        max_seqs=1, num_q_heads=1, num_kv_heads=1, head_dim=8, block_size=8, tile_capacity=1
    )
    with pytest.raises((ValueError, RuntimeError), match=r"device|cuda") as caught:
        ta.TiledAttention(dims, device=name)
    assert name in str(caught.value)


def test_what_is_no_device_and_no_type(cpu):
    for number in (3, True, 0.0, np.int64(0)):
        with pytest.raises(TypeError, match=r"^device: expected a str, .* got .*(int|bool|float)"):
            ta.Workspace(number)
    for text in ("\udc80", "cuda:\udc80"):
        with pytest.raises(ValueError, match=r"device: got .*\\udc80"):
            ta.Workspace(text)
    with pytest.raises(ValueError, match=r"dtype: got .*\\udc80"):
        ta.supports("flash_attention", device="cpu", dtype="\udc80")
    assert ta.Workspace(np.str_("cpu")).device == "cpu"


def test_scratch_pool_views_errors(cpu):
    with pytest.raises(ValueError, match=r"pool.*\[4, 3, 2, 8, 16\]|pool.*3"):
        ta.scratch_pool_views(np.zeros((4, 3, 2, 8, 16), np.float32))
    with pytest.raises(ValueError, match="pool"):
        ta.scratch_pool_views(cases.random(np.random.default_rng(0), (4, 2, 8, 16), "float32"))


@pytest.mark.parametrize(
    "sizes",
    [
        {"q_len": 2**62},
        {"q_len": 0},
        {"q_len": 16, "num_q_heads": 2**58, "num_kv_heads": 1, "head_dim": 1},
        {"num_q_heads": 2**62, "num_kv_heads": 2**62},
    ],
)
@pytest.mark.parametrize("operation", ["flash_attention", "paged_attention", "tiled_attention"])
def test_sizes_beyond_64_bits(operation, sizes):
    """Products of sizes would overflow in the plan, which divides by them."""
    answer = ta.supports(operation, device="cpu", dtype="float32", **sizes)
    assert not answer
    assert answer.reason


def test_reasons_name_the_arguments_of_the_call():
    answer = ta.supports("paged_attention", device="cpu", head_dim=300)
    assert not answer
    assert answer.reason.startswith("head_dim: got head dimension 300")
