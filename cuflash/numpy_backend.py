"""The CPU path, forward: attention tile by tile on all cores, in NumPy alone.

Never an array of seqlen_q x seqlen_k: each worker walks the keys of one block of rows with the online softmax
(Milakov & Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022). 16-bit
inputs are widened tile by tile and computed in float32. Every result has the same bits whatever the number of cores.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.numpy_backward import backward
from cuflash.numpy_scores import (
    by_query_head,
    column_sums,
    compute_scores,
    dropout_keep,
    hide,
    hide_cut,
    load_keys,
    load_rows,
    sink_rows,
    split_heads,
    without_rows,
)
from cuflash.numpy_threads import Workspace, run_tasks
from cuflash.numpy_tiles import Block, Tiling
from cuflash.problem import AttentionProblem, Operands

__all__ = ["backward", "forward"]

Array = NDArray[Any]


def forward(problem: AttentionProblem, operands: Operands, out: Array, lse: Array | None) -> None:
    """Write attention's result and, if wanted, its log-sum-exp.

    Parameters
    ----------
    problem, operands
        The checked problem and its arrays.
    out : (batch, seqlen_q, num_heads_q, head_dim_v), packed (total_q, num_heads_q, head_dim_v), of q's dtype
    lse : None or (batch, num_heads_q, seqlen_q), packed (num_heads_q, total_q), float32 (float64 for float64)
        Both are wholly written; any strides.
    """
    tiling = Tiling(problem, operands)
    # Rows beyond a length or outside every sequence.
    out[...] = 0
    if lse is not None:
        lse[...] = -np.inf
    blocks = tiling.blocks()

    def task(number: int, workspace: Workspace) -> None:
        block = blocks[number]
        block_out, block_lse = _forward_block(tiling, block, workspace)
        tiling.of_sequence(out, block.sequence)[block.rows, block.heads.query] = block_out.swapaxes(0, 1)
        if lse is not None:
            tiling.lse_of_sequence(lse, block.sequence)[block.heads.query, block.rows] = block_lse

    run_tasks(len(blocks), task, tiling.is_large)


def _forward_block(tiling: Tiling, block: Block, workspace: Workspace) -> tuple[Array, Array]:
    """Out (query heads, rows, head_dim_v) and lse (query heads, rows) of one block."""
    p, o, heads = tiling.problem, tiling.operands, block.heads
    dtype = p.accum_dtype
    q = np.ascontiguousarray(load_rows(tiling, o.q, block).swapaxes(1, 2)) * p.softmax_scale
    shape = len(q), q.shape[2]

    # The row's largest score so far, the sum of exp(score - top), and the sum of that times v.
    if o.sink is None:
        top, total = np.full(shape, -np.inf, dtype), np.zeros(shape, dtype)
    else:  # the sink is a first score without a value
        top = sink_rows(tiling, block)
        total = (top != -np.inf).astype(dtype)
    acc = np.zeros((*shape, p.head_dim_v), dtype)
    lowest = np.finfo(dtype).min

    for tile in tiling.tiles(block):
        rows = np.s_[:, tile.rows_within(block)]
        found = compute_scores(tiling, tile, q[:, :, rows[1]], load_keys(tiling, o.k, tile), workspace)
        if found is None:
            continue
        v = load_keys(tiling, o.v, tile)
        scores = found.scores
        if found.visible is not None:
            if found.cut is not None:
                hide_cut(scores, found.cut, heads)
            else:
                hide(scores, found.visible, heads)
            v = without_rows(v, found.visible.any(axis=(0, 2, 3)))
        new_top = np.maximum(top[rows], scores.max(axis=1))
        shift = np.maximum(new_top, lowest)  # -inf - -inf is no number
        scores -= shift[:, None]
        np.exp(scores, out=scores)
        rescale = np.exp(top[rows] - shift)
        total[rows] = total[rows] * rescale + column_sums(scores)
        top[rows] = new_top
        if p.dropout_p:
            view = split_heads(scores, heads)
            view *= dropout_keep(tiling, tile)
        acc[rows] *= rescale[..., None]
        acc[rows] += np.matmul(scores.swapaxes(1, 2), v)

    empty = total == 0
    divisor = np.where(empty, 1, total * (1 - p.dropout_p)).astype(dtype, copy=False)
    lse = np.where(empty, -np.inf, top + np.log(total))
    return by_query_head(acc / divisor[..., None], heads), by_query_head(lse, heads)
