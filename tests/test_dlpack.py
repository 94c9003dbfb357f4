# SPDX-License-Identifier: Apache-2.0
"""Array intake: DLPack in all its forms, capsules used once, read-only and strange arrays, live views."""

from __future__ import annotations

import gc

import calls
import capsules
import cases
import compare
import numpy as np
import pytest
import reference
import tiledattn as ta


def _qkv(seed=0):
    return cases.Flash("", batch=1, q_len=3, kv_len=9, head_dim=8).make("float32", seed)[0]


def _close(out, qkv):
    compare.out_close(np.asarray(out), reference.flash(*qkv).out, "float32")


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"strides": False}, {"byte_offset": 64}], ids=["plain", "no_strides", "offset"]
)
def test_capsules_are_read_and_deleted_once(versioned, options):
    q, k, v = _qkv()
    makers = [capsules.Producer(x, versioned=versioned, **options) for x in (k, v)]
    _close(ta.flash_attention(q, *makers), (q, k, v))
    gc.collect()
    assert [maker.deleted for maker in makers] == [1, 1]


def test_the_framework_of_q_may_be_any_producer():
    q, k, v = _qkv()
    maker = capsules.Producer(q)
    _close(ta.flash_attention(maker, k, v), (q, k, v))
    gc.collect()
    assert maker.deleted == 1


def test_producers_from_before_versions():
    q, k, v = _qkv()
    _close(ta.flash_attention(q, capsules.OldProducer(k), capsules.OldProducer(v)), (q, k, v))


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dtype": (capsules.FLOAT, 64, 1)}, TypeError),
        ({"dtype": (capsules.INT, 32, 1)}, TypeError),
        ({"dtype": (capsules.FLOAT, 32, 2)}, TypeError),
        ({"device": (capsules.CUDA, 0)}, (ValueError, ta.CudaError)),
        ({"device": (77, 0)}, ValueError),
    ],
    ids=["float64", "int32", "lanes", "other_device", "unknown_device"],
)
def test_refused_capsules_are_deleted_once(versioned, options, error):
    q, k, v = _qkv()
    maker = capsules.Producer(k, versioned=versioned, **options)
    with pytest.raises(error, match="k"):
        ta.flash_attention(q, maker, v)
    gc.collect()
    assert maker.deleted <= 1, "deleted twice"
    _close(ta.flash_attention(q, k, v), (q, k, v))


def test_a_refused_shape_deletes_every_capsule_once():
    q, k, v = _qkv()
    makers = [capsules.Producer(x) for x in (k, v[:, :5].copy())]
    with pytest.raises(ValueError, match="v"):
        ta.flash_attention(q, *makers)
    gc.collect()
    assert [maker.deleted for maker in makers] == [1, 1]


def test_a_capsule_of_an_unknown_version_is_refused():
    q, k, v = _qkv()
    maker = capsules.Producer(k, version=(99, 0))
    with pytest.raises((BufferError, ValueError, TypeError), match="k"):
        ta.flash_attention(q, maker, v)
    gc.collect()
    assert maker.deleted == 1


@pytest.mark.parametrize("versioned", [True, False])
def test_h44_a_producer_that_repeats_its_capsule(versioned):
    """cupy/cupy#3611, pytorch/pytorch#56789: the second use of a capsule raises, and it is deleted once."""
    q, k, v = _qkv()
    maker = capsules.Producer(k, versioned=versioned, again=True)
    _close(ta.flash_attention(q, maker, v), (q, k, v))
    with pytest.raises((ValueError, TypeError, BufferError), match="k"):
        ta.flash_attention(q, maker, v)
    maker.kept = None
    gc.collect()
    assert maker.deleted == 1


@pytest.mark.parametrize("versioned", [True, False])
def test_h44_a_raw_capsule_in_two_calls(versioned):
    """cupy/cupy#3611: a raw capsule is taken once or not at all, never twice."""
    q, k, v = _qkv()
    maker = capsules.Producer(k, versioned=versioned)
    capsule = maker.capsule()
    out, error = calls.outcome(TypeError, ta.flash_attention, q, capsule, v)
    if error:
        assert "k" in str(error)
        assert maker.deleted == 0
    else:
        _close(out, (q, k, v))
    with pytest.raises((ValueError, TypeError, BufferError), match="k"):
        ta.flash_attention(q, capsule, v)
    del capsule
    gc.collect()
    assert maker.deleted == 1


