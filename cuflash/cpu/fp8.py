"""Numbers of 8 bits in NumPy: the codes of e4m3 (float8_e4m3fn; Micikevicius et al., 2022)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST = 448.0
_MANTISSA_BITS, _LEAST_EXPONENT = 3, -6
_NAN, _SIGN = 0x7F, 0x80


def e4m3_codes(x: NDArray[Any]) -> NDArray[np.uint8]:
    """The nearest code of each number, ties to the even one; numbers beyond the largest become that, NaN stays NaN."""
    is_nan = np.isnan(x)
    magnitude = np.where(is_nan, 0, np.minimum(np.abs(x), x.dtype.type(LARGEST)))
    _, exponent = np.frexp(np.maximum(magnitude, x.dtype.type(2.0**_LEAST_EXPONENT)))
    exponent = exponent - 1
    steps = np.rint(np.ldexp(magnitude, _MANTISSA_BITS - exponent))
    # The steps of a binade follow those of the one before, whose last number of steps they begin with.
    codes = ((exponent - _LEAST_EXPONENT) << _MANTISSA_BITS) + steps.astype(np.int32)
    return np.where(is_nan, _NAN, codes | np.where(np.signbit(x), _SIGN, 0)).astype(np.uint8)
