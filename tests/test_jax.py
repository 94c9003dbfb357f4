# SPDX-License-Identifier: Apache-2.0
"""tiledattn.jax: eager, jit, vmap and shard_map, against float64."""

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

jax = pytest.importorskip("jax")
tj = importlib.import_module("tiledattn.jax")
jnp = jax.numpy

SCORE = cases.Score(True, (11, None), 5.0, True, 0.2)
FLASH = cases.Flash("", q_len=9, kv_len=21, head_dim=16, head_dim_v=24, score=SCORE)
PAGED = cases.Paged("", seq_lens=(9, 40, 0), q_lens=3, head_dim=16, score=SCORE)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True)
def device(request):
    """Everything in a test is on this device."""
    try:
        device = jax.devices(request.param)[0]
    except RuntimeError as error:
        pytest.skip(f"JAX has no such device: {error}")
    with jax.default_device(device):
        yield device


def _run(call, *args):
    """``call`` on NumPy arrays, as JAX arrays."""
    return call(*(jnp.asarray(x) for x in args))


def _flash(dtype="float32", **options):
    qkv, score = FLASH.make(dtype)

    def call(q, k, v):
        return tj.flash_attention(q, k, v, **score, **options, return_lse=True)

    return call, qkv, reference.flash(*qkv, **score)


def _paged(dtype="float32", case=PAGED):
    data = case.make(dtype)
    cu = data.cu_seqlens_q

    def call(*args):
        options = {**data.score, **({} if cu is None else {"cu_seqlens_q": jnp.asarray(cu)})}
        return tj.paged_attention(*args, **options, return_lse=True)

    return call, data.args, reference.paged(*data.args, **data.kwargs)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("make", [_flash, _paged], ids=["flash", "paged"])
def test_matches_reference(make, jit, dtype):
    call, args, want = make(dtype)
    got = _run(jax.jit(call) if jit else call, *args)
    assert all(isinstance(x, jax.Array) for x in got)
    compare.result_close(tuple(np.asarray(x) for x in got), want, dtype)


@pytest.mark.parametrize("shape", quantised.SCALES)
@pytest.mark.parametrize("kv_dtype", quantised.KV_DTYPES)
def test_quantised_cache(kv_dtype, shape):
    made = quantised.make(cases.Paged("", seq_lens=(40, 9)), "float16", kv_dtype, shape)
    scales = list(made.scales.values())

    def call(k_scale, v_scale, *args):
        return tj.paged_attention(*args, k_scale=k_scale, v_scale=v_scale, return_lse=True)

    args = [jnp.asarray(x) for x in made.data.args]
    got = call(*scales, *args)
    compare.result_close(tuple(np.asarray(x) for x in got), made.want(), "float16")
    if shape != "number":
        got = jax.jit(call)(*map(jnp.asarray, scales), *args)
        compare.result_close(tuple(np.asarray(x) for x in got), made.want(), "float16")


def test_wrong_scales():
    made = quantised.make(cases.Paged("", seq_lens=(40, 9)), "float16", "int8", "head")
    args = [jnp.asarray(x) for x in made.data.args]
    scales = {name: jnp.asarray(x) for name, x in made.scales.items()}
    for name in scales:
        for number in (0.0, -1.0, float("nan"), 1e60):
            with pytest.raises(ValueError, match=rf"{name}: got .*> 0"):
                tj.paged_attention(*args, **{**scales, name: number})
        for wrong in ("1", True, [1.0], object()):
            with pytest.raises(TypeError, match=rf"{name}: expected a JAX array"):
                tj.paged_attention(*args, **{**scales, name: wrong})
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=rf"{name}: got shape \[3\]"):
            jax.block_until_ready(tj.paged_attention(*args, **{**scales, name: jnp.ones(3)}))
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=rf"{name}: got None with int8"):
            jax.block_until_ready(tj.paged_attention(*args, **{**scales, name: None}))


def test_results_stay_on_the_device(device):
    call, args, _ = _flash()
    assert all(x.devices() == {device} for x in _run(call, *args))


