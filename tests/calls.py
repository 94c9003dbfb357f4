# SPDX-License-Identifier: Apache-2.0
"""Whole runs that several test files need: the library and the reference over the same arrays."""

from __future__ import annotations

import compare
import reference
import tiledattn as ta


def outcome(errors, function, *args, **kwargs):
    """(result, None) or (None, error): for what may be right or refused, but nothing else."""
    try:
        return function(*args, **kwargs), None
    except errors as error:
        return None, error


def make_attention(device, data, dims=None, **options):
    """A TiledAttention for a cases.TiledArrays; ``dims`` and ``options`` change what the case says."""
    options = {**data.options, **options}
    if options.get("sinks") is not None:
        options["sinks"] = device.array(options["sinks"])
    return ta.TiledAttention(
        ta.TiledAttentionDims(**data.dims(**(dims or {}))), device=device.device, **options
    )


def step(device, attn, data, tile, **kwargs):
    """One step_tile; NumPy arrays go to the device first."""
    kwargs = {**data.step_kwargs(tile), **kwargs}
    return device.call(attn.step_tile, *data.step_args(tile), **kwargs)


def run_tiled(device, data, dims=None, **options):
    """begin_step, every tile, finalize: (out, lse) as NumPy arrays."""
    attn = make_attention(device, data, dims, **options)
    attn.begin_step(len(data.paged.q))
    for tile in data.tiles:
        device.call(attn.step_tile, *data.step_args(tile), **data.step_kwargs(tile))
    return device.call(attn.finalize, return_lse=True)


def want_tiled(data, num_tiles=None, **options):
    """The reference after the first ``num_tiles`` tiles."""
    judge = reference.Tiled(**{**data.options, **options})
    for tile in data.tiles[:num_tiles]:
        judge.step_tile(*data.step_args(tile), **data.step_kwargs(tile))
    return judge


def run_paged(device, data, **kwargs):
    return device.call(ta.paged_attention, *data.args, **{**data.kwargs, "return_lse": True, **kwargs})


def check_ragged_alone(device, data, got):
    """Each sequence of a ragged call has the bits that it has alone."""
    out, lse = got
    for b in range(len(data.seq_lens)):
        one, rows = data.alone(b)
        compare.same_bits(run_paged(device, one), (out[rows], lse[rows]), f"sequence {b} alone")


def want_paged(data, **kwargs):
    return reference.paged(*data.args, **{**data.kwargs, **kwargs})


def run_flash(device, qkv, score=None, **kwargs):
    return device.call(ta.flash_attention, *qkv, **{**(score or {}), "return_lse": True, **kwargs})


def state_arrays(device, attn, num_seqs):
    """m, l, o of the first ``num_seqs`` sequences through the live views."""
    return tuple(device_view(device, x)[:num_seqs] for x in (attn.m, attn.l, attn.o))


def device_view(device, view):
    """A NumPy copy of a live view (an object with ``__dlpack__``)."""
    if not device.is_cuda:
        import numpy as np

        return np.asarray(view).copy()
    if device.name == "torch":
        return device.numpy(device.torch.from_dlpack(view)).copy()
    return device.numpy(device.cupy.from_dlpack(view))
