# SPDX-License-Identifier: Apache-2.0
"""Quantised KV: float8_e4m3fn and int8 caches with scales of every shape."""

from __future__ import annotations

import itertools

import arrays
import cases
import compare
import numpy as np
import pytest
import quantised
import streamed
import tiledattn as ta

KV_DTYPES, SCALES = quantised.KV_DTYPES, quantised.SCALES


@pytest.fixture(params=KV_DTYPES)
def kv_dtype(request):
    return request.param


def _in_turn(cases_):
    """Each case with a shape of scale for K and one for V: all pairs over the whole list."""
    pairs = itertools.cycle(itertools.product(SCALES, SCALES))
    for case, (k_shape, v_shape) in zip(cases_, itertools.islice(pairs, len(cases_)), strict=True):
        yield pytest.param(case, k_shape, v_shape, id=f"{case}-{k_shape}-{v_shape}")


@pytest.mark.parametrize(("case", "k_shape", "v_shape"), list(_in_turn(cases.PAGED)))
def test_paged_matches_reference(case, k_shape, v_shape, device, dtype, kv_dtype):
    made = quantised.make(case, dtype, kv_dtype, k_shape, v_shape)
    compare.result_close(made.run(device), made.want(), dtype)


@pytest.mark.parametrize("shape", SCALES)
def test_every_scale(shape, device, dtype, kv_dtype):
    case = cases.Paged("", seq_lens=(70, 5, 300), q_lens=2, head_dim=96, head_dim_v=40)
    made = quantised.make(case, dtype, kv_dtype, shape)
    compare.result_close(made.run(device), made.want(), dtype)


@pytest.mark.parametrize("shape", SCALES)
def test_prefill(shape, device, dtype, kv_dtype):
    """More query tokens than decode takes, ragged."""
    case = cases.Paged("", seq_lens=(70, 33), q_lens=(40, 33), score=cases.Score(True, (31, None), 4.0, True))
    made = quantised.make(case, dtype, kv_dtype, shape)
    compare.result_close(made.run(device), made.want(), dtype)


@pytest.mark.parametrize(
    ("case", "shape"),
    [
        pytest.param(case, shape, id=f"{case}-{shape}")
        for case, shape in zip(cases.TILED, itertools.cycle(SCALES), strict=False)
    ],
)
def test_tiled_matches_reference(case, shape, device, dtype, kv_dtype):
    got, want = quantised.run_tiled(device, case, dtype, kv_dtype, shape)
    compare.result_close(got, want, dtype)


def test_float8_without_scales_counts_as_it_is(device, dtype):
    made = quantised.make(cases.Paged("", seq_lens=(40, 9)), dtype, "float8_e4m3fn")
    data = made.data
    real = [pool.astype(np.float64) for pool in (data.k_pool, data.v_pool)]
    plain = made._replace(real=data._replace(k_pool=real[0], v_pool=real[1]), scales={})
    # The values are around 30, so that the scores need a smaller scale to stay moderate.
    kwargs = {"softmax_scale": 0.01}
    data.score.update(kwargs)
    compare.result_close(plain.run(device), plain.want(), dtype)


@pytest.mark.parametrize("q_lens", [None, 3, (20, 1)], ids=["one", "some", "ragged"])
def test_a_scale_of_one_changes_no_bit(q_lens, device, kv_dtype):
    """Over a float32 cache of the same values; on a GPU both take the plain kernels."""
    made = quantised.make(cases.Paged("", seq_lens=(300, 40), q_lens=q_lens), "float32", kv_dtype)
    data = made.data
    data.score["softmax_scale"] = 1e-4
    wide = data._replace(**{name: getattr(data, name).astype(np.float32) for name in ("k_pool", "v_pool")})
    plain = made._replace(data=wide, scales={})
    for one in (1.0, np.ones(2, np.float32)):
        got = made._replace(scales={"k_scale": one, "v_scale": one}).run(device)
        compare.same_bits(got, plain.run(device))