def test_packed_and_ragged():
    (q, k, v), _ = FLASH.make("float32")
    cu_q, cu_k = np.array([0, 4, 4, 9], np.int32), np.array([0, 10, 13, 21], np.int32)
    want = reference.flash_packed(q[0], k[0], v[0], cu_q, cu_k, causal=True)

    def call(q, k, v, cu_q, cu_k):
        return tj.flash_attention(q, k, v, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True)

    got = _run(jax.jit(call), q[0], k[0], v[0], cu_q, cu_k)
    compare.result_close(tuple(map(np.asarray, got)), want, "float32")
    call, args, want = _paged(case=cases.Paged("", seq_lens=(40, 33, 1), q_lens=(7, 33, 1)))
    compare.result_close(tuple(map(np.asarray, _run(call, *args))), want, "float32")


def test_heads_first():
    (q, k, v), score = FLASH.make("float32")
    want = reference.flash(q, k, v, **score)
    swapped = [x.swapaxes(1, 2) for x in (q, k, v)]
    out, lse = _run(
        lambda *args: tj.flash_attention(*args, **score, layout="bhsd", return_lse=True), *swapped
    )
    got = (np.asarray(out).swapaxes(1, 2), np.asarray(lse).swapaxes(1, 2))
    compare.result_close(got, want, "float32")


def test_merge_attention():
    rng = np.random.default_rng(0)
    outs = [rng.standard_normal((3, 4, 16)).astype(np.float32) for _ in range(2)]
    lses = [rng.standard_normal((3, 4)).astype(np.float32) for _ in range(2)]
    out, lse = _run(
        jax.jit(lambda *args: tj.merge_attention(*args, lse_base=2.0)), outs[0], lses[0], outs[1], lses[1]
    )
    want_out, want_lse = reference.merge_attention(outs[0], lses[0], outs[1], lses[1], 2.0)
    compare.out_close(np.asarray(out), want_out, "float32")
    compare.lse_close(np.asarray(lse), want_lse)


