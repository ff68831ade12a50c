"""A cell's random inputs and options, and whether a peer's results are right.

``bias`` and ``mask`` are one for all batches and heads; ``dbias`` is a bias of the scores' whole shape, and its
gradient; ``blocks`` the cell's window as a block mask. A few rows and keys are checked against float64, keys by
cuflash's own out and lse.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cuflash.cpu.dropout import philox4x32
from cuflash.cpu.gradients import EPS
from cuflash.interop import dtype_of
from cuflash.problem.attention_problem import accum_of
from cuflash.tools.bench.cells import Cell, block_mask, default_scale

Array = Any

SOFTCAP = 30.0
DROPOUT_P, DROPOUT_SEED = 0.1, 5
_HALF_WORDS = 65536  # values of the half of a random word that decides
_DROPOUT_THRESHOLD = int(DROPOUT_P * _HALF_WORDS)
# Peers compute these, too.
WITH_PEERS = ("blocks", "deterministic", "hole", "tf32")
# By the result's name: max, mean, and max relative to the largest value.
Errors = dict[str, dict[str, float]]

# Gradients of scores are differences, which may be 0 (where one key has all the weight). An error counts as relative to
# at least this part of the terms that cancel.
LEAST_DIFFERENCE = 2.0**-12

SAMPLES = 32
# Every row and key of sequences up to this length is taken, if their scores with all keys or rows are at most so many.
SMALL, MOST_SCORES = 1024, 1 << 22
# Largest error over the largest value, in roundings of the dtype and of the accumulation.
ROUNDINGS, ACCUMULATIONS = 8, 256
# Positions in the pool are multiples of this, for TMA.
ALIGNED_ELEMENTS = 128


@lru_cache(maxsize=2)
def _largest_pool(xp: ModuleType, dtype: str) -> list[Array]:
    """The largest array of numbers that was drawn, in a list that is empty at first."""
    return []


def _normal_numbers(xp: ModuleType, dtype: str, count: int) -> Array:
    """The first of N(0, 1) numbers, which are drawn anew only if more are wanted than ever before."""
    pool = _largest_pool(xp, dtype)
    if not pool or len(pool[0]) < count:
        numbers = np.random.default_rng(0).standard_normal(count, np.float32)
        pool[:] = [xp.asarray(numbers.astype(dtype_of(dtype)))]
    return pool[0][:count]


class Inputs:
    """q, k, v and dout of a cell: N(0, 1) numbers."""

    def __init__(self, cell: Cell, xp: ModuleType) -> None:
        self.cell = cell
        self.xp = xp
        shapes = cell.shapes()
        # One pool for all cells: drawing takes longer than measuring.
        largest = max(math.prod(shape) for shape in shapes.values())
        largest = -(-largest // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS
        self._pool = _normal_numbers(xp, cell.dtype, 1 << (len(shapes) * largest - 1).bit_length())
        self.arrays: dict[str, Array] = {
            name: self._pool[position * largest :][: math.prod(shape)].reshape(shape)
            for position, (name, shape) in enumerate(shapes.items())
        }

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def of(self, cell: Cell) -> Inputs:
        """The same arrays for a cell of the same shapes."""
        other = copy.copy(self)
        other.cell = cell
        return other

    def normal(self, shape: tuple[int, ...]) -> Array:
        """Further N(0, 1) numbers; those of large arrays repeat."""
        count = math.prod(shape)
        bits = self._pool.view(f"u{self._pool.itemsize}")  # CuPy copies no bfloat16 by all of its functions
        if count > bits.size:
            bits = self.xp.tile(bits, -(-count // bits.size))
        return bits[-count:].view(self._pool.dtype).reshape(shape)

    def coins(self, shape: tuple[int, ...]) -> Array:
        """A bool array, half of it True."""
        return self.normal(shape).view(f"i{self._pool.itemsize}") >= 0  # the sign's bit

    def torch(self, name: str) -> Any:
        """The array as a torch tensor."""
        return as_torch(self.arrays[name])


def as_torch(x: Array) -> Any:
    """A torch tensor over the memory of a NumPy or CuPy array."""
    import torch

    if x.dtype.name == "bfloat16":
        return as_torch(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else torch.from_dlpack(x)


def as_float64(x: Any) -> np.ndarray:
    """Any library's array on the host."""
    if hasattr(x, "detach"):
        x = x.detach().double().cpu().numpy()
    elif hasattr(x, "get"):
        x = x.get()
    return np.asarray(x).astype(np.float64)


