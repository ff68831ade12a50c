"""The reference calls users' own rules on whole arrays, and finds their derivatives by differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Rule = Callable[..., Any]
# Central differences in float64 are off by the square of this, and by a rounding divided by it.
_STEP = 1e-6


class Clamped:
    """An operand whose indices are clamped to its axes, as the contract says."""

    def __init__(self, values: Array) -> None:
        self._values = values
        self.shape, self.ndim, self.dtype, self.size = values.shape, values.ndim, values.dtype, values.size

    def __getitem__(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        return self._values[tuple(_clamped(x, size) for x, size in zip(index, self.shape, strict=True))]


def _clamped(index: Any, size: int) -> Any:
    # NumPy's function takes microseconds for a Python int, and rules are called for every element of an operand.
    return min(max(int(index), 0), size - 1) if isinstance(index, int) else np.clip(index, 0, size - 1)


def _given(operands: Sequence[Any], real: Any) -> list[Any]:
    wide = [x.astype(real) if x.dtype.kind not in "biu" else x for x in map(np.asarray, operands)]
    return [Clamped(x) if x.ndim else x for x in wide]


def places(shape: tuple[int, int, int, int], first_batch: int) -> list[Array]:
    """Return b, h, i and j of all scores, int32."""
    b, h, i, j = np.ix_(*[np.arange(size, dtype=np.int32) for size in shape])
    return [b + np.int32(first_batch), h, i, j]


def scored(rule: Rule, scores: Array, first_batch: int, operands: Sequence[Any]) -> Array:
    """Apply a score_mod to all scores."""
    found = rule(scores, *places(scores.shape, first_batch), *_given(operands, scores.dtype))
    return np.broadcast_to(np.asarray(found).astype(scores.dtype), scores.shape)


def shown(rule: Rule, shape: tuple[int, int, int, int], first_batch: int, operands: Sequence[Any], real: Any) -> Array:
    """Return what a mask_mod shows."""
    return np.broadcast_to(rule(*places(shape, first_batch), *_given(operands, real)), shape)


def slope(rule: Rule, scores: Array, first_batch: int, operands: Sequence[Any]) -> Array:
    """Return the derivative of a score_mod by the score."""
    wide = scores.astype(np.promote_types(scores.dtype, np.float64))
    above, below = (scored(rule, wide + step, first_batch, operands) for step in (_STEP, -_STEP))
    return np.asarray((above - below) / (2 * _STEP), scores.dtype)


def operand_gradients(
    rule: Rule | None, scores: Array, ds: Array, first_batch: int, operands: Sequence[Any], magnitudes: bool
) -> list[Array | None]:
    """Return the gradient of each floating-point operand, None of the others; `ds` is that of the new scores.

    `magnitudes` asks for the sums of absolute values of their terms in place of the gradients.
    """
    wide = scores.astype(np.promote_types(scores.dtype, np.float64))
    found: list[Array | None] = []
    for number, operand in enumerate(map(np.asarray, operands)):
        if operand.dtype.kind in "biu":
            found.append(None)
            continue
        grad = np.zeros(operand.shape, wide.dtype)
        for place in np.ndindex(operand.shape) if rule is not None else ():
            sides = []
            for step in (_STEP, -_STEP):
                moved = list(map(np.asarray, operands))
                moved[number] = operand.astype(wide.dtype)
                moved[number][place] += step
                assert rule is not None
                sides.append(scored(rule, wide, first_batch, moved))
            difference = np.where(ds == 0, 0, sides[0] - sides[1])
            difference = np.abs(difference) if magnitudes else difference
            grad[place] = (ds * difference).sum() / (2 * _STEP)
        found.append(grad)
    return found
