# SPDX-License-Identifier: Apache-2.0
"""The library inside torch: operators that ``torch.compile`` traces, and drop-ins under names people know.

`flash_attention`, `paged_attention`, `merge_attention` and `write_kv` take the arguments of the functions of the
same name in `tiledattn`, but are operators of torch (``torch.ops.tiledattn``): a compiled model holds them without a
graph break. `scaled_dot_product_attention` is torch's function; `flash_attn_func`, `flash_attn_varlen_func` and
`flash_attn_with_kvcache` are those of the package flash-attn. Forward only: a tensor that requires grad,
or has a tangent of forward-mode AD, is refused.

Importing this module imports torch, 2.10 or later.
"""

from __future__ import annotations

from ._flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from ._functions import flash_attention, merge_attention, paged_attention, write_kv
from ._sdpa import scaled_dot_product_attention

__all__ = [
    "flash_attention",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "merge_attention",
    "paged_attention",
    "scaled_dot_product_attention",
    "write_kv",
]
