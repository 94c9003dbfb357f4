# SPDX-License-Identifier: Apache-2.0
"""Shapes of `bench_cpu.py` and whoever computes them: a function of the arrays that returns what to time.

A contestant that does not take a shape raises `Skip`; one whose package is missing raises `ImportError`. Each
lays its arrays out as suits it best before any timing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import tiledattn as ta
import torch

Run = Callable[[], torch.Tensor]
Make = Callable[["Inputs"], Run]

BLOCK_SIZE = 16
# A power of two: bfloat16 holds every element of the quantised types times it.
KV_SCALE = 1 / 32


class Skip(Exception):  # noqa: N818 - no error
    """The contestant does not take this shape or type."""


@dataclass(frozen=True)
class Cell:
    """One shape: ``q [batch, q_len, num_q_heads, head_dim]`` against ``kv_len`` keys."""

    name: str
    dtype: str
    batch: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    q_len: int
    kv_len: int
    causal: bool = False
    kv_dtype: str | None = None  # of a quantised paged cache

    def kv_name(self) -> str:
        """Types of q, K and V as the tables show them."""
        return self.dtype if self.kv_dtype is None else f"{self.dtype}, {self.kv_dtype} cache"

    def torch_dtype(self) -> torch.dtype:
        """Element type of q, K and V."""
        return getattr(torch, self.dtype)

    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_q_heads // self.num_kv_heads

    def kv_bytes(self) -> int:
        """Bytes of K and V."""
        item = 1 if self.kv_dtype else self.torch_dtype().itemsize
        return 2 * self.batch * self.kv_len * self.num_kv_heads * self.head_dim * item


@dataclass(frozen=True)
class Inputs:
    """Arrays of a cell in torch's own layout, ``[batch, heads, tokens, head_dim]``."""

    cell: Cell
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def make_inputs(cell: Cell) -> Inputs:
    """Random inputs, the same in every run."""
    generator = torch.Generator().manual_seed(0)

    def normal(heads: int, tokens: int) -> torch.Tensor:
        shape = (cell.batch, heads, tokens, cell.head_dim)
        return torch.randn(shape, generator=generator).to(cell.torch_dtype())

    k = normal(cell.num_kv_heads, cell.kv_len)
    v = normal(cell.num_kv_heads, cell.kv_len)
    if cell.kv_dtype is not None:  # values that the cache holds exactly, so that all compute the same
        k, v = (quantise(x, cell.kv_dtype).to(k.dtype) * KV_SCALE for x in (k, v))
    return Inputs(cell, normal(cell.num_q_heads, cell.q_len), k, v)


def quantise(x: torch.Tensor, kv_dtype: str) -> torch.Tensor:
    """Round to the values of a quantised cache with scale KV_SCALE."""
    largest = 127 if kv_dtype == "int8" else 448
    scaled = (x.float() / KV_SCALE).clamp(-largest, largest)
    return (scaled.round() if kv_dtype == "int8" else scaled).to(getattr(torch, kv_dtype))


def tiledattn_flash(x: Inputs) -> Run:
    """``flash_attention`` on the arrays as they are."""
    out = torch.empty_like(x.q)
    return lambda: ta.flash_attention(x.q, x.k, x.v, causal=x.cell.causal, layout="bhsd", out=out)