def _written(k, v, k_pool, v_pool, slots):
    """The pools with the tokens in their slots, those of negative slots left out."""
    k_pool, v_pool = k_pool.copy(), v_pool.copy()
    for token, slot in enumerate(slots):
        if slot >= 0:
            k_pool[slot // 8, slot % 8], v_pool[slot // 8, slot % 8] = k[token], v[token]
    return k_pool, v_pool


def _tokens_and_pools(seed=0):
    rng = np.random.default_rng(seed)
    k, v = (rng.standard_normal((5, 2, d), dtype=np.float32) for d in (16, 24))
    pools = (rng.standard_normal((6, 8, 2, d), dtype=np.float32) for d in (16, 24))
    return k, v, *pools, np.array([47, 3, -1, 0, 20], np.int32)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_write_kv(jit):
    """The pools that the caller keeps stay as they were."""
    args = _tokens_and_pools()
    arrays = [jnp.asarray(x) for x in args]
    got = (jax.jit(tj.write_kv) if jit else tj.write_kv)(*arrays)
    compare.same_bits(tuple(map(np.asarray, got)), _written(*args))
    compare.same_bits(tuple(map(np.asarray, arrays)), args)


def test_write_kv_in_place():
    """Pools that are given away are written where they are, in a step that reads them too."""
    args = _tokens_and_pools()

    def step(k, v, k_pool, v_pool, slots):
        pools = tj.write_kv(k, v, k_pool, v_pool, slots)
        q = jnp.ones((1, 4, 16))
        return tj.paged_attention(q, *pools, jnp.array([[0, 5]]), jnp.array([16])), pools

    arrays = [jnp.array(x) for x in args]
    places = [x.unsafe_buffer_pointer() for x in arrays[2:4]]
    out, pools = jax.jit(step, donate_argnums=(2, 3))(*arrays)
    assert [x.unsafe_buffer_pointer() for x in pools] == places
    written = _written(*args)
    compare.same_bits(tuple(map(np.asarray, pools)), written)
    want = reference.paged(np.ones((1, 4, 16), np.float32), *written, np.array([[0, 5]]), np.array([16]))
    compare.out_close(np.asarray(out), want.out, "float32")


@pytest.mark.parametrize("shape", quantised.SCALES)
@pytest.mark.parametrize("kv_dtype", quantised.KV_DTYPES)
def test_write_kv_quantises(kv_dtype, shape):
    k, v, k_pool, v_pool, slots = _tokens_and_pools()
    rng = np.random.default_rng(0)
    stored = [quantised.stored_values(rng, pool.shape, kv_dtype) for pool in (k_pool, v_pool)]
    scales = [quantised.make_scale(rng, pool, shape) for pool in stored]
    got = jax.jit(tj.write_kv)(
        *map(jnp.asarray, (k, v, *stored, slots)),
        k_scale=jnp.float32(scales[0]) if shape == "number" else jnp.asarray(scales[0]),
        v_scale=jnp.float32(scales[1]) if shape == "number" else jnp.asarray(scales[1]),
    )
    for x, pool, scale, result in zip((k, v), stored, scales, got, strict=True):
        each = np.broadcast_to(quantised.spread(scale), (*pool.shape[:3], 1))
        for token, slot in enumerate(slots):
            if slot >= 0:
                at = divmod(int(slot), pool.shape[1])
                pool[at] = quantised.quantise(x[token], each[at], kv_dtype)
        compare.same_bits(np.asarray(result), pool)


@pytest.mark.parametrize("shared", [False, True], ids=["own pools", "one pool"])
def test_vmap_of_write_kv(shared):
    many = [_tokens_and_pools(seed) for seed in range(3)]
    if shared:
        many = [(k, v, *many[0][2:4], slots) for k, v, _, _, slots in many]
    stacked = [np.stack(x) for x in zip(*many, strict=True)]
    axes = [0, 0, None if shared else 0, None if shared else 0, 0]
    args = [x if axis == 0 else x[0] for x, axis in zip(stacked, axes, strict=True)]
    got = _run(jax.jit(jax.vmap(tj.write_kv, in_axes=axes)), *args)
    for i, one in enumerate(many):
        compare.same_bits(tuple(np.asarray(x[i]) for x in got), _written(*one))


def test_errors_of_write_kv(device):
    k, v, k_pool, v_pool, slots = (jnp.asarray(x) for x in _tokens_and_pools())
    runtime_error = (jax.errors.JaxRuntimeError, ValueError)
    with pytest.raises(ValueError, match=r"^k_pool: got shape"):
        tj.write_kv(k, v, k_pool[0], v_pool, slots)
    with pytest.raises(runtime_error, match="slot_mapping: got shape"):
        jax.block_until_ready(tj.write_kv(k, v, k_pool, v_pool, slots[1:]))
    if device.platform == "cpu":  # on a GPU the next call raises it
        with pytest.raises(runtime_error, match=r"slot_mapping.*48"):
            jax.block_until_ready(tj.write_kv(k, v, k_pool, v_pool, slots.at[1].set(48)))


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, 1, None)], ids=str)
def test_vmap(axes):
    """Mapped and shared arguments."""
    call, args, _ = _flash()
    many = [
        x if axis is None else np.stack([x * (1 + 0.1 * i) for i in range(3)], axis=axis).astype(x.dtype)
        for x, axis in zip(args, axes, strict=True)
    ]
    got = _run(jax.jit(jax.vmap(call, in_axes=axes)), *many)
    for i in range(3):
        one = [x if axis is None else x.take(i, axis) for x, axis in zip(many, axes, strict=True)]
        want = reference.flash(*one, **FLASH.make("float32")[1])
        compare.result_close(tuple(np.asarray(x[i]) for x in got), want, "float32")


def test_vmap_of_vmap():
    call, (q, k, v), _ = _flash()
    scale = np.linspace(0.5, 1.5, 6, dtype=np.float32).reshape(2, 3, 1, 1, 1, 1)
    k2 = np.stack([k, 2 * k])
    both = jax.vmap(jax.vmap(call, in_axes=(0, None, None)), in_axes=(0, 0, None))
    got = _run(both, q * scale, k2, v)
    for i in range(2):
        for j in range(3):
            want = reference.flash(q * scale[i, j], k2[i], v, **FLASH.make("float32")[1])
            compare.result_close(tuple(np.asarray(x[i, j]) for x in got), want, "float32")


