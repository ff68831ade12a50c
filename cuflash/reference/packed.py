"""Attention and its gradients of packed sequences, each of which is computed by itself."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .padded import attention, attention_backward
from .pages import paged, unpaged
from .scores import precision_of

Array = NDArray[Any]


def _sequences(cu_seqlens_q: Any, cu_seqlens_k: Any, total_q: int, total_k: int) -> list[tuple[slice, slice]]:
    """Return the rows of every sequence, clamped to the arrays."""

    def slices(cu_seqlens: Any, total: int) -> list[slice]:
        ends = np.clip(np.asarray(cu_seqlens, np.int64), 0, total).tolist()
        return [slice(start, max(start, end)) for start, end in pairwise(ends)]

    return list(zip(slices(cu_seqlens_q, total_q), slices(cu_seqlens_k, total_k), strict=True))


def _sequence_options(index: int, seqlen_q: int, seqlen_k: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of one packed sequence as those of a padded call with batch 1."""
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
    """Return one sequence's part of a bias, mask or gradient (batch | 1, heads | 1, rows | 1, columns | 1)."""
    x = np.reshape(x, (1,) * (4 - x.ndim) + x.shape)
    batch = slice(index, index + 1) if x.shape[0] > 1 else slice(None)
    rows = slice(seqlen_q) if x.shape[2] > 1 else slice(None)
    columns = slice(seqlen_k) if x.shape[3] > 1 else slice(None)
    return x[batch, :, rows, columns]


def _without_pages(
    k: Array, v: Array, cu_seqlens_k: Any, options: dict[str, Any]
) -> tuple[Array, Array, Any, dict[str, Any]]:
    """Return packed keys and values, where they begin, and the options but the block table."""
    rest = {name: x for name, x in options.items() if name != "block_table"}
    table = options.get("block_table")
    if table is None:
        return k, v, cu_seqlens_k, rest
    rows = [unpaged(x, table, options["kv_lengths"]) for x in (k, v)]
    batch, capacity = rows[0].shape[:2]
    k, v = (x.reshape(batch * capacity, *x.shape[2:]) for x in rows)
    return k, v, np.arange(batch + 1) * capacity, rest


def attention_varlen(
    q: Array, k: Array, v: Array, cu_seqlens_q: Any, cu_seqlens_k: Any, **options: Any
) -> tuple[Array, Array]:
    """Attend within packed sequences, q (total_q, num_heads_q, head_dim); out is like q, lse (num_heads_q, total_q).

    Rows outside every sequence are padding: out 0, lse -inf. Extras are indexed locally to each sequence.
    """
    k, v, cu_seqlens_k, options = _without_pages(k, v, cu_seqlens_k, options)
    work, _ = precision_of(options.get("round_to"), options.get("work", np.float64))
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
    """Return the gradients of `attention_varlen`, as `attention_backward` gives them."""
    work, rounding = precision_of(options.get("round_to"), options.get("work", np.float64))
    pools, table = {"k": k, "v": v}, options.get("block_table")
    k, v, cu_seqlens_k, options = _without_pages(k, v, cu_seqlens_k, options)
    grads = {"q": np.zeros(q.shape, work), "k": np.zeros(k.shape, work), "v": np.zeros(v.shape, work)}
    for name in ("bias", "sink", "alibi_slopes"):
        if options.get(name) is not None:
            grads[name] = np.zeros(np.shape(options[name]), work)
    for number, x in enumerate(map(np.asarray, options.get("operands") or ())):
        if x.dtype.kind not in "biu":
            grads[f"operand_{number}"] = np.zeros(x.shape)
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
        for name in grads:
            if name.startswith("operand_"):
                grads[name] += own_grads[name]
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
    if table is not None:
        for name, pool in pools.items():
            own = grads[name].reshape(len(table), np.shape(table)[1] * pool.shape[1], *pool.shape[2:])
            grads[name] = rounding(paged(own, pool, table, options["kv_lengths"]))
    return grads
