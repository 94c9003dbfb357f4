# SPDX-License-Identifier: Apache-2.0
"""The operators ``torch.ops.tiledattn.*``: schemas, kernels and what tracing needs to know of their results.

An operator works on torch's current stream and checks its arguments as the function of the same name in `tiledattn`
does: by the compiled part, when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.autograd.graph import increment_version

from .. import _api

_SCORE = "bool causal, float? softmax_scale, SymInt? window_left, SymInt? window_right, float softcap, Tensor? sinks"
_FLASH = (
    f"Tensor q, Tensor k, Tensor v, {_SCORE}, str layout, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k"
)
_PAGED = (
    f"Tensor q, Tensor k_pool, Tensor v_pool, Tensor block_table, Tensor seq_lens, {_SCORE}, "
    "Tensor? cu_seqlens_q, SymInt? max_seqlen_q"
)
# A schema has no type for "a tensor or a number".
_SCALES = "Tensor? k_scale=None, float? k_scale_number=None, Tensor? v_scale=None, float? v_scale_number=None"
_INTO = "Tensor(a!) out, Tensor(b!)? lse"

_library = torch.library.Library("tiledattn", "DEF")
for _schema in (
    f"flash_attention({_FLASH}) -> Tensor",
    f"flash_attention_lse({_FLASH}) -> (Tensor, Tensor)",
    f"flash_attention_into({_INTO}, {_FLASH}) -> ()",
    f"paged_attention({_PAGED}, {_SCALES}) -> Tensor",
    f"paged_attention_lse({_PAGED}, {_SCALES}) -> (Tensor, Tensor)",
    f"paged_attention_into({_INTO}, {_PAGED}, {_SCALES}) -> ()",
    "merge_attention(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, float lse_base) -> (Tensor, Tensor)",
    f"write_kv(Tensor k, Tensor v, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor slot_mapping, {_SCALES}) -> ()",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def _flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    softmax_scale: float | None,
    window_left: int | None,
    window_right: int | None,
    softcap: float,
    sinks: Tensor | None,
    layout: str,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    return _api.flash_attention(
        q,
        k,
        v,
        causal=causal,
        softmax_scale=softmax_scale,
        window=(window_left, window_right),
        softcap=softcap,
        sinks=sinks,
        layout=layout,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        out=out,
        lse=lse,
        return_lse=return_lse,
    )


def _paged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    causal: bool,
    softmax_scale: float | None,
    window_left: int | None,
    window_right: int | None,
    softcap: float,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int | None,
    k_scale: Tensor | None = None,
    k_scale_number: float | None = None,
    v_scale: Tensor | None = None,
    v_scale_number: float | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    return _api.paged_attention(
        q,
        k_pool,
        v_pool,
        block_table,
        seq_lens,
        causal=causal,
        softmax_scale=softmax_scale,
        window=(window_left, window_right),
        softcap=softcap,
        sinks=sinks,
        k_scale=k_scale if k_scale_number is None else k_scale_number,
        v_scale=v_scale if v_scale_number is None else v_scale_number,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        out=out,
        lse=lse,
        return_lse=return_lse,
    )


def _with_lse(kernel: Any) -> Any:
    """Make the kernel of the operator that returns lse too."""

    def with_lse(*args: Any) -> tuple[Tensor, Tensor]:
        out, lse = kernel(*args, return_lse=True)
        return out, lse

    return with_lse


def _into(kernel: Any) -> Any:
    """Make the kernel of the operator that fills given tensors."""

    def into(out: Tensor, lse: Tensor | None, *args: Any) -> None:
        kernel(*args, out=out, lse=lse)

    return into


def _merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, lse_base: float
) -> tuple[Tensor, Tensor]:
    return _api.merge_attention(out_a, lse_a, out_b, lse_b, lse_base=lse_base)


def _write_kv(
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    k_scale_number: float | None = None,
    v_scale: Tensor | None = None,
    v_scale_number: float | None = None,
) -> None:
    _api.write_kv(
        k,
        v,
        k_pool,
        v_pool,
        slot_mapping,
        k_scale=k_scale if k_scale_number is None else k_scale_number,
        v_scale=v_scale if v_scale_number is None else v_scale_number,
    )


# The dispatch keys below those of autograd, and what is left of them in a call that goes to its kernel at once: no mode
# or transform of torch and no subclass of Tensor stands between. As numbers: a tenth of the time of the objects.
_BELOW = torch._C._after_ADInplaceOrView_keyset - torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
_BELOW_BITS = _BELOW.raw_repr()
_PLAIN_BITS = [
    torch._C.DispatchKeySet(key).raw_repr() for key in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
]


def _where_torch_records(name: str, kernel: Any) -> Any:
    """Make the kernel of an operator that stands where torch records gradients and changes of tensors.

    Transforms such as ``torch.func.grad`` and modes that trace hide from the kernels below, and from the compiled part,
    that a tensor expects a gradient, or its tensor from the change. Where there is none of them the compiled part does
    both itself, and is called without a second way through torch's dispatcher.
    """
    operator = getattr(torch.ops.tiledattn, name).default
    arguments = operator._schema.arguments
    names = [argument.name for argument in arguments]
    written = [
        i for i, argument in enumerate(arguments) if argument.alias_info and argument.alias_info.is_write
    ]

    def record(keys: Any, *values: Any) -> Any:
        if keys.raw_repr() & _BELOW_BITS in _PLAIN_BITS:
            return kernel(*values)
        _refuse_gradients(names, values)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            results = operator.redispatch(keys & _BELOW, *values)
        if written:
            increment_version([values[i] for i in written if values[i] is not None])
        return results

    return record


def _refuse_gradients(names: Sequence[str], values: Sequence[Any]) -> None:
    for name, value in zip(names, values, strict=False):
        if not isinstance(value, Tensor):
            continue
        if value.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: requires grad, and the library computes the forward pass only; call it under "
                "torch.no_grad() or pass a detached tensor"
            )
        if unpack_dual(value).tangent is not None:
            raise ValueError(
                f"{name}: has a tangent of forward-mode AD, and the library computes the forward pass only; pass its "
                "primal, without a tangent"
            )


for _name, _kernel in (
    ("flash_attention", _flash_attention),
    ("flash_attention_lse", _with_lse(_flash_attention)),
    ("flash_attention_into", _into(_flash_attention)),
    ("paged_attention", _paged_attention),
    ("paged_attention_lse", _with_lse(_paged_attention)),
    ("paged_attention_into", _into(_paged_attention)),
    ("merge_attention", _merge_attention),
    ("write_kv", _write_kv),
):
    _library.impl(_name, _kernel, "CPU")
    _library.impl(_name, _kernel, "CUDA")
    _library.impl(_name, _where_torch_records(_name, _kernel), "Autograd", with_keyset=True)


def _refuse_meta_among_others(names: Sequence[str], arguments: Sequence[Any]) -> None:
    """Torch calls the fake kernel once one tensor has no memory, and would return the others' results unmade."""
    tensors = [(name, x) for name, x in zip(names, arguments, strict=False) if isinstance(x, Tensor)]
    first_name, first = tensors[0]
    for name, tensor in tensors:
        if tensor.device != first.device:
            raise ValueError(f"{name}: is on {tensor.device}; expected {first.device} like {first_name}")


