"""Plain attention whose scores are one tile, such as a query over a short cache, without tiles and tasks.

These cost some 80 us a call, which is more than the products of such a call take.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.cpu.scores import LOWEST, overflows, widen
from cuflash.cpu.threads import BLAS_THREADS
from cuflash.cpu.tiles import fits_one_tile
from cuflash.problem.attention_problem import AttentionProblem
from cuflash.problem.operands import Operands

Array = NDArray[Any]
_MOST_PROBLEMS = 64


@functools.lru_cache(maxsize=_MOST_PROBLEMS)
def can_forward(p: AttentionProblem) -> bool:
    """Return True if a problem has no option, every query sees every key, and all scores are one tile."""
    if p.is_empty:
        return False
    sizes = p.batch, p.seqlen_q, p.seqlen_k, p.num_heads_q, p.num_heads_kv, p.head_dim, p.head_dim_v
    plain = AttentionProblem(*sizes, p.dtype, softmax_scale=p.softmax_scale)
    # The CPU path heeds none of these. A side of a window hides nothing where the first query sees the last key, as a
    # causal query does that is alone, or the last query the first key.
    heedless = replace(p, deterministic=None, precision=None, num_splits=None, out_dtype=None)
    if p.window_right is not None and p.window_right >= p.seqlen_q - 1:
        heedless = replace(heedless, window_right=None)
    if p.window_left is not None and p.window_left >= p.seqlen_k - 1:
        heedless = replace(heedless, window_left=None)
    return heedless == plain and fits_one_tile(plain)


def forward(p: AttentionProblem, o: Operands, out: Array, lse: Array | None) -> Array | None:
    """Write out and, if wanted, lse; return which rows have extreme numbers, like lse, and None where none has.

    What such a row holds is not its result, which tiles have. No other row's bits depend on it.
    """
    by_kv_head = p.batch, p.num_heads_kv, p.group_size * p.seqlen_q
    q = widen(o.q).swapaxes(1, 2).reshape(*by_kv_head, p.head_dim)
    k, v = widen(o.k).swapaxes(1, 2), widen(o.v).swapaxes(1, 2)  # (batch, KV heads, keys, dim)
    with BLAS_THREADS, np.errstate(all="ignore"):
        scores = np.matmul(q, k.swapaxes(2, 3))  # (batch, KV heads, query heads of each * queries, keys)
        scores *= p.softmax_scale
        top = np.maximum.reduce(scores, axis=3, keepdims=True)
        scores -= np.maximum(top, LOWEST[p.accum_dtype])
        np.exp(scores, out=scores)
        total = np.add.reduce(scores, axis=3, keepdims=True)
        acc = np.matmul(scores, v)
        extreme = None
        if np.count_nonzero(total) < total.size or overflows(p, acc):
            rows = (total[..., 0] == 0) | ~np.isfinite(acc).all(axis=3)
            extreme = rows.reshape(p.batch, p.num_heads_q, p.seqlen_q)
        np.divide(acc, total, out=acc)
        out[...] = acc.reshape(p.batch, p.num_heads_q, p.seqlen_q, -1).swapaxes(1, 2)
        if lse is not None:
            np.log(total, out=total)
            total += top
            lse[...] = total.reshape(p.batch, p.num_heads_q, p.seqlen_q)
    return extreme
