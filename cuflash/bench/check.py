"""Whether a peer's results are right: a few rows of out and dq, and a few keys of dk and dv, against float64.

The whole problem in float64 would take longer than the benchmark. A row of out and dq needs one query and all keys; a
key of dk and dv needs all queries: their out and lse are cuflash's own, which were checked on the sampled rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.bench.cells import Cell
from cuflash.bench.inputs import Inputs, as_float64, scores

# By the result's name: max, mean, and max relative to the largest value.
Errors = dict[str, dict[str, float]]

SAMPLES = 32
# Of shorter sequences every row and key is taken: mean errors are those of a whole head.
SMALL = 1024
# Largest error over the largest value, in roundings of the dtype and of float32's accumulation: several times what
# right kernels show on N(0, 1) inputs, and far less than a wrong index gives.
ROUNDINGS, ACCUMULATIONS = 8, 256


def limit(dtype: str) -> float:
    """The error above which a result counts as wrong."""
    accum = np.finfo(np.float64 if dtype == "float64" else np.float32).eps
    bits = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}[dtype]  # of the mantissa
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
    dbias: np.ndarray  # (rows, all keys), of a bias of the scores' whole shape

    def forward_errors(self, out: Any) -> Errors:
        """Of the sampled rows of out."""
        return {"out": _error(self._cut(out, self.head)[self.rows], self.out)}

    def backward_errors(self, gradients: tuple[Any, ...]) -> Errors:
        """Of the sampled rows of dq and dbias, if it is there, and keys of dk and dv."""
        dq, dk, dv, *dbias = gradients
        kv_head = self.head * self.cell.num_heads_kv // self.cell.num_heads_q
        errors = {
            "dq": _error(self._cut(dq, self.head)[self.rows], self.dq),
            "dk": _error(self._cut(dk, kv_head)[self.keys], self.dk),
            "dv": _error(self._cut(dv, kv_head)[self.keys], self.dv),
        }
        if dbias:
            errors["dbias"] = _error(as_float64(dbias[0][self.batch, self.head])[self.rows], self.dbias)
        return errors

    def _cut(self, x: Any, head: int) -> np.ndarray:
        return as_float64(x[self.batch, :, head] if x.ndim == 4 else x[self.place, head])


def _error(x: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    error = np.abs(x - truth)
    figures = {"max": error.max(), "mean": error.mean(), "of_largest": error.max() / np.abs(truth).max()}
    return {name: float(figure) if np.isfinite(figure) else float("inf") for name, figure in figures.items()}


def worst(errors: Errors) -> float:
    """The largest error relative to the largest value of its result."""
    return max(error["of_largest"] for error in errors.values())


def take_sample(inputs: Inputs, given: dict[str, Any], out: Any, lse: Any) -> Sample:
    """Compute the truth of a sample of the cell; `out` and `lse` are cuflash's, `given` what its functions take.

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
        batch = int(np.argmax(cell.lengths))  # one row alone has a dq of 0, against which nothing is small
        place, single = cell.sequence(batch)
    head = int(rng.integers(cell.num_heads_q))
    group = cell.num_heads_q // cell.num_heads_kv
    kv_head = head // group
    rows, keys = (_positions(rng, n) for n in (single.seqlen_q, single.seqlen_k))
    every_row, every_key = np.arange(single.seqlen_q), np.arange(single.seqlen_k)

    def cut(x: Any, h: int) -> np.ndarray:
        return as_float64(x[place, h] if cell.lengths else x[batch, :, h])

    k, v = cut(inputs["k"], kv_head), cut(inputs["v"], kv_head)
    q, dout = cut(inputs["q"], head), cut(inputs["dout"], head)
    scored = scores(single, given, batch, head, q[rows], k, rows, every_key)
    top = scored.values.max(axis=1, keepdims=True)
    top[np.isneginf(top)] = 0.0
    weights = np.exp(scored.values - top)
    total = weights.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        row_lse = (top + np.log(total))[:, 0]
    weights /= np.where(total == 0, 1.0, total)
    true_out = (weights * scored.keep) @ v
    dweights = dout[rows] @ v.T * scored.keep
    dscores = weights * (dweights - (dweights * weights).sum(axis=1, keepdims=True))
    dq = (dscores * scored.slopes) @ k

    lse = lse[:, place] if cell.lengths else lse[batch]
    dk, dv = np.zeros((len(keys), cell.head_dim)), np.zeros((len(keys), cell.head_dim_v))
    for h in range(kv_head * group, (kv_head + 1) * group):
        q, dout = cut(inputs["q"], h), cut(inputs["dout"], h)
        head_lse = as_float64(lse[h])
        if h == head:
            _check_lse(head_lse[rows], row_lse, cell)
        scored = scores(single, given, batch, h, q, k[keys], every_row, keys)
        # A row that sees nothing has an lse of -inf, and no weights.
        weights = np.exp(scored.values - np.where(np.isneginf(head_lse), 0.0, head_lse)[:, None])
        delta = (dout * cut(out, h)).sum(axis=1)
        dweights = dout @ v[keys].T * scored.keep
        dk += (weights * (dweights - delta[:, None]) * scored.slopes).T @ q
        dv += (weights * scored.keep).T @ dout
    return Sample(batch, head, rows, keys, single, place, true_out, dq, dk, dv, dscores)


def _check_lse(lse: np.ndarray, truth: np.ndarray, cell: Cell) -> None:
    # A tf32 score is as far off as its products are.
    dtype = "float16" if "tf32" in cell.options else "float64" if cell.dtype == "float64" else "float32"
    tolerance = limit(dtype)
    if not np.allclose(lse, truth, rtol=tolerance, atol=tolerance):
        raise ArithmeticError(f"{cell.name}: lse is wrong by {np.abs(lse - truth).max():.3g}")


def _positions(rng: np.random.Generator, count: int) -> np.ndarray:
    """All positions if they are few, else some, the first and the last among them."""
    if count <= SMALL:
        return np.arange(count)
    return np.unique(np.concatenate(([0, count - 1], rng.integers(count, size=SAMPLES - 2))))