def test_zero_sizes():
    q, k = jnp.ones((2, 0, 4, 16)), jnp.ones((2, 5, 2, 16))
    assert tj.flash_attention(q, k, k).shape == (2, 0, 4, 16)
    out, lse = tj.flash_attention(jnp.ones((2, 3, 4, 16)), k[:, :0], k[:, :0], return_lse=True)
    assert not np.asarray(out).any()
    assert np.isneginf(np.asarray(lse)).all()
    none = jax.vmap(tj.flash_attention)(
        jnp.ones((0, 2, 3, 4, 16)), jnp.ones((0, 2, 5, 2, 16)), jnp.ones((0, 2, 5, 2, 16))
    )
    assert none.shape == (0, 2, 3, 4, 16)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_errors_keep_their_text(jit):
    q, k = jnp.ones((1, 3, 4, 16)), jnp.ones((1, 5, 2, 16))

    def call(*args, **options):
        function = jax.jit(lambda *args: tj.flash_attention(*args, **options))
        return (function(*args) if jit else tj.flash_attention(*args, **options)).block_until_ready()

    runtime_error = (jax.errors.JaxRuntimeError, ValueError)
    with pytest.raises(runtime_error, match=r"v: got shape \[1, 4, 2, 16\]"):
        call(q, k, k[:, 1:])
    with pytest.raises(runtime_error, match="k: "):
        call(q, k.astype(jnp.bfloat16), k)
    with pytest.raises(runtime_error, match="q: "):
        call(q.astype(jnp.int8), k, k)
    with pytest.raises(runtime_error, match="window"):
        call(q, k, k, window=(-1, None))
    with pytest.raises(ValueError, match=r"^q: got shape"):
        call(q[0], k, k)
    with pytest.raises(TypeError, match=r"^k: expected a JAX array, got list"):
        tj.flash_attention(q, [1.0], k)
    with pytest.raises(TypeError, match=r"^q: expected a JAX array, got list"):
        tj.paged_attention([1.0], k, k, k, k)
    with pytest.raises(TypeError, match=r"^v: expected a JAX array, got NoneType"):
        tj.flash_attention(q, k, None)
    with pytest.raises(TypeError, match=r"^v_pool: expected a JAX array, got NoneType"):
        tj.write_kv(k[0], k[0], k, None, k, k_scale=1.0, v_scale=1.0)
    with pytest.raises(TypeError, match=r"^out_a: expected a JAX array, got float"):
        tj.merge_attention(1.0, k, k, k)
    with pytest.raises(ValueError, match=r"^layout: "):
        call(q, k, k, layout="sbhd")
    assert call(q, k, k).shape == q.shape


WRONG_OPTIONS = {
    "window": [
        None,
        3,
        (1,),
        (1, 2, 3),
        (1.7, None),
        ("1", None),
        (True, None),
        (2**70, None),
        (2**64 - 1, None),
    ],
    "causal": ["False", 1, None],
    "softcap": [None, "1", True, 1j],
    "softmax_scale": ["1", "abc", True, 1j, np.ones(2), jnp.ones(2), 10**400],
    "max_seqlen_q": [2.9, "2", True, np.uint64(2**64 - 1)],
    "return_lse": ["no", 1, None],
}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [(name, x) for name, wrong in WRONG_OPTIONS.items() for x in wrong],
    ids=lambda x: str(x)[:20],
)
@pytest.mark.parametrize("make", [_flash, _paged], ids=["flash", "paged"])
def test_options_of_wrong_types_are_named(make, name, wrong):
    """With the words of `ta`, where a call of XLA would take the next best value."""
    function = "flash_attention" if make is _flash else "paged_attention"
    args = make()[1]
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: ") as refused:
        getattr(ta, function)(*args, **{name: wrong})
    with pytest.raises(refused.type) as refused_too:
        getattr(tj, function)(*args, **{name: wrong})
    assert str(refused_too.value) == str(refused.value)


@pytest.mark.parametrize("wrong", ["2", True, None, 1j])
def test_a_wrong_base_is_named(wrong):
    out, lse = jnp.ones((2, 8)), jnp.zeros(2)
    with pytest.raises(TypeError, match=r"^lse_base: expected a number, got "):
        tj.merge_attention(out, lse, out, lse, lse_base=wrong)


