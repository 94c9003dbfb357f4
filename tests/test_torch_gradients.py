# SPDX-License-Identifier: Apache-2.0
"""Forward only, in every way that torch has of asking for gradients; and gradients of others stay right."""

from __future__ import annotations

import importlib

import pytest
import tiledattn as ta

torch = pytest.importorskip("torch")
tt = importlib.import_module("tiledattn.torch")
forward_ad = importlib.import_module("torch.autograd.forward_ad")
func = torch.func

# torch loads formulas of its own at the first forward-mode transform.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

# The functions of `ta` are no operators: a transform gives them wrappers, which have no memory.
REFUSED = {
    tt: "requires grad, and|has a tangent of forward-mode AD, and",
    ta: "requires grad, and|has a tangent of forward-mode AD, and|the memory of this torch.Tensor cannot be read",
}


@pytest.fixture
def tensors(torch_carrier):
    """One argument of each name, small."""
    device = torch_carrier.device
    shapes = {
        "q": (2, 4, 8),
        "k": (2, 3, 2, 8),
        "v": (2, 3, 2, 8),
        "k_pool": (3, 16, 2, 8),
        "v_pool": (3, 16, 2, 8),
        "sinks": (4,),
        "out": (2, 4, 8),
        "lse": (2, 4),
    }
    make = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=make).to(device) for name, shape in shapes.items()}
    made["slot_mapping"] = torch.tensor([3, 40], device=device)
    made["block_table"] = torch.tensor([[2, 0], [1, 1]], device=device)
    made["seq_lens"] = torch.tensor([20, 9], device=device)
    return made


def _flash(module, t, **given):
    t = {**t, **given}
    return module.flash_attention(t["q"].unsqueeze(1), t["k"], t["v"], sinks=t["sinks"]).sum()


def _flash_into(module, t, **given):
    t = {**t, **given}
    out = torch.zeros_like(t["q"]).unsqueeze(1)
    module.flash_attention(t["q"].unsqueeze(1), t["k"], t["v"], sinks=t["sinks"], out=out)
    return out.sum()


def _paged(module, t, **given):
    t = {**t, **given}
    args = [t[name] for name in ("q", "k_pool", "v_pool", "block_table", "seq_lens")]
    out, lse = module.paged_attention(*args, sinks=t["sinks"], return_lse=True)
    return out.sum() + lse.sum()


def _merge(module, t, **given):
    t = {**t, **given}
    return module.merge_attention(t["q"], t["lse"], t["out"], t["lse"])[0].sum()


def _write(module, t, **given):
    t = {**t, **given}
    pools = t["k_pool"].clone(), t["v_pool"].clone()
    module.write_kv(t["k"][:, 0], t["v"][:, 0], *pools, t["slot_mapping"])
    return pools[0].sum() + pools[1].sum()


CALLS = {
    "flash": (_flash, ("q", "k", "v", "sinks")),
    "flash_into": (_flash_into, ("q", "v")),
    "paged": (_paged, ("q", "k_pool", "v_pool", "sinks")),
    "merge": (_merge, ("q", "lse", "out")),
    "write_kv": (_write, ("k", "v", "k_pool", "v_pool")),
}
EACH = [(call, name) for call, (_, names) in CALLS.items() for name in names]


def _dual(f, x):
    with forward_ad.dual_level():
        return f(forward_ad.make_dual(x, x))


def _dual_without_grad(f, x):
    with torch.no_grad():
        return _dual(f, x)