def _own_pools(cell: Cell) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory of the library: on huge pages where the system has them."""
    dtype = cell.kv_dtype or cell.dtype
    geometry = ta.TileGeometry(
        num_blocks=cell.batch * -(-cell.kv_len // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        num_kv_heads=cell.num_kv_heads,
        head_dim=cell.head_dim,
        dtype=dtype,
        **({} if cell.kv_dtype is None else {"k_scale": KV_SCALE, "v_scale": KV_SCALE}),
    )
    source = ta.PoolSource.allocate(geometry)
    pools = (torch.from_numpy(pool.view(f"i{pool.itemsize}")) for pool in (source.k_pool, source.v_pool))
    k, v = (pool.view(getattr(torch, dtype)) for pool in pools)
    return k, v


def reading(x: Inputs) -> Run:
    """Nothing but going through as many bytes of the library's own memory: the rate at which this machine reads.

    By NumPy in threads, since torch's sums are slower.
    """
    if x.cell.q_len > 1:
        raise Skip("not bound by reading")
    k, _ = _own_pools(x.cell)
    k.zero_()
    bits = k.view(torch.int64)  # K and V of a block, then of the next one; the last V is left out
    size = (len(bits) - 1) * bits.stride(0) + bits[0].numel()
    threads = torch.get_num_threads()
    parts = np.array_split(bits.as_strided((size,), (1,)).numpy(), threads)
    pool = ThreadPoolExecutor(threads)
    return lambda: torch.tensor([int(found) for found in pool.map(np.bitwise_or.reduce, parts)])


def tiledattn_paged(x: Inputs) -> Run:
    """``paged_attention`` over shuffled blocks of the library's own memory; scales for each head."""
    cell = x.cell
    blocks = -(-cell.kv_len // BLOCK_SIZE)
    order = torch.randperm(cell.batch * blocks, generator=torch.Generator().manual_seed(1))
    pools = _own_pools(cell)
    for pool, kv in zip(pools, (x.k, x.v), strict=True):
        tokens = kv.transpose(1, 2).reshape(pool.shape)
        pool[order] = tokens if cell.kv_dtype is None else quantise(tokens, cell.kv_dtype)
    scales = {}
    if cell.kv_dtype is not None:
        scale = torch.full((cell.num_kv_heads,), KV_SCALE)
        scales = {"k_scale": scale, "v_scale": scale}
    block_table = order.reshape(cell.batch, blocks).to(torch.int32)
    seq_lens = torch.full((cell.batch,), cell.kv_len, dtype=torch.int32)
    q = x.q.transpose(1, 2).contiguous()
    out = torch.empty_like(q)

    def run() -> torch.Tensor:
        ta.paged_attention(q, *pools, block_table, seq_lens, causal=cell.causal, out=out, **scales)
        return out.transpose(1, 2)

    return run


def tiledattn_paged_unquantised(x: Inputs) -> Run:
    """Where the cache is quantised: the same over a cache of the type of q."""
    if x.cell.kv_dtype is None:
        raise Skip("the cache is not quantised")
    return tiledattn_paged(replace(x, cell=replace(x.cell, kv_dtype=None)))


def _sdpa(*args: torch.Tensor, **kwargs: bool) -> torch.Tensor:
    with torch.inference_mode():
        return torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)


def torch_sdpa(x: Inputs) -> Run:
    """The common spelling."""
    return lambda: _sdpa(x.q, x.k, x.v, is_causal=x.cell.causal, enable_gqa=x.cell.group() > 1)


def _folded_q(x: Inputs) -> torch.Tensor:
    """The query heads of a KV head as query rows: what one who tunes would write."""
    cell = x.cell
    if cell.q_len != 1 or cell.group() == 1:
        raise Skip("no heads to fold")
    return x.q.reshape(cell.batch, cell.num_kv_heads, cell.group(), cell.head_dim)


def torch_sdpa_folded(x: Inputs) -> Run:
    """``scaled_dot_product_attention`` with heads as rows."""
    q = _folded_q(x)
    return lambda: _sdpa(q, x.k, x.v).reshape(x.q.shape)


def torch_products_folded(x: Inputs) -> Run:
    """Two matrix products and a softmax, with heads as rows."""
    q, scale = _folded_q(x), 1 / math.sqrt(x.cell.head_dim)

    def run() -> torch.Tensor:
        with torch.inference_mode():
            weights = torch.softmax(q @ x.k.transpose(-1, -2) * scale, -1)
            return (weights @ x.v).reshape(x.q.shape)

    return run


def torch_sdpa_expanded(x: Inputs) -> Run:
    """KV heads repeated for each of their query heads."""
    if x.cell.group() == 1:
        raise Skip("no heads to repeat")
    k, v = (kv.repeat_interleave(x.cell.group(), 1) for kv in (x.k, x.v))
    return lambda: _sdpa(x.q, k, v, is_causal=x.cell.causal)


def _numpy(x: torch.Tensor) -> np.ndarray:
    if x.dtype == torch.bfloat16:
        raise Skip("no bfloat16")
    return np.ascontiguousarray(x.numpy())


