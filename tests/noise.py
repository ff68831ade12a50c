"""Bounds of the terms that results are sums of, by which rounding errors are measured where they cancel.

The error rule measures by plain attention. On a problem of a few elements that measure is luck: a single rounding may
come out exact. The bounds count roundings in the accumulating type only, so they are far below 16-bit errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from cases import Case

Array = NDArray[Any]


def score_magnitude(case: Case) -> float:
    """A bound of the absolute values that add up to one score, from the norms of the rows of q and k."""
    options = case.options
    scale = abs(options.get("softmax_scale", case.q.shape[-1] ** -0.5))
    reach = case.q.shape[-3] + case.k.shape[-3]
    position = _largest(options.get("bias")) + reach * _largest(options.get("alibi_slopes"))
    return scale * _norm(case.q) * _norm(case.k) + position + _largest(options.get("sink"))


def forward_magnitudes(case: Case) -> dict[str, Array]:
    """For out and lse: a score's error is one of lse, and a relative one of P."""
    score = 1 + score_magnitude(case)
    out = score * _largest(case.v) / (1 - case.options.get("dropout_p", 0.0))
    return {"out": np.array(out), "lse": np.array(score)}


def gradient_magnitudes(case: Case, out: Array | None, lse: Array | None) -> dict[str, Array]:
    """For each gradient: the absolute values of its terms, which share the relative error of P."""
    terms = case.reference_backward(out, lse, magnitudes=True)
    return {name: term * (1 + score_magnitude(case)) for name, term in terms.items()}


def _norm(x: Array) -> float:
    """The largest norm of a row."""
    return float(np.sqrt(np.square(x.astype(np.float64)).sum(axis=-1)).max(initial=0.0))


def _largest(x: Array | None) -> float:
    if x is None:
        return 0.0
    wide = np.abs(x.astype(np.float64))
    return float(wide[np.isfinite(wide)].max(initial=0.0))
