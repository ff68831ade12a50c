"""Attention and its gradients of padded arrays.

The mathematics of one query row ``i`` of one head, with scores ``s_j``::

    s_j = softcap(scale * q_i . k_j) + bias_ij - slope * |i + seqlen_k - seqlen_q - j|      (over visible j)
    lse = log(sum_j exp(s_j) + exp(sink))
    p_j = exp(s_j - lse)
    out = sum_j d_j * p_j * v_j

with dropout's factor ``d_j = keep_j * 65536 / (65536 - floor(65536 * dropout_p))``; and of its gradient, with
``dp_j = d_j * (dout . v_j)``::

    delta = dout . out - dlse
    ds_j  = p_j * (dp_j - delta)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import own_rules
from .pages import paged, unpaged
from .scores import Scores, precision_of, scores_of

Array = NDArray[Any]


def _softmax(s: Scores, sink: Array | None) -> tuple[Array, Array]:
    """Return probabilities, and lse (batch, num_heads_q, seqlen_q), the log of their denominator; -inf if empty."""
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


def _probabilities(s: Scores, lse: Array) -> Array:
    """Return probabilities from a given lse, which may count other keys too."""
    seen = s.visible & (lse != -np.inf)[..., None]
    return np.exp(np.where(seen, s.scores - np.where(lse == -np.inf, 0, lse)[..., None], -np.inf))


def attention(q: Array, k: Array, v: Array, *, sink: Array | None = None, **options: Any) -> tuple[Array, Array]:
    """Compute exact attention naively.

    Parameters
    ----------
    q : (batch, seqlen_q, num_heads_q, head_dim)
    k : (batch, seqlen_k, num_heads_kv, head_dim)
    v : (batch, seqlen_k, num_heads_kv, head_dim_v)
    sink, **options
        Every option of ``cuflash.attention``, with its meaning: given ``block_table``, k and v are pools of pages.
        ``block_mask`` is a bool array that broadcasts to (batch, num_heads_q, seqlen_q, seqlen_k). Also ``work``, the
        type to compute in (float64), and ``round_to``, the name of a type: then this is plain attention in that type,
        which computes and accumulates in float32 (float64 for float64) and rounds scores, probabilities and results to
        it.

    Returns
    -------
    out : (batch, seqlen_q, num_heads_q, head_dim_v)
    lse : (batch, num_heads_q, seqlen_q)
        Both in the type of the computation.
    """
    k, v, options = _without_pages(k, v, options)
    with np.errstate(all="ignore"):
        s = scores_of(q, k, v, sink=sink, **options)
        p, lse = _softmax(s, sink)
        return _result(s, p), lse


def _result(s: Scores, p: Array) -> Array:
    """Return the sums of values, of which the probabilities are not rounded yet."""
    return s.round(s.round(p * s.dropout_factor) @ s.v).transpose(0, 2, 1, 3)


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
    """Return the gradients of ``sum(dout * out) + sum(dlse * lse)``.

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
    dict with "q", "k", "v", and "bias", "sink", "alibi_slopes" where given, and "operand_0" and so on for operands of
    floats: each of its input's shape, in the type of the computation.
    """
    if options.get("block_table") is not None:
        table, pools = options["block_table"], {"k": k, "v": v}
        k, v, options = _without_pages(k, v, options)
        given: dict[str, Any] = {"dlse": dlse, "out": out, "lse": lse, "sink": sink, "magnitudes": magnitudes}
        grads = attention_backward(dout, q, k, v, **given, **options)
        summed = {name: paged(grads[name], pool, table, options["kv_lengths"]) for name, pool in pools.items()}
        _, rounding = precision_of(options.get("round_to"), options.get("work", np.float64))
        return grads | {name: rounding(x) for name, x in summed.items()}
    with np.errstate(all="ignore"):
        s = scores_of(q, k, v, sink=sink, **options)
        work = s.scores.dtype

        def rows(x: Array, fill: float = 0) -> Array:
            """Fill padded rows, which may hold anything."""
            real = s.real_rows if x.ndim == 3 else s.real_rows[..., None]
            return np.where(real, x.astype(work), fill)

        wide_dout = rows(dout.transpose(0, 2, 1, 3))
        if out is None or lse is None:
            p, own_lse = _softmax(s, sink)
            out = _result(s, p) if out is None else out
        if lse is None:
            lse = own_lse
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
        own_rule, operands = options.get("score_mod"), options.get("operands") or ()
        of_operands = own_rules.operand_gradients(
            own_rule, s.before_rule, ds, options.get("first_batch", 0), operands, magnitudes
        )
        if own_rule is not None:
            ds = np.where(ds == 0, 0, ds * (abs(s.rule_slope) if magnitudes else s.rule_slope))
        # The derivative of softcap makes these the gradients of the products q.k.
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
        for number, grad in enumerate(of_operands):
            if grad is not None:
                grads[f"operand_{number}"] = grad
        return {name: abs(grad) for name, grad in grads.items()} if magnitudes else grads


def _without_pages(k: Array, v: Array, options: dict[str, Any]) -> tuple[Array, Array, dict[str, Any]]:
    """Return keys and values one behind the other, and the options but the block table."""
    rest = {name: x for name, x in options.items() if name != "block_table"}
    table = options.get("block_table")
    if table is None:
        return k, v, rest
    return unpaged(k, table, options["kv_lengths"]), unpaged(v, table, options["kv_lengths"]), rest


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