def arguments(inputs: Inputs) -> dict[str, Any]:
    """The keyword arguments of cuflash's functions for the inputs' cell."""
    cell, xp = inputs.cell, inputs.xp
    given: dict[str, Any] = {"causal": cell.causal}
    if cell.density is not None or "blocks" in cell.options:
        given["block_mask"] = block_mask(cell)
    elif cell.window_left is not None:
        given["window"] = (cell.window_left, None)
    scores = (cell.seqlen_q, cell.seqlen_k)
    if "softcap" in cell.options:
        given["softcap"] = SOFTCAP
    if "alibi" in cell.options:
        exponents = -8.0 * np.arange(1, cell.num_heads_q + 1) / cell.num_heads_q  # the ALiBi paper has these slopes
        given["alibi_slopes"] = xp.asarray((2.0**exponents).astype(np.float32))
    if "bias" in cell.options:
        given["bias"] = inputs.normal((1, 1, *scores))
    if "dbias" in cell.options:
        given["bias"] = inputs.normal((cell.batch, cell.num_heads_q, *scores))
    if "mask" in cell.options:
        given["mask"] = inputs.coins((1, 1, *scores))
    if "dropout" in cell.options:
        given.update(dropout_p=DROPOUT_P, dropout_seed=DROPOUT_SEED)
    if "tf32" in cell.options:
        given["precision"] = "tf32"
    return given


def backward_arguments(inputs: Inputs) -> dict[str, Any]:
    """The arguments that only the backward function takes."""
    options = inputs.cell.options
    grads = ("q", "k", "v", "bias") if "dbias" in options else ("q", "k", "v")
    return {"deterministic": True if "deterministic" in options else None, "grads": grads}


class Scores(NamedTuple):
    """Scores of some queries and keys of one head, in float64."""

    values: np.ndarray  # -inf where hidden
    slopes: np.ndarray | float  # the derivative by the product of q and k
    keep: np.ndarray | float  # the factors by which dropout multiplies the weights


def scores(
    cell: Cell,
    given: dict[str, Any],
    batch: int,
    head: int,
    q: np.ndarray,
    k: np.ndarray,
    rows: np.ndarray,
    keys: np.ndarray,
) -> Scores:
    """The scores of the inputs that `arguments` gave."""
    scale = default_scale(cell)
    values = scale * q @ k.T
    slopes: np.ndarray | float = scale
    keep: np.ndarray | float = 1.0
    if "softcap" in given:
        bent = np.tanh(values / SOFTCAP)
        values, slopes = SOFTCAP * bent, scale * (1.0 - bent**2)
    if "alibi_slopes" in given:
        distance = np.abs(rows[:, None] + cell.seqlen_k - cell.seqlen_q - keys)
        values = values - float(given["alibi_slopes"][head]) * distance
    visible = cell.visible(rows, keys)
    if "bias" in given:
        values = values + _cut(given["bias"], batch, head, rows, keys)
    if "mask" in given:
        visible &= _cut(given["mask"], batch, head, rows, keys) != 0
    if "dropout_p" in given:
        keep = _kept(batch, head, rows, keys) * (_HALF_WORDS / (_HALF_WORDS - _DROPOUT_THRESHOLD))
    return Scores(np.where(visible, values, -np.inf), slopes, keep)


