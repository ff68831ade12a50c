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
from cuflash.numpy_threads import Workspace, run_tasks
from cuflash.numpy_tiles import Block, Tiling, hide, without_rows
from cuflash.problem import AttentionProblem, Operands

__all__ = ["backward", "forward"]

Array = NDArray[Any]


def forward(problem: AttentionProblem, operands: Operands, out: Array, lse: Array) -> None:
    """Write attention's result and its log-sum-exp.

    Parameters
    ----------
    problem, operands
        The checked problem and its arrays.
    out : (batch, seqlen_q, num_heads_q, head_dim_v), packed (total_q, num_heads_q, head_dim_v), of q's dtype
    lse : (batch, num_heads_q, seqlen_q), packed (num_heads_q, total_q), float32 (float64 for float64)
        Both are wholly written; any strides.
    """
    tiling = Tiling(problem, operands)
    # Rows beyond a length or outside every sequence.
    out[...] = 0
    lse[...] = -np.inf
    blocks = tiling.blocks()

    def task(number: int, workspace: Workspace) -> None:
        block = blocks[number]
        block_out, block_lse = _forward_block(tiling, block, workspace)
        heads, rows = slice(block.heads.first, block.heads.stop), slice(block.row, block.row_stop)
        tiling.of_sequence(out, block.sequence, rows=True)[rows, heads] = block_out.swapaxes(0, 1)
        tiling.lse_of_sequence(lse, block.sequence)[heads, rows] = block_lse

    run_tasks(len(blocks), task, tiling.is_large)


def _forward_block(tiling: Tiling, block: Block, workspace: Workspace) -> tuple[Array, Array]:
    """Out (query heads, rows, head_dim_v) and lse (query heads, rows) of one block."""
    p, o, heads = tiling.problem, tiling.operands, block.heads
    dtype = p.accum_dtype
    q = tiling.load_rows(o.q, block) * p.softmax_scale
    shape = heads.stop - heads.first, block.row_stop - block.row

    # The row's largest score so far, the sum of exp(score - top), and the sum of that times v.
    if o.sink is None:
        top, total = np.full(shape, -np.inf, dtype), np.zeros(shape, dtype)
    else:  # the sink is a first score without a value
        top = tiling.by_query_head(tiling.sink_rows(block), heads)
        total = (top != -np.inf).astype(dtype)
    acc = np.zeros((*q.shape[:2], p.head_dim_v), dtype)

    for key, key_stop, cut in tiling.tiles(block):
        k = tiling.load_keys(o.k, block, key, key_stop)
        tile = tiling.score_tile(block, key, key_stop, cut, q, k, workspace)
        if tile is None:
            continue
        v = tiling.load_keys(o.v, block, key, key_stop)
        scores = tile.scores
        if tile.visible is not None:
            hide(scores, tile.visible)
            v = without_rows(v, tile.visible.any(axis=(0, 1)))
        new_top = np.maximum(top, scores.max(axis=-1))
        shift = np.where(new_top == -np.inf, 0, new_top).astype(dtype, copy=False)
        scores -= shift[..., None]
        np.exp(scores, out=scores)
        rescale = np.exp(top - shift)
        total = total * rescale + scores.sum(axis=-1)
        top = new_top
        if p.dropout_p:
            scores *= tiling.dropout_keep(block, key, key_stop)
        acc *= tiling.by_kv_head(rescale, heads)[..., None]
        acc += np.matmul(tiling.by_kv_head(scores, heads), v)

    empty = total == 0
    divisor = np.where(empty, 1, total * (1 - p.dropout_p)).astype(dtype, copy=False)
    block_out = tiling.by_query_head(acc, heads) / divisor[..., None]
    return block_out, np.where(empty, -np.inf, top + np.log(total))
