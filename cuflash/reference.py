"""Naive attention and its gradients in NumPy: the oracle that every other path is tested against.

Written to be read beside the formulas, not to be fast: it builds whole score matrices. It imports nothing of this
package, so that it cannot share a mistake with what it checks.

The mathematics of one query row ``i`` of one head, with scores ``s_j``::

    s_j = softcap(scale * q_i . k_j) + bias_ij - slope * |i + seqlen_k - seqlen_q - j|      (over visible j)
    lse = log(sum_j exp(s_j) + exp(sink))
    p_j = exp(s_j - lse)
    out = sum_j keep_j / (1 - dropout_p) * p_j * v_j

and of its gradient, with ``dp_j = keep_j / (1 - dropout_p) * (dout . v_j)``::

    delta = dout . out - dlse
    ds_j  = p_j * (dp_j - delta)
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]


def philox4x32(counter: tuple[Any, Any, Any, Any], seed: int) -> Array:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

    Parameters
    ----------
    counter : four arrays or ints that broadcast together, each in [0, 2^32)
    seed : int in [0, 2^64), the key: its low 32 bits first

    Returns
    -------
    uint32 array (4, *broadcast shape), the four random words.
    """
    low32 = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = np.broadcast_arrays(*[np.asarray(c, np.uint64) for c in counter])
    key0, key1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        product0 = c0 * np.uint64(0xD2511F53)
        product1 = c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (product1 >> np.uint64(32)) ^ c1 ^ np.uint64(key0),
            product1 & low32,
            (product0 >> np.uint64(32)) ^ c3 ^ np.uint64(key1),
            product0 & low32,
        )
        key0, key1 = (key0 + 0x9E3779B9) & 0xFFFFFFFF, (key1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3]).astype(np.uint32)


def dropout_keep(
    batch: int, num_heads_q: int, seqlen_q: int, seqlen_k: int, dropout_p: float, seed: Any, first_batch: int = 0
) -> Array:
    """The keep decision of every probability, bool ``(batch, num_heads_q, seqlen_q, seqlen_k)``.

    Elements {i, i^8} x {j, j^8} share one Philox call and take one of its four words each.
    """
    seed = int(np.asarray(seed, np.uint64).reshape(()))
    b = np.arange(first_batch, first_batch + batch).reshape(-1, 1, 1, 1)
    h = np.arange(num_heads_q).reshape(-1, 1, 1)
    i = np.arange(seqlen_q).reshape(-1, 1)
    j = np.arange(seqlen_k)
    words = philox4x32((i & ~8, j & ~8, h, b), seed)
    choice = 2 * (i >> 3 & 1) + (j >> 3 & 1)
    word = np.take_along_axis(words, np.broadcast_to(choice, words.shape[1:])[None], axis=0)[0]
    return word >= int(np.floor(dropout_p * 2.0**32))


class _Scores(NamedTuple):
    """Everything about the scores that both directions need; arrays are (batch, num_heads_q, seqlen_q, seqlen_k)."""

    q: Array  # (batch, num_heads_q, seqlen_q, head_dim), hidden rows zeroed
    k: Array  # (batch, num_heads_q, seqlen_k, head_dim), repeated over the group, hidden rows zeroed
    v: Array
    scale: float
    scores: Array  # -inf where hidden
    visible: Array
    real_rows: Array  # (batch, 1, seqlen_q): rows that are not padding
    softcap_slope: Array | float  # d softcap(x) / dx
    distance: Array  # (batch, 1, seqlen_q, seqlen_k): |i + seqlen_k - seqlen_q - j|
    dropout_factor: Array | float  # 0 or 1 / (1 - dropout_p)
    round: Callable[[Array], Array]


def _lengths(lengths: Any, batch: int, seqlen: int) -> Array:
    if lengths is None:
        lengths = np.full(batch, seqlen)
    return np.clip(np.asarray(lengths, np.int64), 0, seqlen).reshape(batch, 1, 1, 1)


def _visible(
    shape: tuple[int, int, int, int], causal: bool, window: Any, q_lengths: Any, kv_lengths: Any
) -> tuple[Array, Array, Array]:
    """Visible pairs by position alone, real rows, and the distances, each (batch, 1, seqlen_q, seqlen_k or 1)."""
    batch, _, seqlen_q, seqlen_k = shape
    q_len, kv_len = _lengths(q_lengths, batch, seqlen_q), _lengths(kv_lengths, batch, seqlen_k)
    i = np.arange(seqlen_q).reshape(-1, 1)
    j = np.arange(seqlen_k)
    real_rows = i < q_len
    visible = real_rows & (j < kv_len)
    diagonal = i + kv_len - q_len  # the key that query i is aligned to
    # More than both lengths is unbounded, and might overflow.
    left, right = (side if side is None else min(side, seqlen_q + seqlen_k) for side in window or (None, None))
    if causal:
        visible &= j <= diagonal
    if left is not None:
        visible &= j >= diagonal - left
    if right is not None:
        visible &= j <= diagonal + right
    return visible, real_rows, np.abs(diagonal - j)


