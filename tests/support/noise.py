"""Bounds of the terms that results are sums of, by which rounding errors are measured where they cancel.

The error rule measures by plain attention. On a problem of a few elements that measure is luck: a single rounding may
come out exact. The bounds count roundings in the accumulating type only, so they are far below 16-bit errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import tolerance
from numpy.typing import NDArray

from cuflash import reference

if TYPE_CHECKING:
    from cases import Case

Array = NDArray[Any]


def score_magnitude(case: Case) -> float:
    """Bound the absolute values that add up to one score, by the norms of the rows of q and k."""
    options = case.options
    scale = abs(options.get("softmax_scale", case.q.shape[-1] ** -0.5))
    reach = case.q.shape[-3] + case.k.shape[-3]
    position = _largest(options.get("bias")) + reach * _largest(options.get("alibi_slopes"))
    return scale * _norm(case.q) * _norm(case.k) + position + _largest(options.get("sink"))


def forward_magnitudes(case: Case) -> dict[str, Array]:
    """Bound the terms of out and lse, as a score's error is one of lse, and a relative one of P."""
    score = 1 + score_magnitude(case)
    out = score * _largest(case.v) * reference.dropout_rescale(case.options.get("dropout_p") or 0.0)
    return {"out": np.array(out), "lse": np.array(score)}


def gradient_magnitudes(case: Case, out: Array | None, lse: Array | None) -> dict[str, Array]:
    """Bound the absolute values of each gradient's terms, which share the relative error of P."""
    terms = case.reference_backward(out, lse, magnitudes=True)
    score = 1 + score_magnitude(case)
    delta = _delta_magnitude(case)
    with np.errstate(over="ignore"):  # scores of finfo.min bound nothing
        return {name: score * term + (delta[name] if term.size < tolerance.FEW else 0) for name, term in terms.items()}


def _delta_magnitude(case: Case) -> dict[str, float]:
    """Bound the part of each gradient that comes from the rounding of out, by delta = dout . out.

    It counts where a few elements are all there is: the gradient of one bias for a whole row is 0 but for this error.
    Sums over n rows of either sign grow with the square root of n.
    """
    keep = reference.dropout_rescale(case.options.get("dropout_p") or 0.0)
    accum = "float64" if case.dtype == np.float64 else "float32"
    # This is half a rounding of the inputs' dtype, in roundings of the accumulating type.
    error = tolerance.EPS[case.dtype.name] / tolerance.EPS[accum] / 2 / tolerance.ROUNDINGS
    row = error * _norm(case.dout) * _norm(case.v) * keep
    scale = abs(case.options.get("softmax_scale", case.q.shape[-1] ** -0.5))
    rows = row * np.sqrt(case.q.size / case.q.shape[-1])
    reach = case.q.shape[-3] + case.k.shape[-3]
    return {
        "q": row * scale * _norm(case.k),
        "k": rows * scale * _norm(case.q),
        "v": 0.0,
        "bias": rows,
        "sink": rows,
        "alibi_slopes": rows * reach,
        # The rules of the tests give an element of an operand a factor of no more than this.
        **{name: rows * reach for name in case.grad_names if name.startswith("operand_")},
    }


def _norm(x: Array) -> float:
    """Return the largest norm of a row."""
    return float(np.sqrt(np.square(x.astype(np.float64)).sum(axis=-1)).max(initial=0.0))


def _largest(x: Array | None) -> float:
    if x is None:
        return 0.0
    wide = np.abs(x.astype(np.float64))
    return float(wide[np.isfinite(wide)].max(initial=0.0))
