"""The forward pass of one block of rows on the CPU.

It iterates over tiles of keys with the online softmax (Milakov & Gimelshein, "Online normalizer calculation for
softmax", 2018; Dao et al., "FlashAttention", 2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.cpu.dropout import dropout_keep
from cuflash.cpu.scores import (
    LOWEST,
    Scores,
    by_query_head,
    column_sums,
    column_tops,
    compute_scores,
    hide,
    hide_cut,
    like_keys,
    load_columns,
    load_keys,
    overflows,
    sink_rows,
    split_heads,
    subtract_tops,
    without_rows,
)
from cuflash.cpu.threads import Workspace
from cuflash.cpu.tiles import Block, Tile, Tiling

Array = NDArray[Any]


# Values whose sum overflows are made this much smaller. The factor is a power of two, so that nothing is rounded, and
# suffices for as many keys as there can be.
SHRINK = 2.0**-32


@dataclass
class _Sums:
    """The state of a block's rows, (KV heads, query heads of each * rows), after the keys so far."""

    top: Array  # the largest score
    total: Array  # the sum of exp(score - top)
    acc: Array  # the sum of exp(score - top) * v


def forward_block(tiling: Tiling, block: Block, workspace: Workspace, out: Array, lse: Array | None) -> None:
    """Write the rows of one block."""
    p, sequence, heads = tiling.problem, block.sequence, block.heads
    sums = _sums(tiling, block, workspace)
    divisor = sums.total
    empty = None if np.count_nonzero(divisor) == divisor.size else divisor == 0
    if empty is not None:
        divisor = np.where(empty, 1, divisor).astype(p.accum_dtype, copy=False)
    if p.dropout_p:
        divisor = (divisor / p.dropout_rescale).astype(p.accum_dtype, copy=False)
    target = tiling.of_sequence(out, sequence)[:, block.rows, heads.query]
    acc, divisor = _like_out(sums.acc, block), _like_out(divisor[..., None], block)
    if overflows(p, sums.acc):
        target[...] = _without_overflow(tiling, block, workspace, acc, divisor)
    elif target.dtype == acc.dtype:
        np.divide(acc, divisor, out=target)
    else:
        target[...] = np.divide(acc, divisor, out=acc)
    if lse is not None:
        rows = np.log(sums.total)
        rows += sums.top
        if empty is not None:
            rows[empty] = -np.inf
        tiling.lse_of_sequence(lse, sequence)[:, heads.query, block.rows] = _by_sequence(rows, block)


def _without_overflow(tiling: Tiling, block: Block, workspace: Workspace, acc: Array, divisor: Array) -> Array:
    """Return the means; where `acc` is not finite, of smaller values, because a mean is finite where its values are."""
    means = _like_out(_sums(tiling, block, workspace, SHRINK).acc, block) / divisor
    if not tiling.problem.dropout_p:  # dropout makes weights larger than 1
        largest = np.finfo(means.dtype).max * means.dtype.type(SHRINK)
        # A mean that a few roundings put beyond the largest value is that value.
        np.copyto(means, np.clip(means, -largest, largest), where=np.abs(means) < 2 * largest)
    return np.where(np.isfinite(acc), acc / divisor, means / means.dtype.type(SHRINK))


def _by_sequence(x: Array, block: Block) -> Array:
    """Bring (KV heads, query heads of each * rows, ...) to (sequences, query heads, rows, ...)."""
    rows = by_query_head(x, block.heads)
    return rows.reshape(block.sequence.alike, -1, *rows.shape[1:])


def _like_out(x: Array, block: Block) -> Array:
    """Bring (KV heads, query heads of each * rows, ...) to (sequences, rows, query heads, ...)."""
    return _by_sequence(x, block).swapaxes(1, 2)


def _sums(tiling: Tiling, block: Block, workspace: Workspace, factor: float = 1.0) -> _Sums:
    """Return the sums over all keys, of values times a factor."""
    p, o = tiling.problem, tiling.operands

    def in_own_memory(name: str, x: Array) -> Array:
        """Copy numbers, with splits of one size, into memory of one layout, by which BLAS chooses its loops."""
        if p.split_size is None:
            return x
        copy = workspace.array(name, x.shape, p.accum_dtype)
        copy[...] = x
        return copy

    q = in_own_memory("q", load_columns(tiling, o.q, block, o.q_scale))
    sums = None if o.sink is None else _begin(tiling, block)
    tiles = tiling.tiles(block)
    for tile in workspace.work.each(tiles) if factor == 1 else tiles:
        own = tile.rows_within(block)
        k = in_own_memory("k", load_keys(tiling, o.k, tile, o.k_scale))
        found = compute_scores(tiling, tile, q[..., own], k, workspace)
        if found is None:
            continue
        v = in_own_memory("v", _hide(found, tile, load_keys(tiling, o.v, tile, o.v_scale)))
        if factor != 1:
            v = v * v.dtype.type(factor)
        scores = found.scores
        top = column_tops(scores)
        if sums is None and tile.block is not block:
            sums = _begin(tiling, block)
        if sums is not None:
            top = np.maximum(sums.top[:, own], top)
        shift = np.maximum(top, LOWEST[p.accum_dtype])  # -inf - -inf is no number
        subtract_tops(scores, shift)
        np.exp(scores, out=scores)
        total = column_sums(scores)
        if p.dropout_p:
            view = split_heads(scores, block.heads)
            view *= dropout_keep(tiling, tile)
        acc = np.matmul(like_keys(scores, v).swapaxes(-1, -2), v)
        acc = acc.reshape(-1, *acc.shape[-2:])
        if sums is None:
            sums = _Sums(top, total, acc)
        else:
            rescale = np.exp(sums.top[:, own] - shift)
            sums.top[:, own] = top
            sums.total[:, own] = sums.total[:, own] * rescale + total
            sums.acc[:, own] *= rescale[..., None]
            sums.acc[:, own] += acc
    return _begin(tiling, block) if sums is None else sums


def _begin(tiling: Tiling, block: Block) -> _Sums:
    """Return the sums before the first key; a sink is a first score without a value."""
    dtype = tiling.problem.accum_dtype
    kv_heads, group = block.heads.counts
    shape = kv_heads * block.sequence.alike, group * (block.row_stop - block.row)
    acc = np.zeros((*shape, tiling.problem.head_dim_v), dtype)
    if tiling.operands.sink is None:
        return _Sums(np.full(shape, -np.inf, dtype), np.zeros(shape, dtype), acc)
    top = sink_rows(tiling, block)
    return _Sums(top, (top != -np.inf).astype(dtype), acc)


def _hide(found: Scores, tile: Tile, v: Array) -> Array:
    """Hide what is not visible, and return the values, 0 where nobody sees them."""
    if found.visible is None:
        return v
    if found.cut is not None:
        hide_cut(found.scores, found.cut, tile.block.heads)
    else:
        hide(found.scores, found.visible, tile.block.heads)
    seen: Array = np.any(found.visible, axis=(2, 3))
    return without_rows(v, seen if len(seen) == 1 else like_keys(seen, v))