def _scores(
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
    round_to: DTypeLike | None = None,
    work: DTypeLike = np.float64,
    first_batch: int = 0,
) -> _Scores:
    """Every option of the interface; `sink`, `deterministic` and `precision` do not change scores."""
    real, rounding = _precision(round_to, work)
    batch, seqlen_q, num_heads_q, head_dim = q.shape
    seqlen_k, num_heads_kv = k.shape[1:3]
    shape = (batch, num_heads_q, seqlen_q, seqlen_k)
    group_size = num_heads_q // max(num_heads_kv, 1)

    visible, real_rows, distance = _visible(shape, causal, window, q_lengths, kv_lengths)
    visible = np.array(np.broadcast_to(visible, shape))
    for extra in (mask, block_mask):
        if extra is not None:
            visible &= extra
    if bias is not None:
        bias = np.asarray(bias).astype(real)
        visible &= bias != -np.inf

    # What nobody may see cannot change anything: zero it, whatever it holds.
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
    scores = np.where(visible, rounding(scores), -np.inf)

    factor: Array | float = 1.0
    if dropout_p:
        keep = dropout_keep(*shape, dropout_p, dropout_seed, first_batch)
        factor = keep / real(1 - dropout_p)
    return _Scores(wide_q, wide_k, wide_v, scale, scores, visible, real_rows[..., 0], slope, distance, factor, rounding)


def _precision(round_to: DTypeLike | None, work: DTypeLike) -> tuple[Any, Callable[[Array], Array]]:
    """The type to compute in, and the rounding applied to stored intermediates."""
    if round_to is None:
        return np.dtype(work).type, lambda x: x
    if round_to == "bfloat16":
        import ml_dtypes

        round_to = ml_dtypes.bfloat16
    dtype = np.dtype(round_to)
    accumulator = np.float64 if dtype == np.float64 else np.float32
    return accumulator, lambda x: x.astype(dtype).astype(accumulator)


def _softmax(s: _Scores, sink: Array | None) -> tuple[Array, Array]:
    """Probabilities, and lse (batch, num_heads_q, seqlen_q): the log of their denominator, -inf for an empty row."""
    top = s.scores.max(axis=-1, initial=-np.inf)
    if sink is not None:
        wide_sink = np.asarray(sink).astype(top.dtype).reshape(-1, 1)
        top = np.maximum(top, wide_sink)
    shift = np.where(top == -np.inf, 0, top)
    weights = np.exp(s.scores - shift[..., None])
    total = weights.sum(axis=-1)
    if sink is not None:
        total = total + np.exp(wide_sink - shift)
    lse = np.where(s.real_rows, shift + np.log(total), -np.inf)
    return np.where(weights == 0, 0, weights / total[..., None]), lse


def _probabilities(s: _Scores, lse: Array) -> Array:
    """Probabilities from a given lse, which may count other keys too."""
    seen = s.visible & (lse != -np.inf)[..., None]
    return np.exp(np.where(seen, s.scores - np.where(lse == -np.inf, 0, lse)[..., None], -np.inf))