def test_h44_a_refused_raw_capsule_is_deleted_once():
    """pytorch/pytorch#56789: an exception after taking ownership must not free twice."""
    q, k, v = _qkv()
    maker = capsules.Producer(k, dtype=(capsules.FLOAT, 64, 1))
    capsule = maker.capsule()
    with pytest.raises(TypeError, match="k"):
        ta.flash_attention(q, capsule, v)
    del capsule
    gc.collect()
    assert maker.deleted == 1


class _Broken:
    def __init__(self, result):
        self.result = result

    def __dlpack__(self, **_):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def __dlpack_device__(self):
        return (1, 0)


@pytest.mark.parametrize(
    "result", [None, 3, "capsule", RuntimeError("lent out"), MemoryError("lent out")], ids=repr
)
def test_producers_that_break(result):
    q, _, v = _qkv()
    with pytest.raises(Exception) as caught:
        ta.flash_attention(q, _Broken(result), v)
    if isinstance(result, Exception):
        assert isinstance(caught.value, (type(result), TypeError, ValueError))
        text = str(caught.value) + str(caught.value.__cause__)
        assert "lent out" in text
    else:
        assert isinstance(caught.value, TypeError)
        assert "k" in str(caught.value)


# NumPy.


def test_read_only_inputs_are_read():
    q, k, v = (np.array(x) for x in _qkv())
    for x in (q, k, v):
        x.flags.writeable = False
    _close(ta.flash_attention(q, k, v), (q, k, v))


@pytest.mark.parametrize("name", ["out", "lse"])
def test_read_only_outputs_are_refused(name):
    q, k, v = _qkv()
    target = np.full(q.shape if name == "out" else q.shape[:-1], 7.0, np.float32)
    target.flags.writeable = False
    other = {} if name == "out" else {"out": np.empty_like(q)}
    with pytest.raises((TypeError, ValueError), match=name):
        ta.flash_attention(q, k, v, **other, **{name: target})
    assert (target == 7.0).all()


def test_read_only_capsule_as_out_is_refused():
    q, k, v = _qkv()
    maker = capsules.Producer(np.full_like(q, 7.0), flags=capsules.READ_ONLY)
    with pytest.raises((TypeError, ValueError), match="out"):
        ta.flash_attention(q, k, v, out=maker)
    assert (maker.array == 7.0).all()
    gc.collect()
    assert maker.deleted == 1


def test_outputs_through_capsules():
    q, k, v = _qkv()
    maker = capsules.Producer(np.full_like(q, 7.0))
    ta.flash_attention(q, k, v, out=maker)
    _close(maker.array, (q, k, v))


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_unaligned_arrays(offset):
    """Elements that do not sit at multiples of their size: right, or refused by name."""
    q, k, v = _qkv()
    raw = np.empty(k.nbytes + 8, np.uint8)
    odd = raw[offset : offset + k.nbytes].view(np.float32).reshape(k.shape)
    odd[...] = k
    out, error = calls.outcome(ValueError, ta.flash_attention, q, odd, v)
    if error:
        assert "k" in str(error)
    else:
        _close(out, (q, k, v))


def _odd(array):
    """The same numbers one byte after a multiple of their size."""
    raw = np.empty(array.nbytes + 1, np.uint8)
    odd = raw[1:].view(array.dtype).reshape(array.shape)
    odd[...] = array
    assert odd.ctypes.data % array.itemsize == 1
    return odd


