# SPDX-License-Identifier: Apache-2.0
"""tiledattn.torch: operators that torch checks, traces, compiles and captures; results against float64."""

from __future__ import annotations

import doctest
import importlib

import cases
import compare
import numpy as np
import processes
import pytest
import quantised
import reference
import tiledattn as ta

torch = pytest.importorskip("torch")
importlib.import_module("torch._dynamo.testing")
tt = importlib.import_module("tiledattn.torch")

FLASH = cases.Flash("", q_len=9, kv_len=21, head_dim=16, score=cases.Score(True, (11, None), 5.0, True, 0.2))
PAGED = cases.Paged("", seq_lens=(9, 40, 0), q_lens=3, head_dim=16, score=FLASH.score)


def _flash(carrier, dtype="float32"):
    """Tensors and options of FLASH, and the right result."""
    qkv, score = FLASH.make(dtype)
    want = reference.flash(*qkv, **score)
    return [carrier.array(x) for x in qkv], {**score, "sinks": carrier.array(score["sinks"])}, want


def _paged(carrier, dtype="float32"):
    data = PAGED.make(dtype)
    want = reference.paged(*data.args, **data.kwargs)
    options = {**data.kwargs, "sinks": carrier.array(data.kwargs["sinks"])}
    return [carrier.array(x) for x in data.args], options, want


def _close(carrier, got, want, dtype="float32"):
    compare.result_close(tuple(carrier.numpy(x.contiguous()) for x in got), want, dtype)


def _compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def test_flash_attention(torch_carrier, dtype):
    args, options, want = _flash(torch_carrier, dtype)
    _close(torch_carrier, tt.flash_attention(*args, **options, return_lse=True), want, dtype)


def test_flash_attention_packed(torch_carrier):
    (q, k, v), _ = FLASH.make("float32")
    cu_q, cu_k = np.array([0, 4, 4, 9], np.int32), np.array([0, 10, 13, 21], np.int64)
    want = reference.flash_packed(q[0], k[0], v[0], cu_q, cu_k, causal=True)
    args = [torch_carrier.array(x) for x in (q[0], k[0], v[0])]
    lengths = {"cu_seqlens_q": torch_carrier.array(cu_q), "cu_seqlens_k": torch_carrier.array(cu_k)}
    call = _compiled(lambda *args: tt.flash_attention(*args, causal=True, **lengths, return_lse=True))
    _close(torch_carrier, call(*args), want)


def test_paged_attention(torch_carrier, dtype):
    args, options, want = _paged(torch_carrier, dtype)
    _close(torch_carrier, tt.paged_attention(*args, **options, return_lse=True), want, dtype)


@pytest.mark.parametrize("make", [_flash, _paged], ids=["flash", "paged"])
@pytest.mark.parametrize("compiled", [False, True])
def test_results_into_given_tensors(make, compiled, torch_carrier):
    args, options, want = make(torch_carrier)
    function = tt.flash_attention if make is _flash else tt.paged_attention

    def call(out, lse):
        function(*args, **options, out=out, lse=lse)

    out = torch.full((*want.out.shape[:-1], 20), 7.0, device=torch_carrier.device)
    lse = torch.full(want.lse.shape, 7.0, device=torch_carrier.device)
    (_compiled(call) if compiled else call)(out[..., 2:18], lse)
    _close(torch_carrier, (out[..., 2:18], lse), want)
    assert (out[..., :2] == 7).all()
    assert (out[..., 18:] == 7).all()


def test_one_result_given(torch_carrier):
    args, options, want = _flash(torch_carrier)
    lse = torch.empty(want.lse.shape, device=torch_carrier.device)
    out, same = tt.flash_attention(*args, **options, lse=lse)
    assert same is lse
    _close(torch_carrier, (out, lse), want)
    given = torch.empty_like(out)
    assert tt.flash_attention(*args, **options, out=given) is given
    out, lse = tt.flash_attention(*args, **options, out=given, return_lse=True)
    _close(torch_carrier, (out, lse), want)


