"""The options that a cell may name: what cuflash's functions are given, and what each means in float64.

``softcap``, ``alibi``, ``bias`` and ``mask`` (one for all batches and heads), ``dbias`` (a bias of the scores' whole
shape, and its gradient), ``dropout``, ``deterministic``, ``tf32``, and ``blocks`` (the cell's window as a block mask).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cuflash.bench.cells import Cell, block_mask, default_scale
from cuflash.bench.inputs import Inputs
from cuflash.philox import philox4x32

SOFTCAP = 30.0
DROPOUT_P, DROPOUT_SEED = 0.1, 5
# Another library computes these on the same inputs; all others are cuflash's alone here.
WITH_PEERS = ("blocks", "deterministic", "tf32")


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
    slopes: np.ndarray | float  # the derivative by the product of q and k, softmax's scale included
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
    """The scores of the queries `rows` and the `keys`, whose vectors `q` and `k` hold, with what `arguments` gave."""
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
