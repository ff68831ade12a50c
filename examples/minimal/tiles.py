"""FlashAttention by tiles, in NumPy: what the kernels of this folder do, without threads.

Arrays are (seqlen, head_dim), one head of one sequence, and of a floating-point dtype, in which all is computed.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
BLOCK_M, BLOCK_N = 64, 32  # queries and keys of a tile


def naive(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    """Attention as its formula says it, with the whole matrix of scores."""
    scores = np.where(_visible(q, k, slice(None), slice(None), causal), q @ k.T / q.shape[1] ** 0.5, -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ v


def forward(q: Array, k: Array, v: Array, causal: bool = False) -> tuple[Array, Array]:
    """The result, and the logarithm of each row's sum of exp(score), which is all that `backward` needs of it."""
    scale = q.shape[1] ** -0.5
    out, lse = np.zeros((len(q), v.shape[1]), q.dtype), np.full(len(q), -np.inf, q.dtype)
    for rows in _blocks(len(q), BLOCK_M):
        m = np.full(len(q[rows]), -np.inf, q.dtype)  # each row's largest score so far
        l = np.zeros_like(m)  # noqa: E741  # the sum of exp(score - m) so far
        o = np.zeros_like(out[rows])  # the sum of exp(score - m) * v so far
        for keys in _blocks(len(k), BLOCK_N):
            s = np.where(_visible(q, k, rows, keys, causal), scale * (q[rows] @ k[keys].T), -np.inf)
            larger = np.maximum(m, s.max(axis=1))
            shift = np.where(larger == -np.inf, 0, larger)  # a row that has seen nothing: -inf - -inf is no number
            p = np.exp(s - shift[:, None])
            rescale = np.exp(m - shift)  # what was summed relative to m becomes relative to the larger one
            l = rescale * l + p.sum(axis=1)  # noqa: E741
            o = rescale[:, None] * o + p @ v[keys]
            m = larger
        seen = l > 0
        out[rows][seen] = o[seen] / l[seen, None]
        lse[rows][seen] = m[seen] + np.log(l[seen])
    return out, lse


def backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, causal: bool = False
) -> tuple[Array, Array, Array]:
    """The gradients of q, k and v. The weights are computed again, a tile at a time."""
    scale = q.shape[1] ** -0.5
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    delta = (dout * out).sum(axis=1)  # the sum of weight * dweight over all keys, from the result alone
    for rows in _blocks(len(q), BLOCK_M):
        for keys in _blocks(len(k), BLOCK_N):
            s = scale * (q[rows] @ k[keys].T)
            visible = _visible(q, k, rows, keys, causal)
            p = np.exp(np.where(visible, s - np.where(visible, lse[rows, None], 0), -np.inf))
            dp = dout[rows] @ v[keys].T
            ds = scale * p * (dp - delta[rows, None])
            dv[keys] += p.T @ dout[rows]
            dk[keys] += ds.T @ q[rows]
            dq[rows] += ds @ k[keys]
    return dq, dk, dv


def _blocks(seqlen: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, seqlen)) for start in range(0, seqlen, size)]


def _visible(q: Array, k: Array, rows: slice, keys: slice, causal: bool) -> Array:
    """Which keys each query sees. The last query is aligned to the last key."""
    i, j = np.arange(len(q))[rows, None], np.arange(len(k))[keys]
    return j <= i + len(k) - len(q) if causal else np.ones((len(i), len(j)), bool)