def _checked(name: str, fake: Any) -> Any:
    names = [argument.name for argument in getattr(torch.ops.tiledattn, name).default._schema.arguments]

    def checked(*arguments: Any) -> Any:
        _refuse_meta_among_others(names, arguments)
        return fake(*arguments)

    return checked


def _fake_attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _fake_attention_lse(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _fake_attention(q, k, v, *rest), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _fake_merge(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, lse_base: float
) -> tuple[Tensor, Tensor]:
    return out_a.new_empty(out_a.shape), lse_a.new_empty(out_a.shape[:-1])


def _fake_write(*arguments: Any) -> None:
    pass


for _name, _fake in (
    ("flash_attention", _fake_attention),
    ("flash_attention_lse", _fake_attention_lse),
    ("flash_attention_into", _fake_write),
    ("paged_attention", _fake_attention),
    ("paged_attention_lse", _fake_attention_lse),
    ("paged_attention_into", _fake_write),
    ("merge_attention", _fake_merge),
    ("write_kv", _fake_write),
):
    torch.library.register_fake(f"tiledattn::{_name}", _checked(_name, _fake), lib=_library)

flash_attention = torch.ops.tiledattn.flash_attention.default
flash_attention_lse = torch.ops.tiledattn.flash_attention_lse.default
flash_attention_into = torch.ops.tiledattn.flash_attention_into.default
paged_attention = torch.ops.tiledattn.paged_attention.default
paged_attention_lse = torch.ops.tiledattn.paged_attention_lse.default
paged_attention_into = torch.ops.tiledattn.paged_attention_into.default
merge_attention = torch.ops.tiledattn.merge_attention.default
write_kv = torch.ops.tiledattn.write_kv.default