def attention(q: Array, k: Array, v: Array, *, sink: Array | None = None, **options: Any) -> tuple[Array, Array]:
    """Exact attention, computed naively.

    Parameters
    ----------
    q : (batch, seqlen_q, num_heads_q, head_dim)
    k : (batch, seqlen_k, num_heads_kv, head_dim)
    v : (batch, seqlen_k, num_heads_kv, head_dim_v)
    sink, **options
        Every option of ``cuflash.attention``, with its meaning; ``block_mask`` is a bool array that broadcasts to
        (batch, num_heads_q, seqlen_q, seqlen_k). Also ``work``, the type to compute in (float64), and ``round_to``,
        the name of a type: then this is plain attention in that type, which computes and accumulates in float32
        (float64 for float64) and rounds scores, probabilities and results to it.

    Returns
    -------
    out : (batch, seqlen_q, num_heads_q, head_dim_v)
    lse : (batch, num_heads_q, seqlen_q)
        Both in the type of the computation.
    """
    with np.errstate(all="ignore"):
        s = _scores(q, k, v, sink=sink, **options)
        p, lse = _softmax(s, sink)
        p = s.round(p * s.dropout_factor)
        return s.round(p @ s.v).transpose(0, 2, 1, 3), lse


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    dlse: Array | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    sink: Array | None = None,
    magnitudes: bool = False,
    **options: Any,
) -> dict[str, Array]:
    """Gradients of ``sum(dout * out) + sum(dlse * lse)``.

    Parameters
    ----------
    dout : (batch, seqlen_q, num_heads_q, head_dim_v)
    dlse : (batch, num_heads_q, seqlen_q) or None
    out, lse
        What `attention` returned, or a merged pair; computed here where None.
    magnitudes : bool
        Give the sums of absolute values of all terms instead: rounding errors are measured by these where terms
        cancel, as in the gradient of a softmax over one key.
    q, k, v, sink, **options
        As for `attention`.

    Returns
    -------
    dict with "q", "k", "v", and "bias", "sink", "alibi_slopes" where given: each of its input's shape, in the type of
    the computation.
    """
    if out is None:
        out = attention(q, k, v, sink=sink, **options)[0]
    with np.errstate(all="ignore"):
        s = _scores(q, k, v, sink=sink, **options)
        work = s.scores.dtype

        def rows(x: Array, fill: float = 0) -> Array:
            """Padded rows may hold anything."""
            real = s.real_rows if x.ndim == 3 else s.real_rows[..., None]
            return np.where(real, x.astype(work), fill)

        wide_dout = rows(dout.transpose(0, 2, 1, 3))
        if lse is None:
            p, lse = _softmax(s, sink)
        else:
            lse = rows(lse, -np.inf)
            p = _probabilities(s, lse)
        p = s.round(p)
        delta = (wide_dout * rows(out.transpose(0, 2, 1, 3))).sum(axis=-1)
        if dlse is not None:
            delta = delta - rows(dlse)

        dp = s.round((wide_dout @ s.v.swapaxes(-1, -2)) * s.dropout_factor)
        ds = np.where(p == 0, 0, p * (dp - delta[..., None]))
        if magnitudes:
            s = s._replace(q=abs(s.q), k=abs(s.k), v=abs(s.v), scale=abs(s.scale))
            wide_dout, delta = abs(wide_dout), abs(delta)
            ds = p * ((wide_dout @ s.v.swapaxes(-1, -2)) * s.dropout_factor + delta[..., None])
        # Before softcap, the gradient of the products q.k.
        ds, dproduct = s.round(ds), s.round(ds * s.softcap_slope)
        grads = {
            "q": s.round(s.scale * (dproduct @ s.k)),
            "k": s.round(_sum_group(s.scale * (dproduct.swapaxes(-1, -2) @ s.q), k.shape[2])),
            "v": s.round(_sum_group(s.round(p * s.dropout_factor).swapaxes(-1, -2) @ wide_dout, v.shape[2])),
        }
        grads = {name: grad.transpose(0, 2, 1, 3) for name, grad in grads.items()}
        if options.get("bias") is not None:
            grads["bias"] = s.round(_sum_to_shape(ds, np.shape(options["bias"])))
        if sink is not None:
            wide_sink = np.asarray(sink).astype(work).reshape(-1, 1)
            weight = np.where(lse == -np.inf, 0, np.exp(wide_sink - np.where(lse == -np.inf, 0, lse)))
            grads["sink"] = -np.where(weight == 0, 0, weight * delta).sum(axis=(0, 2))
        if options.get("alibi_slopes") is not None:
            per_head = -(ds * s.distance).sum(axis=(2, 3))
            grads["alibi_slopes"] = _sum_to_shape(per_head, np.shape(options["alibi_slopes"]))
        return {name: abs(grad) for name, grad in grads.items()} if magnitudes else grads


def _sum_group(x: Array, num_heads_kv: int) -> Array:
    """Sum (batch, num_heads_q, ...) over the query heads that share a KV head."""
    batch, num_heads_q = x.shape[:2]
    group_size = num_heads_q // max(num_heads_kv, 1)
    return x.reshape(batch, num_heads_kv, group_size, *x.shape[2:]).sum(axis=2)