def test_every_scale_of_the_same_number_gives_close_results(device, kv_dtype):
    """Every shape filled with one number."""
    case = cases.Paged("", seq_lens=(70, 5))
    made = quantised.make(case, "float32", kv_dtype, "number")
    want = made.run(device)
    num_blocks, block_size, heads, _ = made.data.k_pool.shape
    for shape in ((), (heads,), (num_blocks, heads), (num_blocks, block_size, heads)):
        scales = {name: np.full(shape, number, np.float32) for name, number in made.scales.items()}
        for got, expected in zip(made._replace(scales=scales).run(device), want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("number", [0.5, 1, np.float32(0.25), np.float64(2.0)], ids=repr)
def test_numbers_of_any_kind(number, device):
    made = quantised.make(cases.Paged("", seq_lens=(20,)), "float32", "int8")
    made = made._replace(scales={"k_scale": number / 64, "v_scale": number / 64})
    real = [quantised.dequantise(pool, float(number) / 64) for pool in (made.data.k_pool, made.data.v_pool)]
    made = made._replace(real=made.data._replace(k_pool=real[0], v_pool=real[1]))
    compare.result_close(made.run(device), made.want(), "float32")


def test_every_code_of_v(device, kv_dtype):
    """One key: the output is V, every code of it, NaN and subnormals too."""
    codes = np.arange(256, dtype=np.uint8).view(quantised.STORED[kv_dtype])
    for scale in (1.0, np.full((1, 1, 1), 0.75, np.float32)):
        q = np.ones((1, 1, 8), np.float32)
        k = np.ones((1, 1, 1, 8), np.float32).astype(quantised.STORED[kv_dtype])
        out = device.call(
            ta.paged_attention,
            q,
            k,
            codes.reshape(1, 1, 1, 256),
            np.zeros((1, 1), np.int32),
            np.ones(1, np.int32),
            k_scale=1.0,
            v_scale=scale,
        )
        want = codes.astype(np.float32) * np.float32(np.asarray(scale).max())
        np.testing.assert_array_equal(out.reshape(-1), want)


@pytest.mark.parametrize("head_dim", [1, 8, 200])
def test_every_code_of_k(device, dtype, kv_dtype, head_dim):
    """256 sequences of one key, all of one code. A head's q picks one element: the lse is the score, which is K."""
    codes = np.arange(256, dtype=np.uint8).view(quantised.STORED[kv_dtype])
    picked = np.linspace(0, head_dim - 1, 4).astype(int)
    q = np.zeros((256, 4, head_dim), arrays.NP_DTYPE[dtype])
    q[:, range(4), picked] = 1
    for scale in (1.0, np.full((256, 1), 0.75, np.float32)):
        pool = np.repeat(codes.reshape(256, 1, 1, 1), head_dim, -1)
        _, lse = device.call(
            ta.paged_attention,
            q,
            pool,
            np.ones_like(pool),
            np.arange(256, dtype=np.int32).reshape(256, 1),
            np.ones(256, np.int32),
            softmax_scale=1.0,
            k_scale=scale,
            v_scale=1.0,
            return_lse=True,
        )
        want = codes.astype(np.float64) * np.asarray(scale).max()
        np.testing.assert_allclose(lse, np.repeat(want[:, None], 4, 1), rtol=1e-6)


def test_decode_on_the_cpu_is_precise(cpu, dtype, kv_dtype):
    """Whatever the types, a result that is not rounded yet is off by 2e-6 at most, as over other caches."""
    case = cases.Paged("", seq_lens=(4096, 60), num_q_heads=8, num_kv_heads=2, head_dim=128)
    made = quantised.make(case, dtype, kv_dtype, "slot")
    out = np.empty(made.data.q.shape, np.float32)
    made.run(cpu, out=out)
    want = made.want().out
    assert np.linalg.norm(out - want) <= 2e-6 * np.linalg.norm(want)


@pytest.mark.parametrize("shape", SCALES)
@pytest.mark.parametrize("q_len", [1, 40])
@pytest.mark.parametrize(("k_scale", "softmax_scale"), [(3e38, None), (1e25, -1e25), (1.0, 3e38)])
def test_a_product_of_scales_beyond_float32(k_scale, softmax_scale, q_len, shape, cpu, dtype, kv_dtype):
    """Scores within reach are what they are, and a query of zeros sees all keys alike."""
    score = cases.Score(softmax_scale=softmax_scale)
    made = quantised.make(cases.Paged("", (70,), q_len, head_dim=64, score=score), dtype, kv_dtype, shape)
    k = np.sign(made.data.k_pool.astype(np.float32)).astype(made.data.k_pool.dtype)
    scale = np.full_like(made.scales["k_scale"], k_scale) if shape != "number" else k_scale
    product = np.float64(k_scale) * abs(softmax_scale or 0.125)
    q = made.data.q.astype(np.float64) * max(1e28 / product, 1e-30)
    q[..., ::2, :] = 0
    q = q.astype(made.data.q.dtype)
    data = made.data._replace(q=q, k_pool=k)
    real = made.real._replace(q=q, k_pool=quantised.dequantise(k, scale))
    made = quantised.Quantised(data, real, {**made.scales, "k_scale": scale})
    (out, lse), want = made.run(cpu), made.want()
    compare.out_close(out, want.out, dtype)
    compare.lse_close(lse, want.lse)


@pytest.mark.parametrize("shape", SCALES)
def test_layouts(shape, device, dtype, kv_dtype):
    """Heads before tokens, K and V interleaved, a pool inside a wider one; scales with strides of their own."""
    case = cases.Paged("", seq_lens=(40, 9, 1), head_dim_v=64)
    made = quantised.make(case, dtype, kv_dtype, shape)
    k_pool, v_pool = made.data.k_pool, made.data.v_pool
    heads_first = [
        device.array(np.ascontiguousarray(x.swapaxes(1, 2))).swapaxes(1, 2) for x in (k_pool, v_pool)
    ]
    both = device.array(np.stack([k_pool, v_pool], axis=1))
    wide = np.zeros((*k_pool.shape[:2], 3, 80), k_pool.dtype)
    wide[..., :2, 3:67] = k_pool
    inside = device.array(wide)
    scales = {}
    for name, scale in made.scales.items():
        if shape in ("number", "one"):
            scales[name] = scale
            continue
        # Blocks and heads in the other order, and every second element alone.
        turned = np.ascontiguousarray(np.repeat(scale, 2, axis=-1).swapaxes(0, -1))
        scales[name] = device.array(turned).swapaxes(0, -1)[..., ::2]
    for k, v in (
        heads_first,
        (both[:, 0], both[:, 1]),
        (inside[..., :2, 3:67], both[:, 1]),
    ):
        got = made._replace(data=made.data._replace(k_pool=k, v_pool=v), scales=scales).run(device)
        compare.result_close(got, made.want(), dtype)


@pytest.mark.parametrize("shape", ["block", "slot"])
def test_scale_of_a_key_masked_from_every_query_is_not_observable(shape, device, dtype, kv_dtype):
    case = cases.Paged("", seq_lens=(60,), q_lens=3, block_size=8, score=cases.Score(True, (9, 0)))
    made = quantised.make(case, dtype, kv_dtype, shape)
    want = made.want()
    hidden = 60 - 3 - 9
    for position in range(hidden if shape == "slot" else hidden // 8 * 8):
        block, slot = made.data.block_table[0, position // 8], position % 8
        for scale in made.scales.values():
            scale[(block, slot) if shape == "slot" else block] = np.nan
    compare.result_close(made.run(device), want, dtype)
    assert np.isfinite(want.out).all()


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("shape", ["head", "block", "slot"])
def test_nan_in_a_scale_that_is_used_comes_out(name, shape, device):
    made = quantised.make(cases.Paged("", seq_lens=(40, 40)), "float32", "int8", shape)
    scale, block = made.scales[name], made.data.block_table[0, 1]
    scale[{"head": (1,), "block": (block, 1), "slot": (block, 3, 1)}[shape]] = np.nan
    out, _ = made.run(device)
    assert np.isnan(out[0, 2:]).all()
    assert not np.isnan(out[:, :2]).any()


def test_same_bits_in_any_company(device, dtype, kv_dtype):
    made = quantised.make(cases.Paged("", seq_lens=(300, 40, 17)), dtype, kv_dtype, "slot")
    together = made.run(device)
    for b in range(3):
        alone = made.data._replace(
            q=made.data.q[b : b + 1],
            block_table=made.data.block_table[b : b + 1],
            seq_lens=made.data.seq_lens[b : b + 1],
        )
        got = made._replace(data=alone).run(device)
        compare.same_bits(got, tuple(x[b : b + 1] for x in together))


def test_frameworks(carrier):
    for kv in KV_DTYPES:
        if carrier.name == "cupy" and kv != "int8":
            continue  # CuPy has no float8
        for shape in SCALES:
            made = quantised.make(cases.Paged("", seq_lens=(9, 40)), "float16", kv, shape)
            compare.result_close(made.run(carrier), made.want(), "float16")


@pytest.mark.parametrize("kind", ["host", "device", "read"])
def test_streaming_sources(kind, device, kv_dtype):
    """The bits of the same tiles by hand, and the right ones."""
    made = quantised.make(streamed.LONG, "float16", kv_dtype, "number")
    source = streamed.make_source(kind, device, made.data, **made.scales)
    streaming = streamed.make_streaming(device, made.data)
    got = streamed.attend(device, streaming, made.data, streamed.sequences_of(made.data, source))
    compare.result_close(got, made.want(), "float16")
    attn = ta.TiledAttention(streaming.dims, device=device.device)
    attn.begin_step(len(made.data.q))
    for part in cases.cut(made.data, (streamed.TILE,) * 8):
        args = (*made.data[:3], part.blocks, part.counts)
        device.call(attn.step_tile, *args, last_block_valid_slots=part.valid_slots, **made.scales)
    compare.same_bits(got, device.call(attn.finalize, return_lse=True))


def test_streaming_from_a_plain_and_a_quantised_source(device):
    """Old keys are int8, new ones have the type of q."""
    made = quantised.make(cases.Paged("", seq_lens=(64,), block_size=4), "float32", "int8", "number")
    data, real = made.data, made.real
    plain = [real[i].astype(np.float32) for i in (1, 2)]
    old = streamed.make_source("host", device, data, **made.scales)
    new = ta.PoolSource(*plain)
    blocks = data.block_table[0]
    parts = [ta.KvPart(old, blocks[:10]), ta.KvPart(new, blocks[10:16])]
    streaming = streamed.make_streaming(device, data)
    got = streamed.attend(device, streaming, data, [ta.StreamSequence(64, parts)])
    compare.result_close(got, made.want(), "float32")


def test_scales_of_sources(cpu):
    sizes = {"num_blocks": 2, "block_size": 4, "num_kv_heads": 1, "head_dim": 8}
    with pytest.raises(ValueError, match=r"k_scale: got None with int8.*num_kv_heads=1"):
        ta.TileGeometry(**sizes, dtype="int8")
    with pytest.raises(ValueError, match=r"v_scale: got -1.*> 0"):
        ta.TileGeometry(**sizes, dtype="int8", k_scale=1.0, v_scale=-1.0)
    with pytest.raises(ValueError, match=r"k_scale: got a scale with float16 pools"):
        ta.TileGeometry(**sizes, dtype="float16", k_scale=1.0)
    pool = np.zeros((2, 4, 1, 8), np.int8)
    for wrong in (True, np.True_, "1"):
        with pytest.raises(TypeError, match=r"v_scale: expected"):
            ta.TileGeometry(**sizes, dtype="int8", k_scale=1.0, v_scale=wrong)
        with pytest.raises(TypeError, match=r"k_scale: expected"):
            ta.PoolSource(pool, pool, k_scale=wrong, v_scale=1.0)
        args = (np.ones((1, 1, 8), np.float32), pool, pool, np.array([[0]]), np.array([3]))
        with pytest.raises(TypeError, match=r"k_scale: expected"):
            ta.paged_attention(*args, k_scale=wrong, v_scale=1.0)
    with pytest.raises(ValueError, match=r"v_scale: got None with int8"):
        ta.PoolSource(pool, pool, k_scale=1.0)
    geometry = ta.TileGeometry(**sizes, dtype="float8_e4m3fn", v_scale=0.5)
    assert geometry.block_bytes == 2 * 4 * 8
    source = ta.PoolSource.allocate(geometry)
    assert source.k_pool.dtype == quantised.STORED["float8_e4m3fn"]


def test_supports(device, dtype, kv_dtype):
    for operation in ("paged_attention", "tiled_attention"):
        answer = ta.supports(operation, device=device.device, dtype=dtype, kv_dtype=kv_dtype)
        assert answer, answer.reason
    answer = ta.supports("flash_attention", device=device.device, dtype=dtype, kv_dtype=kv_dtype)
    assert not answer
    assert "kv_dtype" in answer.reason
    assert kv_dtype in answer.reason
    assert not ta.supports("paged_attention", device=device.device, dtype=kv_dtype)
    assert not ta.supports("paged_attention", device=device.device, dtype="float16", kv_dtype="float32")
    assert not ta.supports("paged_attention", device=device.device, dtype=dtype, kv_dtype="uint8")


# What is refused.


def _refused(device, made, error, *words, **changes):
    fields = {name: changes.pop(name) for name in list(changes) if name in made.data._fields}
    with pytest.raises(error) as caught:
        made._replace(data=made.data._replace(**fields), scales={**made.scales, **changes}).run(device)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_wrong_scales_are_refused_by_name(name, device, kv_dtype):
    made = quantised.make(cases.Paged("", seq_lens=(40, 9)), "float32", kv_dtype)
    num_blocks, block_size, heads, _ = made.data.k_pool.shape
    wanted = f"[num_blocks={num_blocks}, block_size={block_size}, num_kv_heads={heads}]"
    for shape in (
        (1,),
        (heads + 1,),
        (heads, num_blocks),
        (num_blocks, 1),
        (num_blocks, block_size),
        (num_blocks, block_size, 1),
        (num_blocks, heads, block_size),
        (num_blocks, block_size, heads, 1),
    ):
        got = str(list(shape))
        _refused(device, made, ValueError, name, got, wanted, **{name: np.ones(shape, np.float32)})
    for dtype in (np.float16, np.float64, np.int32):
        wrong = np.ones(heads, dtype)
        _refused(device, made, TypeError, name, np.dtype(dtype).name, "float32", **{name: wrong})
    for number in (0.0, -1.0, float("nan"), float("inf"), 1e60, 1e-60):
        _refused(device, made, ValueError, name, "> 0", **{name: number})
    for thing in ("1", [1.0], object(), True):
        _refused(device, made, TypeError, name, **{name: thing})


def test_int8_needs_scales(device):
    made = quantised.make(cases.Paged("", seq_lens=(40, 9)), "float32", "int8")
    for name in made.scales:
        _refused(device, made, ValueError, name, "None", "int8", "num_kv_heads=2", **{name: None})


@pytest.mark.parametrize("scale", [1.0, np.ones(2, np.float32)], ids=["number", "array"])
def test_scales_without_a_quantised_pool_are_refused(scale, device, dtype):
    data = cases.Paged("", seq_lens=(40, 9)).make(dtype)
    for name in ("k_scale", "v_scale"):
        with pytest.raises(ValueError, match=rf"{name}.*{dtype}.*None"):
            device.call(ta.paged_attention, *data.args, **{name: scale})


def test_pools_of_wrong_types(device):
    made = quantised.make(cases.Paged("", seq_lens=(40, 9)), "float16", "int8")
    float8 = made.data.v_pool.view(np.uint8).view(quantised.STORED["float8_e4m3fn"])
    half = made.data.v_pool.astype(np.float16)
    _refused(device, made, TypeError, "v_pool", "float8_e4m3fn", "int8", "k_pool", v_pool=float8)
    _refused(device, made, TypeError, "v_pool", "float16", "int8", "k_pool", v_pool=half)
    unsigned = made.data.k_pool.view(np.uint8)
    _refused(device, made, TypeError, "k_pool", "uint8", "float16", "int8", k_pool=unsigned)
    with pytest.raises(TypeError, match=r"q.*int8"):
        made._replace(data=made.data._replace(q=made.data.q.astype(np.int8))).run(device)


def test_step_tile_checks_scales_too(device):
    data = cases.Tiled("", cases.Paged("", seq_lens=(40, 9)), tile_blocks=(3,)).make("float32")
    attn = ta.TiledAttention(ta.TiledAttentionDims(**data.dims()), device=device.device)
    attn.begin_step(2)
    args, kwargs = data.step_args(data.tiles[0]), data.step_kwargs(data.tiles[0])
    stored = [pool.view(np.uint8)[..., ::4].view(np.int8).copy() for pool in args[1:3]]
    with pytest.raises(ValueError, match=r"k_scale.*float32.*None"):
        device.call(attn.step_tile, *args, **kwargs, k_scale=1.0)
    with pytest.raises(ValueError, match=r"k_scale.*None.*int8"):
        device.call(attn.step_tile, args[0], *stored, *args[3:], **kwargs)
    with pytest.raises(ValueError, match=r"v_scale.*\[3\]"):
        device.call(
            attn.step_tile, args[0], *stored, *args[3:], **kwargs, k_scale=1.0, v_scale=np.ones(3, np.float32)
        )


@pytest.mark.gpu
def test_scales_on_another_device_are_refused(gpu):
    made = quantised.make(cases.Paged("", seq_lens=(40, 9)), "float16", "int8")
    data = made.data._replace(**{name: gpu.array(getattr(made.data, name)) for name in ("k_pool", "v_pool")})
    torch = pytest.importorskip("torch")
    for name in made.scales:
        scales = {**made.scales, name: torch.ones(2)}
        with pytest.raises(ValueError, match=rf"{name}.*cpu.*cuda"):
            made._replace(data=data, scales=scales).run(gpu)


def test_flash_attention_takes_no_quantised_keys(device, kv_dtype):
    (q, k, v), _ = cases.Flash("").make("float16")
    stored = quantised.STORED[kv_dtype]
    with pytest.raises(TypeError, match=rf"k: .*{kv_dtype}"):
        device.call(ta.flash_attention, q, k.astype(stored), v.astype(stored))