@pytest.mark.parametrize(
    ("name", "pick"),
    [
        ("softmax_scale", lambda x: x),
        ("softcap", lambda x: x),
        ("window", lambda x: (x.astype(int), None)),
        ("window", lambda x: x),
        ("causal", lambda x: x > 0),
        ("max_seqlen_q", lambda x: x.astype(int)),
        ("return_lse", lambda x: x > 0),
    ],
)
def test_traced_options_are_named(name, pick):
    q = jnp.ones((1, 3, 4, 16))
    with pytest.raises(TypeError, match=rf"^{name}: expected .*, got jax"):
        jax.jit(lambda x: tj.flash_attention(q, q, q, **{name: pick(x)}))(1.0)


def test_numbers_of_numpy_and_jax_are_numbers():
    _, args, want = _flash()
    options = {**FLASH.make("float32")[1], "causal": np.True_, "window": [np.int64(11), None]}
    options |= {"softcap": jnp.float32(5.0), "softmax_scale": np.float32(0.2), "max_seqlen_q": np.int32(9)}
    got = tj.flash_attention(*map(jnp.asarray, args), **options, return_lse=np.True_)
    compare.result_close(tuple(map(np.asarray, got)), want, "float32")


def _integer_calls():
    """Each argument of integers, as int64 of NumPy, and a call that takes it."""
    q, k, v = (x[0] for x in FLASH.make("float32")[0])
    paged = dict(zip(("q", "k_pool", "v_pool", "block_table", "seq_lens"), _paged()[1], strict=True))
    written = dict(zip(("k", "v", "k_pool", "v_pool", "slot_mapping"), _tokens_and_pools(), strict=True))
    lengths = {"cu_seqlens_q": np.array([0, 4, 9]), "cu_seqlens_k": np.array([0, 10, 21])}
    flash = {"q": q, "k": k, "v": v, **lengths}
    ragged = {**paged, "q": q, "cu_seqlens_q": np.array([0, 4, 9, 9])}
    calls = [(tj.flash_attention, flash, name) for name in lengths]
    calls += [(tj.paged_attention, paged, name) for name in ("block_table", "seq_lens")]
    calls += [(tj.paged_attention, ragged, "cu_seqlens_q"), (tj.write_kv, written, "slot_mapping")]
    return calls


