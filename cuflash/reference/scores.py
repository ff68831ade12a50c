"""Scores of every pair of query and key, -inf where hidden, with the other arrays that both directions need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from . import own_rules
from .dropout import dropout_keep, dropout_rescale

Array = NDArray[Any]


class Scores(NamedTuple):
    """The scores and all that both directions need of them, as (batch, num_heads_q, seqlen_q, seqlen_k)."""

    q: Array  # (batch, num_heads_q, seqlen_q, head_dim), hidden rows zeroed
    k: Array  # (batch, num_heads_q, seqlen_k, head_dim), repeated over the group, hidden rows zeroed
    v: Array
    scale: float
    scores: Array  # -inf where hidden
    visible: Array
    real_rows: Array  # (batch, 1, seqlen_q): rows that are not padding
    softcap_slope: Array | float  # d softcap(x) / dx
    distance: Array  # (batch, 1, seqlen_q, seqlen_k): |i + seqlen_k - seqlen_q - j|
    dropout_factor: Array | float  # 0 or the factor of kept weights
    round: Callable[[Array], Array]
    before_rule: Array  # the scores that score_mod is given
    rule_slope: Array | float  # d score_mod / d score


def _lengths(lengths: Any, batch: int, seqlen: int) -> Array:
    if lengths is None:
        lengths = np.full(batch, seqlen)
    return np.clip(np.asarray(lengths, np.int64), 0, seqlen).reshape(batch, 1, 1, 1)


def _visible(
    shape: tuple[int, int, int, int], causal: bool, window: Any, q_lengths: Any, kv_lengths: Any
) -> tuple[Array, Array, Array]:
    """Return pairs visible by position, real rows, and distances, each (batch, 1, seqlen_q, seqlen_k or 1)."""
    batch, _, seqlen_q, seqlen_k = shape
    q_len, kv_len = _lengths(q_lengths, batch, seqlen_q), _lengths(kv_lengths, batch, seqlen_k)
    i = np.arange(seqlen_q).reshape(-1, 1)
    j = np.arange(seqlen_k)
    real_rows = i < q_len
    visible = real_rows & (j < kv_len)
    diagonal = i + kv_len - q_len  # the key that query i is aligned to
    # A side of more than both lengths is unbounded, and might overflow.
    left, right = (side if side is None else min(side, seqlen_q + seqlen_k) for side in window or (None, None))
    if causal:
        visible &= j <= diagonal
    if left is not None:
        visible &= j >= diagonal - left
    if right is not None:
        visible &= j <= diagonal + right
    return visible, real_rows, np.abs(diagonal - j)


def scores_of(
    q: Array,
    k: Array,
    v: Array,
    causal: bool = False,
    window: Any = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    alibi_slopes: Array | None = None,
    sink: Array | None = None,
    q_lengths: Any = None,
    kv_lengths: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: Any = None,
    block_mask: Array | None = None,
    deterministic: bool = False,
    precision: str | None = None,
    score_mod: own_rules.Rule | None = None,
    mask_mod: own_rules.Rule | None = None,
    operands: Sequence[Any] = (),
    num_splits: int | None = None,
    split_size: int | None = None,
    round_to: DTypeLike | None = None,
    work: DTypeLike = np.float64,
    first_batch: int = 0,
) -> Scores:
    """Compute the scores with every option; `sink`, `deterministic`, `precision` and splits do not change them."""
    real, rounding = precision_of(round_to, work)
    batch, seqlen_q, num_heads_q, head_dim = q.shape
    seqlen_k, num_heads_kv = k.shape[1:3]
    shape = (batch, num_heads_q, seqlen_q, seqlen_k)
    group_size = num_heads_q // max(num_heads_kv, 1)

    visible, real_rows, distance = _visible(shape, causal, window, q_lengths, kv_lengths)
    visible = np.array(np.broadcast_to(visible, shape))
    for extra in (mask, block_mask):
        if extra is not None:
            visible &= extra
    if mask_mod is not None:
        visible &= own_rules.shown(mask_mod, shape, first_batch, operands, real)
    if bias is not None:
        bias = np.asarray(bias).astype(real)
        visible &= bias != -np.inf

    # A key that nobody may see cannot change anything, so it is set to zero, whatever it holds.
    seen_keys = np.any(visible, axis=(1, 2))[:, None, :, None]
    wide_q = np.where(real_rows, q.astype(real).transpose(0, 2, 1, 3), 0)
    wide_k = np.where(seen_keys, np.repeat(k.astype(real), group_size, axis=2).transpose(0, 2, 1, 3), 0)
    wide_v = np.where(seen_keys, np.repeat(v.astype(real), group_size, axis=2).transpose(0, 2, 1, 3), 0)

    scale = head_dim**-0.5 if softmax_scale is None else float(softmax_scale)
    scores = real(scale) * (wide_q @ wide_k.swapaxes(-1, -2))
    slope: Array | float = 1.0
    if softcap:
        tanh = np.tanh(scores / real(softcap))
        scores, slope = real(softcap) * tanh, 1 - tanh * tanh
    if bias is not None:
        scores = scores + np.where(visible, bias, 0)
    if alibi_slopes is not None:
        slopes = np.asarray(alibi_slopes).astype(real)
        scores = scores - slopes.reshape(-1, num_heads_q, 1, 1) * distance
    before, rule_slope = scores, np.ones(()) if score_mod is None else np.zeros(())
    if score_mod is not None:
        scores = own_rules.scored(score_mod, before, first_batch, operands)
        visible &= scores != -np.inf
        rule_slope = own_rules.slope(score_mod, before, first_batch, operands)
    scores = np.where(visible, rounding(scores), -np.inf)

    factor: Array | float = 1.0
    if dropout_p:
        keep = dropout_keep(*shape, dropout_p, dropout_seed, first_batch)
        factor = keep * real(dropout_rescale(dropout_p))
    return Scores(
        wide_q,
        wide_k,
        wide_v,
        scale,
        scores,
        visible,
        real_rows[..., 0],
        slope,
        distance,
        factor,
        rounding,
        before,
        rule_slope,
    )


def precision_of(round_to: DTypeLike | None, work: DTypeLike) -> tuple[Any, Callable[[Array], Array]]:
    """Return the type to compute in, and the rounding of stored intermediates."""
    if round_to is None:
        return np.dtype(work).type, lambda x: x
    if round_to == "bfloat16":
        import ml_dtypes

        round_to = ml_dtypes.bfloat16
    dtype = np.dtype(round_to)
    accumulator = np.float64 if dtype == np.float64 else np.float32
    return accumulator, lambda x: x.astype(dtype).astype(accumulator)
