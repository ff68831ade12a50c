"""What a cell's problem is computed of: random inputs, seen by every library through the same memory, and options.

``softcap``, ``alibi``, ``bias`` and ``mask`` (one for all batches and heads), ``dbias`` (a bias of the scores' whole
shape, and its gradient), ``dropout``, ``deterministic``, ``tf32``, and ``blocks`` (the cell's window as a block mask).
"""

from __future__ import annotations

import copy
import math
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cuflash.bench.cells import Cell, block_mask, default_scale
from cuflash.interop import bfloat16
from cuflash.numpy_scores import philox4x32

Array = Any

SOFTCAP = 30.0
DROPOUT_P, DROPOUT_SEED = 0.1, 5
# Another library computes these on the same inputs; all others are cuflash's alone here.
WITH_PEERS = ("blocks", "deterministic", "tf32")


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of a name, bfloat16 included."""
    return bfloat16() if name == "bfloat16" else np.dtype(name)


# Positions in the pool are multiples of this: TMA wants arrays aligned.
ALIGNED_ELEMENTS = 128


@lru_cache(maxsize=2)
def _normal_numbers(xp: ModuleType, dtype: str, count: int) -> Array:
    numbers = np.random.default_rng(0).standard_normal(count, np.float32)
    return xp.asarray(numbers.astype(numpy_dtype(dtype)))


class Inputs:
    """q, k, v and dout of a cell: N(0, 1) numbers, as arrays of `xp` and as torch tensors over the same memory."""

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
    """An array of any of the libraries on the host in float64."""
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
        given["alibi_slopes"] = xp.asarray(_slopes(cell.num_heads_q))
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
    """What the backward function takes beside them."""
    options = inputs.cell.options
    grads = ("q", "k", "v", "bias") if "dbias" in options else ("q", "k", "v")
    return {"deterministic": True if "deterministic" in options else None, "grads": grads}


def _slopes(heads: int) -> np.ndarray:
    """The geometric slopes of the ALiBi paper."""
    return (2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)).astype(np.float32)


class Scores(NamedTuple):
    """Scores of some queries and keys of one head, in float64."""

    values: np.ndarray  # -inf where hidden
    slopes: np.ndarray | float  # the derivative by the product of q and k
    keep: np.ndarray | float  # what dropout multiplies the weights by


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
    """The scores of the queries `rows` and the `keys`, with what `arguments` gave."""
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
        keep = _kept(batch, head, rows, keys) / (1.0 - DROPOUT_P)
    return Scores(np.where(visible, values, -np.inf), slopes, keep)


def _cut(x: Any, batch: int, head: int, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    of_head = x[batch if x.shape[0] > 1 else 0, head if x.shape[1] > 1 else 0]
    host = of_head.get() if hasattr(of_head, "get") else of_head
    return host[np.ix_(rows, keys)].astype(np.float64)


def _kept(batch: int, head: int, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Dropout's decision, from its definition."""
    i, j = (x.astype(np.uint64) for x in (rows[:, None], keys[None, :]))
    without_bit_3 = ~np.uint64(8)
    words = philox4x32((i & without_bit_3, j & without_bit_3, np.uint64(head), np.uint64(batch)), DROPOUT_SEED)
    word = 2 * ((rows[:, None] >> 3) & 1) + ((keys[None, :] >> 3) & 1)
    chosen = np.choose(word, [np.broadcast_to(w, word.shape) for w in words])
    return chosen >= np.uint64(int(DROPOUT_P * 2.0**32))