@pytest.mark.parametrize("wrong", [2**32, 2**32 + 3, 2**31, -(2**31) - 1, -(2**32) + 1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("call", range(6))
def test_integers_that_jax_would_wrap_are_refused(call, wrong):
    """Without jax_enable_x64 it takes their lowest 32 bits: block 2**32 would be block 0."""
    function, args, name = _integer_calls()[call]
    array = np.asarray(args[name]).astype(np.int64)
    whole = function(**{**args, name: array})
    same = function(**{**args, name: array.astype(np.int32)})
    compare.same_bits(
        tuple(map(np.asarray, jax.tree.leaves(whole))), tuple(map(np.asarray, jax.tree.leaves(same)))
    )
    array.flat[-1] = wrong
    with pytest.raises(
        ValueError, match=rf"^{name}: got {wrong}, which JAX would make another number as int32"
    ):
        function(**{**args, name: array})
    unsigned = np.full_like(array, 2**64 - 1, dtype=np.uint64)
    with pytest.raises(ValueError, match=rf"^{name}: got {2**64 - 1}, which JAX"):
        function(**{**args, name: unsigned})


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_numbers_that_jax_would_round_are_refused(dtype):
    flash = dict(zip("qkv", FLASH.make("float32")[0], strict=True))
    paged = dict(zip(("q", "k_pool", "v_pool", "block_table", "seq_lens"), _paged()[1], strict=True))
    written = dict(zip(("k", "v", "k_pool", "v_pool", "slot_mapping"), _tokens_and_pools(), strict=True))
    out, lse = np.ones((2, 8), np.float32), np.zeros(2, np.float32)
    merged = {"out_a": out, "lse_a": lse, "out_b": out, "lse_b": lse}
    calls = [
        (tj.flash_attention, {**flash, "sinks": np.ones(4, np.float32)}, [*flash, "sinks"]),
        (tj.paged_attention, paged, paged),
        (tj.paged_attention, {**paged, "k_scale": lse, "v_scale": lse}, ["k_scale", "v_scale"]),
        (tj.write_kv, written, written),
        (tj.merge_attention, merged, merged),
    ]
    for function, args, names in calls:
        for name in names:
            with pytest.raises(TypeError, match=rf"^{name}: got {dtype}, which JAX would make "):
                function(**{**args, name: args[name].astype(dtype)})


def test_64_bit_integers_with_x64():
    """Then JAX keeps them, and the library finds what is wrong with them."""
    code = """
import jax, numpy as np, tiledattn.jax as tj
jax.config.update("jax_enable_x64", True)
pool, q = np.ones((3, 16, 2, 8), np.float32), np.ones((1, 4, 8), np.float32)
print(tj.paged_attention(q, pool, pool, np.array([[2, 0]]), np.array([20])).sum())
for table, lens in (([[2**32, 0]], [20]), ([[2, 0]], [2**32 + 3])):
    try:
        tj.paged_attention(q, pool, pool, np.array(table), np.array(lens)).block_until_ready()
        print("taken")
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        print("refused", any(str(2**32 + more) in str(error) for more in (0, 3)))
"""
    said = processes.run(code, options=["-W", "ignore"], JAX_PLATFORMS="cpu")
    assert said.split() == ["32.0", "refused", "True", "refused", "True"]


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_a_block_id_outside_the_pool(device):
    """On the CPU the call raises; on a GPU the next one does (test_device_errors.py)."""
    call, args, _ = _paged()
    table = args[3].copy()
    table[0, 0] = 99
    # XLA's OUT_OF_RANGE, which JAX raises as one or the other, depending on where it waits.
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=r"block_table.*99"):
        _run(call, *args[:3], table, args[4])[0].block_until_ready()


@pytest.mark.parametrize("name", ["q", "block_table", "seq_lens"])
def test_other_byte_orders_are_refused(name):
    call, args, _ = _paged()
    args = dict(zip(("q", "k_pool", "v_pool", "block_table", "seq_lens"), args, strict=True))
    args[name] = args[name].astype(args[name].dtype.newbyteorder())
    with pytest.raises(TypeError, match=f"^{name}: dtype is .*byte order"):
        call(*args.values())


def test_gradients_are_refused():
    q = jnp.ones((1, 3, 4, 16))
    with pytest.raises((ValueError, NotImplementedError, TypeError), match=r"differentiat|JVP"):
        jax.grad(lambda q: tj.flash_attention(q, q, q).sum())(q)


def test_examples_of_the_docstrings():
    results = doctest.testmod(tj)
    assert results.attempted
    assert not results.failed


def test_importing_registers_nothing():
    """XLA looks at handlers when its backends start, so an import alone must not matter to it."""
    code = """
import jax, tiledattn.jax
before = tiledattn.jax._register.cache_info().currsize
tiledattn.jax.flash_attention(*[jax.numpy.ones((1, 1, 1, 8))] * 3)
print(before, tiledattn.jax._register.cache_info().currsize)
"""
    assert processes.run(code, options=["-W", "ignore"], JAX_PLATFORMS="cpu").strip() == "0 1"


def test_shard_map_over_devices():
    """Two devices, each with half of the heads."""
    code = """
import jax, numpy as np, tiledattn.jax
from jax.sharding import Mesh, PartitionSpec as P
shard_map = getattr(jax, "shard_map", None)
if shard_map is None:
    from jax.experimental.shard_map import shard_map
q, k, v = np.random.default_rng(0).standard_normal((3, 1, 5, 4, 16), dtype=np.float32)
heads = P(None, None, "x")
mesh = Mesh(np.array(jax.devices()), ("x",))
call = jax.jit(shard_map(tiledattn.jax.flash_attention, mesh=mesh, in_specs=(heads,) * 3, out_specs=heads))
got = call(q, k, v)
want = tiledattn.jax.flash_attention(*map(jax.numpy.asarray, (q, k, v)))
print(len(got.sharding.device_set), np.array_equal(got, want))
"""
    said = processes.run(
        code,
        options=["-W", "ignore"],
        JAX_PLATFORMS="cpu",
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )
    assert said.split() == ["2", "True"]
