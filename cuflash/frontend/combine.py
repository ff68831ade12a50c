"""The results of parts become those of the whole: outputs merge by their log-sum-exps, a sink is a part of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash import interop
from cuflash.problem.attention_problem import Array

# dout, out, lse, dlse
Residuals = tuple[Any, Any, Any, "Any | None"]


def merge_into(out: Array, lse: Array, part_out: Array, part_lse: Array) -> None:
    """Merge results over further keys into those so far, in place: (.., rows, heads, dim) and (.., heads, rows)."""
    xp = interop.namespace_of(lse)
    with np.errstate(all="ignore"):
        total = xp.logaddexp(lse, part_lse)
        own, others = (xp.where(x == -np.inf, 0, xp.exp(x - total)) for x in (lse, part_lse))
    out *= own.swapaxes(-1, -2)[..., None]
    out += xp.where(part_lse == -np.inf, 0, others).swapaxes(-1, -2)[..., None] * part_out
    lse[...] = total


def gradient_of_sink(sink: Array, inside: Any, residuals: Residuals) -> Array:
    """The gradient of a sink (heads,), which is a key whose value is 0, in the dtype of lse.

    `inside` says which of the rows, (.., heads, rows) or what broadcasts to it, lie in a sequence.
    """
    dout, out, lse, dlse = residuals
    xp = interop.namespace_of(lse)
    dout, out = dout.astype(lse.dtype), out.astype(lse.dtype)
    # No dout, NaN neither, counts of a row that sees nothing.
    delta = xp.where(out.any(axis=-1), (dout * out).sum(axis=-1), 0).swapaxes(-1, -2)
    if dlse is not None:
        delta = delta - dlse
    with np.errstate(all="ignore"):
        weight = xp.exp(sink[:, None] - lse)
        shares = xp.where(inside & (lse != -np.inf), -weight * delta, 0)
    axes = tuple(axis for axis in range(shares.ndim) if axis != shares.ndim - 2)
    return shares.sum(axis=axes).astype(lse.dtype)