def _far(array):
    """The same array with rows so far apart that offsets leave 64 bits."""
    kind = capsules.INT if array.dtype.kind == "i" else capsules.FLOAT
    strides = (2**62, *(s // array.itemsize for s in array.strides[1:]))
    return capsules.Producer(array, dtype=(kind, 8 * array.itemsize, 1), strides=strides)


def _calls_with_indices(dtype):
    """(function, arrays by name, names of the index arrays) of every call that takes index arrays."""

    def numbers(*values):
        return np.array(values, dtype)

    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((6, 2, 8)).astype(np.float32) for _ in range(3))
    pool = rng.standard_normal((5, 4, 2, 8)).astype(np.float32)
    dims = ta.TiledAttentionDims(
        max_seqs=2, num_q_heads=2, num_kv_heads=2, head_dim=8, block_size=4, tile_capacity=2
    )
    attn = ta.TiledAttention(dims, device="cpu")
    attn.begin_step(2)
    flash = {"q": q, "k": k, "v": v, "cu_seqlens_q": numbers(0, 2, 6), "cu_seqlens_k": numbers(0, 4, 6)}
    table = np.array([[1, 3], [4, 0]], dtype)
    paged = {"q": q, "k_pool": pool, "v_pool": pool, "block_table": table, "seq_lens": numbers(5, 8)}
    tile = {"q": q[:2], "k_pool": pool, "v_pool": pool, "tile_blocks": table}
    tile |= {"tile_block_counts": numbers(2, 1), "last_block_valid_slots": numbers(4, 3)}
    tile |= {"kv_positions": numbers(0, 0), "q_positions": numbers(9, 9)}
    write = {"k": k, "v": v, "k_pool": pool.copy(), "v_pool": pool.copy()}
    return [
        (ta.flash_attention, flash, ["cu_seqlens_q", "cu_seqlens_k"]),
        (
            ta.paged_attention,
            paged | {"cu_seqlens_q": numbers(0, 2, 6)},
            ["block_table", "seq_lens", "cu_seqlens_q"],
        ),
        (attn.step_tile, tile, list(tile)[3:]),
        (ta.write_kv, write | {"slot_mapping": numbers(0, 19, -1, 4, 5, 6)}, ["slot_mapping"]),
    ]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_misaligned_index_arrays_are_refused(dtype):
    for call, arrays, names in _calls_with_indices(dtype):
        for name in names:
            with pytest.raises(ValueError, match=rf"{name}: .*multiple of its {dtype().itemsize}-byte"):
                call(**{**arrays, name: _odd(arrays[name])})
        call(**arrays)


def test_strides_whose_offsets_leave_64_bits_are_refused():
    """Refused and not wrapped: 2**62 elements of 4 bytes are offset 0 modulo 2**64."""
    for dtype in (np.int32, np.int64):
        for call, arrays, _ in _calls_with_indices(dtype):
            for name, array in arrays.items():
                far = _far(array)
                with pytest.raises(
                    ValueError, match=rf"{name}: got strides \[4611686018427387904.*4e18 bytes"
                ):
                    call(**{**arrays, name: far})
                gc.collect()
                assert far.deleted == 1
            call(**arrays)


@pytest.mark.parametrize("name", ["out", "lse"])
def test_outputs_whose_offsets_leave_64_bits_are_refused(name):
    q, k, v = (np.concatenate([x, x]) for x in _qkv())
    result = np.full(q.shape if name == "out" else q.shape[:-1], 7.0, np.float32)
    with pytest.raises(ValueError, match=rf"{name}: got strides \[4611686018427387904"):
        ta.flash_attention(q, k, v, **{name: _far(result)})
    assert (result == 7).all()


def test_shapes_whose_size_leaves_64_bits_are_refused():
    q, k, v = _qkv()
    for strides in ((0, 0, 0, 1), False):
        huge = capsules.Producer(k, shape=(2**32, 2**32, 2, 8), strides=strides)
        with pytest.raises(ValueError, match=r"k: got shape \[4294967296, 4294967296, 2, 8\]"):
            ta.flash_attention(q, huge, v)


@pytest.mark.parametrize(
    ("says", "device"),
    [((capsules.CUDA, 0), (capsules.CPU, 0)), ((capsules.CPU, 0), (capsules.CUDA, 0))],
    ids=["says cuda", "says cpu"],
)
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_a_device_that_the_capsule_contradicts_is_refused(says, device, name):
    """The stream was chosen for one device and the data would be read on another."""
    q, k, v = _qkv()
    arrays = {"q": q, "k": k, "v": v, "out": np.full_like(q, 7.0)}
    maker = capsules.Producer(arrays[name], says=says, device=device)
    with pytest.raises(ValueError, match=rf"{name}: its __dlpack_device__\(\) says .*, but its capsule"):
        ta.flash_attention(**{**arrays, name: maker})
    assert (arrays["out"] == 7.0).all()
    gc.collect()
    assert maker.deleted == 1


@pytest.mark.parametrize("says", [None, 1, (1,), ("cpu", 0), (1, 0, 0), (1.5, 0)], ids=str)
def test_a_device_that_is_no_pair_of_numbers_is_refused(says):
    q, k, v = _qkv()
    maker = capsules.Producer(k, says=() if says is None else says)
    with pytest.raises(TypeError, match=r"k: .*__dlpack_device__\(\) gave .*pair of numbers"):
        ta.flash_attention(q, maker, v)


def test_other_byte_order_is_refused():
    q, k, v = _qkv()
    with pytest.raises((TypeError, BufferError, ValueError), match="k"):
        ta.flash_attention(q, k.astype(">f4"), v)


@pytest.mark.parametrize(
    "bad", [3, "q", [1.0], object(), b"bytes", np.float32(3)], ids=lambda bad: type(bad).__name__
)
def test_what_is_no_array(bad):
    q, _, v = _qkv()
    with pytest.raises((TypeError, ValueError), match="k"):
        ta.flash_attention(q, bad, v)


@pytest.mark.parametrize("dtype", ["complex64", "bool", "object", "datetime64[s]", "float8_e4m3fn", "int4"])
def test_element_types_that_attention_does_not_take(dtype):
    import ml_dtypes

    q, k, v = _qkv()
    other = np.zeros(k.shape, getattr(ml_dtypes, dtype, dtype))
    with pytest.raises((TypeError, BufferError), match="k"):
        ta.flash_attention(q, other, v)


# torch.


def test_grad_is_refused_while_grad_mode_is_on():
    torch = pytest.importorskip("torch")
    qkv = [torch.from_numpy(x) for x in _qkv()]
    for i, name in enumerate("qkv"):
        given = [x.clone().requires_grad_(i == j) for j, x in enumerate(qkv)]
        with pytest.raises((ValueError, TypeError, RuntimeError), match=rf"{name}\b.*grad"):
            ta.flash_attention(*given)
        with torch.no_grad():
            _close(ta.flash_attention(*given), _qkv())
        with torch.inference_mode():
            _close(ta.flash_attention(*given), _qkv())


def test_fake_and_meta_tensors_are_refused():
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k, v = map(torch.from_numpy, _qkv())
    with FakeTensorMode():
        fake = torch.empty(k.shape)
    for bad in (fake, torch.empty(k.shape, device="meta")):
        with pytest.raises((TypeError, ValueError, RuntimeError, BufferError), match="k"):
            ta.flash_attention(q, bad, v)


@pytest.mark.parametrize("name", ["q", "k_pool", "v_pool", "block_table", "seq_lens", "sinks"])
def test_masked_arrays_are_refused(name):
    data = cases.Paged("", seq_lens=(20, 7)).make("float32")
    heads = data.q.shape[-2]
    arrays = {"q": data.q, "k_pool": data.k_pool, "v_pool": data.v_pool, "block_table": data.block_table}
    arrays |= {"seq_lens": data.seq_lens, "sinks": np.zeros(heads, np.float32)}
    ta.paged_attention(**arrays)
    with pytest.raises(TypeError, match=f"^{name}: is a masked array"):
        ta.paged_attention(**arrays | {name: np.ma.array(arrays[name])})


def test_strange_torch_tensors():
    """Sparse tensors are refused, a lazy negation is right or refused, a Parameter is an array."""
    torch = pytest.importorskip("torch")
    qkv = _qkv()
    q, k, v = map(torch.from_numpy, qkv)
    with pytest.raises((TypeError, ValueError, RuntimeError, BufferError), match="k"):
        ta.flash_attention(q, k.to_sparse(), v)
    negated = torch._neg_view(k)
    refusals = (TypeError, ValueError, RuntimeError, BufferError)
    out, error = calls.outcome(refusals, ta.flash_attention, q, negated, v)
    if error:
        assert "k" in str(error)
    else:
        _close(out, (qkv[0], -qkv[1], qkv[2]))
    _close(ta.flash_attention(q, torch.nn.Parameter(k, requires_grad=False), v), qkv)


def test_frameworks_mix_on_one_device():
    """The result is an array of the framework of q."""
    torch = pytest.importorskip("torch")
    q, k, v = _qkv()
    got = ta.flash_attention(torch.from_numpy(q), k, torch.from_numpy(v))
    assert isinstance(got, torch.Tensor)
    _close(got, (q, k, v))
    got = ta.flash_attention(q, torch.from_numpy(k), v)
    assert isinstance(got, np.ndarray)
    _close(got, (q, k, v))


def test_results_are_independent_of_the_inputs():
    q, k, v = _qkv()
    out = ta.flash_attention(q, k, v)
    kept = out.copy()
    q[...], k[...], v[...] = 0, 0, 0
    compare.same_bits(out, kept)
    out[...] = 1  # writable


# JAX.


def test_jax_outputs_are_refused():
    jax = pytest.importorskip("jax")
    cpu = jax.devices("cpu")[0]
    q, k, v = (jax.device_put(x, cpu) for x in _qkv())
    target = jax.device_put(np.full(q.shape, 7.0, np.float32), cpu)
    with pytest.raises((TypeError, ValueError), match="out"):
        ta.flash_attention(q, k, v, out=target)
    assert (np.asarray(target) == 7.0).all()


# Live views.


def test_views_are_live_and_outlive_the_object(device):
    data = cases.Tiled("", cases.Paged("", seq_lens=(40, 9)), tile_blocks=(2, 1)).make("float32")
    attn = calls.make_attention(device, data)
    attn.begin_step(2)
    if device.name == "cupy":
        take = device.cupy.from_dlpack
    else:
        take = device.torch.from_dlpack if device.name == "torch" else np.asarray
    m, l, o = (take(x) for x in (attn.m, attn.l, attn.o))
    assert np.isneginf(device.numpy(m)).all()
    calls.step(device, attn, data, data.tiles[0])
    compare.same_bits(tuple(map(device.numpy, (m, l, o))), calls.state_arrays(device, attn, 2))
    kept = tuple(device.numpy(x).copy() for x in (m, l, o))
    assert np.isfinite(kept[0]).all()
    assert (kept[1] > 0).all()
    del attn
    gc.collect()
    compare.same_bits(tuple(map(device.numpy, (m, l, o))), kept)


@pytest.mark.parametrize("wrong", ["x", 3, (1,), (1, 0, 0), ("x", 0), (1, "x")], ids=str)
@pytest.mark.parametrize("argument", ["dl_device", "max_version"])
def test_views_name_the_argument_of_dlpack_that_is_wrong(cpu, argument, wrong):
    view = calls.make_attention(cpu, cases.Tiled("", cases.Paged("")).make("float32")).m
    with pytest.raises(TypeError, match=f"^{argument}: expected"):
        view.__dlpack__(**{argument: wrong})
    assert view.__dlpack__(dl_device=(1, 0), max_version=(1, 0)) is not None


def test_views_by_dlpack_on_the_cpu(cpu):
    torch = pytest.importorskip("torch")
    data = cases.Tiled("", cases.Paged("", seq_lens=(40, 9))).make("float32")
    attn = calls.make_attention(cpu, data)
    attn.begin_step(2)
    calls.step(cpu, attn, data, data.tiles[0])
    for view in (attn.m, attn.l, attn.o):
        compare.same_bits(torch.from_dlpack(view).numpy(), np.from_dlpack(view))
        compare.same_bits(np.asarray(view), np.from_dlpack(view))
