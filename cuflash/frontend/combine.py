"""The residuals of an attention over all keys, and the gradient of its sink, which is a part of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash import interop
from cuflash.problem.attention_problem import Array

# dout, out, lse, dlse
Residuals = tuple[Any, Any, Any, "Any | None"]


def shares_of_sink(xp: Any, sink: Array, residuals: Residuals) -> Array:
    """Return every row's share (.., heads, rows) of the gradient of its sink, which is a key whose value is 0.

    `sink` broadcasts to lse, and `xp` is the namespace of the arrays.
    """
    dout, out, lse, dlse = residuals
    dout, out = dout.astype(lse.dtype), out.astype(lse.dtype)
    # A row that sees nothing has out 0: its dout does not count, even where it is NaN.
    delta = xp.where(out.any(axis=-1), (dout * out).sum(axis=-1), 0).swapaxes(-1, -2)
    if dlse is not None:
        delta = delta - dlse
    with np.errstate(all="ignore"):
        return xp.where(lse == -np.inf, 0, -xp.exp(sink - lse) * delta)


def gradient_of_sink(sink: Array, inside: Any, residuals: Residuals) -> Array:
    """Return the gradient of a sink (heads,) in the dtype of lse.

    `inside` says which of the rows, (.., heads, rows) or what broadcasts to it, lie in a sequence.
    """
    lse = residuals[2]
    xp = interop.namespace_of(lse)
    shares = xp.where(inside, shares_of_sink(xp, sink[:, None], residuals), 0)
    axes = tuple(axis for axis in range(shares.ndim) if axis != shares.ndim - 2)
    return shares.sum(axis=axes).astype(lse.dtype)
