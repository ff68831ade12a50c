"""Whether a peer's results are right: a few rows of out and dq, and a few keys of dk and dv, against float64.

The whole problem in float64 would take longer than the benchmark. A row of out and dq needs one query and all keys; a
key of dk and dv needs all queries: their out and lse are cuflash's own, which were checked on the sampled rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.bench.cells import Cell, default_scale
from cuflash.bench.inputs import Inputs, as_float64

SAMPLES = 8
# Largest error over the largest value of the sample, in units of the dtype's rounding and of float32's accumulation:
# several times what right kernels show on N(0, 1) inputs, and far less than any wrong index or mask gives.
ROUNDINGS, ACCUMULATIONS = 8, 256
# Of the mantissa.
BITS, TF32_BITS = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}, 10


def limit(dtype: str, precision: str | None = None) -> float:
    """The error above which a result counts as wrong."""
    accum = np.finfo(np.float64 if dtype == "float64" else np.float32).eps
    bits = TF32_BITS if precision == "tf32" else BITS[dtype]
    return float(ROUNDINGS * 2.0**-bits + ACCUMULATIONS * accum)


@dataclass
class Sample:
    """The float64 truth of a few rows and keys of one head of one sequence."""

    batch: int
    head: int  # of q; its KV head is checked with it
    rows: np.ndarray
    keys: np.ndarray
    cell: Cell  # the sampled sequence's own problem
    place: slice  # of the sequence in packed arrays
    out: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray

    def forward_error(self, out: Any) -> float:
        """Largest error of the sampled rows, relative to the largest value."""
        return _relative(self._cut(out, self.head)[self.rows], self.out)

    def backward_error(self, gradients: tuple[Any, Any, Any]) -> float:
        """Largest of the three gradients' errors."""
        dq, dk, dv = gradients
        kv_head = self.head * self.cell.num_heads_kv // self.cell.num_heads_q
        return max(
            _relative(self._cut(dq, self.head)[self.rows], self.dq),
            _relative(self._cut(dk, kv_head)[self.keys], self.dk),
            _relative(self._cut(dv, kv_head)[self.keys], self.dv),
        )

    def _cut(self, x: Any, head: int) -> np.ndarray:
        return as_float64(x[self.batch, :, head] if x.ndim == 4 else x[self.place, head])


def _relative(x: np.ndarray, truth: np.ndarray) -> float:
    error = np.abs(x - truth).max()
    return float(error / np.abs(truth).max()) if np.isfinite(error) else float("inf")


def take_sample(inputs: Inputs, out: Any, lse: Any) -> Sample:
    """Compute the truth of a sample of the cell; `out` and `lse` are cuflash's.

    Raises
    ------
    ArithmeticError
        If the sampled rows of `lse` are wrong.
    """
    cell = inputs.cell
    rng = np.random.default_rng(1)
    batch = int(rng.integers(cell.batch))
    place, single = slice(None), cell
    if cell.lengths:
        batch = int(np.argmax(cell.lengths))  # a sequence of one row has a dq of 0, against which nothing is small
        place, single = cell.sequence(batch)
    head = int(rng.integers(cell.num_heads_q))
    group = cell.num_heads_q // cell.num_heads_kv
    kv_head = head // group
    rows, keys = (_positions(rng, n) for n in (single.seqlen_q, single.seqlen_k))

    def cut(x: Any, h: int) -> np.ndarray:
        return as_float64(x[place, h] if cell.lengths else x[batch, :, h])

    k, v = cut(inputs["k"], kv_head), cut(inputs["v"], kv_head)
    q, dout = cut(inputs["q"], head), cut(inputs["dout"], head)
    scale = default_scale(cell)
    scores = np.where(single.visible(rows), scale * q[rows] @ k.T, -np.inf)
    top = scores.max(axis=1, keepdims=True)
    top[np.isneginf(top)] = 0.0
    weights = np.exp(scores - top)
    total = weights.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        row_lse = (top + np.log(total))[:, 0]
    weights /= np.where(total == 0, 1.0, total)
    true_out = weights @ v
    dweights = dout[rows] @ v.T
    dq = scale * (weights * (dweights - (dweights * weights).sum(axis=1, keepdims=True))) @ k

    lse = lse[:, place] if cell.lengths else lse[batch]
    visible = single.visible(np.arange(single.seqlen_q))[:, keys]
    dk, dv = np.zeros((len(keys), cell.head_dim)), np.zeros((len(keys), cell.head_dim_v))
    for h in range(kv_head * group, (kv_head + 1) * group):
        q, dout = cut(inputs["q"], h), cut(inputs["dout"], h)
        head_lse = as_float64(lse[h])
        if h == head:
            _check_lse(head_lse[rows], row_lse, cell)
        weights = np.where(visible, np.exp(scale * q @ k[keys].T - head_lse[:, None]), 0.0)
        delta = (dout * cut(out, h)).sum(axis=1)
        dk += scale * (weights * (dout @ v[keys].T - delta[:, None])).T @ q
        dv += weights.T @ dout
    return Sample(batch, head, rows, keys, single, place, true_out, dq, dk, dv)


def _check_lse(lse: np.ndarray, truth: np.ndarray, cell: Cell) -> None:
    tolerance = limit("float64" if cell.dtype == "float64" else "float32", cell.precision)
    if not np.allclose(lse, truth, rtol=tolerance, atol=tolerance):
        raise ArithmeticError(f"{cell.name}: lse is wrong by {np.abs(lse - truth).max():.3g}")


def _positions(rng: np.random.Generator, count: int) -> np.ndarray:
    """A few positions, the first and the last among them."""
    return np.unique(np.concatenate(([0, count - 1], rng.integers(count, size=SAMPLES - 2))))
