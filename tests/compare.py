# SPDX-License-Identifier: Apache-2.0
"""How far a result may be from the float64 reference, and assertions that say by how much it was."""

from __future__ import annotations

import numpy as np

# ||got - want|| / ||want|| over the whole result; one row (one query, one head) may have four times that.
OUT_BOUND = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-5}
ROW_FACTOR = 4.0
# The bounds hold for |score| up to this; beyond, they grow with the largest score.
SCORE_LIMIT = 30.0
LSE_ABSOLUTE, LSE_RELATIVE = 1e-3, 1e-5
# Half the distance of the smallest numbers of a type: no result of that type can be nearer.
HALF_STEP = {"bfloat16": 2.0**-134, "float16": 2.0**-25, "float32": 2.0**-150}


def _same_special_values(got, want, name):
    """NaN, infinities and exact zeros of empty rows sit at the same places."""
    assert got.shape == want.shape, f"{name}: shape {got.shape}, wanted {want.shape}"
    for kind, test in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = np.argwhere(test(got) != test(want))
        assert not len(wrong), f"{name}: {kind} misplaced at {len(wrong)} places, first {tuple(wrong[0])}"


def out_close(got, want, dtype, max_score=0.0, name="out"):
    """Overall and row by row; a row that is zero in the reference must be exactly zero."""
    got, want = np.asarray(got).astype(np.float64), np.asarray(want, np.float64)
    _same_special_values(got, want, name)
    if not got.size:
        return
    bound = OUT_BOUND[dtype] * max(1.0, max_score / SCORE_LIMIT)
    finite = np.isfinite(want)
    got, want = np.where(finite, got, 0.0), np.where(finite, want, 0.0)
    row_error = np.linalg.norm(got - want, axis=-1)
    row_size = np.linalg.norm(want, axis=-1)
    empty = row_size == 0
    assert not row_error[empty].any(), (
        f"{name}: a row that sees nothing holds {got[empty][row_error[empty] > 0][0]}"
    )
    row_error = np.maximum(row_error - HALF_STEP[dtype] * np.sqrt(want.shape[-1]), 0.0)
    total = np.linalg.norm(row_error) / max(np.linalg.norm(row_size), np.finfo(float).tiny)
    assert total <= bound, f"{name}: relative error {total:.3g}, bound {bound:.3g} ({dtype})"
    relative = np.where(empty, 0.0, row_error / np.where(empty, 1.0, row_size))
    worst = np.unravel_index(relative.argmax(), relative.shape)
    where = tuple(map(int, worst))
    limit = ROW_FACTOR * bound
    assert relative[worst] <= limit, f"{name}: row {where} is off by {relative[worst]:.3g}, bound {limit:.3g}"


def lse_close(got, want, name="lse"):
    got, want = np.asarray(got), np.asarray(want, np.float64)
    assert got.dtype == np.float32, f"{name}: type {got.dtype}, wanted float32"
    _same_special_values(got, want, name)
    finite = np.isfinite(want)
    error = np.abs(got[finite].astype(np.float64) - want[finite])
    over = error - (LSE_ABSOLUTE + LSE_RELATIVE * np.abs(want[finite]))
    assert not (over > 0).any(), (
        f"{name}: off by {error[over.argmax()]:.3g} where {want[finite][over.argmax()]:.6g} is right"
    )


def result_close(got, want, dtype):
    """``got`` is ``(out, lse)``, ``want`` a ``reference.Result``; the output has the type of q."""
    out, lse = got
    assert str(out.dtype) == dtype, f"out: type {out.dtype}, wanted {dtype}"
    out_close(out, want.out, dtype, want.max_score)
    lse_close(lse, want.lse)


def state_close(got, want, dtype, max_score=0.0):
    """A float32 state against a ``reference.State``: m, m + ln l and o / l."""
    m, l, o = (np.asarray(part) for part in got)
    want_m, want_l, want_o = want
    lse_close(m, want_m, "m")
    assert ((l == 0) == (want_l == 0)).all(), "l: zero where keys were seen, or the reverse"
    with np.errstate(divide="ignore", invalid="ignore"):
        lse_close((m + np.log(l)).astype(np.float32), want_m + np.log(want_l), "m + ln l")
        # l and o hang on the rounding of m by exp(m - want_m); o / l does not.
        got_out = np.where((l == 0)[..., None], o, o / l[..., None])
        want_out = np.where((want_l == 0)[..., None], want_o, want_o / want_l[..., None])
    out_close(got_out, want_out, dtype, max_score, "o / l")


def same_bits(got, want, name="result"):
    """Arrays, or tuples of arrays, with equal bytes; the sign of zero and the payload of NaN count."""
    if isinstance(got, tuple):
        assert len(got) == len(want)
        for i, (one, other) in enumerate(zip(got, want, strict=True)):
            same_bits(one, other, f"{name}[{i}]")
        return
    got, want = np.ascontiguousarray(got), np.ascontiguousarray(want)
    assert got.dtype == want.dtype, f"{name}: types {got.dtype} and {want.dtype}"
    assert got.shape == want.shape, f"{name}: shapes {got.shape} and {want.shape}"
    integer = np.dtype(f"u{got.dtype.itemsize}")
    differ = np.argwhere(got.view(integer) != want.view(integer))
    assert not len(differ), (
        f"{name}: {len(differ)} of {got.size} elements differ, first at {tuple(map(int, differ[0]))}: "
        f"{got[tuple(differ[0])]} and {want[tuple(differ[0])]}"
    )
