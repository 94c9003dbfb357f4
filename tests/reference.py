# SPDX-License-Identifier: Apache-2.0
"""Attention in float64 NumPy: the only judge of the tests.

Keys that no query of a call may see are dropped before anything is computed: what they hold never matters.
Shapes and meaning are those of the public functions; a state is ``(m, l, o)`` in natural units.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

UNBOUNDED = (None, None)


class State(NamedTuple):
    """``m``, ``l``: [..., Hq]; ``o``: [..., Hq, Dv], not normalised."""

    m: np.ndarray
    l: np.ndarray
    o: np.ndarray


class Result(NamedTuple):
    """``max_score`` is the largest finite ``|score|`` that any row used: error bounds grow with it."""

    out: np.ndarray
    lse: np.ndarray
    max_score: float = 0.0


def float64(array):
    return np.asarray(array).astype(np.float64)


def visible(q_positions, kv_positions, causal, window=UNBOUNDED):
    """Mask [Sq, Sk]: which key positions a query position sees."""
    distance = np.asarray(kv_positions)[None, :] - np.asarray(q_positions)[:, None]
    mask = np.ones(distance.shape, bool)
    if causal:
        mask &= distance <= 0
    left, right = window
    if left is not None:
        mask &= distance >= -left
    if right is not None:
        mask &= distance <= right
    return mask


def empty_state(rows_shape, head_dim_v):
    return State(np.full(rows_shape, -np.inf), np.zeros(rows_shape), np.zeros((*rows_shape, head_dim_v)))


def scores(q, k, softmax_scale=None, softcap=0.0):
    """Scaled and capped scores [Hq, Sq, Sk] of q [Sq, Hq, D] against k [Sk, Hk, D]."""
    q, k = float64(q), float64(k)
    q_len, num_q_heads, head_dim = q.shape
    kv_len, num_kv_heads, _ = k.shape
    scale = 1.0 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
    grouped = q.transpose(1, 0, 2).reshape(num_kv_heads, -1, head_dim)
    raw = (grouped @ k.transpose(1, 2, 0)).reshape(num_q_heads, q_len, kv_len) * scale
    return softcap * np.tanh(raw / softcap) if softcap else raw


def attend(q, k, v, mask, *, softmax_scale=None, softcap=0.0):
    """State of q [Sq, Hq, D] over k [Sk, Hk, D], v [Sk, Hk, Dv] that mask [Sq, Sk] shows, and top |score|."""
    used = mask.any(axis=0)
    k, v, mask = k[used], float64(v)[used], mask[:, used]
    q_len, num_q_heads, _ = q.shape
    num_kv_heads, head_dim_v = v.shape[1:]
    if q_len == 0 or not used.any():
        return empty_state((q_len, num_q_heads), head_dim_v), 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        s = np.where(mask, scores(q, k, softmax_scale, softcap), -np.inf)
        m = s.max(axis=-1, keepdims=True)
        p = np.exp(s - np.where(m == -np.inf, 0.0, m))
        l = p.sum(axis=-1)
        o = _weighted_sum(p, v, mask, num_kv_heads)
    finite = np.abs(s[np.isfinite(s)])
    rows = State(m[..., 0].T, l.T, o.transpose(1, 0, 2))
    return rows, float(finite.max()) if finite.size else 0.0


def _weighted_sum(p, v, mask, num_kv_heads):
    """p [Hq, Sq, Sk] times v [Sk, Hk, Dv]; a NaN or Inf in v reaches only the rows that see its key."""
    num_q_heads, q_len, kv_len = p.shape
    if np.isfinite(v).all():
        grouped = p.reshape(num_kv_heads, -1, kv_len)
        return (grouped @ v.transpose(1, 0, 2)).reshape(num_q_heads, q_len, -1)
    group = num_q_heads // num_kv_heads
    o = np.zeros((num_q_heads, q_len, v.shape[2]))
    for head in range(num_q_heads):
        for row in range(q_len):
            seen = mask[row]
            o[head, row] = p[head, row, seen] @ v[seen, head // group]
    return o


def finalize(state, sinks=None):
    """Output and lse of a state; a sink is one extra logit for each query head, without a value."""
    m, l, o = (float64(part) for part in state)
    if sinks is not None:
        m, l, o = merge_states([State(m, l, o), _sink_state(m.shape, o.shape[-1], sinks)])
    with np.errstate(invalid="ignore", divide="ignore"):
        empty = l == 0
        out = np.where(empty[..., None], 0.0, o / np.where(empty, 1.0, l)[..., None])
        lse = np.where(empty, -np.inf, m + np.log(l))
    return out, lse


def _sink_state(rows_shape, head_dim_v, sinks):
    m = np.broadcast_to(float64(sinks), rows_shape)
    return State(m, np.where(m == -np.inf, 0.0, 1.0), np.zeros((*rows_shape, head_dim_v)))


def merge_states(states):
    """One state over all keys of states over disjoint keys."""
    m = np.maximum.reduce([float64(state.m) for state in states])
    base = np.where(m == -np.inf, 0.0, m)
    l, o = np.zeros(m.shape), np.zeros(states[0].o.shape)
    for state in states:
        weight = np.exp(float64(state.m) - base)
        l = l + weight * float64(state.l)
        o = o + weight[..., None] * float64(state.o)
    return State(m, l, o)


def merge_attention(out_a, lse_a, out_b, lse_b, lse_base=math.e):
    """One result of two results over disjoint keys; both lse in the logarithm of ``lse_base``."""
    log_base = math.log(lse_base)
    parts = []
    for out, lse in ((out_a, lse_a), (out_b, lse_b)):
        m = float64(lse) * log_base
        parts.append(State(m, np.where(m == -np.inf, 0.0, 1.0), float64(out)))
    out, lse = finalize(merge_states(parts))
    return out, lse / log_base


def _sequence(q, k, v, q_positions, causal, window, sinks, softmax_scale, softcap, paged=False):
    mask = visible(q_positions, np.arange(len(k)), causal, window)
    if paged:  # query tokens from before the sequence began see nothing, causal or not
        mask &= np.asarray(q_positions)[:, None] >= 0
    state, max_score = attend(q, k, v, mask, softmax_scale=softmax_scale, softcap=softcap)
    return (*finalize(state, sinks), max_score)


def flash(
    q, k, v, *, causal=False, softmax_scale=None, window=UNBOUNDED, softcap=0.0, sinks=None, layout="bshd"
):
    """Dense: q [B, Sq, Hq, D], k [B, Sk, Hk, D], v [B, Sk, Hk, Dv]; bhsd has heads before the sequence."""
    if layout == "bhsd":
        swapped = (np.asarray(x).swapaxes(1, 2) for x in (q, k, v))
        result = flash(
            *swapped, causal=causal, softmax_scale=softmax_scale, window=window, softcap=softcap, sinks=sinks
        )
        return Result(result.out.swapaxes(1, 2), result.lse.swapaxes(1, 2), result.max_score)
    batch, q_len, num_q_heads, _ = q.shape
    kv_len = k.shape[1]
    out = np.zeros((batch, q_len, num_q_heads, v.shape[3]))
    lse = np.full((batch, q_len, num_q_heads), -np.inf)
    max_score = 0.0
    positions = np.arange(q_len) + kv_len - q_len
    for b in range(batch):
        out[b], lse[b], top = _sequence(
            q[b], k[b], v[b], positions, causal, window, sinks, softmax_scale, softcap
        )
        max_score = max(max_score, top)
    return Result(out, lse, max_score)


def flash_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, **options):
    """Packed: q [total_q, Hq, D], k, v [total_k, Hk, D]; sequence b is rows cu[b] to cu[b + 1]."""
    out = np.zeros((*q.shape[:2], v.shape[2]))
    lse = np.full(q.shape[:2], -np.inf)
    max_score = 0.0
    for b in range(len(cu_seqlens_q) - 1):
        rows = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
        keys = slice(cu_seqlens_k[b], cu_seqlens_k[b + 1])
        one = flash(q[None, rows], k[None, keys], v[None, keys], **options)
        out[rows], lse[rows] = one.out[0], one.lse[0]
        max_score = max(max_score, one.max_score)
    return Result(out, lse, max_score)


def gather(pool, blocks, length):
    """The first ``length`` tokens of the blocks: [length, Hk, D]."""
    block_size = pool.shape[1]
    used = np.asarray(blocks)[: -(-length // block_size)]
    return pool[used].reshape(-1, *pool.shape[2:])[:length]


def paged(
    q,
    k_pool,
    v_pool,
    block_table,
    seq_lens,
    *,
    causal=True,
    softmax_scale=None,
    window=UNBOUNDED,
    softcap=0.0,
    sinks=None,
    cu_seqlens_q=None,
):
    """Paged: q [B, Hq, D], [B, Sq, Hq, D] or ragged; the last query token is at position ``seq_lens - 1``."""
    rows = q.reshape(-1, *q.shape[-2:])
    if cu_seqlens_q is None:
        q_len = 1 if q.ndim == 3 else q.shape[1]
        cu_seqlens_q = np.arange(len(seq_lens) + 1) * q_len
    out = np.zeros((*rows.shape[:2], v_pool.shape[3]))
    lse = np.full(rows.shape[:2], -np.inf)
    max_score = 0.0
    for b, length in enumerate(int(n) for n in seq_lens):
        mine = slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
        q_len = mine.stop - mine.start
        k, v = (gather(pool, block_table[b], length) for pool in (k_pool, v_pool))
        positions = np.arange(q_len) + length - q_len
        out[mine], lse[mine], top = _sequence(
            rows[mine], k, v, positions, causal, window, sinks, softmax_scale, softcap, paged=True
        )
        max_score = max(max_score, top)
    return Result(out.reshape(*q.shape[:-1], v_pool.shape[3]), lse.reshape(q.shape[:-1]), max_score)


class Tiled:
    """The tiled object in float64: one state for each sequence, tiles folded in one after the other."""

    def __init__(self, *, softmax_scale=None, softcap=0.0, window=UNBOUNDED, sinks=None):
        self.options = {"softmax_scale": softmax_scale, "softcap": softcap}
        self.window, self.sinks = window, sinks
        self.state, self.max_score = None, 0.0

    def step_tile(
        self,
        q,
        k_pool,
        v_pool,
        tile_blocks,
        tile_block_counts,
        last_block_valid_slots=None,
        kv_positions=None,
        q_positions=None,
    ):
        num_seqs, block_size = len(q), k_pool.shape[1]
        rows = q[:, None] if q.ndim == 3 else q
        folded = empty_state(rows.shape[:-1], v_pool.shape[3])
        for b in range(num_seqs):
            valid = (
                block_size
                if last_block_valid_slots is None
                else np.broadcast_to(last_block_valid_slots, num_seqs)[b]
            )
            count = int(tile_block_counts[b])
            length = (count - 1) * block_size + int(valid) if count else 0
            k, v = (gather(pool, tile_blocks[b], length) for pool in (k_pool, v_pool))
            mask = np.ones((rows.shape[1], length), bool)
            if kv_positions is not None:
                q_at = int(q_positions[b]) + np.arange(rows.shape[1])
                mask = visible(q_at, int(kv_positions[b]) + np.arange(length), True, self.window)
            state, top = attend(rows[b], k, v, mask, **self.options)
            for part, one in zip(folded, state, strict=True):
                part[b] = one
            self.max_score = max(self.max_score, top)
        if q.ndim == 3:
            folded = State(*(part[:, 0] for part in folded))
        self.state = folded if self.state is None else merge_states([self.state, folded])

    def finalize(self):
        return Result(*finalize(self.state, self.sinks), self.max_score)
