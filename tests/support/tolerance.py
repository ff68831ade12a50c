"""The one rule for errors, every number of which stands here.

A result may be ``FORWARD_FACTOR`` times (gradients: ``GRADIENT_FACTOR`` times) as far from the float64 reference as
plain attention in the same type is, plus a few roundings of the largest value; its mean error may be ``MEAN_FACTOR``
times that of plain attention, plus half a rounding of the type of accumulation (where plain attention is nearly exact,
as with equal scores, a factor of it says nothing), or all of the few where terms may cancel. inf and NaN must stand in
the same places.

Terms of a gradient may cancel, even to exactly 0 (a softmax over one key has none); a gradient may also be a few
roundings of the type of accumulation away, relative to the sum of its terms' absolute values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

FORWARD_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
MEAN_FACTOR = 1.5
ROUNDINGS = 4.0
MEAN_ROUNDINGS = 0.5
# Plain attention's error is luck on fewer elements, as those of a gradient of sinks, however long the sums are.
FEW = 256

# EPS is a unit in the last place of 1; np.finfo does not know bfloat16.
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


def reference_work(dtype: Any) -> Any:
    """Return the type that the reference computes in for inputs of `dtype`, which is wider where there is one."""
    return np.longdouble if np.dtype(dtype) == np.float64 else np.float64


def assert_close(
    actual: NDArray[Any],
    expected: NDArray[Any],
    naive: NDArray[Any],
    *,
    gradient: bool = False,
    dtype: Any = None,
    magnitude: NDArray[Any] | None = None,
    name: str = "result",
) -> None:
    """Check `actual` by the rule.

    Parameters
    ----------
    actual, expected, naive : arrays of one shape
        The result to check, the float64 reference and plain attention rounded to the type.
    gradient : bool
        Whether the factor for gradients holds.
    dtype : dtype of the inputs, that of `actual` by default (an lse is float32 for 16-bit inputs)
    magnitude : array, optional
        The sums of absolute values of the terms that `actual` is a sum of (``magnitudes=True`` of the reference).
    name : str
        What it is, for the message.
    """
    assert actual.shape == expected.shape == naive.shape, (
        f"{name}: shape {actual.shape}, reference {expected.shape}, naive {naive.shape}"
    )
    if actual.size == 0:
        return
    eps = EPS[np.dtype(actual.dtype if dtype is None else dtype).name]
    sum_eps = EPS["float64" if actual.dtype == np.float64 else "float32"]
    actual, expected, naive = (x.astype(np.longdouble) for x in (actual, expected, naive))

    for kind, test in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = test(actual) != test(expected)
        assert not wrong.any(), (
            f"{name}: {kind} in different places, {wrong.sum()} of {wrong.size}, {_places(wrong, actual, expected)}"
        )

    finite = np.isfinite(expected)
    if not finite.any():
        return
    error = np.where(finite, np.abs(_zeroed(actual, finite) - _zeroed(expected, finite)), 0)
    # Plain attention is no measure where it overflows and the reference does not.
    usable = finite & np.isfinite(naive)
    naive_error = np.abs(_zeroed(naive, usable) - _zeroed(expected, usable))
    largest = np.abs(expected[finite]).max()
    terms = 0.0 if magnitude is None else ROUNDINGS * sum_eps * np.nanmax(magnitude)
    floor = ROUNDINGS * eps * largest + terms
    factor = GRADIENT_FACTOR if gradient else FORWARD_FACTOR
    limit = factor * naive_error.max() + floor
    assert error.max() <= limit, (
        f"{name}: largest error {float(error.max()):.3e} > {float(limit):.3e} = {factor:g} * "
        f"{float(naive_error.max()):.3e} (plain attention) + {float(floor):.3e}; "
        f"{(error > limit).sum()} of {error.size} beyond, {_places(error > limit, actual, expected, error)}"
    )
    mean, naive_mean = error.sum() / finite.sum(), naive_error.sum() / max(usable.sum(), 1)
    # Few elements have no mean to speak of.
    is_strict = magnitude is None and error.size >= FEW
    mean_floor = MEAN_ROUNDINGS * sum_eps * largest if is_strict else floor
    mean_limit = MEAN_FACTOR * naive_mean + mean_floor
    assert mean <= mean_limit, (
        f"{name}: mean error {float(mean):.3e} > {float(mean_limit):.3e} = {MEAN_FACTOR:g} * {float(naive_mean):.3e} "
        f"(plain attention) + {float(mean_floor):.3e}"
    )


def _zeroed(x: NDArray[Any], keep: NDArray[Any]) -> NDArray[Any]:
    return np.where(keep, x, 0)


def _places(
    wrong: NDArray[Any], actual: NDArray[Any], expected: NDArray[Any], error: NDArray[Any] | None = None
) -> str:
    """Return the worst (or first) wrong element, and the box of all of them, which often names the tile at fault."""
    at = np.argmax(wrong) if error is None else np.argmax(np.where(wrong, error, -1))
    index = tuple(int(x) for x in np.unravel_index(at, wrong.shape))
    box = [(int(axis.min()), int(axis.max())) for axis in np.nonzero(wrong)]
    return f"such as {index}: {float(actual[index]):.6e}, reference {float(expected[index]):.6e}; all within {box}"