def onnxruntime_attention(x: Inputs) -> Run:
    """``GroupQueryAttention`` for one query token, past and present in one buffer, else ``MultiHeadAttention``."""
    import onnxruntime as ort
    from onnx import TensorProto, helper

    cell = x.cell
    if cell.q_len > 1 and cell.group() > 1:
        raise Skip("no grouped heads with many query tokens")
    by_token = {name: _numpy(kv.transpose(1, 2)) for name, kv in (("q", x.q), ("k", x.k), ("v", x.v))}
    arrays = {name: kv.reshape(*kv.shape[:2], -1) for name, kv in by_token.items()}
    out = np.empty_like(arrays["q"])
    results = {"out": out}
    if cell.q_len == 1:
        kind, options = "GroupQueryAttention", {"kv_num_heads": cell.num_kv_heads}
        past = {"past_k": _numpy(x.k).copy(), "past_v": _numpy(x.v).copy()}
        arrays = {name: kv[:, -1:].copy() for name, kv in arrays.items()} | past
        arrays["last"] = np.full(cell.batch, cell.kv_len - 1, np.int32)
        arrays["total"] = np.array([cell.kv_len], np.int32)
        results |= {"present_k": past["past_k"], "present_v": past["past_v"]}
    else:
        kind, options = "MultiHeadAttention", {"unidirectional": int(cell.causal)}

    def declare(named: dict[str, np.ndarray]) -> list[object]:
        kinds = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "int32": TensorProto.INT32}
        return [helper.make_tensor_value_info(n, kinds[str(a.dtype)], a.shape) for n, a in named.items()]

    node = helper.make_node(
        kind, list(arrays), list(results), domain="com.microsoft", num_heads=cell.num_q_heads, **options
    )
    graph = helper.make_graph([node], "attention", declare(arrays), declare(results))
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=9)
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    session = ort.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    values = {id(a): ort.OrtValue.ortvalue_from_numpy(a) for a in [*arrays.values(), *results.values()]}
    for name, array in arrays.items():
        binding.bind_ortvalue_input(name, values[id(array)])
    for name, array in results.items():
        binding.bind_ortvalue_output(name, values[id(array)])

    def run() -> torch.Tensor:
        session.run_with_iobinding(binding)
        result = torch.from_numpy(values[id(out)].numpy())
        return result.view(cell.batch, cell.q_len, cell.num_q_heads, cell.head_dim).transpose(1, 2)

    return run


def _openvino_tensor(x: torch.Tensor) -> object:
    """The same memory as a tensor of OpenVINO."""
    import openvino as ov

    kind = {torch.float32: ov.Type.f32, torch.float16: ov.Type.f16, torch.bfloat16: ov.Type.bf16}[x.dtype]
    x = x.contiguous()
    if x.dtype != torch.bfloat16:
        return ov.Tensor(x.numpy(), shared_memory=True)
    tensor = ov.Tensor(kind, ov.Shape(x.shape))
    torch.from_numpy(tensor.data.view(np.int16)).copy_(x.view(torch.int16))
    return tensor


def _openvino_request(model: object, cell: Cell) -> object:
    import openvino as ov

    kind = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[cell.dtype]
    config = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": kind,
        "KV_CACHE_PRECISION": kind,
        "PERFORMANCE_HINT": "LATENCY",
    }
    return ov.Core().compile_model(model, "CPU", config).create_infer_request()


def _openvino_result(request: object, like: torch.Tensor) -> torch.Tensor:
    data = request.get_output_tensor(0).data
    bits = torch.from_numpy(data.view(f"i{data.itemsize}"))
    kinds = {torch.int32: torch.float32, torch.int16: like.dtype}
    return bits.view(kinds[bits.dtype]).reshape(like.shape)


def openvino_sdpa(x: Inputs) -> Run:
    """``ScaledDotProductAttention``; with one query token, heads as rows."""
    import openvino as ov
    from openvino import opset13

    q = x.q if x.cell.group() == 1 else _folded_q(x)
    tensors = [_openvino_tensor(array) for array in (q, x.k, x.v)]
    inputs = [opset13.parameter(tensor.shape, tensor.element_type) for tensor in tensors]
    attention = opset13.scaled_dot_product_attention(*inputs, causal=x.cell.causal)
    request = _openvino_request(ov.Model([attention], inputs), x.cell)
    for i, tensor in enumerate(tensors):
        request.set_input_tensor(i, tensor)

    def run() -> torch.Tensor:
        request.infer()
        return _openvino_result(request, x.q)

    return run


def _openvino_cached_model(cell: Cell) -> object:
    """Attention over K and V kept as state, to which each call appends a token."""
    import openvino as ov
    from openvino import opset13 as ops
    from openvino.op.util import Variable, VariableInfo

    def numbers(*values: int) -> object:
        return ops.constant(np.array(values, np.int64))

    kv_heads, head_dim = cell.num_kv_heads, cell.head_dim
    shape = ov.PartialShape([-1, kv_heads, -1, head_dim])
    q = ops.parameter(ov.PartialShape([-1, cell.num_q_heads, -1, head_dim]), ov.Type.f32)
    order = ops.parameter(ov.PartialShape([-1]), ov.Type.i32)
    first_axis = ops.constant(np.array(0))
    parameters, assigned, expanded = [q], [], []
    for name in "kv":
        new = ops.parameter(shape, ov.Type.f32)
        info = VariableInfo()
        info.data_shape, info.data_type, info.variable_id = shape, ov.Type.f32, name
        state = Variable(info)
        batch = ops.gather(ops.shape_of(new, "i64"), numbers(0), first_axis)
        nothing = ops.concat([batch, numbers(kv_heads, 0, head_dim)], 0)
        past = ops.read_value(ops.broadcast(ops.constant(np.float32(0)), nothing), state)
        present = ops.concat([ops.gather(past, order, first_axis), new], 2)
        groups = ops.broadcast(
            ops.unsqueeze(present, numbers(2)),
            numbers(1, 1, cell.group(), 1, 1),
            broadcast_spec="BIDIRECTIONAL",
        )
        parameters.append(new)
        assigned.append(ops.assign(present, state))
        expanded.append(ops.reshape(groups, numbers(0, cell.num_q_heads, -1, head_dim), True))
    attention = ops.scaled_dot_product_attention(q, *expanded, causal=False)
    return ov.Model([ops.result(attention)], assigned, [*parameters, order])


