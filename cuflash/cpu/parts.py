"""Partial results of one attention become its result: `gpu.parts` in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.problem.attention_problem import PartialResult

Array = NDArray[Any]


def merge_parts(parts: Sequence[PartialResult], out: Array, lse: Array) -> None:
    """Write the attention over all keys, from those over disjoint parts of them; see `gpu.parts.merge_parts`."""
    total, weighted = np.full(lse.shape, -np.inf, lse.dtype), np.zeros(out.shape, lse.dtype)
    with np.errstate(all="ignore"):
        for part in parts:
            assert part.lse is not None
            rows = part.rows
            merged = np.logaddexp(total[..., rows], part.lse)
            own, others = (np.where(x == -np.inf, 0, np.exp(x - merged)) for x in (total[..., rows], part.lse))
            weighted[..., rows, :, :] *= _by_row(own)
            weighted[..., rows, :, :] += np.where(_by_row(part.lse) == -np.inf, 0, _by_row(others) * part.x)
            total[..., rows] = merged
    out[...], lse[...] = weighted, total


def sum_parts(parts: Sequence[PartialResult], total: Array) -> None:
    """Write the sum of parts that may each have some of the rows."""
    added = np.zeros(total.shape, parts[0].x.dtype if parts else total.dtype)
    for part in parts:
        added[..., part.rows, :, :] += part.x
    with np.errstate(all="ignore"):
        total[...] = added


def _by_row(x: Array) -> Array:
    """(..., heads, rows) to (..., rows, heads, 1)."""
    return x.swapaxes(-1, -2)[..., None]