TRANSFORMS = {
    "backward": lambda f, x: f(x.clone().requires_grad_()).backward(),
    "grad": lambda f, x: func.grad(f)(x),
    "vjp": lambda f, x: func.vjp(f, x),
    "jacrev": lambda f, x: func.jacrev(f)(x),
    "vmap of grad": lambda f, x: func.vmap(func.grad(f))(x.unsqueeze(0)),
    "grad of grad": lambda f, x: func.grad(lambda y: func.grad(f)(y).sum())(x),
    "dual": _dual,
    "dual, no_grad": _dual_without_grad,
    "jvp": lambda f, x: func.jvp(f, (x,), (x,)),
    "jacfwd": lambda f, x: func.jacfwd(f)(x),
    "hessian": lambda f, x: func.hessian(f)(x),
    "functional.jvp": lambda f, x: torch.autograd.functional.jvp(f, (x,), (x,)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(("call", "name"), EACH)
@pytest.mark.parametrize("module", [tt, ta], ids=["torch", "ta"])
def test_derivatives_are_refused(module, call, name, transform, tensors):
    function, _ = CALLS[call]
    with pytest.raises((ValueError, TypeError), match=REFUSED[module]):
        TRANSFORMS[transform](lambda x: function(module, tensors, **{name: x}), tensors[name])


@pytest.mark.parametrize("call", CALLS)
def test_derivatives_are_refused_while_compiling(call, tensors):
    function, names = CALLS[call]
    torch._dynamo.reset()
    run = torch.compile(func.grad(lambda x: function(tt, tensors, **{names[0]: x})), backend="aot_eager")
    with pytest.raises((ValueError, torch._dynamo.exc.TorchRuntimeError), match="requires grad"):
        run(tensors[names[0]])


@pytest.mark.parametrize("call", CALLS)
def test_what_needs_no_derivative_passes(call, tensors):
    """Inside of a transform too, the call may get what that does not differentiate."""
    function, names = CALLS[call]
    x, factor = tensors[names[0]], torch.tensor(2.0, device=tensors["q"].device)
    want = function(tt, tensors)

    def of_factor(factor):
        return function(tt, tensors) * factor

    def without_grad(x):
        with torch.no_grad():
            value = function(tt, tensors, **{names[0]: x})
        return value * x.sum()

    torch.testing.assert_close(func.grad(of_factor)(factor), want)
    torch.testing.assert_close(func.jvp(of_factor, (factor,), (factor,))[1], want * factor)
    torch.testing.assert_close(func.grad(without_grad)(x), want.expand_as(x))
    detached = func.grad(lambda x: function(tt, tensors, **{names[0]: x.detach()}) * x.sum())(x)
    torch.testing.assert_close(detached, want.expand_as(x))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        got = function(ta, tensors, **{names[0]: forward_ad.unpack_dual(dual).primal})
    assert torch.equal(got, want)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("call", ["flash", "paged", "merge"])
def test_vmap(call, tensors):
    function, names = CALLS[call]
    x = torch.stack([tensors[names[0]], 2 * tensors[names[0]]])
    got = func.vmap(lambda x: function(tt, tensors, **{names[0]: x}))(x)
    assert torch.equal(got, torch.stack([function(tt, tensors, **{names[0]: one}) for one in x]))


def _tiled(t, **results):
    dims = ta.TiledAttentionDims(
        max_seqs=2, num_q_heads=4, num_kv_heads=2, head_dim=8, block_size=16, tile_capacity=2
    )
    attn = ta.TiledAttention(dims, device=str(t["q"].device))
    attn.begin_step(2)
    counts = torch.tensor([2, 1], device=t["q"].device)
    last = results if results.pop("last", False) else {}
    attn.step_tile(t["q"], t["k_pool"], t["v_pool"], t["block_table"], counts, **last)
    if not last:
        attn.finalize(**results)


def _streamed(t, **results):
    dims = ta.TiledAttentionDims(
        max_seqs=2, num_q_heads=4, num_kv_heads=2, head_dim=8, block_size=16, tile_capacity=2
    )
    attn = ta.StreamingAttention(dims, device=str(t["q"].device))
    source = ta.PoolSource(t["k_pool"], t["v_pool"])
    sequences = [ta.StreamSequence(20, ta.KvPart(source, [2, 0])) for _ in range(2)]
    attn.attend(t["q"], sequences, **results)


def _paged_into(module):
    def write(t, **results):
        args = [t[name] for name in ("q", "k_pool", "v_pool", "block_table", "seq_lens")]
        module.paged_attention(*args, **results)

    return write


def _dense_into(module):
    def write(t, out=None, lse=None):
        with_token = {"out": None if out is None else out.unsqueeze(1), "lse": lse.unsqueeze(1)}
        module.flash_attention(t["q"].unsqueeze(1), t["k"], t["v"], **with_token)

    return write


def _written(module):
    def write(t, k_pool, v_pool):
        module.write_kv(t["k"][:, 0], t["v"][:, 0], k_pool, v_pool, t["slot_mapping"])

    return write


WRITERS = {
    "torch.flash_attention": (_dense_into(tt), ("out", "lse")),
    "flash_attention": (_dense_into(ta), ("out", "lse")),
    "torch.paged_attention": (_paged_into(tt), ("out", "lse")),
    "paged_attention": (_paged_into(ta), ("out", "lse")),
    "merge_attention": (
        lambda t, **results: ta.merge_attention(t["q"], t["lse"], t["q"], t["lse"], **results),
        ("out", "lse"),
    ),
    "torch.write_kv": (_written(tt), ("k_pool", "v_pool")),
    "write_kv": (_written(ta), ("k_pool", "v_pool")),
    "step_tile": (lambda t, **results: _tiled(t, last=True, **results), ("out", "lse")),
    "finalize": (_tiled, ("out", "lse")),
    "StreamingAttention": (_streamed, ("out", "lse")),
}


@pytest.mark.parametrize("grad_mode", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("which", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_gradient_of_what_was_overwritten_is_refused(writer, which, compiled, grad_mode, tensors):
    """torch keeps a tensor for the backward pass by its version; whoever writes to it has to count that up."""
    write, names = WRITERS[writer]
    if compiled and not writer.startswith("torch."):
        pytest.skip("torch does not trace it")
    torch._dynamo.reset()
    write = torch.compile(write, backend="aot_eager", fullgraph=True) if compiled else write
    results = {name: tensors[name].clone() for name in names}
    kept = results[names[which]]
    weight = torch.ones_like(kept, requires_grad=True)
    loss = (weight * kept).sum()
    with torch.set_grad_enabled(grad_mode):
        write(tensors, **results)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("writer", WRITERS)
def test_a_gradient_of_what_was_only_read_is_right(writer, tensors):
    write, names = WRITERS[writer]
    read = [name for name, x in tensors.items() if name not in names and x.is_floating_point()]
    weights = {name: torch.ones_like(tensors[name], requires_grad=True) for name in read}
    loss = sum((weights[name] * tensors[name]).sum() for name in weights)
    write(tensors, **{name: tensors[name].clone() for name in names})
    loss.backward()
    for name, weight in weights.items():
        assert torch.equal(weight.grad, tensors[name])


@pytest.mark.parametrize("writer", WRITERS)
def test_inference_tensors_are_written(writer, tensors):
    """They have no version to count, and no backward pass keeps them."""
    write, names = WRITERS[writer]
    with torch.inference_mode():
        results = {name: torch.full_like(tensors[name], 7.0) for name in names}
    write(tensors, **results)
    assert all((x != 7).any() for x in results.values())
    with torch.inference_mode():
        write(tensors, **results)


def test_a_transform_sees_the_change_too(tensors):
    def loss(x):
        kept = torch.ones_like(tensors["out"])
        total = (x * kept).sum()
        _paged_into(tt)(tensors, out=kept)
        return total

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        func.grad(loss)(tensors["out"])