def test_write_kv_in_a_compiled_step(torch_carrier):
    """Write into the cache, then attend to it: the order survives, and the caller's pool holds the token."""
    data = cases.Paged("", seq_lens=(9, 40), head_dim=16).make("float32")
    args = [torch_carrier.array(x.copy()) for x in data.args]
    k, v = torch.ones(2, 2, 2, 16, device=torch_carrier.device).unbind()
    last = data.seq_lens - 1
    slots = data.block_table[np.arange(2), last // 16].astype(np.int64) * 16 + last % 16

    def step(q, k_pool, v_pool, table, lens, slots):
        tt.write_kv(k, v, k_pool, v_pool, slots)
        return tt.paged_attention(q, k_pool, v_pool, table, lens, return_lse=True)

    got = _compiled(step)(*args, torch_carrier.array(slots))
    pools = [x.copy() for x in data.args[1:3]]
    for pool in pools:
        pool.reshape(-1, 2, 16)[slots] = 1.0
    want = reference.paged(data.args[0], *pools, *data.args[3:])
    _close(torch_carrier, got, want)
    assert (args[1].reshape(-1, 2, 16)[torch_carrier.array(slots)] == 1).all()


def test_merge_attention(torch_carrier):
    rng = np.random.default_rng(0)
    outs = [rng.standard_normal((3, 4, 16)).astype(np.float32) for _ in range(2)]
    lses = [rng.standard_normal((3, 4)).astype(np.float32) for _ in range(2)]
    lses[0][1] = -np.inf
    args = [torch_carrier.array(x) for pair in zip(outs, lses, strict=True) for x in pair]
    out, lse = _compiled(lambda *args: tt.merge_attention(*args, lse_base=2.0))(*args)
    want_out, want_lse = reference.merge_attention(outs[0], lses[0], outs[1], lses[1], 2.0)
    compare.out_close(torch_carrier.numpy(out), want_out, "float32")
    compare.lse_close(torch_carrier.numpy(lse), want_lse)


@pytest.mark.parametrize(
    "op", ["flash", "flash_lse", "flash_into", "paged", "paged_lse", "paged_into", "merge", "write_kv"]
)
def test_opcheck(op, torch_carrier):
    """torch's own check: schema, fake kernel, autograd registration, AOT dispatch with dynamic shapes."""
    ops = torch.ops.tiledattn
    device = torch_carrier.device
    if op == "merge":
        out, lse = torch.ones(3, 4, 16, device=device), torch.ones(3, 4, device=device)
        torch.library.opcheck(ops.merge_attention.default, (out, lse, 2 * out, lse, 2.0))
        return
    if op == "write_kv":
        k, pool = torch.ones(2, 2, 16, device=device), torch.zeros(3, 16, 2, 16, device=device)
        slots = torch.tensor([40, -1], device=device)
        torch.library.opcheck(ops.write_kv.default, (k, k, pool, pool.clone(), slots))
        return
    if op.startswith("flash"):
        args, options, want = _flash(torch_carrier)
        rest = ("bshd", None, None, None, None)
    else:
        args, options, want = _paged(torch_carrier)
        rest = (None, None)
    score = [options[name] for name in ("causal", "softmax_scale")]
    score += [*options["window"], options["softcap"], options["sinks"]]
    args = (*args, *score, *rest)
    family, _, suffix = op.partition("_")
    overload = getattr(ops, "_".join(filter(None, (family, "attention", suffix)))).default
    if suffix == "into":
        out = torch.zeros(want.out.shape, device=device)
        torch.library.opcheck(overload, (out, torch.zeros(want.lse.shape, device=device), *args))
        torch.library.opcheck(overload, (out, None, *args))
    else:
        torch.library.opcheck(overload, args)


@pytest.mark.parametrize("scale", ["number", "head", "slot"])
@pytest.mark.parametrize("kv_dtype", quantised.KV_DTYPES)
def test_quantised_cache(kv_dtype, scale, torch_carrier):
    """Written and read in one graph."""
    made = quantised.make(cases.Paged("", seq_lens=(40, 9)), "float16", kv_dtype, scale)
    q, k_pool, v_pool, table, lens = map(torch_carrier.array, made.data.args)
    scales = {name: x if scale == "number" else torch_carrier.array(x) for name, x in made.scales.items()}
    token = torch.full((1, 2, 64), 0.5, device=q.device, dtype=q.dtype)
    slots = torch.tensor([-1], device=q.device)

    def call(q, k_pool, v_pool):
        tt.write_kv(token, token, k_pool, v_pool, slots, **scales)
        return tt.paged_attention(q, k_pool, v_pool, table, lens, return_lse=True, **scales)

    out, lse = _compiled(call)(q, k_pool, v_pool)
    compare.result_close((torch_carrier.numpy(out), torch_carrier.numpy(lse)), made.want(), "float16")
    slots = torch.tensor([int(made.data.block_table[0, 0]) * 16], device=q.device)
    _compiled(call)(q, k_pool, v_pool)
    stored = torch_carrier.numpy(k_pool)[made.data.block_table[0, 0], 0]
    spread = np.broadcast_to(quantised.spread(made.scales["k_scale"]), (*k_pool.shape[:3], 1))
    want = quantised.quantise(np.full((2, 64), 0.5), spread[made.data.block_table[0, 0], 0], kv_dtype)
    compare.same_bits(stored, want)


def test_scales_may_be_numbers_of_numpy(torch_carrier):
    made = quantised.make(cases.Paged("", seq_lens=(40, 9)), "float32", "int8", "number")
    args = list(map(torch_carrier.array, made.data.args))
    want = tt.paged_attention(*args, **made.scales)
    got = tt.paged_attention(*args, **{name: np.float64(scale) for name, scale in made.scales.items()})
    assert torch.equal(got, want)


def test_a_hint_that_only_the_run_knows():
    """max_seqlen_q from a tensor stands for no number while the graph is traced."""
    q, cu = torch.randn(6, 2, 8), torch.tensor([0, 2, 6])

    def call(q, longest):
        return tt.flash_attention(
            q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest.max().item(), max_seqlen_k=4
        )

    longest = torch.tensor([2, 4])
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(q, longest), call(q, longest), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize(
    "wrong", ["1", True, [1.0], np.ones(2, np.float32)], ids=["str", "bool", "list", "numpy"]
)
def test_scales_of_wrong_types_are_named(name, wrong, torch_carrier):
    made = quantised.make(cases.Paged("", seq_lens=(40, 9)), "float32", "int8", "number")
    args = list(map(torch_carrier.array, made.data.args))
    with pytest.raises(
        TypeError, match=f"^{name}: expected a tensor or a number, got {type(wrong).__name__}"
    ):
        tt.paged_attention(*args, **{**made.scales, name: wrong})
    k = torch.ones(1, 2, 64, device=torch_carrier.device)
    slots = torch.tensor([3], device=torch_carrier.device)
    with pytest.raises(TypeError, match=f"^{name}: expected a tensor or a number"):
        tt.write_kv(k, k, *args[1:3], slots, **{**made.scales, name: wrong})


@pytest.mark.parametrize("name", ["k_pool", "seq_lens", "k_scale", "slot_mapping"])
def test_a_tensor_without_memory_among_others_is_refused(name, torch_carrier):
    """torch would take the whole call for one without memory: results never made, a cache never written."""
    made = quantised.make(cases.Paged("", seq_lens=(40, 9)), "float32", "int8", "head")
    names = ("q", "k_pool", "v_pool", "block_table", "seq_lens")
    args = dict(zip(names, map(torch_carrier.array, made.data.args), strict=True))
    args |= {key: torch_carrier.array(x) for key, x in made.scales.items()}
    if name in args:
        with pytest.raises((ValueError, TypeError), match=f"{name}: "):
            tt.paged_attention(**{**args, name: args[name].to("meta")})
    k = torch.ones(1, 2, 64, device=torch_carrier.device)
    slots = {"slot_mapping": torch.tensor([3], device=torch_carrier.device)}
    write = {key: args[key] for key in ("k_pool", "v_pool", "k_scale", "v_scale")} | slots
    if name in write:
        with pytest.raises((ValueError, TypeError), match=f"{name}: "):
            tt.write_kv(k, k, **{**write, name: write[name].to("meta")})


def test_opcheck_of_quantised_calls(torch_carrier):
    ops = torch.ops.tiledattn
    made = quantised.make(cases.Paged("", seq_lens=(40, 9)), "float32", "int8", "head")
    args = list(map(torch_carrier.array, made.data.args))
    scales = [torch_carrier.array(x) for x in made.scales.values()]
    score = (True, None, None, None, 0.0, None, None, None)
    for rest in ((scales[0], None, scales[1], None), (None, 0.5, scales[1], None)):
        torch.library.opcheck(ops.paged_attention.default, (*args, *score, *rest))
        k = torch.ones(1, 2, 64, device=torch_carrier.device)
        slots = torch.tensor([3], device=torch_carrier.device)
        torch.library.opcheck(ops.write_kv.default, (k, k, *args[1:3], slots, *rest))


def test_fake_results_are_the_real_ones(torch_carrier):
    """Shapes, types, strides and device, also for layouts and V sizes that differ."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    q = torch.ones(2, 4, 5, 16, device=torch_carrier.device).transpose(1, 2).bfloat16()
    k = torch.ones(2, 5, 2, 16, device=torch_carrier.device).bfloat16()
    v = torch.ones(2, 5, 2, 24, device=torch_carrier.device).bfloat16()
    real = tt.flash_attention(q, k, v, return_lse=True)
    with FakeTensorMode() as mode:
        fake = tt.flash_attention(*map(mode.from_tensor, (q, k, v)), return_lse=True)
    for got, want in zip(fake, real, strict=True):
        assert (got.shape, got.dtype, got.stride(), got.device) == (
            want.shape,
            want.dtype,
            want.stride(),
            want.device,
        )


def test_compiled_with_changing_lengths(torch_carrier):
    """One graph serves every length."""
    counter = torch._dynamo.testing.CompileCounter()
    torch._dynamo.reset()
    call = torch.compile(
        lambda q, k, v: tt.flash_attention(q * 1.0, k, v, causal=True, return_lse=True),
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    for length in (5, 9, 33):
        (q, k, v), score = cases.Flash(
            "", q_len=length, kv_len=2 * length, score=cases.Score(causal=True)
        ).make("float32")
        _close(torch_carrier, call(*map(torch_carrier.array, (q, k, v))), reference.flash(q, k, v, **score))
    assert counter.frame_count == 1


def test_compiled_by_inductor():
    """The default backend, in a process of its own: its first use warns of things that are not ours."""
    code = """
import logging; logging.disable(logging.WARNING)  # torch says so where its CUDA finds no GPU
import torch, tiledattn.torch as tt
q, k, v = torch.randn(3, 1, 64, 4, 32).unbind()
call = torch.compile(lambda q, k, v: 2 * tt.flash_attention(q + 1, k, v, causal=True).relu(), fullgraph=True)
got, want = call(q, k, v), 2 * tt.flash_attention(q + 1, k, v, causal=True).relu()
print(torch.equal(got, want))
"""
    assert processes.run(code, options=["-W", "ignore"]).split()[-1] == "True"


def test_inference_mode(torch_carrier):
    with torch.inference_mode():
        args, options, want = _flash(torch_carrier)
        out, lse = tt.flash_attention(*args, **options, return_lse=True)
    assert out.is_inference()
    _close(torch_carrier, (out, lse), want)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_refused(compiled, torch_carrier):
    args, options, want = _flash(torch_carrier)
    q = args[0].clone().requires_grad_()

    def call(q):
        return tt.flash_attention(q, *args[1:], **options, return_lse=True)

    run = _compiled(call) if compiled else call
    with pytest.raises((ValueError, torch._dynamo.exc.TorchRuntimeError), match="requires grad"):
        run(q)
    with torch.no_grad():
        _close(torch_carrier, run(q), want)


def test_errors_are_those_of_the_library(torch_carrier):
    args, _, _ = _flash(torch_carrier)
    q, k, v = args
    with pytest.raises(ValueError, match="v: got shape"):
        tt.flash_attention(q, k, v[:, 1:])
    with pytest.raises(TypeError, match="k: "):
        tt.flash_attention(q, k.double(), v)
    with pytest.raises(ValueError, match="window"):
        tt.flash_attention(q, k, v, window=(-1, None))
    with pytest.raises(ValueError, match="layout"):
        tt.flash_attention(q, k, v, layout="sbhd")


# What the functions of `ta` say too: no argument goes to torch's check of types, which names none.
WRONG_SCORES = {
    "window": [None, 3, (1,), (1, 2, 3), (1.5, None), ("1", None), (True, None), (2**70, None)],
    "causal": ["no", 1, None],
    "softcap": [None, "1", True, 1j],
    "softmax_scale": ["1", True, 1j, np.ones(2), 10**400],
    "max_seqlen_q": [2.5, "2", True],
    "return_lse": [1, "no"],
}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [(name, x) for name, all_ in WRONG_SCORES.items() for x in all_],
    ids=lambda x: str(x)[:20],
)
@pytest.mark.parametrize("make", [_flash, _paged], ids=["flash", "paged"])
def test_options_of_wrong_types_are_named(make, name, wrong, torch_carrier):
    args, options, _ = make(torch_carrier)
    function = "flash_attention" if make is _flash else "paged_attention"
    said = []
    for module in (tt, ta):
        with pytest.raises((TypeError, ValueError), match=rf"^{name}: ") as refused:
            getattr(module, function)(*args, **{**options, name: wrong})
        said.append((refused.type, str(refused.value)))
    assert said[0] == said[1]


@pytest.mark.parametrize(
    "wrong", [np.ones(2, np.float32), [1.0], 1.0, "x"], ids=["numpy", "list", "float", "str"]
)
@pytest.mark.parametrize("call", ["flash", "paged", "merge", "write_kv"])
def test_what_is_no_tensor_is_named(call, wrong, torch_carrier):
    flash, paged = _flash(torch_carrier)[0], _paged(torch_carrier)[0]
    out, lse = torch.ones(2, 3, 8), torch.ones(2, 3)
    pool = ["k_pool", "v_pool"]
    function, names, args, optional = {
        "flash": (tt.flash_attention, ["q", "k", "v"], flash, ["sinks", "cu_seqlens_q", "out", "lse"]),
        "paged": (tt.paged_attention, ["q", *pool, "block_table", "seq_lens"], paged, ["sinks", "out"]),
        "merge": (tt.merge_attention, ["out_a", "lse_a", "out_b", "lse_b"], [out, lse, out, lse], []),
        "write_kv": (tt.write_kv, ["k", "v", *pool, "slot_mapping"], [out, out, *paged[1:3], lse], []),
    }[call]
    given = dict(zip(names, args, strict=True))
    for name in (*names, *optional):
        said = rf"^{name}: expected a torch tensor.*, got {type(wrong).__name__}$"
        with pytest.raises(TypeError, match=said):
            function(**{**given, name: wrong})
    with pytest.raises(TypeError, match=rf"^{names[0]}: expected a torch tensor, got NoneType$"):
        function(**{**given, names[0]: None})


def test_numbers_of_numpy_are_numbers(torch_carrier):
    args, options, want = _flash(torch_carrier)
    options |= {"causal": np.True_, "window": [np.int64(11), None], "softcap": np.float32(5.0)}
    options["softmax_scale"] = np.float64(options.get("softmax_scale") or 0.25)
    _close(torch_carrier, tt.flash_attention(*args, **options, return_lse=np.True_), want)


def test_a_block_id_outside_the_pool():
    args = [torch.from_numpy(x) for x in PAGED.make("float32").args]
    args[3][1, 0] = 99
    with pytest.raises(IndexError, match="block_table"):
        tt.paged_attention(*args)


@pytest.mark.parametrize("module", ["_flash_attn", "_functions", "_sdpa"])
def test_examples_of_the_docstrings(module):
    results = doctest.testmod(importlib.import_module(f"tiledattn.torch.{module}"))
    assert results.attempted
    assert not results.failed


def _captured(work):
    """``work`` in a CUDA graph, after one run outside that makes workspaces; and its results."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result


@pytest.mark.gpu
def test_a_graph_replays_new_lengths(gpu):
    args, options, want = _paged(gpu)
    graph, got = _captured(lambda: tt.paged_attention(*args, **options, return_lse=True))
    graph.replay()
    _close(gpu, got, want)
    first = PAGED.make("float32")
    lens = np.array([5, 17, 0], first.seq_lens.dtype)
    args[4].copy_(gpu.array(lens))
    graph.replay()
    _close(gpu, got, reference.paged(*first.args[:4], lens, **first.kwargs))


# torch begins its pool of graphs with an empty one.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.gpu
def test_compiled_with_cuda_graphs(gpu):
    """The operators inside graphs that torch captures itself."""
    args, options, want = _flash(gpu)
    torch._dynamo.reset()
    call = torch.compile(
        lambda *args: tt.flash_attention(args[0] * 1.0, *args[1:], **options, return_lse=True),
        fullgraph=True,
        backend="cudagraphs",
    )
    for _ in range(4):
        got = [x.clone() for x in call(*args)]
        _close(gpu, got, want)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_compiled_by_inductor_with_cuda_graphs():
    """mode="reduce-overhead": generated kernels and ours in one graph of torch's own, replayed with new inputs."""
    code = """
import torch, tiledattn.torch as tt

@torch.compile(fullgraph=True, mode="reduce-overhead")
def step(q, k, v):
    return 2 * tt.flash_attention(q + 1, k, v, causal=True).relu()

for seed in range(5):
    torch.manual_seed(seed)
    q, k, v = torch.randn(3, 1, 64, 4, 32, device="cuda").unbind()
    want = 2 * tt.flash_attention(q + 1, k, v, causal=True).relu()
    assert torch.allclose(step(q, k, v), want, rtol=1e-5, atol=1e-6), seed
print("right")
"""
    assert processes.run(code, options=["-W", "ignore"]).split()[-1] == "right"


@pytest.mark.gpu
def test_the_current_stream_is_used(gpu):
    """Under torch.cuda.stream(side) the operator is ordered after side's work."""
    args, options, want = _flash(gpu)
    late = torch.zeros_like(args[0])
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(int(30 * 1.5e6))
        late.copy_(args[0])
        got = tt.flash_attention(late, *args[1:], **options, return_lse=True)
        _close(gpu, got, want)