def _cut(x: Any, batch: int, head: int, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    of_head = x[batch if x.shape[0] > 1 else 0, head if x.shape[1] > 1 else 0]
    host = of_head.get() if hasattr(of_head, "get") else of_head
    return host[np.ix_(rows, keys)].astype(np.float64)


def _kept(batch: int, head: int, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Dropout's decision, from its definition."""
    i, j = (x.astype(np.uint64) for x in (rows[:, None], keys[None, :]))
    counter = i & ~np.uint64(8), j & ~np.uint64(9), np.uint64(head), np.uint64(batch)
    words = philox4x32(counter, DROPOUT_SEED)
    word = 2 * ((rows[:, None] >> 3) & 1) + ((keys[None, :] >> 3) & 1)
    chosen = np.choose(word, [np.broadcast_to(w, word.shape) for w in words])
    half = chosen >> np.uint64(16) * (j & np.uint64(1)) & np.uint64(_HALF_WORDS - 1)
    return half >= np.uint64(_DROPOUT_THRESHOLD)


def limit(dtype: str) -> float:
    """The error above which a result counts as wrong."""
    return ROUNDINGS * EPS[dtype] + ACCUMULATIONS * EPS[accum_of(dtype)]


@dataclass
class Sample:
    """The truth of a few rows and keys of one head of one sequence."""

    batch: int
    head: int  # a query head; its KV head is checked with it
    rows: np.ndarray
    keys: np.ndarray
    cell: Cell  # the sampled sequence's own problem
    place: slice  # the place of the sequence in packed arrays of queries
    place_k: slice  # and in those of keys
    out: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dbias: np.ndarray  # (rows, all keys), of a bias of the scores' whole shape
    dscore: float  # the largest sum of abs(dout * v), which a score's gradient is a difference of
    largest_q: float
    largest_k: float

    def forward_errors(self, out: Any) -> Errors:
        """Errors of the sampled rows of out."""
        return {"out": _error(self._cut(out, self.head, self.place)[self.rows], self.out)}

    def backward_errors(self, gradients: tuple[Any, ...]) -> Errors:
        """Errors of the sampled rows of dq and dbias, and keys of dk and dv."""
        dq, dk, dv, *dbias = gradients
        kv_head = self.head * self.cell.num_heads_kv // self.cell.num_heads_q
        least = LEAST_DIFFERENCE * default_scale(self.cell) * self.dscore
        errors = {
            "dq": _error(self._cut(dq, self.head, self.place)[self.rows], self.dq, least * self.largest_k),
            "dk": _error(self._cut(dk, kv_head, self.place_k)[self.keys], self.dk, least * self.largest_q),
            "dv": _error(self._cut(dv, kv_head, self.place_k)[self.keys], self.dv),
        }
        if dbias:
            found = as_float64(dbias[0][self.batch, self.head])[self.rows]
            errors["dbias"] = _error(found, self.dbias, LEAST_DIFFERENCE * self.dscore)
        return errors

    def _cut(self, x: Any, head: int, place: slice) -> np.ndarray:
        return as_float64(x[self.batch, :, head] if x.ndim == 4 else x[place, head])


def _error(x: np.ndarray, truth: np.ndarray, least: float = 0.0) -> dict[str, float]:
    error = np.abs(x - truth)
    largest = max(np.abs(truth).max(), least) or 1e-30  # where all is hidden, only 0 is right
    figures = {"max": error.max(), "mean": error.mean(), "of_largest": error.max() / largest}
    return {name: float(figure) if np.isfinite(figure) else float("inf") for name, figure in figures.items()}


def worst(errors: Errors) -> float:
    """The largest relative error."""
    return max(error["of_largest"] for error in errors.values())


def take_sample(inputs: Inputs, given: dict[str, Any], out: Any, lse: Any) -> Sample:
    """`out` and `lse` are what cuflash's functions make of `given`."""
    cell = inputs.cell
    rng = np.random.default_rng(1)
    batch = int(rng.integers(cell.batch))
    place, place_k, single = slice(None), slice(None), cell
    if cell.lengths:
        batch = int(np.argmax(cell.lengths))  # one row alone has a dq of 0, against which nothing is small
        place, place_k, single = cell.sequence(batch)
    head = int(rng.integers(cell.num_heads_q))
    group = cell.num_heads_q // cell.num_heads_kv
    kv_head = head // group
    rows = _positions(rng, single.seqlen_q, single.seqlen_k)
    keys = _positions(rng, single.seqlen_k, single.seqlen_q * group)
    every_row, every_key = np.arange(single.seqlen_q), np.arange(single.seqlen_k)

    def cut(x: Any, h: int, where: slice = place) -> np.ndarray:
        return as_float64(x[where, h] if cell.lengths else x[batch, :, h])

    k, v = cut(inputs["k"], kv_head, place_k), cut(inputs["v"], kv_head, place_k)
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
    terms = np.where(weights > 0, np.abs(dout[rows]) @ np.abs(v.T) * scored.keep, 0.0)
    cancelling = float(terms.max()), float(np.abs(q).max()), float(np.abs(k).max())
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
    return Sample(batch, head, rows, keys, single, place, place_k, true_out, dq, dk, dv, dscores, *cancelling)


def _check_lse(lse: np.ndarray, truth: np.ndarray, cell: Cell) -> None:
    # A tf32 score is as far off as its products are.
    tolerance = limit("float16" if "tf32" in cell.options else accum_of(cell.dtype))
    if not np.allclose(lse, truth, rtol=tolerance, atol=tolerance):
        raise ArithmeticError(f"{cell.name}: lse is wrong by {np.abs(lse - truth).max():.3g}")


def _positions(rng: np.random.Generator, count: int, others: int) -> np.ndarray:
    """Some of `count` rows, each of which has scores with `others`, or all of them."""
    if count <= SMALL and count * others <= MOST_SCORES:
        return np.arange(count)
    return np.unique(np.concatenate(([0, count - 1], rng.integers(count, size=SAMPLES - 2))))