def _sum_to_shape(x: Array, shape: tuple[int, ...]) -> Array:
    """Undo broadcasting from `shape`."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    stretched = tuple(axis for axis, size in enumerate(shape) if size == 1 and x.shape[axis] != 1)
    return x.sum(axis=stretched, keepdims=True)


def _sequences(cu_seqlens_q: Any, cu_seqlens_k: Any, total_q: int, total_k: int) -> list[tuple[slice, slice]]:
    """The rows of every sequence, clamped to the arrays."""

    def slices(cu_seqlens: Any, total: int) -> list[slice]:
        ends = np.clip(np.asarray(cu_seqlens, np.int64), 0, total).tolist()
        return [slice(start, max(start, end)) for start, end in pairwise(ends)]

    return list(zip(slices(cu_seqlens_q, total_q), slices(cu_seqlens_k, total_k), strict=True))


def _sequence_options(index: int, seqlen_q: int, seqlen_k: int, options: dict[str, Any]) -> dict[str, Any]:
    """The options of one packed sequence as those of a padded call with batch 1."""
    own = dict(options, first_batch=index)
    for name in ("bias", "mask", "block_mask"):
        if options.get(name) is not None:
            own[name] = _sequence_extra(np.asarray(options[name]), index, seqlen_q, seqlen_k)
    for name in ("q_lengths", "kv_lengths"):
        if options.get(name) is not None:
            own[name] = np.asarray(options[name])[index : index + 1]
    slopes = options.get("alibi_slopes")
    if slopes is not None and np.ndim(slopes) == 2:
        own["alibi_slopes"] = slopes[index if len(slopes) > 1 else 0]
    return own


def _sequence_extra(x: Array, index: int, seqlen_q: int, seqlen_k: int) -> Array:
    """The part of a bias, mask or gradient of shape (batch | 1, heads | 1, rows | 1, columns | 1) for one sequence."""
    x = x.reshape((1,) * (4 - x.ndim) + x.shape)
    batch = slice(index, index + 1) if x.shape[0] > 1 else slice(None)
    rows = slice(seqlen_q) if x.shape[2] > 1 else slice(None)
    columns = slice(seqlen_k) if x.shape[3] > 1 else slice(None)
    return x[batch, :, rows, columns]


def attention_varlen(
    q: Array, k: Array, v: Array, cu_seqlens_q: Any, cu_seqlens_k: Any, **options: Any
) -> tuple[Array, Array]:
    """Packed sequences: q (total_q, num_heads_q, head_dim); returns out like q and lse (num_heads_q, total_q).

    Rows outside every sequence are padding: out 0, lse -inf. Extras are indexed locally to each sequence.
    """
    work, _ = _precision(options.get("round_to"), options.get("work", np.float64))
    out = np.zeros((*q.shape[:2], v.shape[2]), work)
    lse = np.full((q.shape[1], q.shape[0]), -np.inf, work)
    for index, (rows, keys) in enumerate(_sequences(cu_seqlens_q, cu_seqlens_k, len(q), len(k))):
        own = _sequence_options(index, rows.stop - rows.start, keys.stop - keys.start, options)
        own_out, own_lse = attention(q[None, rows], k[None, keys], v[None, keys], **own)
        out[rows], lse[:, rows] = own_out[0], own_lse[0]
    return out, lse


def attention_varlen_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    dlse: Array | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    **options: Any,
) -> dict[str, Array]:
    """Gradients of `attention_varlen`, as `attention_backward` gives them."""
    work, rounding = _precision(options.get("round_to"), options.get("work", np.float64))
    grads = {"q": np.zeros(q.shape, work), "k": np.zeros(k.shape, work), "v": np.zeros(v.shape, work)}
    for name in ("bias", "sink", "alibi_slopes"):
        if options.get(name) is not None:
            grads[name] = np.zeros(np.shape(options[name]), work)
    for index, (rows, keys) in enumerate(_sequences(cu_seqlens_q, cu_seqlens_k, len(q), len(k))):
        seqlen_q, seqlen_k = rows.stop - rows.start, keys.stop - keys.start
        own_grads = attention_backward(
            dout[None, rows],
            q[None, rows],
            k[None, keys],
            v[None, keys],
            dlse=None if dlse is None else dlse[None, :, rows],
            out=None if out is None else out[None, rows],
            lse=None if lse is None else lse[None, :, rows],
            **_sequence_options(index, seqlen_q, seqlen_k, options),
        )
        grads["q"][rows], grads["k"][keys], grads["v"][keys] = (own_grads[name][0] for name in "qkv")
        if "bias" in grads:
            view = grads["bias"].reshape((1,) * (4 - grads["bias"].ndim) + grads["bias"].shape)
            _sequence_extra(view, index, seqlen_q, seqlen_k)[...] += own_grads["bias"]
        if "sink" in grads:
            grads["sink"] += own_grads["sink"]
        if "alibi_slopes" in grads:
            target = grads["alibi_slopes"]
            per_sequence = target.ndim == 2 and len(target) > 1
            target[index if per_sequence else ...] += own_grads["alibi_slopes"]
    if "bias" in grads:
        grads["bias"] = rounding(grads["bias"])
    return grads