def openvino_stateful(x: Inputs) -> Run:
    """One token with K and V in OpenVINO's own cache, as in its language models; each run makes that a key longer."""
    import openvino as ov

    if x.cell.q_len > 1:
        raise Skip("only for one query token")
    request = _openvino_request(_openvino_cached_model(x.cell), x.cell)
    k, v = (np.ascontiguousarray(kv.float().numpy()) for kv in (x.k, x.v))
    for state in request.query_state():
        state.state = ov.Tensor(np.ascontiguousarray((k if state.name == "k" else v)[:, :, :-1]))
    token = [x.q.float().numpy(), k[:, :, -1:].copy(), v[:, :, -1:].copy()]
    for i, array in enumerate([*token, np.arange(x.cell.batch, dtype=np.int32)]):
        request.set_input_tensor(i, ov.Tensor(array))

    def run() -> torch.Tensor:
        request.infer()
        return _openvino_result(request, x.q)

    return run


def ggml_attention(x: Inputs) -> Run:
    """``ggml_flash_attn_ext`` over K and V as they are, with q and out in float32, the only type it takes."""
    import ctypes

    import ggml

    cell = x.cell
    kinds = {
        torch.float32: ggml.GGML_TYPE_F32,
        torch.float16: ggml.GGML_TYPE_F16,
        torch.bfloat16: ggml.GGML_TYPE_BF16,
    }
    context = ggml.ggml_init(ggml.ggml_init_params(mem_size=1 << 20, mem_buffer=None, no_alloc=True))
    arrays = [x.q.float(), x.k, x.v]
    if cell.causal:
        hidden = torch.ones(cell.q_len, cell.kv_len, dtype=torch.bool).triu(cell.kv_len - cell.q_len + 1)
        arrays.append(
            torch.zeros(hidden.shape, dtype=torch.float16).masked_fill_(hidden, -math.inf)[None, None]
        )

    def share(array: torch.Tensor) -> object:
        tensor = ggml.ggml_new_tensor_4d(context, kinds[array.dtype], *reversed(array.shape))
        tensor.contents.data = array.data_ptr()
        return tensor

    q, k, v, *mask = (share(array) for array in arrays)
    out = torch.empty(cell.batch, cell.q_len, cell.num_q_heads, cell.head_dim)
    scale = 1 / math.sqrt(cell.head_dim)
    result = ggml.ggml_flash_attn_ext(context, q, k, v, mask[0] if mask else None, scale, 0.0, 0.0)
    result.contents.data = out.data_ptr()
    graph = ggml.ggml_new_graph(context)
    ggml.ggml_build_forward_expand(graph, result)
    threads = torch.get_num_threads()
    pool_params = ggml.ggml_threadpool_params_default(threads)
    plan = ggml.ggml_graph_plan(graph, threads, ggml.ggml_threadpool_new(ctypes.pointer(pool_params)))
    scratch = (ctypes.c_uint8 * max(plan.work_size, 1))()
    plan.work_data = ctypes.cast(scratch, ctypes.POINTER(ctypes.c_uint8))

    def run(_kept: tuple = (arrays, scratch)) -> torch.Tensor:  # ggml has only their addresses
        if ggml.ggml_graph_compute(graph, ctypes.pointer(plan)) != ggml.GGML_STATUS_SUCCESS:
            raise RuntimeError("ggml_graph_compute failed")
        return out.transpose(1, 2)

    return run


READING = "reading K and V"

# The first is what the others' times are divided by.
CONTESTANTS: dict[str, Make] = {
    "tiledattn flash_attention": tiledattn_flash,
    "tiledattn paged_attention": tiledattn_paged,
    "tiledattn paged_attention, unquantised": tiledattn_paged_unquantised,
    "torch sdpa": torch_sdpa,
    "torch sdpa, heads folded": torch_sdpa_folded,
    "torch products, heads folded": torch_products_folded,
    "torch sdpa, heads expanded": torch_sdpa_expanded,
    "onnxruntime": onnxruntime_attention,
    "openvino": openvino_sdpa,
    "openvino, own cache": openvino_stateful,
    "ggml": ggml_attention,
    READING: reading,
}
