"""Users' own rules on the CPU change the scores of a tile, and give gradients of their operands."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.cpu.tiles import Tile, Tiling
from cuflash.problem.attention_problem import operand_name
from cuflash.rules.derivative import derivative
from cuflash.rules.expression import SCORE, input_node, loads_of
from cuflash.rules.to_numpy import Evaluation

Array = NDArray[Any]

# The gradient of an operand of no more numbers is summed as a whole in every task; of a larger one as the stretches
# that tiles read.
_FEW_NUMBERS = 1 << 16


def places_of(tiling: Tiling, tile: Tile) -> dict[str, Array]:
    """Return b, h, i and j of a tile, int32, in shapes that broadcast against `scores.split_heads`."""
    block, place = tile.block, tiling.problem.place
    kv_heads, group = block.heads.counts
    alike = block.sequence.alike
    heads = np.arange(block.heads.first, block.heads.stop).reshape(kv_heads, 1, group, 1)
    batches = np.repeat(np.arange(alike), kv_heads).reshape(-1, 1, 1, 1)
    rows, keys = np.arange(block.row, block.row_stop), np.arange(tile.key, tile.key_stop)
    found = {
        "b": place.first_batch + block.sequence.batch + batches,
        "h": place.first_head + np.tile(heads, (alike, 1, 1, 1)),
        "i": place.first_q + place.stride * rows.reshape(1, 1, 1, -1),
        "j": place.first_k + place.stride * keys.reshape(1, -1, 1, 1),
    }
    return {name: x.astype(np.int32) for name, x in found.items()}


def visible_by_rule(tiling: Tiling, tile: Tile) -> Array | None:
    """Return bools, which broadcast against `scores.split_heads`, of what a mask_mod shows; None without one."""
    root = tiling.problem.rules.visible
    if root is None:
        return None
    shown = np.asarray(Evaluation(places_of(tiling, tile), tiling.operands.of_rules)(root))
    return shown.reshape((1,) * (4 - shown.ndim) + shown.shape)


@dataclass(frozen=True)
class OperandTerms:
    """The terms that a tile adds to the gradient of an operand: sums for a stretch of its flat elements."""

    name: str
    first: int
    sums: Array


class ScoreRule:
    """A score_mod on one tile; `scores` is (KV heads, keys, query heads of each, rows), before it."""

    def __init__(self, tiling: Tiling, tile: Tile, scores: Array) -> None:
        root = tiling.problem.rules.score
        assert root is not None
        self._root = root
        self._operands = tiling.operands.of_rules
        # The scores are copied, because they are overwritten before the derivatives are asked for.
        self._values = Evaluation({SCORE: scores.copy(), **places_of(tiling, tile)}, self._operands)

    def apply(self, scores: Array) -> Array | None:
        """Write the new scores, and return bools that tell what -inf does not hide; None where it hides nothing."""
        scores[...] = self._values(self._root)
        is_score = scores != -np.inf
        return None if is_score.all() else is_score

    def chain(self, ds: Array) -> None:
        """Make gradients of the new scores those of the scores before, in place."""
        slope = self._values(derivative(self._root, input_node(SCORE, self._root.dtype)))
        with np.errstate(all="ignore"):
            np.multiply(ds, slope, out=ds, where=ds != 0)  # nothing, not even NaN, reaches a hidden one

    def operand_terms(self, ds: Array, wanted: frozenset[str]) -> list[OperandTerms]:
        """Return the terms that gradients of the new scores add to those of the operands."""
        found = []
        for load in loads_of(self._root):
            name, operand = operand_name(load.value), self._operands[load.value]
            if name not in wanted:
                continue
            terms = np.zeros(ds.shape)
            with np.errstate(all="ignore"):
                np.multiply(ds, self._values(derivative(self._root, load)), out=terms, where=ds != 0)
            indices = self._values.indices(load)
            flat = np.asarray(np.ravel_multi_index(np.broadcast_arrays(*indices), operand.shape) if indices else 0)
            flat = flat.reshape((1,) * (4 - flat.ndim) + flat.shape)
            summed = tuple([axis for axis in range(4) if flat.shape[axis] == 1 and terms.shape[axis] > 1])
            terms = terms.sum(axis=summed, keepdims=True)
            first = int(flat.min())
            sums = np.bincount((flat - first).ravel(), weights=np.broadcast_to(terms, flat.shape).ravel())
            found.append(OperandTerms(name, first, sums))
        return found


class OperandSums:
    """The sums of terms that one task, or all of them, add to the gradients of operands."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self._whole = {name: np.zeros(size) for name, size in sizes.items() if size <= _FEW_NUMBERS}
        self._stretches: list[OperandTerms] = []

    @classmethod
    def of_all_tasks(cls, grads: dict[str, Array]) -> OperandSums:
        """Make the sums of all tasks for gradients of these operands."""
        sums = cls({})
        sums._whole = {name: np.zeros(x.size) for name, x in grads.items()}
        return sums

    def add(self, terms: OperandTerms) -> None:
        """Add a tile's terms."""
        if terms.name in self._whole:
            self._whole[terms.name][terms.first : terms.first + len(terms.sums)] += terms.sums
        else:
            self._stretches.append(terms)

    def add_all(self, other: OperandSums) -> None:
        """Add a task's sums."""
        for name, sums in other._whole.items():
            self.add(OperandTerms(name, 0, sums))
        for terms in other._stretches:
            self.add(terms)

    def write(self, grads: dict[str, Array]) -> None:
        """Write the gradients, each in its own shape and dtype."""
        for name, sums in self._whole.items():
            grads[name][...] = sums.reshape(grads[name].shape)


def sizes_of(grads: dict[str, Array]) -> dict[str, int]:
    """Return the numbers of elements of operands' gradients."""
    return {name: math.prod(x.shape) for name, x in grads.items()}
