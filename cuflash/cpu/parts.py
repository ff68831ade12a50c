"""NumPy merges partial results of one attention, as `gpu.parts` does on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.problem.attention_problem import PartialResult
from cuflash.problem.merging import merge_into

Array = NDArray[Any]


def merge_parts(parts: Sequence[PartialResult], out: Array, lse: Array) -> None:
    """Merge attentions over disjoint parts of the keys into that over all of them; see `gpu.parts.merge_parts`."""
    total_out, total_lse = np.zeros(out.shape, lse.dtype), np.full(lse.shape, -np.inf, lse.dtype)
    for part in parts:
        assert part.lse is not None
        merge_into(total_out[..., part.rows, :, :], total_lse[..., part.rows], part.x, part.lse)
    with np.errstate(all="ignore"):
        out[...], lse[...] = total_out, total_lse


def sum_parts(parts: Sequence[PartialResult], total: Array) -> None:
    """Write the sum of parts that may each have some of the rows."""
    added = np.zeros(total.shape, parts[0].x.dtype if parts else total.dtype)
    for part in parts:
        added[..., part.rows, :, :] += part.x
    with np.errstate(all="ignore"):
        total[...] = added
