"""Results over disjoint sets of keys become the result over all of them, in arrays of NumPy or CuPy.

A part has the weight ``w_i = exp(lse_i - lse)`` in ``out = sum_i w_i out_i``, where ``lse = log sum_i exp(lse_i)`` (Dao
et al., "FlashAttention", 2022, section 3.1). `merge`, the CPU's partial results and offload's chunks take it from here;
the kernel `merge_parts` computes the same in one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from cuflash import interop
from cuflash.problem.attention_problem import Array


def weights_of(lses: Sequence[Array]) -> tuple[list[Array], Array]:
    """Return the parts' weights, 0 where a part's lse (.., heads, rows) is -inf, and the lse over all of them."""
    xp = interop.namespace_of(lses[0])
    with np.errstate(all="ignore"):
        top = reduce(xp.maximum, lses)
        top = xp.where(top == -np.inf, 0, top).astype(top.dtype)
        shares = [xp.exp(lse - top) for lse in lses]
        total = reduce(xp.add, shares)
        divisor = xp.where(total == 0, 1, total)
        return [share / divisor for share in shares], top + xp.log(total)


def weighted(out: Array, lse: Array, weight: Array) -> Array:
    """Return out (.., rows, heads, columns) times a weight; 0 where lse is -inf, even if out is NaN there."""
    return interop.namespace_of(out).where(by_row(lse) == -np.inf, 0, by_row(weight) * out)


def merge_into(out: Array, lse: Array, part_out: Array, part_lse: Array) -> None:
    """Merge a part into the results over other keys, in place; these have out 0 where lse is -inf.

    lse may be of a wider dtype than the rest, so that it is not rounded for each of many parts.
    """
    weights, total = weights_of((lse, part_lse))
    own, others = (weight.astype(out.dtype, copy=False) for weight in weights)
    with np.errstate(all="ignore"):
        out *= by_row(own)
        out += weighted(part_out, part_lse, others)
    lse[...] = total


def by_row(x: Array) -> Array:
    """Bring (.., heads, rows) to the form (.., rows, heads, 1)."""
    return x.swapaxes(-1, -2)[..., None]
